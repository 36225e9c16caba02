"""Runs killed at any moment and resumed each time: the result equals that of an uninterrupted run."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from evalkit.benchmarks.run import evaluate
from evalkit.runs.folder import load_run
from evalkit.runs.score_table import ScoreRow
from tests.benchmarks.kinds import Lines
from tests.documents import made_up
from tests.journals import entries_of

PRELOADED = [
    "evalkit.benchmarks.run", "evalkit.models.loading.load", "evalkit.benchmarks.lm_eval.log_format",
    "evalkit.scoring.engine", "lm_eval.tasks", "pyarrow.parquet",
    # transformers imports these when it loads a model, which takes seconds
    "transformers.conversion_mapping", "transformers.core_model_loading", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip


def _evaluate(options: dict[str, Any]) -> pd.DataFrame:
    return evaluate(**options, progress=Lines()).scores


def batches_in(output: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in output.glob("*/journal.jsonl"))


def whole(output: Path, expected: pd.DataFrame, batches: int) -> None:
    """A finished run whose table is the expected one to the last bit, each row once in the journal."""
    [folder] = output.iterdir()
    pd.testing.assert_frame_equal(load_run(folder).scores, expected, check_exact=True)
    entries = entries_of(load_run(folder), ScoreRow)
    assert len(entries) == batches_in(output) == batches
    rows = [(row.subtask, row.doc_id, row.choice) for _, rows in entries for row in rows]
    assert len(rows) == len(set(rows)) == len(expected)


def disturb(process: Any, output: Path, dice: random.Random, duration: float) -> None:
    """Kill the process at any moment, also while it starts or writes its results; more often while it scores."""
    if dice.random() < 0.3:
        process.join(dice.uniform(0, duration))
    else:
        ahead, end = batches_in(output) + dice.randint(1, 8), time.monotonic() + 60
        while batches_in(output) < ahead and process.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        process.join(dice.uniform(0, 0.02))
    process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.slow
def test_many_kills(checkpoint: Path, tmp_path: Path) -> None:
    """Of a run in which every document is a batch; one kill of the command is in tests/guards."""
    options = {"model": str(checkpoint), "data_dir": made_up(tmp_path / "documents", count=20), "token_budget": 128,
               "allow_unofficial_data": True, "tasks": ("arc_easy", "piqa", "boolq")}  # fmt: skip
    # Processes start with everything imported, so that one can be killed every half second
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)

    def start(output: Path) -> Any:
        process = processes.Process(target=_evaluate, args=(options | {"output": output},))
        process.start()
        return process

    dice, most, duration = random.Random(2), 50, 0.0
    for number in range(2):  # the first one also imports
        started = time.monotonic()
        start(tmp_path / f"undisturbed {number}").join()
        duration = time.monotonic() - started
    expected = _evaluate(options | {"output": tmp_path / "expected"})
    batches = batches_in(tmp_path / "expected")
    assert batches > 20
    kills, runs, seen = 0, 0, set()
    while kills < most:
        output, finished = tmp_path / str(runs), False
        while not finished:
            process = start(output)
            if kills < most:
                disturb(process, output, dice, duration)
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            finished = process.exitcode == 0
            kills += not finished
            seen.add(batches_in(output))
            if any(output.glob("*/results.json")):
                whole(output, expected, batches)
        whole(output, expected, batches)
        runs += 1
    # The kills happened at different points of the run
    assert len(seen & set(range(1, batches))) > most / 5
