"""Several processes on one run folder, with the moments at which they meet."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from evalkit.benchmarks import session
from evalkit.benchmarks.run import evaluate
from evalkit.display import Progress
from evalkit.errors import RunInUseError
from evalkit.models.loading.fingerprint import state_of
from evalkit.runs import lock, writing
from evalkit.runs.folder import MANIFEST, RESULTS, Run, load_run
from evalkit.runs.writing import open_run
from tests.runs.test_folder import MANIFEST as CONTENT
from tests.studies.tiny_studies import made_files, made_study

HOOKED = """
import sys, time
from pathlib import Path
from evalkit.benchmarks import session
from evalkit.cli import main

opened = session.open_run
def late(*arguments):
    Path("waiting").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    return opened(*arguments)
session.open_run = late
main(sys.argv[1:])
"""
"""A command that has found no finished run, and opens its folder once another process has finished it."""


@pytest.fixture
def small(checkpoint: Path, documents: Path, tmp_path: Path) -> Callable[[], Run]:
    common: dict[str, Any] = {"tasks": "piqa", "data_dir": documents, "allow_unofficial_data": True, "limit": 2}
    return lambda: evaluate(str(checkpoint), **common, output=tmp_path / "runs", progress=Progress(live=False))


def test_a_run_that_another_process_has_finished_meanwhile_is_opened(
    small: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[Any] = []

    def late(*arguments: Any) -> Any:
        """Open the folder after another process has written the run."""
        monkeypatch.undo()
        states.append(state_of(small().folder / RESULTS))
        return open_run(*arguments)

    monkeypatch.setattr(session, "open_run", late)
    assert state_of(small().folder / RESULTS) == states[0]


@pytest.mark.slow
def test_two_commands_of_which_one_opens_the_folder_late(
    small: Callable[[], Run], checkpoint: Path, documents: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOOKED, "run", str(checkpoint), "--tasks", "piqa", "--data-dir", str(documents),
               "--allow-unofficial-data", "--limit", "2", "--output", "runs"]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        run = small()
        before = state_of(run.folder / RESULTS)
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out.splitlines()[-1]) == (0, f"runs/{run.folder.name}"), err
    assert "Traceback" not in err
    assert state_of(run.folder / RESULTS) == before


@pytest.mark.slow
def test_several_studies_of_one_file_at_once(tmp_path: Path) -> None:
    folder = made_files(tmp_path)
    for number in range(3):
        path = made_study(folder, {"A": "vanilla", "B": "intg-seed1"}, output=f"runs{number}")
        command = [sys.executable, "-m", "evalkit", "study", "run", str(path)]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "abc"]
        ends = [(*one.communicate(timeout=200), one.returncode) for one in started]
        for out, err, code in ends:
            assert "failed" not in out + err and "Traceback" not in err, (out, err)
            assert code == 0 or "in use" in out, (out, err)
        assert any("2 runs: 2 finished" in out for out, _, _ in ends)
        assert all(load_run(place.parent).complete for place in folder.glob(f"runs{number}/*/{MANIFEST}"))


def test_a_folder_that_an_interrupted_process_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though this process already waits for its lock."""
    monkeypatch.setattr(lock, "_PATIENCE", 20.0)
    held, entered, done = Event(), Event(), Event()
    problems: list[BaseException] = []

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt), open_run(tmp_path, "run", dict(CONTENT)):
            held.set()
            time.sleep(0.2)  # the other one waits
            raise KeyboardInterrupt
        held.set()

    def second() -> None:
        try:
            with open_run(tmp_path, "run", dict(CONTENT)):
                entered.set()
                done.wait(20)
        except BaseException as error:
            problems.append(error)
            entered.set()

    threads = [Thread(target=interrupted), Thread(target=second)]
    threads[0].start()
    held.wait(20)
    threads[1].start()
    entered.wait(20)
    threads[0].join()
    assert not problems
    monkeypatch.setattr(lock, "_PATIENCE", 0.2)
    owner = lock.read_owner(tmp_path / "run")
    assert owner is not None and not owner.released
    with pytest.raises(RunInUseError), open_run(tmp_path, "run", dict(CONTENT)):
        pass
    assert load_run(tmp_path / "run").manifest["id"] == CONTENT["id"]
    done.set()
    threads[1].join()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_of_another_process_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there was no folder when this process began."""
    locked, content = lock.locked, CONTENT | {"imported": {"origin": "a log", "files": {}}}

    @contextmanager
    def late(folder: Path) -> Iterator[lock.Lock]:
        monkeypatch.undo()
        with open_run(tmp_path, "run", dict(content)) as writer:
            writer.save_bytes("other", b"content")
            writer.save_results({})
        with locked(folder) as held:
            yield held

    monkeypatch.setattr(writing, "locked", late)
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path, "run", dict(content)):
        raise KeyboardInterrupt
    assert (tmp_path / "run" / RESULTS).exists()


def _interrupt_often(root: Path, seed: int, found: Any) -> None:
    """Open the folder and leave it by an interruption, again and again; count what must not happen."""
    dice, counts, token = random.Random(seed), Counter[str](), root / "token"
    end = time.monotonic() + 4
    while time.monotonic() < end:
        try:
            with open_run(root / "runs", "run", dict(CONTENT)) as writer:
                counts["opened"] += 1
                try:
                    token.touch(exist_ok=False)
                except FileExistsError:
                    counts["two writers"] += 1
                time.sleep(dice.random() * 0.004)
                counts["without a manifest"] += not (writer.folder / MANIFEST).is_file()
                token.unlink(missing_ok=True)
                raise KeyboardInterrupt
        except (KeyboardInterrupt, RunInUseError):
            pass
        except Exception as error:
            counts[repr(error)] += 1
    found.put(+counts)


@pytest.mark.slow
def test_processes_that_are_interrupted_at_any_moment(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=_interrupt_often, args=(tmp_path, seed, found)) for seed in range(4)]
    for process in processes:
        process.start()
    counts = sum((found.get(timeout=100) for _ in processes), Counter[str]())
    for process in processes:
        process.join()
    assert list(counts) == ["opened"] and counts["opened"] > 20
    assert list((tmp_path / "runs").iterdir()) == []
