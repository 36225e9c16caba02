"""Results of a study by its names: found without checkpoints, missing runs named, changed checkpoints reported."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.curves import curve
from evalkit.comparison.sides import Side
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.pages.report import contents_of_study
from evalkit.runs.folder import Run, load_run
from evalkit.studies.results import StudyResults, read_results, study_sides, study_trainings
from evalkit.studies.study import StudyBenchmark, record_of, save_record, select, trainings
from evalkit.studies.study_file import read_study
from tests.studies.made import compute, write_study
from tests.test_api import heavy_after
from tests.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def results(computed_study: Path) -> StudyResults:
    return read_results(computed_study)


def zs(results: StudyResults) -> StudyBenchmark:
    return results.study.benchmark("zs")


def changed(path: Path, **content: Any) -> StudyResults:
    """Change the content of a study file."""
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text("utf-8")) | content, sort_keys=False), "utf-8")
    return read_results(path)


def folders(results: StudyResults, name: str) -> list[str]:
    """Return the run folders of a model, without the ends of their names."""
    found = results.runs(select(results.study, name).checkpoints, zs(results))
    return [run.folder.name.partition("-zeroshot8")[0] for run in found]


def runs(results: StudyResults, *beginnings: str) -> tuple[Run, ...]:
    """Find run folders by the beginnings of their names, without records."""
    return tuple(load_run(folder) for begin in beginnings for [folder] in [results.study.output.glob(f"{begin}*")])


def test_seeds_and_steps_are_found(results: StudyResults) -> None:
    assert folders(results, "vanilla") == ["vanilla"]
    assert folders(results, "intg") == ["intg-seed1", "intg-seed2"]
    assert folders(results, "diff") == ["diff-seed1-checkpoint-10", "diff-seed2-checkpoint-10"]
    assert folders(results, "diff@5") == ["diff-seed1-checkpoint-5", "diff-seed2-checkpoint-5"]
    seeds = trainings(results.study, "diff")
    assert [(name, [one.step for one in found]) for name, found in seeds] == [
        ("diff seed 1", [5, 10, 20]),
        ("diff seed 2", [5, 10]),
    ]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("itng", UnknownNameError, "checkpoint of study .*'itng'.*'intg'"),
        ("diff@20", UsageError, "not every seed of diff has step 20"),
        ("diff@7", UnknownNameError, "step of study .*'diff@7'.*diff@10, diff@5"),
        ("intg@7", UnknownNameError, "step of study .*'intg@7'.*no steps"),
    ],
)
def test_unknown_names(results: StudyResults, name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        select(results.study, name)


def test_names_of_steps(study: Path, tmp_path: Path) -> None:
    """A name may contain the sign of a step; seeds may have no step in common."""
    names = {"a@5": str(study.parent / "checkpoints/vanilla")}
    other = read_study(write_study(tmp_path / "s.yaml", checkpoints=names, settings={}, benchmarks={"needle": {}}))
    assert select(other, "a@5").checkpoints[0].name == "a@5"
    for step in (5, 10):
        shutil.rmtree(study.parent / f"train/diff-seed2/checkpoint-{step}")
    shutil.copytree(study.parent / "checkpoints/vanilla", study.parent / "train/diff-seed2/checkpoint-7")
    shutil.rmtree(study.parent / "runs/.studies")
    with pytest.raises(UsageError, match="the seeds of diff have no training step in common"):
        select(read_study(study), "diff")


def test_neither_checkpoints_nor_torch_are_needed(study: Path) -> None:
    """Steps that a trainer deleted stay, and a seed that was removed goes; without any, all stay."""
    names = ("vanilla", "intg", "diff")
    expected = [folders(read_results(study), name) for name in names]
    shutil.rmtree(study.parent / "train/diff-seed1/checkpoint-5")
    shutil.rmtree(study.parent / "checkpoints/intg-seed1")
    results = read_results(study)
    assert [one.step for _, found in trainings(results.study, "diff") for one in found] == [5, 10, 20, 5, 10]
    assert folders(results, "intg") == ["intg-seed2"]
    for name in ("checkpoints", "train"):
        shutil.rmtree(study.parent / name)
    results = read_results(study)
    assert [folders(results, name) for name in names] == expected and len(results.study.checkpoints) == 8
    imports = "from pathlib import Path\nfrom evalkit.studies.results import read_results"
    assert heavy_after(f"{imports}\nread_results(Path({str(study)!r}))") == set()
    shutil.rmtree(results.study.output / ".studies")
    with pytest.raises(UsageError, match=r"checkpoint 'intg': no folder matches"):
        read_study(study)


def test_a_run_is_that_of_its_record(study: Path) -> None:
    """A folder of another id, an unfinished one, one that is gone, a damaged record, other settings: not finished."""
    whole = read_study(study)
    [run] = [one for one in whole.runs if one.label == "vanilla on zs"]
    record = record_of(whole.output, run)
    assert record is not None and record.checkpoint == "checkpoints/vanilla"
    folder, path = whole.output / record.folder, whole.output / ".studies" / f"{run.key}.json"

    def is_found() -> bool:
        return read_results(study).run(run.checkpoint, run.benchmark) is not None

    text = path.read_text("utf-8")
    for content in ({"id": "0" * 12}, {"folder": "../runs/" + record.folder}, {"folder": ".."}, {"folder": 3}):
        path.write_text(json.dumps(json.loads(text) | content), "utf-8")
        assert not is_found(), content
    path.write_text(text, "utf-8")
    (folder / "results.json").rename(folder / "kept.json")
    assert not is_found()
    (folder / "kept.json").rename(folder / "results.json")
    assert is_found()
    (folder / "manifest.json").write_text("{}", "utf-8")
    with pytest.raises(RunError, match=r"vanilla.*is damaged"):
        is_found()
    shutil.rmtree(folder)
    assert not is_found()
    settings = yaml.safe_load(study.read_text("utf-8"))["settings"] | {"dtype": "bfloat16"}
    assert folders(changed(study, settings=settings), "intg") == []


def test_changed_checkpoints_are_reported(tmp_path: Path, computed_study: Path) -> None:
    """Weights that were hashed here and replaced since, and a config; but nothing after a mere copy."""
    folder = tmp_path / "own"
    shutil.copytree(computed_study.parent / "documents", folder / "documents")
    before = time.time() - 60  # old enough for digests to be cached
    for seed, name in enumerate("ab"):
        for file in tiny_checkpoint(folder / name, seed=seed).iterdir():
            os.utime(file, (before, before))
    benchmarks = {"zs": {"suite": "zeroshot8", "tasks": ["piqa"], "limit": 1}}
    path = write_study(folder / "study.yaml", checkpoints={"a": "a", "b": "b"}, benchmarks=benchmarks)
    compute(path)

    def changes() -> list[str]:
        results = read_results(path)
        return results.changes(results.study.checkpoints, results.study.benchmarks[0])

    assert changes() == []
    weights = folder / "a" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert changes() == []
    tiny_checkpoint(folder / "a", seed=7)
    config = json.loads((folder / "b" / "config.json").read_text("utf-8"))
    (folder / "b" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}), "utf-8")
    first, second = changes()
    assert first.startswith("a: a has other files than this run's (weights); evalkit study run ")
    assert second.startswith("b: b has other files than this run's (config); ")
    (folder / "b" / "model.safetensors").unlink()
    assert len(changes()) == 1
    # A checkpoint of this name in another study, whose runs are in the same folder, has not its numbers
    shutil.copytree(folder, tmp_path / "two", ignore=shutil.ignore_patterns("runs"))
    more = {"output": "../own/runs", "benchmarks": benchmarks}
    other = read_results(write_study(tmp_path / "two" / "study.yaml", checkpoints={"a": "a"}, **more))
    assert other.run(other.study.checkpoints[0], other.study.benchmarks[0]) is None


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


def test_sides(results: StudyResults) -> None:
    found = study_sides(results, [], zs(results))
    assert [side.name for side in found.sides] == ["vanilla", "intg", "diff"]
    assert found.notes == ("Training steps: diff 10.",)
    steps = study_sides(results, ["diff@5", "diff"], zs(results))
    assert [[run.folder.name[:24] for run in side.runs] for side in steps.sides] == [
        ["diff-seed1-checkpoint-5-", "diff-seed2-checkpoint-5-"],
        ["diff-seed1-checkpoint-10", "diff-seed2-checkpoint-10"],
    ]
    assert steps.notes == ("Training steps: diff@5 5, diff 10.",)
    with pytest.raises(UsageError, match=r"nothing to compare intg with.*: vanilla, intg, diff$"):
        study_sides(results, ["intg"], zs(results))
    for make in (study_sides, lambda *given: contents_of_study(given[0], given[1], "zs")):
        with pytest.raises(UsageError, match=r"is named twice \(in diff and in diff@10\)"):
            make(results, ["diff", "diff@10"], zs(results))
    assert contents_of_study(results, ["vanilla"], "zs").comparisons == ()
    [comparison] = contents_of_study(results, ["vanilla", "diff"], "zs").comparisons
    assert [(one.side.name, one.steps) for one in comparison.trainings] == [
        ("diff seed 1", (5, 10, 20)),
        ("diff seed 2", (5, 10)),
    ]


def test_runs_that_are_not_finished(study: Path) -> None:
    shutil.rmtree(next(study.parent.glob("runs/intg-seed2-needle*")))
    results = read_results(study)
    needle, output = results.study.benchmark("needle"), results.study.output
    [failed] = [run for run in results.study.runs if run.label == "diff seed 2 step 10 on needle"]
    save_record(output, failed, output / "diff-0123456789ab", "0123456789ab", "out of memory")
    with pytest.raises(UsageError, match=r"^intg seed 2 on needle is not finished; run evalkit study run .*study.yaml"):
        study_sides(results, ["vanilla", "intg"], needle)
    words = r"diff seed 1 step 10 on needle, diff seed 2 step 10 on needle \(out of memory\) are not finished"
    with pytest.raises(UsageError, match=words):
        study_sides(results, ["vanilla", "diff"], needle)


def test_curves(study: Path) -> None:
    """One for each seed, by the steps that the study names; what is not finished is left out."""
    results = read_results(study)
    first, second = study_trainings(results, [], zs(results))
    assert (first.side.name, first.steps, second.steps) == ("diff seed 1", (5, 10, 20), (5, 10))
    assert first.notes == second.notes == ()
    expected = runs(results, "diff-seed2-checkpoint-10-", "diff-seed2-checkpoint-5-")
    assert curve(second.side, None, second.steps) == curve(Side("diff seed 2", expected))
    renamed, named = curve(first.side, None, (7, 9, 8)), curve(first.side, None, first.steps)
    assert [(point.step, point.accuracy) for point in renamed.average] == [
        (step, named.average[place].accuracy) for step, place in ((7, 0), (8, 2), (9, 1))
    ]
    with pytest.raises(UsageError, match="intg has no training steps"):
        study_trainings(results, ["intg"], zs(results))
    shutil.rmtree(next(study.parent.glob("runs/diff-seed1-checkpoint-10-*")))
    results = read_results(study)
    first, _ = study_trainings(results, ["diff"], zs(results))
    assert (first.steps, first.notes) == ((5, 20), ("diff seed 1: not finished: step 10.",))
    shutil.rmtree(next(study.parent.glob("runs/diff-seed1-checkpoint-20-*")))
    results = read_results(study)
    with pytest.raises(UsageError, match=r"^diff seed 1 step 10 on zs, diff seed 1 step 20 on zs are not finished"):
        study_trainings(results, ["diff"], zs(results))
    results = changed(study, checkpoints={"vanilla": "checkpoints/vanilla"})
    with pytest.raises(UsageError, match="no checkpoint has 'steps'"):
        study_trainings(results, [], zs(results))
