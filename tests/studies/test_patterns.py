"""Patterns of study files: folders on disk, and those that only records name."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.studies.study_file import StudyFolders


def folders(root: Path, *names: str, recorded: tuple[str, ...] = ()) -> StudyFolders:
    for name in names:
        (root / name).mkdir(parents=True)
    return StudyFolders(root, frozenset(recorded))


def test_by_number(tmp_path: Path) -> None:
    found = folders(tmp_path, "m/seed10", "m/seed2", "m/other", "m/seed2/x")
    assert found.models("m/seed*") == ["m/seed2", "m/seed10"]
    assert found.models("./m/seed*") == ["./m/seed2", "./m/seed10"]
    assert found.models(f"{tmp_path}/m/seed*") == [f"{tmp_path}/m/seed2", f"{tmp_path}/m/seed10"]
    assert found.models("org/name") == ["org/name"]
    assert found.models("n*") == []


def test_a_name_with_the_characters_of_a_pattern(tmp_path: Path) -> None:
    found = folders(tmp_path, "a[1]", "a1")
    assert found.models("a[1]") == ["a[1]"]


@pytest.mark.parametrize("root", ["", "/data/"])
def test_recorded_folders_stand_for_those_that_are_gone(tmp_path: Path, root: str) -> None:
    recorded = (f"{root}t/d-seed10/checkpoint-5", f"{root}t/d-seed2/checkpoint-5", f"{root}t/d-seed2/checkpoint-50",
                f"{root}t/e", "org/hub@step5")  # fmt: skip
    found = folders(tmp_path, recorded=recorded)
    assert found.models(f"{root}t/d-seed*") == [f"{root}t/d-seed2", f"{root}t/d-seed10"]
    assert found.models(f"{root}t/*/checkpoint-5") == [
        f"{root}t/d-seed2/checkpoint-5",
        f"{root}t/d-seed10/checkpoint-5",
    ]
    assert found.models(f"{root}t/x*") == found.models(f"{root}d-seed*") == []
    assert found.is_folder(f"{root}t/d-seed2")
    assert not found.is_folder("org/hub")
    assert not found.is_folder(f"{root}t/d-seed")
    assert found.steps(f"{root}t/d-seed2", "checkpoint-*") == ["checkpoint-5", "checkpoint-50"]
    assert found.steps(f"{root}t/d-seed2/", "checkpoint-?") == ["checkpoint-5"]


def test_steps_are_those_on_disk_and_recorded_but_seeds_on_disk_alone(tmp_path: Path) -> None:
    found = folders(tmp_path, "t-1/step9", "t-1/step30", recorded=("t-1/step1", "t-2/step9"))
    assert found.models("t-*") == ["t-1"]
    assert found.steps("t-1", "step*") == ["step1", "step9", "step30"]
    assert found.located("t-1/step1") == "t-1/step1"
    assert found.located("t-1/step9") == str(tmp_path / "t-1/step9")
