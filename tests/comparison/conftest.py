"""Runs to compare, made of right and wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comparison.made import make_run, scores_of

Make = Callable[..., Path]
N = {"arc_easy": 60, "boolq": 40, "mmlu": 57}
GROUPS = {"Reasoning": ["arc_easy"], "Knowledge": ["boolq", "mmlu"]}
PASSAGES = [place - place % 2 for place in range(N["boolq"])]
SUBJECTS = [f"mmlu_{place % 19}" for place in range(N["mmlu"])]


def answers(seed: int, share: float, n: int) -> list[int]:
    """Return random right answers; a higher share includes those of a lower one with the same seed."""
    return (np.random.default_rng(seed).random(n) < share).astype(int).tolist()


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a run of three tasks: one plain, one with shared passages, one with subjects."""

    def run(model: str, share: float = 0.5, seed: int = 1, first: int | None = None, **more: Any) -> Path:
        def part(values: Sequence[Any]) -> list[Any]:
            return list(values)[:first]

        tables = {
            "arc_easy": scores_of("arc_easy", part(answers(seed, share, N["arc_easy"]))),
            "boolq": scores_of("boolq", part(answers(seed + 1, share, N["boolq"])), clusters=part(PASSAGES)),
            "mmlu": scores_of("mmlu", part(answers(seed + 2, share, N["mmlu"])), subtasks=part(SUBJECTS)),
        }
        return make_run(tmp_path / "runs", tables, model=model, **({"groups": GROUPS} | more))

    return run
