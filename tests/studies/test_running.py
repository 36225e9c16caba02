"""Planning and running a study, in one process and in several, its records, and the state of its runs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalkit.benchmarks.run import planned
from evalkit.display import Progress
from evalkit.errors import RunError, SeveralErrors
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import JOURNAL, RESULTS, Run, load_run
from evalkit.runs.writing import Owner, locked, read_owner
from evalkit.studies import running as module
from evalkit.studies.running import Job, Outcome, outcomes_report, plan_checkpoints, plan_runs, run_here, run_study
from evalkit.studies.status import RunState, states_of, status_report
from evalkit.studies.study import Record, Study, finished_run_of, record_of, recorded_checkpoints, save_record
from evalkit.studies.study_file import read_study
from tests.printed import printed
from tests.studies.tiny_studies import CHOICES, NEEDLE, Told, made_files, made_study, same_tables, tables_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints and documents."""
    return made_files(tmp_path)


def record_at(study: Study, place: int) -> Record:
    """Return the record of a run, which exists."""
    record = record_of(study.output, study.runs[place])
    assert record is not None
    return record


def folder_of(study: Study, place: int) -> Path:
    """Return the folder of a run that is recorded."""
    return study.output / record_at(study, place).folder


def run(study: Study, told: Progress | None = None, runner: Any = run_here, wait: bool = False) -> list[str]:
    """Run a study; return the states of the outcomes."""
    return [outcome.state for outcome in run_study(study, told or Told(), runner, wait)]


# Plans


def test_plans_are_those_of_single_commands(folder: Path) -> None:
    """Messages are said once."""
    settings = {"device": "cpu", "dtype": "float32", "context": 2048, "context_original": 512}
    benchmarks = {"zeroshot8": CHOICES, "needle": NEEDLE}
    study = read_study(made_study(folder, {"A": "vanilla", "B": "intg-*"}, benchmarks, settings=settings))
    said: list[str] = []
    plans = plan_runs(study, said.append)
    assert len(said) == len(set(said)) > 0
    assert [one.label for one, _ in plans] == [one.label for one in study.runs]
    for one, plan in plans:
        options = {**one.options, "output": study.output}
        assert plan.folder == planned(one.checkpoint.model, options, silent).folder
    assert not study.output.exists()


def test_all_problems_are_named_at_once(folder: Path) -> None:
    (folder / "empty").mkdir()
    for name in ("short", "copy"):
        shutil.copytree(folder / "vanilla", folder / name)
    weights = folder / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    checkpoints = {"A": "vanilla", "gone": "./nix", "lost": "far/away/from", "empty": "empty", "short": "short",
                   "copy": "copy"}  # fmt: skip
    benchmarks = {"zeroshot8": CHOICES, "far": {"suite": "needle", "lengths": [100_000]},
                  "again": CHOICES | {"suite": "zeroshot8", "rule": "acc_norm"}}  # fmt: skip
    study = read_study(made_study(folder, checkpoints, benchmarks))
    with pytest.raises(SeveralErrors) as raised:
        run_study(study, Told(), run_here, wait=False)
    assert not study.output.exists()
    assert str(study.path) in raised.value.summary and "\n" not in str(raised.value)
    problems = {problem.partition(": ")[0]: problem for problem in raised.value.problems}
    for name, what in {
        "checkpoint gone": "nix",
        "checkpoint lost": "far/away/from",
        "checkpoint empty": "empty",
        "checkpoint short": "model.safetensors",
        "benchmark far": "1024 tokens",
    }.items():
        assert what in problems.pop(name)
    assert sum("every rule reads the same scores" in problem for problem in problems) == 2 or len(problems) == 3
    same = "\n".join(problems.values())
    assert "A on zeroshot8 and A on again are the same run" in same
    assert "A on zeroshot8 and copy on zeroshot8 are the same run" in same


def test_checkpoints_of_one_benchmark(folder: Path) -> None:
    options = CHOICES | {"data_dir": folder / "documents", "device": "cpu", "output": folder / "runs"}
    models = [str(folder / name) for name in ("vanilla", "nix", "intg-seed1", "nox")]
    with pytest.raises(SeveralErrors) as raised:
        plan_checkpoints(models, options, silent)
    assert [name in problem for name, problem in zip(models[1::2], raised.value.problems, strict=True)] == [True, True]
    assert [job.label for job in plan_checkpoints(models[::2], options, silent)] == models[::2]


def test_checkpoints_that_are_gone(folder: Path) -> None:
    """Their finished runs are kept; what they lack is left out, unless the user names the step."""
    checkpoints: dict[str, Any] = {"B": "./intg-seed1", "C": {"model": "train-seed1", "steps": "checkpoint-*"}}
    path = made_study(folder, checkpoints)
    run(read_study(path))
    shutil.rmtree(folder / "intg-seed1")
    shutil.rmtree(folder / "train-seed1" / "checkpoint-20")
    said: list[str] = []
    plans = plan_runs(read_study(path), said.append)
    assert [isinstance(plan, Run) for _, plan in plans] == [True, True, False]
    assert said[-1].startswith("C step 20 on zeroshot8: finished, and not checked again")
    report = outcomes_report(run_study(read_study(path), Told(), run_here, wait=True))
    assert "3 runs: 3 finished" in printed(report)
    assert all(record["score"] is not None for record in report.content)
    # A cluster is not started for them
    del checkpoints["C"]

    def runner(*_: object) -> list[Outcome]:
        raise AssertionError

    assert run(read_study(made_study(folder, checkpoints)), runner=runner, wait=True) == ["finished"]
    more = {"zeroshot8": CHOICES, "needle": NEEDLE}
    steps: dict[str, Any] = {"C": {"model": "train-seed1", "steps": "checkpoint-*"}}
    del said[:]
    plans = plan_runs(read_study(made_study(folder, steps, more)), said.append)
    assert [one.label for one, _ in plans] == ["C step 20 on zeroshot8", "C step 100 on zeroshot8",
                                               "C step 100 on needle"]  # fmt: skip
    assert [line for line in said if "left out" in line] == [
        "C step 20 on needle: left out, since its checkpoint was deleted before this run was finished"
    ]
    steps["C"]["steps"] = ["checkpoint-20", "checkpoint-100"]
    with pytest.raises(SeveralErrors, match=r"checkpoint C step 20: .*not found"):
        plan_runs(read_study(made_study(folder, steps, more)), silent)
    # A checkpoint that is damaged is not gone
    weights = folder / "train-seed1" / "checkpoint-100" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    steps["C"]["steps"] = ["checkpoint-100"]
    with pytest.raises(SeveralErrors, match=r"checkpoint C step 100: .*model.safetensors: cannot be read"):
        plan_runs(read_study(made_study(folder, steps)), silent)


# Records


@pytest.fixture
def unread(tmp_path: Path) -> Study:
    """A study of two checkpoints that do not exist."""
    return read_study(made_study(tmp_path, {"A": "org/a", "B": "org/b"}))


def test_records(unread: Study) -> None:
    """Success clears a failure, parameters stay; unchanged is not written again, but the same failure is."""
    output, [one, other] = unread.output, unread.runs
    assert record_of(output, one) is None
    save_record(output, one, output / "folder", "0123", "it broke", 7)
    first = record_at(unread, 0)
    assert (first.label, first.folder, first.id, first.error) == ("A on zeroshot8", "folder", "0123", "it broke")
    [path] = (output / ".studies").iterdir()
    time.sleep(0.002)
    save_record(output, one, output / "folder", "0123", "it broke")
    assert record_at(unread, 0).written > first.written
    save_record(output, one, output / "folder", "0123")
    assert (record_at(unread, 0).error, record_at(unread, 0).parameters) == ("", 7)
    before = path.stat().st_ino
    save_record(output, one, output / "folder", "0123")
    assert path.stat().st_ino == before
    # Another checkpoint in its place
    save_record(output, one, output / "two", "4567")
    assert record_at(unread, 0).parameters is None
    # Only checkpoints with a finished run are known by their records
    save_record(output, other, output / "one", "0123")
    place = unread.checkpoints[0].place
    assert recorded_checkpoints(output, place) == set()
    for name in ("two", "one"):
        (output / name).mkdir()
    (output / "one" / RESULTS).touch()
    assert recorded_checkpoints(output, place) == {"org/b"}
    assert recorded_checkpoints(output, "../elsewhere") == set()
    for content in ("", "[]", '{"label": 1}', '{"label": "a", "folder": "../../x", "id": "1"}'):
        path.write_text(content)
        assert record_of(output, one) is None and finished_run_of(unread, one) is None
    shutil.rmtree(output / ".studies")
    (output / ".studies").touch()
    with pytest.raises(RunError, match=r"\.studies.* cannot be written"):
        save_record(output, one, output / "folder", "0123")


_WRITING = """
import sys
from pathlib import Path
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
study = read_study(Path(sys.argv[1]))
for number in range(200):
    save_record(study.output, study.runs[0], study.output / "folder", "0123", f"{sys.argv[2]} {number}")
"""


@pytest.mark.slow
def test_processes_may_write_a_record_at_the_same_time(unread: Study) -> None:
    command = [sys.executable, "-c", _WRITING, str(unread.path)]
    started = [subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True) for number in range(3)]
    for process in started:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert record_at(unread, 0).error.endswith(" 199")
    assert len(list((unread.output / ".studies").iterdir())) == 1


# Running


def test_a_failure_is_recorded_and_cleared_by_success(folder: Path) -> None:
    path = made_study(folder, {"A": "vanilla", "B": "intg-*"}, {"zeroshot8": CHOICES, "needle": NEEDLE})
    study, weights = read_study(path), folder / "intg-seed1" / "model.safetensors"
    own, other = weights.read_bytes(), (folder / "vanilla" / "model.safetensors").read_bytes()

    def damaging(jobs: Sequence[Job], progress: Progress, done: Any) -> list[Outcome]:
        weights.write_bytes(other)  # after planning
        return run_here(jobs, progress, done)

    told = Told()
    outcomes = run_study(study, told, damaging, wait=False)
    assert [one.state for one in outcomes] == ["finished", "finished", "failed", "failed", "finished", "finished"]
    assert len([line for line in told.lines if line.startswith("B seed 1 on ") and " failed: " in line]) == 2
    assert "changed since this run was started" in record_at(study, 2).error
    assert record_at(study, 2).parameters == 139_584
    text = printed(outcomes_report(outcomes))
    assert "6 runs: 4 finished, 2 failed" in text and "the same command tries the failed runs again" in text
    # A recorded failure is not touched when the study is planned again: another process may write it at this moment
    records = {path: path.stat().st_ino for path in (study.output / ".studies").iterdir()}

    def idle(jobs: Sequence[Job], *_: Any) -> list[Outcome]:
        return [Outcome(job, "in use") for job in jobs]

    weights.write_bytes(own)
    assert run(study, runner=idle) == ["in use"] * 6
    assert records == {path: path.stat().st_ino for path in (study.output / ".studies").iterdir()}
    assert run(study) == ["finished"] * 6
    assert record_at(study, 2).error == ""


def test_runs_of_others_are_named_and_waiting_takes_them_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = read_study(made_study(folder, {"A": "vanilla", "B": "intg-*"}))
    run(study)
    single, taken = tables_of(study), folder_of(study, 1)
    (taken / RESULTS).unlink()
    held = locked(taken)
    held.__enter__()
    outcomes = run_study(study, Told(), run_here, wait=False)
    assert [one.state for one in outcomes] == ["finished", "in use", "finished"]
    assert outcomes[1].message == str(read_owner(taken))
    assert f"process {os.getpid()} on " in printed(outcomes_report(outcomes))
    told, rounds, calls = Told(), list[float](), list[int]()

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 3:
            held.__exit__(None, None, None)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))

    def runner(jobs: Sequence[Job], progress: Progress, done: Any) -> list[Outcome]:
        calls.append(len(jobs))
        return run_here(jobs, progress, done)

    assert run(study, told, runner, wait=True) == ["finished"] * 3
    assert (calls, len(rounds)) == ([3, 1], 3)
    assert told.lines.count("waiting for other processes: B seed 1 on zeroshot8") == 1
    same_tables(tables_of(study), single)


def test_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rests where a folder only seems to be free, and what failed in another process meanwhile is not tried."""
    study = read_study(made_study(folder, {"A": "vanilla"}))
    [(one, plan)] = plan_runs(study, silent)
    rounds: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=rounds.append))
    calls: list[int] = []

    def in_use(jobs: Sequence[Job], *_: Any) -> list[Outcome]:
        calls.append(len(jobs))
        return [Outcome(job, "in use" if len(calls) < 4 else "finished") for job in jobs]

    def fail() -> None:
        time.sleep(0.002)  # records have milliseconds
        save_record(study.output, one, plan.folder, plan.manifest["id"], "it broke")

    # An earlier failure says nothing: the process that had the run may have been killed
    fail()
    assert run(study, runner=in_use, wait=True) == ["finished"]
    assert (len(calls), len(rounds)) == (4, 2)
    calls.clear()

    def failing(jobs: Sequence[Job], *_: Any) -> list[Outcome]:
        fail()
        return in_use(jobs)

    told = Told()
    [outcome] = run_study(study, told, failing, wait=True)
    assert (outcome.state, outcome.message, len(calls)) == ("failed", "it broke", 1)
    assert told.lines[-1] == "A on zeroshot8 failed in another process: it broke"


def test_results_are_those_of_the_rule_in_the_file(folder: Path) -> None:
    """A run that is finished has every rule's results, and the id does not depend on the rule."""
    for rule in ("ppl", "acc_norm"):
        study = read_study(made_study(folder, {"A": "vanilla"}, {"zeroshot8": CHOICES | {"rule": rule}}))
        before = [state.result for state in states_of(study, silent)]
        [record] = outcomes_report(run_study(study, Told(), run_here, wait=False)).content
        assert record["score"] == load_run(Path(record["folder"])).stored["rules"][rule]["averages"][-1]["accuracy"]
        assert f"({rule})" in record["result"]
        [state] = states_of(study, silent)
        assert (state.score, state.result) == (record["score"], record["result"])
    assert before == [record["result"]]  # before the study was run again
    # Another study has the same run under another name
    told = Told()
    other = read_study(made_study(folder, {"base": "vanilla", "B": "intg-seed1"}, name="other.yaml"))
    run(other, told)
    assert folder_of(other, 0) == folder_of(study, 0)
    assert [line for line in told.lines if " of 2: " in line] == ["2 of 2: B on zeroshot8"]


@contextmanager
def processes(path: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that run a study and wait for each other."""
    command = [sys.executable, "-m", "evalkit", "study", "run", str(path), "--wait"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("ends", [[signal.SIGKILL, signal.SIGKILL], [signal.SIGINT], [signal.SIGTERM]])
def test_processes_share_a_study_and_some_are_ended(ends: list[signal.Signals], tmp_path: Path) -> None:
    """Two more than are ended, if any is killed: they take over. An interrupted one resumes."""
    folder = made_files(tmp_path, count=60)
    checkpoints = {"A": "vanilla", "B": "intg-*", "C": {"model": "train-*", "steps": "checkpoint-*"}}
    alone, path = read_study(made_study(folder, checkpoints, name="alone.yaml", output="alone")), folder / "study.yaml"
    run(alone)
    made_study(folder, checkpoints)
    with processes(path, 4 if len(ends) > 1 else 1) as started:
        ended: dict[int, signal.Signals] = {}
        deadline = time.monotonic() + 240
        while len(ended) < len(ends):
            assert time.monotonic() < deadline
            for journal in (folder / "runs").glob(f"*/{JOURNAL}"):
                owner = read_owner(journal.parent)
                begun = journal.read_bytes().count(b"\n") > 2 and not (journal.parent / RESULTS).exists()
                if owner and begun and not owner.released and owner.process not in ended and len(ended) < len(ends):
                    ended[owner.process] = ends[len(ended)]
                    os.kill(owner.process, ended[owner.process])
            time.sleep(0.005)
        codes = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}
        for process in started:
            out, err = process.communicate(timeout=300)
            assert process.returncode == codes.get(ended.get(process.pid), 0) and "Traceback" not in err, err
            assert process.pid in ended or "7 runs: 7 finished" in out
            if process.returncode > 0:
                assert err.splitlines()[-1].startswith("evalkit: interrupted; finished batches are saved")
    study = read_study(path)
    assert set(run(study)) == {"finished"}
    same_tables(tables_of(study), tables_of(alone))


# States


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished study of three checkpoints. Copy it."""
    folder = made_files(tmp_path_factory.mktemp("study"))
    assert run(read_study(made_study(folder, {"A": "vanilla", "B": "intg-*"}))) == ["finished"] * 3
    return folder


@pytest.fixture
def study(finished: Path, tmp_path: Path) -> Study:
    """A copy of the study."""
    return read_study(Path(shutil.copytree(finished, tmp_path / "study")) / "study.yaml")


def state(study: Study, place: int) -> RunState:
    """Return the state of a run."""
    return states_of(study, silent)[place]


def test_finished_and_missing_runs(study: Study) -> None:
    """Checkpoints are not read where records exist; a missing run is estimated from the others by parameters."""
    for file in [path for name in ("vanilla", "intg-seed1") for path in (study.path.parent / name).iterdir()]:
        file.unlink()
    states = states_of(study, silent)
    assert all(one.state == "finished" and one.result and one.score and one.seconds for one in states)
    report = status_report(study, states)
    assert report.verdict == ("3 runs: 3 finished",) and report.content["seconds_left"] is None
    folder, identity = folder_of(study, 0), record_at(study, 0).id
    shutil.rmtree(folder)
    states = states_of(study, silent)
    rates = sum(one.seconds or 0 for one in states[1:]) / 2
    assert (states[0].state, states[0].seconds_left) == ("missing", pytest.approx(rates))
    save_record(study.output, study.runs[0], folder, identity, parameters=10 * 139_584)
    assert state(study, 0).seconds_left == pytest.approx(10 * rates)
    assert "3 runs: 2 finished, 1 missing; about 0:" in printed(status_report(study, states_of(study, silent)))


def test_runs_in_use(study: Study) -> None:
    folder = folder_of(study, 1)
    (folder / RESULTS).unlink()
    with locked(folder) as held:
        held.report(0.5, 90.0)
        held._write()
        one = state(study, 1)
        assert (one.state, one.share, one.seconds_left) == ("running", 0.5, 90.0)
        text = printed(status_report(study, states_of(study, silent)))
        assert f"process {os.getpid()} on {platform.node()}" in text and "about 1:30 left" in text
    one = state(study, 1)
    assert (one.state, one.share, one.host) == ("interrupted", 0.5, "") and one.seconds_left is not None
    # Of another machine, as long as it renews its file
    owner = Owner(host="another-machine", process=7, done=0.25, seconds_left=60.0)
    (folder / ".owner").write_text(json.dumps(owner.model_dump()))
    one = state(study, 1)
    assert (one.state, one.host, one.process, one.share) == ("running", "another-machine", 7, 0.25)
    os.utime(folder / ".owner", (0, 0))
    assert state(study, 1).state == "interrupted"


def test_runs_without_results(study: Study) -> None:
    """A failed run has its reason until it is finished; a damaged one has failed; another id is another run."""
    folder = folder_of(study, 2)
    save_record(study.output, study.runs[2], folder, record_at(study, 2).id, "it broke")
    assert state(study, 2).state == "finished"  # by another process, meanwhile
    (folder / RESULTS).unlink()
    assert (state(study, 2).state, state(study, 2).reason) == ("failed", "it broke")
    (folder_of(study, 0) / RESULTS).write_text("{}")
    assert state(study, 0).state == "failed" and "results.json is damaged" in state(study, 0).reason
    save_record(study.output, study.runs[1], folder_of(study, 1), "0123456789ab")
    assert state(study, 1).state == "interrupted"


def test_without_records_runs_are_planned(study: Study) -> None:
    """Neither torch nor transformers is imported."""
    shutil.rmtree(study.output / ".studies")
    (study.path.parent / "intg-seed2" / "config.json").unlink()
    script = (
        "import sys\nfrom pathlib import Path\nfrom evalkit.models.loading.locate import silent\n"
        "from evalkit.studies.status import states_of, status_report\n"
        "from evalkit.studies.study_file import read_study\n"
        f"study = read_study(Path({str(study.path)!r}))\nstates = states_of(study, silent)\n"
        "status_report(study, states)\nprint([one.state for one in states], states[2].reason)\n"
        "print([name for name in ('torch', 'transformers', 'pandas', 'lm_eval') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    states, heavy = done.stdout.splitlines()
    assert states.startswith("['finished', 'finished', 'not planned']") and "has no config.json" in states
    assert heavy == "[]"
    assert not (study.output / ".studies").exists()
