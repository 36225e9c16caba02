"""Agreement of two runs by document."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.comparison.comparison import Agreement, agreements
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import load_run
from tests.comparison.made import make_longbench, make_run, scores_of


def sides(*folders: Path) -> list[Side]:
    return [Side(folder.name, (load_run(folder),)) for folder in folders]


def test_right_and_wrong_answers(tmp_path: Path) -> None:
    right = [1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1, 0]
    folders = [make_run(tmp_path, {"piqa": scores_of("piqa", one)}, model=f"m{number}")
               for number, one in enumerate(right)]  # fmt: skip
    [found] = agreements(pair(*sides(*folders), {}), "acc")
    assert found == Agreement("piqa", 7, a_higher=2, b_higher=3, both_right=1, both_wrong=1)
    assert found.equal == 2


def test_graded_scores(tmp_path: Path) -> None:
    scores = [0.0, 0.5, 1.0, 0.3], [0.1, 0.5, 1.0, 0.2]
    folders = [make_longbench(tmp_path, {"qasper": one}, model=f"m{number}") for number, one in enumerate(scores)]
    [found] = agreements(pair(*sides(*folders), {}), "longbench")
    assert found == Agreement("qasper", 4, a_higher=1, b_higher=1, both_right=None, both_wrong=None)
    assert found.equal == 2


def test_groups_have_no_agreement(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path, {"piqa": scores_of("piqa", [1, 0])}, model=f"m{n}")) for n in range(3)]
    with pytest.raises(UsageError, match="is of two runs"):
        agreements(pair(Side("a", tuple(runs[:2])), Side("b", (runs[2],)), {}), "acc")
