"""`evalkit attention` on the command line; snapshots have what it prints."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.arguments import arguments
from tests.cli.test_root import Command, _no_settings, complains, evalkit

__all__ = ["_no_settings", "evalkit"]  # fixtures


@pytest.fixture
def attention(evalkit: Command, checkpoint: Path, documents: Path) -> Command:
    """An analysis of a few documents."""
    common = {"--data-dir": documents, "--allow-unofficial-data": None, "--device": "cpu", "--tasks": "piqa",
              "--sample": 3, "--measures": "bos,entropy", "--output": "runs"}  # fmt: skip
    return lambda *more: evalkit("attention", checkpoint, *arguments(common, more))


def test_a_line_for_each_layer_and_a_finished_run_is_opened(
    attention: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = attention()
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["layer", "bos_abs", "entropy", "entropy_shifted"]
    assert [line.split()[0] for line in lines[2:6] if line[0] != "-"] == ["0", "1", "all"]
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))
    assert attention()[:2] == outcome[:2]


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["--measures", "bos,rnak"], 2, ["'rnak'", "'rank'"]),
        (["--layers", "7"], 2, ["--layers", "7"]),
        (["--text", "nowhere.txt"], 2, ["--tasks", "--text"]),
        (["--continuation", "best"], 2, ["best"]),
    ],
)
def test_invalid_options(attention: Command, given: list[str], code: int, words: list[str]) -> None:
    complains(attention(*given), code, *words)


def test_words_need_spacy(attention: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("evalkit.benchmarks.attention.categories.metadata.version", absent)
    complains(attention("--measures", "mass"), 2, "evalkit-checkpoints[attention]")
