"""`evalkit compare`: invalid options, tasks of lm-eval that name their sources, and its speed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import evalkit
from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.cli.test_root import Command, _no_settings, complains
from tests.cli.test_root import evalkit as command
from tests.comparison.made import compared, make_run, scores_of, three_tasks
from tests.documents import COUNTS

__all__ = ["_no_settings", "command"]  # fixtures


def test_invalid_options(command: Command, tmp_path: Path) -> None:
    runs = [three_tasks(tmp_path / "runs", name) for name in "ab"]
    for options, nouns in (
        (["--group", "x="], ["--group x="]),
        (["--plot", "forest.gif"], ["forest.gif", ".png, .pdf or .svg"]),
        (["--curve", "--fail-if-worse"], ["--fail-if-worse", "--curve"]),
        (["--rule", "acc_nrm"], ["'acc_nrm'", "'acc_norm'"]),
        (["--curve"], ["training step", "trainer_state.json"]),
    ):
        complains(command("compare", *runs, *options), 2, *nouns)


def test_a_task_of_lm_eval_says_what_its_documents_share(checkpoint: Path, tmp_path: Path) -> None:
    documents = [
        {"question": f"which {number}", "story": f"story {number // 3}", "choices": ["a", "b"], "gold": number % 2}
        for number in range(9)
    ]
    task = CHOICE | {"task": "made_stories", "metadata": {"version": 1.0, "source": "story"}}
    write_task(tmp_path / "tasks", task, documents)
    options = {"include_path": tmp_path / "tasks", "tasks": "made_stories", "progress": evalkit.Progress(live=False)}
    runs = [evalkit.evaluate(str(checkpoint), output=tmp_path, dtype=dtype, **options)  # type: ignore[arg-type]
            for dtype in ("float32", "bfloat16")]  # fmt: skip
    [stories] = compared(*runs).tasks
    assert (stories.n, stories.sources, stories.test) == (9, 3, "sign flip and t")


@pytest.mark.slow
def test_two_full_suites_within_two_seconds_of_work(tmp_path: Path) -> None:
    """34,507 documents of each, from a cold start; CPU time, so that a busy machine does not fail the test."""
    dice = np.random.default_rng(1)
    runs = []
    for model in ("a", "b"):
        tables = {}
        for task, count in COUNTS.items():
            subtasks = [f"mmlu_{number % 57}" for number in range(count)] if task == "mmlu" else None
            tables[task] = scores_of(task, dice.integers(0, 2, count).tolist(), subtasks=subtasks)
            tables[task]["ll_continuation"] += dice.normal(0, 0.01, len(tables[task]))
        runs.append(str(make_run(tmp_path, tables, model=model)))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "evalkit", "compare", *runs], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
