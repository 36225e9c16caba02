"""Plans of whole studies: all problems at once, before anything is computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import planned
from evalkit.data.library import Library
from evalkit.errors import SeveralErrors
from evalkit.models.loading.locate import silent
from evalkit.studies.planning import plan_checkpoints, plan_study
from evalkit.studies.running import Outcome, outcomes_report, run_here, run_study
from evalkit.studies.study import record_of, save_record
from evalkit.studies.study_file import read_study
from tests.printed import printed
from tests.studies.tiny_studies import CHOICES, NEEDLE, Told, made_files, made_study


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints and documents."""
    return made_files(tmp_path)


def problems_of(path: Path) -> tuple[str, ...]:
    """Return the problems of a study that cannot be planned; nothing is written."""
    study = read_study(path)
    with pytest.raises(SeveralErrors) as raised:
        plan_study(study, silent)
    assert not study.output.exists()
    assert str(path) in raised.value.summary
    assert "\n" not in str(raised.value)
    return raised.value.problems


def test_every_run_is_the_one_of_a_single_command_and_is_recorded(folder: Path) -> None:
    study = read_study(made_study(folder, {"A": "vanilla", "B": "intg-*"}, {"zeroshot8": CHOICES, "needle": NEEDLE}))
    found = plan_study(study, silent).runs
    assert [one.run.label for one in found] == [one.label for one in study.runs]
    for one in found:
        options = {**one.run.options, "output": study.output}
        assert one.plan.folder == planned(one.run.checkpoint.model, options, silent).folder
        record = record_of(study.output, one.run)
        assert record is not None
        assert (record.folder, record.id, record.error) == (one.plan.folder.name, one.plan.manifest["id"], "")
        assert record.parameters == 139_584
    assert not any(one.plan.folder.exists() for one in found)


def test_documents_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    create: Callable[..., None] = Library.__init__

    def counted(library: Library, *arguments: Any, **more: Any) -> None:
        made.append(arguments)
        create(library, *arguments, **more)

    monkeypatch.setattr(Library, "__init__", counted)
    plan_study(
        read_study(made_study(folder, {"A": "vanilla", "B": "intg-*", "C": "train-seed1/checkpoint-20"})), silent
    )
    assert len(made) == 1


def test_all_checkpoints_that_do_not_exist_are_named_at_once(folder: Path) -> None:
    (folder / "empty").mkdir()
    short = Path(shutil.copytree(folder / "vanilla", folder / "short"))
    weights = short / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    checkpoints = {"A": "vanilla", "gone": "./nix", "lost": "far/away/from", "empty": "empty", "short": "short"}
    benchmarks = {"zeroshot8": CHOICES, "needle": NEEDLE}
    found = problems_of(made_study(folder, checkpoints, benchmarks))
    assert len(found) == 4
    for problem, (name, what) in zip(
        found,
        {
            "gone": "nix: file or folder not found",
            "lost": "file or folder not found",
            "empty": "the folder is empty",
            "short": "model.safetensors: cannot be read as undamaged weights",
        }.items(),
        strict=True,
    ):
        assert problem.startswith(f"checkpoint {name}: ")
        assert what in problem


def test_a_problem_of_a_benchmark_is_named_once(folder: Path) -> None:
    far, odd = {"suite": "needle", "lengths": [100_000]}, CHOICES | {"suite": "zeroshot8", "rule": "nix"}
    benchmarks = {"zeroshot8": CHOICES, "far": far, "odd": odd}
    found = problems_of(made_study(folder, {"A": "vanilla", "B": "intg-*"}, benchmarks))
    assert [one.partition(":")[0] for one in found] == ["benchmark far", "benchmark odd"]
    assert "the model's context window is 1024 tokens" in found[0]


def test_two_entries_that_are_the_same_run_are_both_named(folder: Path) -> None:
    shutil.copytree(folder / "vanilla", folder / "copy")
    benchmarks = {"zeroshot8": CHOICES, "again": CHOICES | {"suite": "zeroshot8", "rule": "acc_norm"}}
    found = problems_of(made_study(folder, {"A": "vanilla", "B": "intg-seed1"}, benchmarks))
    assert [one.partition(" (")[0] for one in found] == [
        "A on zeroshot8 and A on again are the same run",
        "B on zeroshot8 and B on again are the same run",
    ]
    assert "every rule reads the same scores" in found[0]
    [found_one] = problems_of(made_study(folder, {"A": "vanilla", "B": "./vanilla"}))
    assert "A on zeroshot8 and B on zeroshot8 are the same run" in found_one
    [found_one] = problems_of(made_study(folder, {"A": "vanilla", "B": "copy"}))
    assert "their checkpoints have the same content" in found_one


def test_messages_are_said_once(folder: Path) -> None:
    said: list[str] = []
    benchmarks = {"zeroshot8": CHOICES | {"tasks": ["piqa"], "context": 2048, "context_original": 512}}
    plan_study(read_study(made_study(folder, {"A": "vanilla", "B": "intg-*"}, benchmarks)), said.append)
    assert len(said) == len(set(said))


def test_checkpoints_of_one_benchmark(folder: Path) -> None:
    options = CHOICES | {"data_dir": folder / "documents", "device": "cpu", "output": folder / "runs"}
    models = [str(folder / name) for name in ("vanilla", "nix", "intg-seed1", "nox")]
    with pytest.raises(SeveralErrors, match="2 problems; nothing was computed") as raised:
        plan_checkpoints(models, options, silent)
    assert [one.split(":")[0] for one in raised.value.problems] == [models[1], models[3]]
    jobs = plan_checkpoints(models[::2], options, silent)
    assert [job.label for job in jobs] == models[::2]


def test_a_finished_run_whose_checkpoint_is_gone_is_kept(folder: Path) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "./intg-seed1"})
    run_study(read_study(path), Told(), run_here, wait=False)
    shutil.rmtree(folder / "intg-seed1")
    said: list[str] = []
    plan = plan_study(read_study(path), said.append)
    assert [one.run.label for one in plan.runs] == ["A on zeroshot8"]
    assert [one.run.label for one in plan.kept] == ["B on zeroshot8"]
    assert said[-1].startswith("B on zeroshot8: finished, and not checked again")
    # It is one of the study's outcomes
    found = run_study(read_study(path), Told(), run_here, wait=True)
    report = outcomes_report(found)
    assert "2 runs: 2 finished" in printed(report)
    assert [(one["run"], one["state"]) for one in report.content] == [
        ("A on zeroshot8", "finished"), ("B on zeroshot8", "finished"),
    ]  # fmt: skip
    assert report.content[1]["score"] is not None


def test_a_damaged_checkpoint_of_a_finished_run_is_a_problem(folder: Path) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "intg-seed1"})
    run_study(read_study(path), Told(), run_here, wait=False)
    weights = folder / "intg-seed1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SeveralErrors, match=r"checkpoint B: .*model.safetensors: cannot be read"):
        plan_study(read_study(path), silent)


def test_nothing_is_computed_where_every_checkpoint_is_gone(folder: Path) -> None:
    path = made_study(folder, {"B": "./intg-seed1"})
    run_study(read_study(path), Told(), run_here, wait=False)
    shutil.rmtree(folder / "intg-seed1")

    def runner(*_: object) -> list[Outcome]:
        raise AssertionError("a cluster would be started")

    [(_, outcome)] = run_study(read_study(path), Told(), runner, wait=True)
    assert outcome.state == "finished"


def test_steps_that_a_trainer_deleted(folder: Path) -> None:
    """Their finished runs are kept; what they lack is left out, unless the user names the step."""
    steps: dict[str, Any] = {"C": {"model": "train-seed1", "steps": "checkpoint-*"}}
    run_study(read_study(made_study(folder, steps)), Told(), run_here, wait=False)
    shutil.rmtree(folder / "train-seed1" / "checkpoint-20")
    more = {"zeroshot8": CHOICES, "needle": NEEDLE}
    path = made_study(folder, steps, more)
    said: list[str] = []
    plan = plan_study(read_study(path), said.append)
    assert [one.run.label for one in plan.runs] == ["C step 100 on zeroshot8", "C step 100 on needle"]
    assert [one.run.label for one in plan.kept] == ["C step 20 on zeroshot8"]
    assert [line for line in said if "left out" in line] == [
        "C step 20 on needle: left out, since its checkpoint was deleted before this run was finished"
    ]
    steps["C"]["steps"] = ["checkpoint-20", "checkpoint-100"]
    with pytest.raises(SeveralErrors, match=r"checkpoint C step 20: .*not found"):
        plan_study(read_study(made_study(folder, steps, more)), silent)


def test_a_recorded_failure_stays_when_the_study_is_planned_again(folder: Path) -> None:
    """Nothing is written, since another process may write the failure at this moment."""
    study = read_study(made_study(folder, {"A": "vanilla"}))
    [one] = plan_study(study, silent).runs
    save_record(study.output, one.run, one.plan.folder, one.plan.manifest["id"], "it broke")
    [path] = (study.output / ".studies").iterdir()
    before = path.stat().st_ino
    plan_study(study, silent)
    assert path.stat().st_ino == before
    record = record_of(study.output, one.run)
    assert record is not None
    assert (record.error, record.parameters) == ("it broke", 139_584)
