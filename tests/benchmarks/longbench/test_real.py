"""LongBench on real weights and real rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.benchmarks.longbench.scores import load_generations
from tests.benchmarks.longbench.made import evaluate_longbench
from tests.benchmarks.longbench.test_session import request
from tests.benchmarks.multiple_choice.test_evaluation import Lines

SHORT = [task.name for task in TASKS.values() if task.max_new_tokens <= 64 or task.name == "samsum"]
ROWS = 3


@pytest.mark.slow
def test_batches_write_what_single_prompts_do(demo: Path, longbench_data: Path, tmp_path: Path) -> None:
    rows, tables = longbench_data / "minilongbench_en", {}
    for budget in (1, 30_000):
        asked = request(
            demo, rows, tmp_path / str(budget), *SHORT, max_prompt_tokens=800, limit=ROWS, token_budget=budget
        )
        tables[budget] = load_generations(evaluate_longbench(asked, Lines()))
    single, batched = (table.drop(columns=["seconds", "reused"]) for table in tables.values())
    assert len(single) == ROWS * len(SHORT) >= 30
    pd.testing.assert_frame_equal(single, batched)
