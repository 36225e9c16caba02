"""Shell completion, through click's own machinery."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from evalkit.cli.root import cli
from evalkit.runs.folder import Run


def completed(*words: str) -> list[str]:
    """Return the completions of the last word; "file" where a path is accepted."""
    *before, begun = words
    found = BashComplete(cli, {}, "evalkit", "_EVALKIT_COMPLETE").get_completions(before, begun)
    return [one.value if one.type == "plain" else one.type for one in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["comp"], ["compare"]),
        (["run", "--sui"], ["--suite"]),
        (["run", "--suite", "zeroshot8_"], ["zeroshot8_text"]),
        (["run", "--suite", "my_suite.y"], ["file"]),
        (["run", "--tasks", "piqa,arc_"], ["piqa,arc_easy", "piqa,arc_challenge"]),
        (["run", "--template", "in"], ["inst", "instruction-line"]),
        (["rescore", "x", "--rule", "acc_n"], ["acc_norm"]),
        (["export", "x", "--to", "h"], ["hub"]),
        (["table", "main"], ["main_res"]),
        (["run", "--data-dir", "here"], ["file"]),
        (["compare", "--format", "mark"], ["markdown"]),
        (["nonsense", "--x"], []),
    ],
)
def test_names(words: list[str], expected: list[str]) -> None:
    assert completed(*words) == expected


def test_runs_by_their_folders(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_OUTPUT", str(finished.folder.parent))
    begun = finished.folder.name[:5]
    assert finished.folder.name in completed("export", begun)
    assert finished.folder.name in completed("compare", "one", begun)


def test_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_OUTPUT", str(tmp_path / "nowhere"))
    assert completed("export", "x") == ["file"]
