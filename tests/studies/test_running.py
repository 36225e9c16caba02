"""Running a study in one process and in several: the same tables, nothing lost, failures recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from evalkit.display import Progress
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import JOURNAL, RESULTS, load_run
from evalkit.runs.lock import locked, read_owner
from evalkit.studies import running as module
from evalkit.studies.planning import Job, plan_study
from evalkit.studies.running import Outcome, outcomes_report, run_here, run_study
from evalkit.studies.status import states_of
from evalkit.studies.study import record_of, save_record
from evalkit.studies.study_file import read_study
from tests.printed import printed
from tests.studies.tiny_studies import CHOICES, NEEDLE, Told, made_files, made_study, same_tables, tables_of

CHECKPOINTS = {"A": "vanilla", "B": "intg-*", "C": {"model": "train-*", "steps": "checkpoint-*"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints and documents."""
    return made_files(tmp_path)


def folder_of(path: Path, place: int) -> Path:
    """Return the folder of a run that is recorded."""
    study = read_study(path)
    record = record_of(study.output, study.runs[place])
    assert record is not None
    return study.output / record.folder


def test_a_failure_is_recorded_and_cleared_by_success(folder: Path) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "intg-*"}, {"zeroshot8": CHOICES, "needle": NEEDLE})
    study = read_study(path)
    weights = folder / "intg-seed1" / "model.safetensors"
    own, other = weights.read_bytes(), (folder / "vanilla" / "model.safetensors").read_bytes()

    def damaging(jobs: Sequence[Job], progress: Progress, done: object) -> list[Outcome]:
        weights.write_bytes(other)  # after planning
        return run_here(jobs, progress, done)  # type: ignore[arg-type]

    told = Told()
    found = run_study(study, told, damaging, wait=False)
    assert [outcome.state == "failed" for _, outcome in found] == [
        run.checkpoint.given == "intg-seed1" for run, _ in found
    ]
    assert len([line for line in told.lines if line.startswith("B seed 1 on ") and " failed: " in line]) == 2
    [first, *_] = [run for run, outcome in found if outcome.state == "failed"]
    record = record_of(study.output, first)
    assert record is not None
    assert "changed since this run was started" in record.error
    text = printed(outcomes_report(found))
    assert "6 runs: 4 finished, 2 failed" in text
    assert "the same command tries the failed runs again" in text
    weights.write_bytes(own)
    assert {outcome.state for _, outcome in run_study(study, Told(), run_here, wait=False)} == {"finished"}
    record = record_of(study.output, first)
    assert record is not None
    assert record.error == ""


def test_runs_of_others_are_named_and_waiting_takes_them_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "intg-*"})
    study = read_study(path)
    run_study(study, Told(), run_here, wait=False)
    single = tables_of(study)
    taken = folder_of(path, 1)
    (taken / RESULTS).unlink()
    with locked(taken):
        found = run_study(study, Told(), run_here, wait=False)
        assert [outcome.state for _, outcome in found] == ["finished", "in use", "finished"]
        assert found[1][1].message == str(read_owner(taken))
        text = printed(outcomes_report(found))
        assert "3 runs: 2 finished, 1 in use" in text
        assert f"process {os.getpid()} on " in text
    held = locked(taken)
    held.__enter__()
    told, rounds = Told(), list[float]()
    calls: list[int] = []

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 3:
            held.__exit__(None, None, None)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))

    def runner(jobs: Sequence[Job], progress: Progress, done: object) -> list[Outcome]:
        assert jobs
        calls.append(len(jobs))
        return run_here(jobs, progress, done)  # type: ignore[arg-type]

    found = run_study(study, told, runner, wait=True)
    assert {outcome.state for _, outcome in found} == {"finished"}
    assert calls == [3, 1]
    assert len(rounds) == 3
    assert told.lines.count("waiting for other processes: B seed 1 on zeroshot8") == 1
    same_tables(tables_of(study), single)


def test_it_does_not_spin_where_a_folder_seems_to_be_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = read_study(made_study(folder, {"A": "vanilla"}))
    rounds: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=rounds.append))
    monkeypatch.setattr(module, "is_locked", lambda _: False)
    tries: list[int] = []

    def runner(jobs: Sequence[Job], progress: Progress, done: object) -> list[Outcome]:
        tries.append(len(jobs))
        return [Outcome(job, "in use" if len(tries) < 4 else "failed", "why") for job in jobs]

    run_study(study, Told(), runner, wait=True)
    assert (len(tries), len(rounds)) == (4, 2)


def test_a_failure_in_another_process_is_not_tried_again_by_those_that_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = read_study(made_study(folder, {"A": "vanilla"}))
    [one] = plan_study(study, silent).runs

    def fail() -> None:
        save_record(study.output, one.run, one.plan.folder, one.plan.manifest["id"], "it broke")

    calls: list[int] = []

    def runner(jobs: Sequence[Job], progress: Progress, done: object) -> list[Outcome]:
        calls.append(len(jobs))
        if len(calls) > 1:
            return run_here(jobs, progress, done)  # type: ignore[arg-type]
        return [Outcome(job, "in use") for job in jobs]

    # An earlier failure says nothing: the process that had the run may have been killed
    fail()
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: None))
    [(_, outcome)] = run_study(study, Told(), runner, wait=True)
    assert (outcome.state, calls) == ("finished", [1, 1])
    fail()
    calls.clear()
    told = Told()

    def failing(jobs: Sequence[Job], progress: Progress, done: object) -> list[Outcome]:
        fail()
        return runner(jobs, progress, done)

    deadline = time.monotonic() + 0.01  # records have milliseconds
    while time.monotonic() < deadline:
        pass
    [(_, outcome)] = run_study(study, told, failing, wait=True)
    assert (outcome.state, outcome.message, calls) == ("failed", "it broke", [1])
    assert told.lines[-1] == "A on zeroshot8 failed in another process: it broke"


def test_results_are_those_of_the_rule_in_the_file(folder: Path) -> None:
    """A run that is finished has every rule's results, and the id does not depend on the rule."""
    checkpoints = {"A": "vanilla", "B": "intg-seed1"}
    for rule in ("ppl", "acc_norm"):
        study = read_study(made_study(folder, checkpoints, {"zeroshot8": CHOICES | {"rule": rule}}))
        before = [one.result for one in states_of(study, silent)]
        report = outcomes_report(run_study(study, Told(), run_here, wait=False))
        first, _ = report.content
        stored = load_run(Path(first["folder"])).stored["rules"][rule]["averages"][-1]
        assert first["score"] == stored["accuracy"]
        assert f"({rule})" in first["result"]
        states = states_of(study, silent)
        assert [(one.score, one.result) for one in states] == [(one["score"], one["result"]) for one in report.content]
    # Before the study was run again
    assert before == [one["result"] for one in report.content]


def test_two_studies_share_runs_in_one_folder(folder: Path) -> None:
    one = made_study(folder, {"A": "vanilla"}, name="one.yaml")
    other = made_study(folder, {"base": "vanilla", "B": "intg-seed1"}, name="other.yaml")
    run_study(read_study(one), Told(), run_here, wait=False)
    before = folder_of(one, 0).stat().st_ino, (folder_of(one, 0) / RESULTS).stat().st_mtime_ns
    told = Told()
    run_study(read_study(other), told, run_here, wait=False)
    assert folder_of(other, 0) == folder_of(one, 0)
    assert (folder_of(one, 0).stat().st_ino, (folder_of(one, 0) / RESULTS).stat().st_mtime_ns) == before
    assert [line for line in told.lines if " of 2: " in line] == ["2 of 2: B on zeroshot8"]


@contextmanager
def processes(path: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that run a study and wait for each other."""
    command = [sys.executable, "-m", "evalkit", "study", "run", str(path), "--wait"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_four_processes_share_a_study_and_two_are_killed(tmp_path: Path) -> None:
    folder = made_files(tmp_path, count=60)
    benchmarks = {"zeroshot8": CHOICES | {"token_budget": 128}}
    alone = made_study(folder, CHECKPOINTS, benchmarks, "alone.yaml", output="alone")
    run_study(read_study(alone), Told(), run_here, wait=False)
    path = made_study(folder, CHECKPOINTS, benchmarks)
    with processes(path, 4) as started:
        killed: list[int] = []
        deadline = time.monotonic() + 240
        while len(killed) < 2:
            assert time.monotonic() < deadline
            for journal in (folder / "runs").glob(f"*/{JOURNAL}"):
                owner = read_owner(journal.parent)
                begun = journal.read_bytes().count(b"\n") > 2 and not (journal.parent / RESULTS).exists()
                if owner and begun and not owner.released and owner.process not in killed and len(killed) < 2:
                    # In the middle of a run
                    os.kill(owner.process, signal.SIGKILL)
                    killed.append(owner.process)
            time.sleep(0.005)
        ends = {one.pid: (*one.communicate(timeout=300), one.returncode) for one in started}
    assert set(killed) <= set(ends)
    for pid, (out, err, code) in ends.items():
        assert code == (-signal.SIGKILL if pid in killed else 0), err
        if pid not in killed:
            assert "7 runs: 7 finished" in out
            assert "Traceback" not in err
    same_tables(tables_of(path), tables_of(alone))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_study_resumes(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder = made_files(tmp_path, count=60)
    path = made_study(folder, {"A": "vanilla", "B": "intg-seed1"})
    alone = made_study(folder, {"A": "vanilla", "B": "intg-seed1"}, name="alone.yaml", output="alone")
    run_study(read_study(alone), Told(), run_here, wait=False)
    with processes(path, 1) as [one]:
        deadline = time.monotonic() + 120
        while not any(journal.stat().st_size for journal in (folder / "runs").glob(f"*/{JOURNAL}")):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        one.send_signal(number)
        _, err = one.communicate(timeout=60)
        assert one.returncode == code
        assert err.splitlines()[-1].startswith("evalkit: interrupted; finished batches are saved")
    assert {outcome.state for _, outcome in run_study(read_study(path), Told(), run_here, wait=False)} == {"finished"}
    same_tables(tables_of(path), tables_of(alone))
