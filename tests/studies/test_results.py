"""Finished runs of a study: found without checkpoints, missing ones by name, and changed checkpoints reported."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.studies.results import StudyResults, read_results
from evalkit.studies.study import Study, StudyRun, record_of, save_record, select, trainings
from evalkit.studies.study_file import read_study
from tests.studies.made import compute, write_study
from tests.test_api import heavy_after
from tests.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))


def run_of(study: Study, label: str) -> StudyRun:
    [found] = [one for one in study.runs if one.label == label]
    return found


def changed(path: Path, **content: Any) -> Path:
    """Change the content of a study file."""
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text("utf-8")) | content, sort_keys=False), "utf-8")
    return path


def folders(results: StudyResults, name: str, benchmark: str = "zs") -> list[str]:
    """Return the run folders of a model, without the ends of their names."""
    found = results.runs(select(results.study, name).checkpoints, results.study.benchmark(benchmark))
    return [run.folder.name.partition("-zeroshot8")[0] for run in found]


def test_seeds_and_steps_are_found(computed_study: Path) -> None:
    results = read_results(computed_study)
    assert folders(results, "vanilla") == ["vanilla"]
    assert folders(results, "intg") == ["intg-seed1", "intg-seed2"]
    assert folders(results, "diff") == ["diff-seed1-checkpoint-10", "diff-seed2-checkpoint-10"]
    assert folders(results, "diff@5") == ["diff-seed1-checkpoint-5", "diff-seed2-checkpoint-5"]
    seeds = trainings(results.study, "diff")
    assert [(name, [one.step for one in found]) for name, found in seeds] == [
        ("diff seed 1", [5, 10, 20]),
        ("diff seed 2", [5, 10]),
    ]


def test_the_names_that_there_are_not(computed_study: Path) -> None:
    study = read_study(computed_study)
    with pytest.raises(UnknownNameError, match=r"unknown checkpoint of study .*study.yaml 'itng': did you mean 'intg'"):
        select(study, "itng")
    with pytest.raises(UsageError, match="not every seed of diff has step 20"):
        select(study, "diff@20")
    with pytest.raises(UnknownNameError, match=r"unknown step of study .* 'diff@7'.* Known: diff@10, diff@5"):
        select(study, "diff@7")
    with pytest.raises(UnknownNameError, match=r"unknown step of study .* 'intg@7'.*it has no steps"):
        select(study, "intg@7")
    with pytest.raises(UsageError, match="vanilla has no training steps, so it has no curve"):
        trainings(study, "vanilla")


def test_a_name_may_contain_the_sign_of_a_step(computed_study: Path, tmp_path: Path) -> None:
    names = {"a@5": str(computed_study.parent / "checkpoints/vanilla")}
    study = read_study(write_study(tmp_path / "s.yaml", checkpoints=names, settings={}, benchmarks={"needle": {}}))
    assert select(study, "a@5").checkpoints[0].name == "a@5"


def test_seeds_without_a_common_step(study: Path) -> None:
    shutil.rmtree(study.parent / "train/diff-seed2/checkpoint-5")
    shutil.rmtree(study.parent / "train/diff-seed2/checkpoint-10")
    shutil.copytree(study.parent / "checkpoints/vanilla", study.parent / "train/diff-seed2/checkpoint-7")
    shutil.rmtree(study.parent / "runs/.studies")
    with pytest.raises(UsageError, match="the seeds of diff have no training step in common"):
        select(read_study(study), "diff")


def test_neither_checkpoints_nor_torch_are_needed(study: Path) -> None:
    expected = [
        [run.folder.name for run in read_results(study).runs(found.checkpoints, read_study(study).benchmarks[0])]
        for found in (select(read_study(study), name) for name in ("vanilla", "intg", "diff"))
    ]
    shutil.rmtree(study.parent / "checkpoints")
    shutil.rmtree(study.parent / "train")
    results = read_results(study)
    assert [
        [run.folder.name for run in results.runs(select(results.study, name).checkpoints, results.study.benchmarks[0])]
        for name in ("vanilla", "intg", "diff")
    ] == expected
    assert len(results.study.checkpoints) == 8
    imports = "from pathlib import Path\nfrom evalkit.studies.results import read_results"
    assert heavy_after(f"{imports}\nread_results(Path({str(study)!r}))") == set()
    shutil.rmtree(results.study.output / ".studies")
    with pytest.raises(UsageError, match=r"checkpoint 'intg': no folder matches 'checkpoints/intg-seed\*'"):
        read_study(study)


def test_steps_that_a_trainer_deleted_stay_and_a_seed_that_was_removed_goes(study: Path) -> None:
    shutil.rmtree(study.parent / "train/diff-seed1/checkpoint-5")
    shutil.rmtree(study.parent / "checkpoints/intg-seed1")
    results = read_results(study)
    assert [one.step for _, found in trainings(results.study, "diff") for one in found] == [5, 10, 20, 5, 10]
    assert folders(results, "intg") == ["intg-seed2"]
    shutil.rmtree(results.study.output / ".studies")
    assert [one.step for _, found in trainings(read_study(study), "diff") for one in found] == [10, 20, 5, 10]


def test_runs_that_are_not_finished(study: Path) -> None:
    results = read_results(study)
    [(intg, needle)] = [(select(results.study, "diff"), results.study.benchmark("needle"))]
    missing = results.missing(intg.checkpoints, needle)
    assert [run.label for run in missing] == ["diff seed 1 step 10 on needle", "diff seed 2 step 10 on needle"]
    failed = missing[1]
    save_record(results.study.output, failed, Path("diff-0123456789ab"), "0123456789ab", "out of memory")
    words = (
        r"^diff seed 1 step 10 on needle, diff seed 2 step 10 on needle \(out of memory\) are not finished; "
        r"run evalkit study run .*study\.yaml, which computes what is missing$"
    )
    with pytest.raises(UsageError, match=words):
        results.require(intg.checkpoints, needle)


def test_a_run_is_that_of_its_record(study: Path) -> None:
    """A folder of another id, an unfinished one, one that is gone, a damaged record: not finished."""
    whole = read_study(study)
    run = run_of(whole, "vanilla on zs")
    record = record_of(whole.output, run)
    assert record is not None
    assert record.checkpoint == "checkpoints/vanilla"
    folder = whole.output / record.folder
    path = whole.output / ".studies" / f"{run.key}.json"

    def found() -> bool:
        return read_results(study).run(run.checkpoint, run.benchmark) is not None

    assert found()
    text = path.read_text("utf-8")
    for content in ({"id": "0" * 12}, {"folder": "../runs/" + record.folder}, {"folder": ".."}, {"folder": 3}):
        path.write_text(json.dumps(json.loads(text) | content), "utf-8")
        assert not found(), content
    path.write_text(text[:-20], "utf-8")
    assert not found()
    path.write_text(text, "utf-8")
    (folder / "results.json").rename(folder / "kept.json")
    assert not found()
    (folder / "kept.json").rename(folder / "results.json")
    assert found()
    (folder / "manifest.json").write_text("{}", "utf-8")
    with pytest.raises(RunError, match=r"vanilla.*is damaged"):
        found()
    shutil.rmtree(folder)
    assert not found()


def test_other_settings_are_another_run(study: Path) -> None:
    content = yaml.safe_load(study.read_text("utf-8"))
    results = read_results(changed(study, settings=content["settings"] | {"dtype": "bfloat16"}))
    assert folders(results, "vanilla") == []


def settle(folder: Path) -> None:
    """Give the files of a folder a time that is old enough for digests to be cached."""
    before = time.time() - 60
    for path in folder.iterdir():
        os.utime(path, (before, before))


def test_changed_checkpoints_are_reported(tmp_path: Path, computed_study: Path) -> None:
    """Weights that were hashed here and replaced since, and a config; but nothing after a mere copy."""
    folder = tmp_path / "own"
    shutil.copytree(computed_study.parent / "documents", folder / "documents")
    for seed, name in enumerate("ab"):
        tiny_checkpoint(folder / name, seed=seed)
        settle(folder / name)
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


def test_checkpoints_of_one_name_in_two_studies(tmp_path: Path, computed_study: Path) -> None:
    """Both store their runs in one folder: neither has the numbers of the other's checkpoint."""
    benchmarks = {"zs": {"suite": "zeroshot8", "tasks": ["piqa"], "limit": 1}}
    studies = []
    for seed, name in enumerate(("one", "two")):
        tiny_checkpoint(tmp_path / name / "model", seed=seed)
        shutil.copytree(computed_study.parent / "documents", tmp_path / name / "documents")
        more = {"output": "../runs", "benchmarks": benchmarks}
        studies.append(write_study(tmp_path / name / "study.yaml", checkpoints={"m": "model"}, **more))
    compute(studies[0])
    first, second = map(read_results, studies)
    assert first.run(first.study.checkpoints[0], first.study.benchmarks[0]) is not None
    assert second.run(second.study.checkpoints[0], second.study.benchmarks[0]) is None
