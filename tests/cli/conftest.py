"""Commands in this process, isolated from the environment and working folder of the test process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from click.shell_completion import BashComplete

from evalkit.cli import main
from evalkit.cli.root import cli
from tests.arguments import arguments


class Outcome(NamedTuple):
    """Outcome of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("EVALKIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def evalkit(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        return Outcome(int(left.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def run(evalkit: Command, checkpoint: Path, documents: Path) -> Command:
    """Run `evalkit run` on two documents each of two tasks; later options override these."""
    common = {"--model": checkpoint, "--data-dir": documents, "--allow-unofficial-data": None, "--tasks": "piqa,boolq",
              "--limit": 2, "--output": "runs"}  # fmt: skip
    return lambda *more: evalkit("run", *arguments(common, more))


def complains(outcome: Outcome, code: int, *words: str) -> None:
    """Check that only the last line is an error, with these words, and that there is no traceback."""
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err
    *news, last = outcome.err.splitlines()
    assert last.startswith("evalkit: ")
    assert not any(line.startswith("evalkit:") for line in news)
    for word in words:
        assert word in last, last
    assert outcome.out == ""


def completed(*words: str) -> list[str]:
    """Return the completions of the last word; "file" where a path is accepted."""
    *before, begun = words
    items = BashComplete(cli, {}, "evalkit", "_EVALKIT_COMPLETE").get_completions(before, begun)
    return [item.value if item.type == "plain" else item.type for item in items]
