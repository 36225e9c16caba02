"""Degenerate comparisons: no difference, only differences, one document, one source."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from evalkit.comparison.comparison import compare
from evalkit.comparison.comparison_report import comparison_report, headline
from evalkit.comparison.differences import Comparison, Difference, exit_code
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.runs.folder import load_run
from evalkit.stats.power import mcnemar_detectable
from evalkit.stats.significance import mcnemar
from tests.comparison.made import make_run, scores_of
from tests.printed import printed

Answers = dict[str, list[int]]


def group(root: Path, name: str, runs: list[Answers], clusters: list[int] | None = None) -> Side:
    """Runs of different checkpoints; each answers these tasks' documents right (1) or wrong (0)."""
    folders = [
        make_run(
            root,
            {task: scores_of(task, right, clusters=clusters) for task, right in one.items()},
            model=f"org/{name}{place}",
        )
        for place, one in enumerate(runs)
    ]
    return Side(name, tuple(map(load_run, folders)))


def compared(a: Side, b: Side) -> Comparison:
    found = compare(pair(a, b, {}))
    printed(comparison_report([found]))  # can be printed
    for one in (*found.tasks, *found.averages):
        agree(one)
    return found


def agree(one: Difference) -> None:
    """The interval holds the difference, and zero where the p value is more than 5 %, and only there."""
    assert one.low <= one.difference <= one.high
    assert (one.low <= 0 <= one.high) == (one.p is None or one.p > 0.05)


@pytest.mark.parametrize("runs", [(1, 1), (3, 3), (1, 3), (2, 5)])
def test_identical_runs_leave_the_doubt_about_other_documents(tmp_path: Path, runs: tuple[int, int]) -> None:
    same: Answers = {"piqa": [0, 1] * 50, "boolq": [1, 0] * 20}
    found = compared(group(tmp_path, "a", [same] * runs[0]), group(tmp_path, "b", [same] * runs[1]))
    # The average's interval is at least as long as the smaller task's contribution
    for one, n, share in zip((*found.tasks, found.average), (100, 40, 40), (1, 1, 2), strict=True):
        reach = stats.norm.ppf(0.975) * math.sqrt(2) / (n + 2) / share
        assert (one.p, one.difference) == (1, 0)
        assert -one.low == one.high == pytest.approx(reach, rel=0.05)
    assert {found.average.verdict, *(task.verdict for task in found.tasks)} == {"undecided"}
    for task in found.tasks:
        assert (task.detectable or 0) >= (mcnemar_detectable(task.n, 0) or 1)
    assert exit_code([found], 0.0) == 4
    assert exit_code([found], 0.1) == 0


@pytest.mark.parametrize("runs", [(1, 1), (3, 3), (1, 3), (2, 5)])
def test_all_documents_won_in_every_run(tmp_path: Path, runs: tuple[int, int]) -> None:
    lost, won = {"piqa": [0] * 60, "boolq": [0] * 40}, {"piqa": [1] * 60, "boolq": [1] * 40}
    a, b = group(tmp_path, "a", [lost] * runs[0]), group(tmp_path, "b", [won] * runs[1])
    found = compared(a, b)
    for one in (*found.tasks, found.average):
        assert one.difference == one.high == 1
        assert one.p is not None and one.p < 1e-6
        assert 0.8 < one.low < 1
        assert one.verdict == "better"
    assert headline(found).startswith("b is better than a on 2 of 2 tasks")
    assert {task.verdict for task in compared(b, a).tasks} == {"worse"}
    assert exit_code([compared(b, a)], 0.0) == 3


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("n", [2, 5, 6, 10])
def test_few_documents_all_won_are_what_the_exact_test_makes_of_them(tmp_path: Path, n: int, runs: int) -> None:
    a, b = (group(tmp_path, name, [{"piqa": [right] * n}] * runs) for right, name in enumerate("ab"))
    found = compared(a, b)
    verdict = "better" if mcnemar(n, 0) <= 0.05 else "undecided"
    assert (found.tasks[0].verdict, found.average.verdict) == (verdict, verdict)
    assert (found.tasks[0].low > 0) == (verdict == "better")
    assert found.tasks[0].low < 0.95


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("n", [3, 4])
def test_an_average_does_not_make_more_of_few_documents(tmp_path: Path, n: int, runs: int) -> None:
    """All of three documents won, and a thousand of another task the same."""
    a, b = (
        group(tmp_path, name, [{"piqa": [right] * n, "boolq": [1] * 1000}] * runs) for right, name in enumerate("ab")
    )
    found = compared(a, b)
    assert {found.tasks[0].verdict, found.average.verdict} == {"undecided"}
    assert found.average.low < 0
    assert exit_code([found], 0.0) == 4


def test_one_large_source_that_stays_and_small_ones_that_are_won(tmp_path: Path) -> None:
    """60 documents of one source, and 30 sources of two: the mean over documents needs more large sources."""
    clusters = [0] * 60 + [60 + place - place % 2 for place in range(60)]
    answers = {name: [1] * 60 + [right] * 50 + [1] * 10 for right, name in enumerate("ab")}
    a, b = (group(tmp_path, name, [{"boolq": given}], clusters) for name, given in answers.items())
    found = compared(a, b)
    assert found.tasks[0].verdict == found.average.verdict == "undecided"
    assert exit_code([found], 0.0) == exit_code([compared(b, a)], 0.0) == 4


def test_parts_of_the_variance_of_an_average(tmp_path: Path) -> None:
    """Two tasks of which one has sources of four; only A's two runs differ, B's three are one."""
    dice = np.random.default_rng(7)
    one, other = ({"piqa": dice.integers(0, 2, 30), "boolq": dice.integers(0, 2, 40)} for _ in range(2))
    alike = {"piqa": dice.integers(0, 2, 30), "boolq": dice.integers(0, 2, 40)}
    sources = {"piqa": list(range(30)), "boolq": [place - place % 4 for place in range(40)]}

    def side(name: str, runs: list[dict[str, Any]]) -> Side:
        made = [
            {task: scores_of(task, list(map(int, right)), clusters=sources[task]) for task, right in run.items()}
            for run in runs
        ]
        folders = [make_run(tmp_path, given, model=f"org/{name}{place}") for place, given in enumerate(made)]
        return Side(name, tuple(map(load_run, folders)))

    def variance(task: str, values: Any) -> float:
        """Return the variance of a task's mean, by Liang and Zeger."""
        sums = np.bincount(sources[task], values - values.mean())
        count = len(set(sources[task]))
        return float(count / (count - 1) * (sums**2).sum() / len(values) ** 2)

    means = [np.mean([run[task].mean() for task in run]) for run in (one, other)]
    documents = sum(variance(task, alike[task] - (one[task] + other[task]) / 2) for task in alike) / 4
    shared = sum(variance(task, (one[task] - other[task]) / 2) for task in alike) / 4
    a, b = side("a", [one, other]), side("b", [alike] * 3)
    found = compared(a, b).average.spread
    assert found is not None
    assert found[:4] == pytest.approx((np.var(means, ddof=1) / 2, 0.0, documents, shared))
    assert found[4:] == (2, 3)


@pytest.mark.parametrize("runs", [1, 3])
def test_one_document(tmp_path: Path, runs: int) -> None:
    a, b = (group(tmp_path, name, [{"piqa": [right]}] * runs) for right, name in enumerate("ab"))
    found = compared(a, b)
    [piqa] = found.tasks
    assert (piqa.difference, piqa.low, piqa.high, piqa.stderr, piqa.detectable) == (1, -1, 1, None, None)
    assert piqa.p == (1 if runs == 1 else None)
    assert {piqa.verdict, found.average.verdict} == {"undecided"}
    assert exit_code([found], 0.0) == 4


@pytest.mark.parametrize("runs", [1, 3])
def test_documents_of_three_sources(tmp_path: Path, runs: int) -> None:
    """All of 300 documents won, yet three draws: two times in eight three coins agree."""
    clusters = [100 * (place // 100) for place in range(300)]
    a, b = (group(tmp_path, name, [{"piqa": [right] * 300}] * runs, clusters) for right, name in enumerate("ab"))
    found = compared(a, b)
    assert found.tasks[0].verdict == found.average.verdict == "undecided"
    assert found.tasks[0].p == pytest.approx(0.25, abs=0.02)
    assert found.tasks[0].low < 0


def test_the_interval_says_what_the_exact_test_says(tmp_path: Path) -> None:
    """60 won and 40 lost: p = 0.057, where the interval alone would lie above zero."""
    a = group(tmp_path, "a", [{"piqa": [0] * 60 + [1] * 40 + [1] * 900}])
    b = group(tmp_path, "b", [{"piqa": [1] * 60 + [0] * 40 + [1] * 900}])
    found = compared(a, b)
    assert found.tasks[0].p == pytest.approx(0.0569, abs=1e-4)
    assert (found.tasks[0].verdict, found.tasks[0].low) == ("undecided", 0)
    assert exit_code([compared(b, a)], 0.0) == 4
