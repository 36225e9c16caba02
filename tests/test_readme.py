"""The README's commands, followed in order from the state that `make demo` leaves: each ends without an error."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalkit.cli import main
from tests.tiny import tiny_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    "".join(found)
    for found in re.findall(r"^    ((?:export|python|evalkit) .*)|`(evalkit [^`]+)`", README, re.MULTILINE)
]
[PYTHON] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
[DEMO] = re.findall(r"^\t\$\(BIN\)/(evalkit .*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
WRITTEN = ("samples.html", "report.html", "forest.png", "rounding.tex", "rounded-4-bit", "results/rounding")
"""What the commands leave in the checkout."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the commands read of a checkout."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("pretrain", "replication"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "samples").symlink_to(ROOT / "results" / "samples")
    return tmp_path


def verify(folder: Path) -> None:
    for page in ("samples.html", "report.html"):
        text = (folder / page).read_text(encoding="utf-8")
        assert "could show" in text, page
        assert "is not compared with" not in text, page
    left = [name for name in WRITTEN if (folder / name).exists()]
    assert left == list(WRITTEN)
    paths = [name + "/" * (folder / name).is_dir() for name in left]
    ignored = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True)
    if "not a git repository" not in ignored.stderr:
        assert ignored.stdout.split() == paths


@pytest.mark.slow
def test_in_order_on_a_tiny_checkpoint(
    checkout: Path, documents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, with a random checkpoint of the demo's name and made-up documents, without workers."""
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("EVALKIT_DATA_DIR", str(documents))
    monkeypatch.setenv("EVALKIT_ALLOW_UNOFFICIAL_DATA", "1")
    # Restored at the end, since the README's own `export` sets it
    monkeypatch.setenv("EVALKIT_OUTPUT", "results/runs")
    tiny_checkpoint(checkout / "demo", window=4096)
    study = checkout / "examples" / "rounding_study.yaml"
    study.write_text(study.read_text(encoding="utf-8").replace("before: demo", "before: ../demo"), encoding="utf-8")
    for command in (DEMO, *COMMANDS):
        here = re.sub(
            r"(--model|round_weights.py) demo|--workers \d+", lambda m: f"{m[1]} ./demo" if m[1] else "", command
        )
        words = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {here}"], capture_output=True, text=True, check=True
        ).stdout.split("\n")[:-1]  # as the shell expands them
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            monkeypatch.setenv(name, value)
        elif words[0] == "python":
            monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
        else:
            with pytest.raises(SystemExit) as ended:
                main(words[1:])
            assert not ended.value.code, (command, capsys.readouterr().err)
    scope: dict[str, Any] = {}
    exec(PYTHON.replace('"demo"', '"./demo"'), scope)
    assert scope["run"].complete
    verify(checkout)


@pytest.mark.slow
@pytest.mark.cluster
def test_in_order_as_a_reader_does(checkout: Path, demo: Path) -> None:
    """In a shell, literally but for the sizes of the samples: the demo checkpoint, and workers."""
    script = "\n".join((DEMO, *COMMANDS, f"python <<'END'\n{PYTHON}END"))
    for size, small in ((r"\b50\b", "2"), (r"(sample[ =])200\b", r"\g<1>4")):
        script = re.sub(size, small, script)
    programs = f"export PATH={Path(sys.executable).parent}:$PATH\nset -e\n"
    subprocess.run(["bash", "-c", programs + script], cwd=checkout, check=True)
    verify(checkout)
