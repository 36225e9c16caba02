"""Every command that prints a table supports every format, under the same names."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from evalkit.cli import main
from evalkit.cli.root import cli
from evalkit.reporting.table import FORMATS
from evalkit.runs.folder import Run
from tests.tiny import tiny_checkpoint

CHOICES = ("terminal", "markdown", "latex", "html", "csv", "json")
PRINTING = {"run", "rescore", "attention", "longbench run", "longbench rescore", "longbench score", "needle",
            "perplexity", "compare", "show", "table", "integrity", "ls", "data", "doctor", "models ls",
            "models show"}  # fmt: skip
"""Commands whose result is a table."""


def commands(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def test_the_same_formats_everywhere() -> None:
    assert CHOICES == FORMATS
    found = {}
    for name, command in commands(cli):
        for option in command.params:
            if option.name == "form" and "--format" in option.opts:
                assert isinstance(option.type, click.Choice)
                found[name] = tuple(option.type.choices)
    # Those of studies are shown in test_study.py
    assert found == dict.fromkeys((*PRINTING, "study run", "study status"), FORMATS)


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A finished needle test's command."""
    folder = tmp_path_factory.mktemp("needle")
    model = tiny_checkpoint(folder / "tiny", window=512)
    return ["needle", str(model), "--lengths", "200,400", "--depths", "0,100", "--repeats", "1", "-o", str(folder)]


@pytest.fixture(scope="module")
def perplexity(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A perplexity run's command."""
    folder = tmp_path_factory.mktemp("perplexity")
    (folder / "text.txt").write_text("The river rose in the night. " * 20, encoding="utf-8")
    model = tiny_checkpoint(folder / "tiny")
    return ["perplexity", str(model), "--text", str(folder / "text.txt"), "-o", str(folder)]


@pytest.fixture(scope="module")
def shown(
    finished: Run,
    checkpoint: Path,
    documents: Path,
    needle: list[str],
    perplexity: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    run = str(finished.folder)
    mapping = tmp_path_factory.mktemp("mapping") / "runs.yaml"
    mapping.write_text(f"rows: {{intg_125m: {json.dumps(run)}}}\n", encoding="utf-8")
    again = ["run", str(checkpoint), "--data-dir", str(documents), "--allow-unofficial-data", "-o"]
    return {
        "run": [*again, str(finished.folder.parent)],
        "rescore": ["rescore", run, "--rule", "acc", "--detail"],
        "integrity": ["integrity", run],
        "show": ["show", run, "--task", "boolq"],
        "table": ["table", "main_res", "--source", "both", "--runs", str(mapping)],
        "needle": needle,
        "perplexity": perplexity,
        "ls suites": ["ls", "suites"],
        "ls runs": ["ls", "runs", "-o", str(finished.folder.parent)],
        "data": ["data", "--data-dir", str(documents)],
        "doctor": ["doctor"],
        "models ls": ["models", "ls"],
        "models show": ["models", "show", "llama-125m-diff"],
    }


NAMES = ["run", "rescore", "show", "integrity", "table", "needle", "ls suites", "ls runs", "data", "doctor",
         "models ls", "models show"]  # fmt: skip
"""Of `shown`; comparisons, curves and LongBench have tests of their own."""


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    for name in [name for name in os.environ if name.startswith("EVALKIT_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        captured = capsys.readouterr()
        assert not left.value.code, captured.err
        return captured.out

    return run


@pytest.mark.parametrize("name", ["rescore", "table", "ls runs"])
def test_every_format(name: str, shown: dict[str, list[str]], out: Callable[..., str]) -> None:
    for form in FORMATS:
        if (name, form) == ("models show", "csv"):  # two tables
            continue
        text = out(*shown[name], "--format", form)
        assert text.strip()
        if form == "json":
            json.loads(text)
        if form == "csv":
            heading, *rows = csv.reader(io.StringIO(text))
            assert rows
            assert {len(row) for row in rows} == {len(heading)}
        if form == "html":
            assert text.count("<table") == text.count("</table>") > 0
        if form == "terminal":
            assert max(map(len, text.splitlines()[:12])) < 400


@pytest.mark.latex
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed (Debian: texlive-latex-extra)")
@pytest.mark.parametrize("name", NAMES)
def test_latex_compiles(name: str, shown: dict[str, list[str]], out: Callable[..., str], tmp_path: Path) -> None:
    text = out(*shown[name], "--format", "latex", "--standalone")
    (tmp_path / "page.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]


def test_standalone_is_of_documents_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["models", "ls", "--standalone"])
    assert left.value.code == 2
    assert "--standalone is for --format latex and html" in capsys.readouterr().err
