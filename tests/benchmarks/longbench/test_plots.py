"""Figures are drawn in both formats, and errors name what cannot be drawn. (Their look is for a person to judge.)"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.benchmarks.longbench.results_report import draw_by_length
from evalkit.benchmarks.needle.results import needle_heatmap
from evalkit.errors import RunError, UsageError
from tests.benchmarks.longbench.made import generations

BEGINNINGS = {".png": b"\x89PNG", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", BEGINNINGS)
@pytest.mark.parametrize("tasks", [["lcc"], list(TASKS)])
def test_scores_by_length_are_drawn(tmp_path: Path, suffix: str, tasks: list[str]) -> None:
    pairs = [("Paragraph 1", "Paragraph 1"), ("no", "Paragraph 2")]
    table = pd.concat([generations(task, *pairs, lengths=[1000, 9000]) for task in tasks])
    draw_by_length(table, tmp_path / "new" / f"scores{suffix}")
    assert (tmp_path / "new" / f"scores{suffix}").read_bytes().startswith(BEGINNINGS[suffix])


@pytest.mark.parametrize("suffix", BEGINNINGS)
@pytest.mark.parametrize("shape", [(1, 1), (11, 8), (13, 14)])
def test_a_heatmap_is_drawn(tmp_path: Path, suffix: str, shape: tuple[int, int]) -> None:
    scores = np.linspace(0, 1, shape[0] * shape[1]).reshape(shape)
    scores[0, 0] = np.nan
    path = tmp_path / f"needle{suffix}"
    needle_heatmap(scores, list(range(shape[0])), list(range(shape[1])), path)
    assert path.read_bytes().startswith(BEGINNINGS[suffix])


def test_figures_that_fail_are_reported(tmp_path: Path) -> None:
    scores = np.zeros((2, 3))
    with pytest.raises(UsageError, match=r"a\.jpg: figures are written as \.png, \.pdf or \.svg"):
        needle_heatmap(scores, [0, 1], [1, 2, 3], tmp_path / "a.jpg")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        needle_heatmap(scores, [0, 1], [1, 2, 3], tmp_path / "file" / "a.png")
