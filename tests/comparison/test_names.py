"""Which runs a checkpoint's name means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from evalkit.comparison.sides import find_alike
from evalkit.errors import RunError, UsageError
from evalkit.runs.folder import MANIFEST, RESULTS
from tests.comparison.made import answers, make_run, scores_of

TABLE = {"arc_easy": scores_of("arc_easy", answers(0, 0.5, 60))}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    """Make a run of a checkpoint, created on a day; return its folder's name."""

    def run(model: str, day: int, weights: str = "", **specification: object) -> str:
        about = {"created": f"2026-11-{day:02}T10:00:00+00:00"}
        checkpoint = {"weights": weights or model}
        return make_run(tmp_path, TABLE, model=model, manifest=about, checkpoint=checkpoint, **specification).name

    return run


def chosen(root: Path, *names: str) -> list[str]:
    return [run.folder.name for run in find_alike(names, (), root).singles]


def test_a_checkpoint_stands_for_the_run_that_is_measured_as_the_other_side(
    make: Callable[..., str], tmp_path: Path
) -> None:
    whole, older, part = make("org/a", 3), make("org/a", 2, dtype="float16"), make("org/a", 4, limit=20)
    other_part, other_half = make("org/b", 1, limit=20), make("org/c", 1, dtype="float16")
    assert chosen(tmp_path, "a") == [whole]  # not the newest, which is of 20 documents
    assert chosen(tmp_path, "a", "b") == chosen(tmp_path, "org/a", other_part) == [part, other_part]
    assert chosen(tmp_path, "c", "a") == [other_half, older]
    assert chosen(tmp_path, "b", "c") == [other_part, other_half]  # no two are alike
    [note] = find_alike(["a", "b"], (), tmp_path).notes
    assert note.startswith(f"a: {part} (") and "limit 20" in note and "3 runs" in note
    with pytest.raises(UsageError, match=r"'a' matches 3 runs.*limit 20"):
        find_alike(["a", "b"], (), tmp_path, is_strict=True)


def test_an_older_state_of_a_checkpoint_and_another_checkpoint_of_the_name_are_never_chosen(
    make: Callable[..., str], tmp_path: Path
) -> None:
    make("org/last", 1)
    overwritten = make("org/last", 2, weights="trained further", limit=20)
    assert chosen(tmp_path, "last") == [overwritten]
    make("their/last", 3)
    with pytest.raises(UsageError, match=r"their/last.*org/last"):
        chosen(tmp_path, "last")


def test_an_unfinished_or_damaged_run_is_not_passed_over(make: Callable[..., str], tmp_path: Path) -> None:
    make("org/last", 1)
    (tmp_path / make("org/last", 2, weights="trained further") / RESULTS).unlink()
    with pytest.raises(RunError, match="not finished"):
        chosen(tmp_path, "last")
    make("step1000", 3)
    torn = tmp_path / make("step100", 4)
    (torn / RESULTS).unlink()
    with pytest.raises(UsageError, match="2 runs"):
        chosen(tmp_path, "step10")
    (torn / MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=MANIFEST):
        chosen(tmp_path, "step100")


def test_a_checkpoint_that_is_here_is_no_namesake(
    make: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("elsewhere/checkpoint-7", 1)
    (tmp_path / "here" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "here" / "checkpoint-7" / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(RunError, match="checkpoint-7"):
        chosen(tmp_path, "checkpoint-7")


def test_groups_and_what_a_command_can_use(make: Callable[..., str], tmp_path: Path) -> None:
    whole, part, other = make("org/a", 1), make("org/a", 2, limit=20), make("org/b", 1, limit=20)
    named = find_alike([], ["old=a,b", "new=b"], tmp_path)
    assert [(name, [run.folder.name for run in runs]) for name, runs in named.groups] == [
        ("old", [part, other]), ("new", [other]),
    ]  # fmt: skip
    [run] = find_alike(["a"], (), tmp_path, usable=lambda run: run.folder.name == part).singles
    assert run.folder.name == part != whole
