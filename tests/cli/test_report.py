"""The command `evalkit report`."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from evalkit.cli import main
from evalkit.reporting.decimals import percent
from evalkit.runs.folder import Run
from tests.comparison.made import finished_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    """Two finished runs."""
    return [finished_run(tmp_path, "org/first", 0.4), finished_run(tmp_path, "org/second", 0.7, seed=5)]


def ended(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """Run a command; its exit code and what it printed."""
    with pytest.raises(SystemExit) as found:
        main([str(one) for one in arguments])
    out, err = capsys.readouterr()
    return int(found.value.code or 0), out, err


def test_a_page_of_two_runs(runs: list[Run], tmp_path: Path, capsys: Any) -> None:
    """Its numbers are those of results.json and of compare."""
    path = tmp_path / "page" / "report.html"
    code, out, _ = ended(capsys, "report", *(run.folder for run in runs), "-o", path)
    assert code == 0
    assert out.strip() == f"{path} ({path.stat().st_size / 1e6:,.1f} MB)"
    text = path.read_text(encoding="utf-8")
    for run in runs:
        for average in run.stored["averages"]:
            assert percent(average["accuracy"]) in text
    code, out, _ = ended(capsys, "compare", *(run.folder for run in runs), "--format", "json")
    [found] = json.loads(out)["comparisons"]
    assert percent(found["averages"][-1]["difference"], signed=True) in text
    index = json.loads(re.search(r'<script[^>]*id="document-index"[^>]*>(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert [one["task"] for one in index["tasks"]] == ["arc_easy", "boolq", "mmlu"]
    assert [one["name"] for one in index["runs"]] == ["first", "second"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["-o", "report.pdf"], "--output report.pdf: the report is an HTML page; give a file name that ends in .html"),
        (["--sample", 3, "--without-documents"], "--without-documents and --sample"),
        (["--names", "a"], "--names has 1 name for 2 runs; give one for each run"),
        (["--names", "a,a"], "two sides are called 'a'"),
        (["--benchmark", "zeroshot8"], "--benchmark needs --study"),
        (["--study", "study.yaml", "--names", "a,b"], "--study and --names"),
        (["--rule", "nix"], "--rule nix: unknown rule 'nix'"),
        (["nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    given: list[object], said: str, runs: list[Run], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = ended(capsys, "report", *(run.folder for run in runs), *given)
    assert code in (1, 2)
    assert not out
    assert said in err.splitlines()[-1]
    assert not list(tmp_path.glob("*.html"))


def test_a_file_that_cannot_be_written(runs: list[Run], tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "report.html"
    folder.mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    for path in (folder, tmp_path / "file" / "report.html", tmp_path / ("x" * 300 + ".html")):
        code, _, err = ended(capsys, "report", runs[0].folder, "-o", path)
        assert code in (1, 2)
        assert f"{path} cannot be written: " in err.splitlines()[-1]


def test_a_full_disk_keeps_the_earlier_page(
    runs: list[Run], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    assert ended(capsys, "report", runs[0].folder, "-o", path)[0] == 0
    before = path.read_bytes()

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("evalkit.paths.os.fsync", full)
    code, _, err = ended(capsys, "report", runs[1].folder, "-o", path)
    assert code == 1
    assert err.splitlines()[-1].endswith(f"{path} cannot be written: No space left on device")
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))
