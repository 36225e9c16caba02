"""Runs killed at any moment and resumed each time: the result equals that of an uninterrupted run."""

from __future__ import annotations

import multiprocessing
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.runs.folder import load_run
from tests.benchmarks.kinds import Lines
from tests.documents import made_up
from tests.journals import entries_of
from tests.marks import fast

PRELOADED = [
    "evalkit.benchmarks.run", "evalkit.models.loading.load", "evalkit.benchmarks.lm_eval_files",
    "evalkit.scoring.engine", "lm_eval.tasks", "pyarrow.parquet",
    # transformers imports these when it loads a model, which takes seconds
    "transformers.conversion_mapping", "transformers.core_model_loading", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


def _evaluate(options: dict[str, Any]) -> pd.DataFrame:
    return evaluate(**options, progress=Lines()).scores


@pytest.fixture(scope="module")
def options(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run in which every document is a batch."""
    return {
        "model": str(checkpoint),
        "data_dir": made_up(tmp_path_factory.mktemp("documents"), count=20),
        "allow_unofficial_data": True,
        "tasks": ("arc_easy", "piqa", "boolq"),
        "token_budget": 128,
        "output": tmp_path_factory.mktemp("undisturbed"),
    }


def journal_of(output: Path) -> bytes:
    return b"".join(path.read_bytes() for path in output.glob("*/journal.jsonl"))


def batches_in(output: Path) -> int:
    return journal_of(output).count(b"\n")


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


def whole(output: Path, expected: pd.DataFrame, batches: int) -> None:
    """A finished run whose table is the expected one to the last bit, each row once in the journal."""
    [folder] = output.iterdir()
    pd.testing.assert_frame_equal(load_run(folder).scores, expected, check_exact=True)
    entries = entries_of(load_run(folder))
    assert len(entries) == batches_in(output) == batches
    rows = [(entry.task, row.document, row.choice) for entry, rows in entries for row in rows]
    assert len(rows) == len(set(rows)) == len(expected)


def start(processes: ForkServerContext, options: dict[str, Any], output: Path) -> ForkServerProcess:
    process = processes.Process(target=_evaluate, args=(options | {"output": output},))
    process.start()
    return process


def disturb(process: ForkServerProcess, output: Path, dice: random.Random, duration: float) -> None:
    """Kill the process at any moment, also while it starts or writes its results; more often while it scores."""
    if dice.random() < 0.3:
        process.join(dice.uniform(0, duration))
    else:
        ahead = batches_in(output) + dice.randint(1, 8)
        wait_for(lambda: batches_in(output) >= ahead or not process.is_alive(), 60)
        process.join(dice.uniform(0, 0.02))
    process.kill()


@pytest.mark.slow
def test_many_kills(options: dict[str, Any], tmp_path: Path) -> None:
    # Processes start with everything imported, so that one can be killed every half second
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    dice, most, duration = random.Random(2), 50, 0.0
    for number in range(2):  # the first one also imports
        started = time.monotonic()
        start(processes, options, tmp_path / f"undisturbed {number}").join()
        duration = time.monotonic() - started
    expected = _evaluate(options)
    batches = batches_in(options["output"])
    assert batches > 20
    kills, runs, seen = 0, 0, set()
    while kills < most:
        output = tmp_path / str(runs)
        finished = False
        while not finished:
            process = start(processes, options, output)
            if kills < most:
                disturb(process, output, dice, duration)
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            finished = process.exitcode == 0
            process.close()
            kills += not finished
            seen.add(batches_in(output))
            if any(output.glob("*/results.json")):
                whole(output, expected, batches)
        whole(output, expected, batches)
        runs += 1
    # The kills happened at different points of the run
    assert len(seen & set(range(1, batches))) > most / 5


@pytest.mark.parametrize("kind", fast([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
def test_the_command_is_killed_and_given_again(options: dict[str, Any], tmp_path: Path, kind: signal.Signals) -> None:
    # Long enough for a signal to arrive during scoring
    options = options | {"data_dir": made_up(tmp_path / "documents", count=60), "output": tmp_path / "undisturbed"}
    output = tmp_path / "runs"
    command = [sys.executable, "-m", "evalkit", "run", options["model"], "--data-dir", str(options["data_dir"]),
               "--allow-unofficial-data", "--tasks", ",".join(options["tasks"]), "--token-budget", "128",
               "--output", str(output)]  # fmt: skip
    expected = _evaluate(options)
    batches = batches_in(options["output"])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start background processes with interrupts ignored, which is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: batches_in(output) >= 2 or process.poll() is not None, 120)
    process.send_signal(kind)
    out, err = process.communicate()
    assert out == "" and "Traceback" not in err
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(kind, -kind)
    if kind != signal.SIGKILL:
        assert err.splitlines()[-1].startswith("evalkit: interrupted")
    assert not any(output.glob("*/results.json"))
    kept = journal_of(output)
    assert 2 <= batches_in(output) < batches
    _evaluate(options | {"output": output})
    whole(output, expected, batches)
    assert journal_of(output).startswith(kept)  # nothing was scored again
