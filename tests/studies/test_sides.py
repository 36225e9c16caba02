"""Comparisons and curves by a study's names: the same as those of the runs themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.curves import curve
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import Run, load_run
from evalkit.studies.results import StudyResults, read_results, study_sides, study_trainings


@pytest.fixture
def results(computed_study: Path) -> StudyResults:
    return read_results(computed_study)


def runs(results: StudyResults, *beginnings: str) -> tuple[Run, ...]:
    """Find run folders by the beginnings of their names, without records."""
    found = [sorted(results.study.output.glob(f"{begin}*")) for begin in beginnings]
    assert all(len(one) == 1 for one in found)
    return tuple(load_run(folder) for [folder] in found)


@pytest.mark.parametrize("benchmark", ["zs", "lm_eval", "longbench", "needle"])
def test_seeds_are_groups_on_every_benchmark(results: StudyResults, benchmark: str) -> None:
    suite = "zeroshot8" if benchmark == "zs" else benchmark
    found = study_sides(results, ["vanilla", "intg"], results.study.benchmark(benchmark))
    expected = [
        Side("vanilla", runs(results, f"vanilla-{suite}")),
        Side("intg", runs(results, f"intg-seed1-{suite}", f"intg-seed2-{suite}")),
    ]
    assert compare_sides(found.sides) == compare_sides(expected)
    assert found.notes == ()


def test_without_names_all_are_compared_with_the_first(results: StudyResults) -> None:
    found = study_sides(results, [], results.study.benchmark("zs"))
    assert [side.name for side in found.sides] == ["vanilla", "intg", "diff"]
    assert found.notes == ("Training steps: diff 10.",)
    steps = study_sides(results, ["diff@5", "diff"], results.study.benchmark("zs"))
    assert [[run.folder.name[:24] for run in side.runs] for side in steps.sides] == [
        ["diff-seed1-checkpoint-5-", "diff-seed2-checkpoint-5-"],
        ["diff-seed1-checkpoint-10", "diff-seed2-checkpoint-10"],
    ]
    assert steps.notes == ("Training steps: diff@5 5, diff 10.",)


def test_sides_that_cannot_be_compared(results: StudyResults) -> None:
    zs, needle = (results.study.benchmark(name) for name in ("zs", "needle"))
    with pytest.raises(UsageError, match=r"nothing to compare intg with; name two .*: vanilla, intg, diff$"):
        study_sides(results, ["intg"], zs)
    with pytest.raises(UsageError, match=r"is named twice \(in diff and in diff@10\)"):
        study_sides(results, ["diff", "diff@10"], zs)
    with pytest.raises(UsageError, match=r"^diff seed 1 step 10 on needle, diff seed 2 step 10 on needle are not fini"):
        study_sides(results, [], needle)


def test_a_missing_seed_is_an_error(study: Path) -> None:
    shutil.rmtree(next(study.parent.glob("runs/intg-seed2-needle*")))
    results = read_results(study)
    with pytest.raises(UsageError, match=r"^intg seed 2 on needle is not finished; run evalkit study run .*study.yaml"):
        study_sides(results, ["vanilla", "intg"], results.study.benchmark("needle"))


def test_a_curve_for_each_seed(results: StudyResults) -> None:
    first, second = study_trainings(results, [], results.study.benchmark("zs"))
    assert (first.side.name, first.steps, second.steps) == ("diff seed 1", (5, 10, 20), (5, 10))
    assert first.notes == second.notes == ()
    found = curve(second.side, None, second.steps)
    expected = runs(results, "diff-seed2-checkpoint-10-", "diff-seed2-checkpoint-5-")
    assert found == curve(Side("diff seed 2", expected))
    with pytest.raises(UsageError, match="intg has no training steps"):
        study_trainings(results, ["intg"], results.study.benchmark("zs"))


def test_the_study_names_the_steps(results: StudyResults) -> None:
    """Not what the names of runs and checkpoints contain."""
    [first, _] = study_trainings(results, ["diff"], results.study.benchmark("zs"))
    found, expected = curve(first.side, None, (7, 9, 8)), curve(first.side, None, first.steps)
    assert [point.step for point in found.average] == [7, 8, 9]
    assert [point.accuracy for point in found.average] == [expected.average[place].accuracy for place in (0, 2, 1)]


def test_a_curve_that_grows(study: Path) -> None:
    shutil.rmtree(next(study.parent.glob("runs/diff-seed1-checkpoint-10-*")))
    results = read_results(study)
    first, _ = study_trainings(results, ["diff"], results.study.benchmark("zs"))
    assert first.steps == (5, 20)
    assert first.notes == ("diff seed 1: not finished: step 10.",)
    shutil.rmtree(next(study.parent.glob("runs/diff-seed1-checkpoint-20-*")))
    results = read_results(study)
    with pytest.raises(UsageError, match=r"^diff seed 1 step 10 on zs, diff seed 1 step 20 on zs are not finished"):
        study_trainings(results, ["diff"], results.study.benchmark("zs"))
    content = yaml.safe_load(study.read_text("utf-8"))
    content["checkpoints"] = {"vanilla": "checkpoints/vanilla"}
    study.write_text(yaml.safe_dump(content), "utf-8")
    results = read_results(study)
    with pytest.raises(UsageError, match="no checkpoint has 'steps', so there is no curve"):
        study_trainings(results, [], results.study.benchmark("zs"))
