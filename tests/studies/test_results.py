"""Results of a study by its names: without its checkpoints, of missing runs, and of checkpoints that changed."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import yaml

from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.curves import curve
from evalkit.comparison.sides import Side
from evalkit.errors import UnknownNameError, UsageError
from evalkit.pages.report import contents_of_study
from evalkit.reporting.report import render
from evalkit.runs.folder import Run, load_run
from evalkit.studies.results import StudyResults, read_results, study_sides, study_trainings
from evalkit.studies.running import run_here, run_study
from evalkit.studies.study import StudyBenchmark, record_of, save_record, select, trainings
from evalkit.studies.study_file import read_study
from evalkit.studies.tables import own_tables
from tests.studies.made import NEEDLE, ZS, Told, changed, write_study
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


def folders(results: StudyResults, name: str) -> list[str]:
    """The run folders of a model, without the ends of their names."""
    runs = results.runs(select(results.study, name).checkpoints, zs(results))
    return [run.folder.name.partition("-zeroshot8")[0] for run in runs]


def runs_of(results: StudyResults, *beginnings: str) -> tuple[Run, ...]:
    """Find run folders by the beginnings of their names, without records."""
    return tuple(load_run(folder) for begin in beginnings for [folder] in [results.study.output.glob(f"{begin}*")])


def steps_of(results: StudyResults) -> list[tuple[str, list[int | None]]]:
    return [(name, [checkpoint.step for checkpoint in steps]) for name, steps in trainings(results.study, "diff")]


def test_models_are_selected_by_name_and_step(results: StudyResults, study: Path, tmp_path: Path) -> None:
    """A name may contain the sign of a step; seeds may have no step in common."""
    assert folders(results, "vanilla") == ["vanilla"] and folders(results, "intg") == ["intg_seed_1", "intg_seed_2"]
    for step, name in ((10, "diff"), (5, "diff@5")):
        assert folders(results, name) == [f"diff_seed_{seed}_step_{step}" for seed in (1, 2)]
    assert steps_of(results) == [("diff seed 1", [5, 10, 20]), ("diff seed 2", [5, 10])]
    for name, nouns in [
        ("itng", "checkpoint of study .*'itng'.*'intg'"),
        ("diff@20", "step .*'diff@20'.*diff@10, diff@5"),
    ]:
        with pytest.raises(UnknownNameError, match=nouns):
            select(results.study, name)
    other = write_study(tmp_path / "s.yaml", {"a@5": str(study.parent / "vanilla")}, {"needle": NEEDLE}, settings={})
    assert select(read_study(other), "a@5").checkpoints[0].name == "a@5"
    for step in (5, 10):
        shutil.rmtree(study.parent / f"train/diff-seed2/checkpoint-{step}")
    shutil.copytree(study.parent / "vanilla", study.parent / "train/diff-seed2/checkpoint-7")
    shutil.rmtree(study.parent / "runs/.studies")
    with pytest.raises(UsageError, match="diff have no training step in common"):
        select(read_study(study), "diff")


def test_neither_checkpoints_nor_torch_are_needed(study: Path) -> None:
    """Steps that a trainer deleted stay, and a seed that was removed goes; without any, all stay."""
    names = ("vanilla", "intg", "diff")
    expected = [folders(read_results(study), name) for name in names]
    shutil.rmtree(study.parent / "train/diff-seed1/checkpoint-5")
    shutil.rmtree(study.parent / "intg-seed1")
    results = read_results(study)
    assert steps_of(results) == [("diff seed 1", [5, 10, 20]), ("diff seed 2", [5, 10])]
    assert folders(results, "intg") == ["intg_seed_2"]
    for name in ("vanilla", "intg-seed2", "train"):
        shutil.rmtree(study.parent / name)
    results = read_results(study)
    assert [folders(results, name) for name in names] == expected and len(results.study.checkpoints) == 8
    imports = (
        "from pathlib import Path\nfrom evalkit.cli.root import cli\nfrom evalkit.studies.results import read_results"
    )
    status = f"cli.main(['study', 'status', {str(study)!r}], standalone_mode=False)"
    assert heavy_after(f"{imports}\nread_results(Path({str(study)!r}))\n{status}") == set()


def test_changed_checkpoints_are_reported(tmp_path: Path, files: Path) -> None:
    """Weights that were hashed here and replaced since, and a config; but nothing after a mere copy."""
    folder = tmp_path / "first"
    shutil.copytree(files / "documents", folder / "documents")
    before = time.time() - 60  # old enough for digests to be cached
    for seed, name in enumerate("ab"):
        for file in tiny_checkpoint(folder / name, seed=seed).iterdir():
            os.utime(file, (before, before))
    benchmarks = {"zs": ZS | {"tasks": ["piqa"], "limit": 1}}
    path = write_study(folder / "study.yaml", {"a": "a", "b": "b"}, benchmarks)
    run_study(read_study(path), Told(), run_here, wait=False)

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
    assert first.startswith("a: ") and "(weights)" in first and second.startswith("b: ") and "(config)" in second
    # A checkpoint of this name in another study, whose runs are in the same folder, has not its numbers
    shutil.copytree(folder, tmp_path / "two", ignore=shutil.ignore_patterns("runs"))
    other = read_results(write_study(tmp_path / "two" / "study.yaml", {"a": "a"}, benchmarks, output="../first/runs"))
    assert other.run(other.study.checkpoints[0], other.study.benchmarks[0]) is None


def test_sides(results: StudyResults) -> None:
    """Seeds are groups on every benchmark."""
    chosen = study_sides(results, ["vanilla", "intg"], zs(results))
    seeds = runs_of(results, "intg_seed_1-zeroshot8", "intg_seed_2-zeroshot8")
    expected = [Side("vanilla", runs_of(results, "vanilla-zeroshot8")), Side("intg", seeds)]
    assert compare_sides(chosen.sides) == compare_sides(expected) and chosen.notes == ()
    chosen = study_sides(results, [], zs(results))
    assert [side.name for side in chosen.sides] == ["vanilla", "intg", "diff"]
    assert chosen.notes == ("Training steps: diff 10.",)
    steps = study_sides(results, ["diff@5", "diff"], zs(results))
    assert [[run.folder.name.partition("-zeroshot8")[0] for run in side.runs] for side in steps.sides] == [
        [f"diff_seed_{seed}_step_{step}" for seed in (1, 2)] for step in (5, 10)
    ]
    assert steps.notes == ("Training steps: diff@5 5, diff 10.",)
    with pytest.raises(UsageError, match=r"intg with.*: vanilla, intg, diff$"):
        study_sides(results, ["intg"], zs(results))
    with pytest.raises(UsageError, match="two sides are one run"):
        study_sides(results, ["diff", "diff@10"], zs(results))
    [comparison] = contents_of_study(results, ["vanilla", "diff"], "zs").benchmarks
    assert [(training.side.name, training.steps) for training in comparison.trainings] == [
        ("diff seed 1", (5, 10, 20)),
        ("diff seed 2", (5, 10)),
    ]


def test_runs_that_are_not_finished(study: Path) -> None:
    shutil.rmtree(next(study.parent.glob("runs/intg_seed_2-needle*")))
    results = read_results(study)
    needle, output = results.study.benchmark("needle"), results.study.output
    [failed] = [run for run in results.study.runs if run.label == "diff seed 2 step 10 on needle"]
    save_record(output, failed, output / "diff-0123456789ab", "0123456789ab", "out of memory")
    with pytest.raises(UsageError, match=r": intg seed 2 on needle; .*evalkit study run .*study.yaml"):
        study_sides(results, ["vanilla", "intg"], needle)
    nouns = r"diff seed 1 step 10 on needle, diff seed 2 step 10 on needle \(out of memory\)"
    with pytest.raises(UsageError, match=nouns):
        study_sides(results, ["vanilla", "diff"], needle)


def test_checkpoints_that_do_not_run_on_a_benchmark(study: Path) -> None:
    """They are neither compared nor missing, and an error where they are named."""
    with pytest.raises(UsageError, match="diff seed 1 step 10 on needle"):
        study_sides(read_results(study), [], read_results(study).study.benchmark("needle"))
    only = NEEDLE | {"checkpoints": ["intg", "vanilla"]}
    results = read_results(changed(study, benchmarks={"zs": ZS, "needle": only}))
    needle = results.study.benchmark("needle")
    assert [side.name for side in study_sides(results, [], needle).sides] == ["vanilla", "intg"]
    for call in (study_sides, study_trainings):
        with pytest.raises(UsageError, match=r"checkpoint of benchmark needle.*'diff'"):
            call(results, ["diff", "vanilla"], needle)
    with pytest.raises(UsageError, match="no checkpoint has 'steps'"):
        study_trainings(results, [], needle)
    report = own_tables(results, "needle", None, errors=False)
    content = report.content
    assert "n = " in report.verdict[0] and "n = " in render(report, "latex").partition("\\caption{")[2]
    assert {row["model"] for row in content} == {"vanilla", "intg"}
    assert contents_of_study(results).notes == ()


def test_curves(study: Path) -> None:
    """One for each seed, by the steps that the study names; what is not finished is left out."""
    results = read_results(study)
    first, second = study_trainings(results, [], zs(results))
    assert (first.side.name, first.steps, second.steps) == ("diff seed 1", (5, 10, 20), (5, 10))
    assert first.notes == second.notes == ()
    expected = runs_of(results, "diff_seed_2_step_10-", "diff_seed_2_step_5-")
    assert curve(second.side, None, second.steps) == curve(Side("diff seed 2", expected))
    renamed, named = curve(first.side, None, (7, 9, 8)), curve(first.side, None, first.steps)
    assert [(point.step, point.value) for point in renamed.average] == [
        (step, named.average[position].value) for step, position in ((7, 0), (8, 2), (9, 1))
    ]
    shutil.rmtree(next(study.parent.glob("runs/diff_seed_1_step_10-*")))
    results = read_results(study)
    first, _ = study_trainings(results, ["diff"], zs(results))
    assert (first.steps, first.notes) == ((5, 20), ("diff seed 1: not finished: step 10.",))
    results = read_results(changed(study, checkpoints={"vanilla": "vanilla"}))
    with pytest.raises(UsageError, match="'steps'"):
        study_trainings(results, [], zs(results))


def test_a_run_is_that_of_its_record(study: Path) -> None:
    """One of another id, an unfinished one, one that is gone, and other settings are none."""
    whole = read_study(study)
    [run] = [run for run in whole.runs if run.label == "vanilla on zs"]
    record = record_of(whole.output, run)
    assert record is not None and record.checkpoint == "vanilla"
    path = whole.output / ".studies" / f"{run.key}.json"
    text, results = path.read_text("utf-8"), whole.output / record.folder / "results.json"

    def is_finished() -> bool:
        return read_results(study).run(run.checkpoint, run.benchmark) is not None

    assert is_finished()
    path.write_text(json.dumps(json.loads(text) | {"id": "0" * 12}), "utf-8")
    assert not is_finished()
    path.write_text(text, "utf-8")
    results.unlink()
    assert not is_finished()
    settings = yaml.safe_load(study.read_text("utf-8"))["settings"] | {"dtype": "bfloat16"}
    assert folders(read_results(changed(study, settings=settings)), "intg") == []
