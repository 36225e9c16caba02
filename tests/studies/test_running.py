"""Running a study: plans and their problems, records, failures, runs of other processes, and the state of each run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from evalkit.display import Progress
from evalkit.errors import SeveralErrors
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import JOURNAL, RESULTS, Run, load_run
from evalkit.runs.writing import Owner, locked, read_owner
from evalkit.studies import running as module
from evalkit.studies.running import Job, Outcome, outcomes_report, plan_of, plan_runs, run_here, run_study
from evalkit.studies.status import RunState, states_of, status_report
from evalkit.studies.study import Record, Study, finished_run_of, record_of, recorded_checkpoints, save_record
from evalkit.studies.study_file import read_study
from tests.printed import printed
from tests.studies.made import CHECKPOINTS, NEEDLE, ZS, Told, made_files, tables_of, write_study


def record_at(study: Study, number: int) -> Record:
    record = record_of(study.output, study.runs[number])
    assert record is not None
    return record


def folder_of(study: Study, number: int) -> Path:
    return study.output / record_at(study, number).folder


def run(study: Study, told: Progress | None = None, runner: Any = run_here, wait: bool = False) -> list[str]:
    """Run a study; return the states of the outcomes."""
    return [outcome.state for outcome in run_study(study, told or Told(), runner, wait)]


def same_tables(path: Path, expected: dict[str, pd.DataFrame]) -> None:
    """Assert equality to the last bit."""
    tables = tables_of(path)
    assert tables.keys() == expected.keys()
    for name, table in tables.items():
        pd.testing.assert_frame_equal(table, expected[name], check_exact=True)


# Plans


def test_all_problems_are_named_at_once(folder: Path) -> None:
    (folder / "empty").mkdir()
    for name in ("short", "copy"):
        shutil.copytree(folder / "vanilla", folder / name)
    weights = folder / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    checkpoints = {"A": "vanilla", "gone": "./nix", "lost": "far/away/from", "empty": "empty", "short": "short",
                   "copy": "copy"}  # fmt: skip
    benchmarks = {"zs": ZS, "far": {"suite": "needle", "lengths": [100_000]}, "again": ZS | {"rule": "acc_norm"}}
    study = read_study(write_study(folder / "study.yaml", checkpoints, benchmarks))
    with pytest.raises(SeveralErrors) as raised:
        run_study(study, Told(), run_here, wait=False)
    assert not study.output.exists() and str(study.path) in raised.value.summary
    problems = {problem.partition(": ")[0]: problem for problem in raised.value.problems}
    for name, noun in {"gone on zs": "nix", "lost on zs": "far/away/from", "empty on zs": "empty",
                       "short on zs": "model.safetensors", "A on far": "1024 tokens"}.items():  # fmt: skip
        assert noun in problems.pop(name)
    same = "\n".join(problems.values())
    assert "A on zs and A on again are the same run" in same and "A on zs and copy on zs are the same run" in same


def test_checkpoints_that_are_gone(study: Path) -> None:
    """Their finished runs are kept; what they lack is left out, unless the user names the step."""
    folder = study.parent
    lost, steps = folder / "train/diff-seed1/checkpoint-5", {"model": "train/diff-seed1", "steps": "checkpoint-*"}
    for path in (folder / "vanilla", lost):
        shutil.rmtree(path)
    said: list[str] = []
    plans = plan_runs(read_study(write_study(study, CHECKPOINTS)), said.append)
    kept = [study_run.label for study_run, plan in plans if isinstance(plan, Run)]
    assert kept == ["vanilla on zs", "diff seed 1 step 5 on zs"] and len(plans) == 8
    assert all(any(line.startswith(label) for line in said) for label in kept)

    # A cluster is not started for them
    outcomes = run_study(read_study(write_study(study, {"A": "vanilla"})), Told(), pytest.fail, wait=True)
    report = outcomes_report(outcomes)
    assert report.content[0]["state"] == "finished" and report.content[0]["value"] is not None
    both = {"zs": ZS, "needle": NEEDLE}
    plans = plan_runs(read_study(write_study(study, {"C": steps}, both)), said.append)
    assert [study_run.label for study_run, _ in plans] == ["C step 5 on zs", *(
        f"C step {step} on {name}" for step in (10, 20) for name in both)]  # fmt: skip
    assert [line.partition(":")[0] for line in said if "left out" in line] == ["C step 5 on needle"]
    listed = steps | {"steps": ["checkpoint-5", "checkpoint-10"]}
    with pytest.raises(SeveralErrors, match=r"C step 5 on .*not found"):
        plan_runs(read_study(write_study(study, {"C": listed}, both)), silent)


# Records


@pytest.fixture
def unread(tmp_path: Path) -> Study:
    """A study of two checkpoints that do not exist."""
    return read_study(write_study(tmp_path / "study.yaml", {"A": "org/a", "B": "org/b"}))


def test_records(unread: Study) -> None:
    """Success clears a failure, parameters stay; what is unchanged is not written again."""
    output, [first_run, other] = unread.output, unread.runs
    assert record_of(output, first_run) is None
    save_record(output, first_run, output / "folder", "0123", "it broke", 7)
    first = record_at(unread, 0)
    assert (first.label, first.folder, first.id, first.error) == ("A on zs", "folder", "0123", "it broke")
    save_record(output, first_run, output / "folder", "0123")
    assert (record_at(unread, 0).error, record_at(unread, 0).parameters) == ("", 7)
    [path] = (output / ".studies").iterdir()
    before = path.stat().st_ino
    save_record(output, first_run, output / "folder", "0123")
    assert path.stat().st_ino == before
    save_record(output, first_run, output / "two", "4567")  # another checkpoint in its place
    assert record_at(unread, 0).parameters is None
    # Only checkpoints with a finished run are known by their records
    save_record(output, other, output / "one", "0123")
    place = unread.checkpoints[0].place
    assert recorded_checkpoints(output, place) == set()
    (output / "one").mkdir()
    (output / "one" / RESULTS).touch()
    assert recorded_checkpoints(output, place) == {"org/b"} and recorded_checkpoints(output, "../elsewhere") == set()
    path.write_text('{"label": "a", "folder": "../../x", "id": "1"}')
    assert record_of(output, first_run) is None and finished_run_of(unread, first_run) is None


# Running


@pytest.mark.slow
def test_a_failure_is_recorded_and_cleared_by_success(folder: Path) -> None:
    study = read_study(write_study(folder / "study.yaml", {"A": "vanilla", "B": "intg-*"}))
    weights = folder / "intg-seed1" / "model.safetensors"
    whole, other = weights.read_bytes(), (folder / "vanilla" / "model.safetensors").read_bytes()

    def damaging(jobs: Sequence[Job], progress: Progress, done: Any) -> list[Outcome]:
        weights.write_bytes(other)  # after planning
        return run_here(jobs, progress, done)

    told = Told()
    outcomes = run_study(study, told, damaging, wait=False)
    assert [outcome.state for outcome in outcomes] == ["finished", "failed", "finished"]
    assert len([line for line in told.lines if line.startswith("B seed 1 on ") and " failed: " in line]) == 1
    assert "changed since this run was started" in record_at(study, 1).error
    assert record_at(study, 1).parameters == 139_584
    assert "3 runs: 2 finished, 1 failed" in printed(outcomes_report(outcomes))
    # A recorded failure is not touched when the study is planned again: another process may write it at this moment
    records = {path: path.stat().st_ino for path in (study.output / ".studies").iterdir()}

    def idle(jobs: Sequence[Job], *_: Any) -> list[Outcome]:
        return [Outcome(job, "in use") for job in jobs]

    weights.write_bytes(whole)
    assert run(study, runner=idle) == ["in use"] * 3
    assert records == {path: path.stat().st_ino for path in (study.output / ".studies").iterdir()}
    assert run(study) == ["finished"] * 3
    assert record_at(study, 1).error == ""


def test_runs_of_others_are_named_and_waiting_takes_them_over(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: CHECKPOINTS[name] for name in ("vanilla", "intg")}
    whole = read_study(write_study(study, names))
    single, taken = tables_of(study), folder_of(whole, 1)
    (taken / RESULTS).unlink()
    held = locked(taken)
    held.__enter__()
    outcomes = run_study(whole, Told(), run_here, wait=False)
    assert [outcome.state for outcome in outcomes] == ["finished", "in use", "finished"]
    assert outcomes[1].message == str(read_owner(taken))
    assert f"process {os.getpid()} on " in printed(outcomes_report(outcomes))
    told, rounds, calls = Told(), list[float](), list[int]()

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 3:
            held.__exit__(None, None, None)

    def runner(jobs: Sequence[Job], progress: Progress, done: Any) -> list[Outcome]:
        calls.append(len(jobs))
        return run_here(jobs, progress, done)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    assert run(whole, told, runner, wait=True) == ["finished"] * 3
    assert (calls, len(rounds)) == ([3, 1], 3)
    assert told.lines.count("waiting for other processes: intg seed 1 on zs") == 1
    same_tables(study, single)


def test_what_failed_in_another_process_meanwhile_is_not_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier failure says nothing: its process may have been killed."""
    study = read_study(write_study(folder / "study.yaml", {"A": "vanilla"}))
    [(study_run, plan)] = plan_runs(study, silent)
    told, calls = Told(), list[int]()
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: None))

    def fail(jobs: Sequence[Job] = (), *_: Any) -> list[Outcome]:
        calls.append(len(jobs))
        time.sleep(0.002)  # records have milliseconds
        save_record(study.output, study_run, plan.folder, plan.manifest["id"], f"it broke {len(calls)}")
        return [Outcome(job, "in use") for job in jobs]

    fail()
    [outcome] = run_study(study, told, fail, wait=True)
    assert (outcome.state, outcome.message, calls) == ("failed", "it broke 2", [0, 1])
    assert told.lines[-1].startswith("A on zs failed in another process")


@pytest.mark.slow
def test_results_are_those_of_the_rule_in_the_file(study: Path) -> None:
    """A finished run has every rule's results; its id does not depend on the rule, nor on the name in a study."""
    for rule in ("ppl", "acc_norm"):
        whole = read_study(write_study(study, {"A": "vanilla"}, {"zs": ZS | {"rule": rule}}))
        [before] = states_of(whole, silent)
        [record] = outcomes_report(run_study(whole, Told(), run_here, wait=False)).content
        stored = load_run(Path(record["folder"])).stored["rules"][rule]["averages"][-1]["value"]
        [state] = states_of(whole, silent)
        assert (
            state.headline is not None
            and record["value"] == state.headline.value == stored
            and f"({rule})" in record["result"]
        )
        assert (before.result, state.result) == (record["result"], record["result"])
    told = Told()
    other = write_study(study.with_name("other.yaml"), {"base": "vanilla", "B": "intg-seed1"}, {"z": ZS | {"limit": 4}})
    run(read_study(other), told)
    assert len([line for line in told.lines if " of 2: " in line]) == 2
    again = read_study(write_study(other, {"C": "intg-seed1"}, {"x": ZS | {"limit": 4}}))
    assert run(again, told) == ["finished"] and not any("C on" in line for line in told.lines)


@pytest.mark.slow
def test_processes_share_a_study_and_take_over_from_those_that_are_killed(tmp_path: Path) -> None:
    folder, benchmarks = made_files(tmp_path, count=60), {"zs": ZS | {"limit": None, "token_budget": 128}}
    alone = write_study(folder / "alone.yaml", CHECKPOINTS, benchmarks, output="alone")
    assert set(run(read_study(alone))) == {"finished"}
    path = write_study(folder / "study.yaml", CHECKPOINTS, benchmarks)
    command = [sys.executable, "-m", "evalkit", "study", "run", str(path), "--wait"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(4)]
    try:
        ended: set[int] = set()
        deadline = time.monotonic() + 240
        while len(ended) < 2:
            assert time.monotonic() < deadline
            for journal in (folder / "runs").glob(f"*/{JOURNAL}"):
                owner = read_owner(journal.parent)
                begun = journal.read_bytes().count(b"\n") > 2 and not (journal.parent / RESULTS).exists()
                if owner and begun and not owner.released and len(ended) < 2:
                    ended.add(owner.process)
                    os.kill(owner.process, signal.SIGKILL)
            time.sleep(0.005)
        for process in started:
            out, err = process.communicate(timeout=300)
            assert process.returncode == (-signal.SIGKILL if process.pid in ended else 0), err
            assert process.pid in ended or "8 runs: 8 finished" in out
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert set(run(read_study(path))) == {"finished"}
    same_tables(path, tables_of(alone))


# States


@pytest.fixture
def small(study: Path) -> Study:
    """A finished study of three checkpoints on one benchmark."""
    return read_study(write_study(study, {name: CHECKPOINTS[name] for name in ("vanilla", "intg")}))


def state(study: Study, number: int) -> RunState:
    return states_of(study, silent)[number]


def test_finished_and_missing_runs(small: Study) -> None:
    """Checkpoints are not read where records exist; a missing run is estimated from the others by parameters."""
    for file in [path for name in ("vanilla", "intg-seed1") for path in (small.path.parent / name).iterdir()]:
        file.unlink()
    states = states_of(small, silent)
    assert all(state.state == "finished" and state.result and state.headline and state.seconds for state in states)
    report = status_report(small, states)
    assert report.verdict == ("3 runs: 3 finished",) and report.content["seconds_left"] is None
    folder, identity = folder_of(small, 0), record_at(small, 0).id
    shutil.rmtree(folder)
    states = states_of(small, silent)
    rate = sum(state.seconds or 0 for state in states[1:]) / 2
    assert (states[0].state, states[0].seconds_left) == ("missing", pytest.approx(rate))
    save_record(small.output, small.runs[0], folder, identity, parameters=10 * 139_584)
    assert state(small, 0).seconds_left == pytest.approx(10 * rate)
    assert "3 runs: 2 finished, 1 missing; about 0:" in printed(status_report(small, states_of(small, silent)))


def test_runs_in_use_and_without_results(small: Study) -> None:
    """A failed run has its reason until it is finished; a damaged one has failed; another id is another run."""
    folder = folder_of(small, 1)
    (folder / RESULTS).rename(folder / "kept")
    with locked(folder) as held:
        held.report(0.5, 90.0)
        held._write()
        running = state(small, 1)
        assert (running.state, running.share, running.seconds_left) == ("running", 0.5, 90.0)
        text = printed(status_report(small, states_of(small, silent)))
        assert f"process {os.getpid()} on {platform.node()}" in text and "about 1:30 left" in text
    ended = state(small, 1)
    assert (ended.state, ended.share, ended.host) == ("interrupted", 0.5, "") and ended.seconds_left is not None
    # Of another machine
    owner = Owner(host="another-machine", process=7, done=0.25, seconds_left=60.0)
    (folder / ".owner").write_text(json.dumps(owner.model_dump()))
    running = state(small, 1)
    assert (running.state, running.host, running.process, running.share) == ("running", "another-machine", 7, 0.25)
    (folder / ".owner").unlink()
    save_record(small.output, small.runs[1], folder, record_at(small, 1).id, "it broke")
    assert (state(small, 1).state, state(small, 1).reason) == ("failed", "it broke")
    (folder / "kept").rename(folder / RESULTS)
    assert state(small, 1).state == "finished"  # by another process, meanwhile
    (folder_of(small, 0) / RESULTS).write_text("{}")
    assert state(small, 0).state == "failed" and "results.json" in state(small, 0).reason
    save_record(small.output, small.runs[1], folder, "0123456789ab")
    assert state(small, 1).state == "interrupted"


def test_without_records_runs_are_planned(small: Study) -> None:
    shutil.rmtree(small.output / ".studies")
    (small.path.parent / "intg-seed2" / "config.json").unlink()
    states = states_of(small, silent)
    assert [state.state for state in states] == ["finished", "finished", "not planned"]
    assert "config.json" in states[2].reason and not (small.output / ".studies").exists()


def test_no_texts_are_made_for_the_state_of_runs(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of RULER take long; without them no run has begun."""
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    content = read_study(write_study(study, {"vanilla": "vanilla"}, {"zs": ZS, "needle": NEEDLE | {"repeats": 2}}))
    assert [state.state for state in states_of(content, silent)] == ["finished", "missing"]
    assert not (tmp_path / "cache" / "ruler-samples").exists()
    plan_of(content, content.runs[1], silent)
    assert (tmp_path / "cache" / "ruler-samples").exists()
    assert state(content, 1).state == "missing" and state(content, 1).id
