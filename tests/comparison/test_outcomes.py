"""Comparisons by continuous outcomes, and the line on bits per byte below those by accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from evalkit.comparison.comparison_report import comparison_report
from evalkit.comparison.differences import BETTER, UNDECIDED, WORSE
from evalkit.runs.folder import Run, load_run
from tests.comparison.made import compared, make_run, scores_of
from tests.printed import printed

TASKS = {"arc_easy": 80, "piqa": 50}
Made = Callable[..., Run]


def table(task: str, gold: np.ndarray, others: np.ndarray, sizes: np.ndarray) -> pd.DataFrame:
    """A score table with the log-likelihoods of the gold answers, [n], and the other three, [n, 3]."""
    base = scores_of(task, [1] * len(gold))
    base["ll_continuation"] = np.column_stack([gold, others]).ravel()
    base["bytes"] = base["chars"] = np.repeat(sizes, 4)
    return base


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def run(model: str, better: float = 0.0, noise: float = 0.5, seed: int = 1, **more: object) -> Run:
        dice, own, tables = np.random.default_rng(7), np.random.default_rng(seed), {}
        for task, n in TASKS.items():
            gold, others = -dice.gamma(4, 5, n), -dice.gamma(4, 5, (n, 3))
            sizes = dice.integers(5, 60, n)
            tables[task] = table(task, gold + better + own.normal(0, noise, n), others, sizes)
        return load_run(make_run(tmp_path / "runs", tables, model=model, **more))  # type: ignore[arg-type]

    return run


def values(run: Run, task: str) -> np.ndarray:
    """Bits per byte of the gold answers, which are the first choices."""
    rows = run.scores[(run.scores["task"] == task) & (run.scores["choice"] == 0)]
    found: np.ndarray = (-rows["ll_continuation"] / math.log(2) / rows["bytes"]).to_numpy()
    return found


def test_differences_intervals_and_holm(made: Made) -> None:
    a, b = made("org/a"), made("org/b", 0.4, seed=2)
    found = compared(a, b, "bits_per_byte")
    ps = []
    for one in found.tasks:
        apart = values(b, one.name) - values(a, one.name)
        assert one.difference == pytest.approx(apart.mean(), rel=1e-9)
        assert one.score_a == pytest.approx(values(a, one.name).mean(), rel=1e-9)
        assert one.stderr == pytest.approx(stats.sem(apart), rel=1e-9)
        assert (one.won, one.lost) == ((apart < 0).sum(), (apart > 0).sum())  # lower is better
        assert one.p is not None and one.p >= stats.ttest_1samp(apart, 0).pvalue - 1e-12
        ps.append(one.p)
    assert [one.p_holm for one in found.tasks] == pytest.approx(multipletests(ps, method="holm")[1])
    assert {one.verdict for one in found.tasks} == {BETTER}
    assert found.average.verdict == BETTER and found.average.difference < 0
    assert found.continuous is None
    turned = compared(b, a, "bits_per_byte")
    assert {one.verdict for one in turned.tasks} == {WORSE}
    assert "Bits per byte" not in printed(comparison_report([turned]))


def test_the_line_below_accuracy(made: Made) -> None:
    a, b = made("org/a"), made("org/b", 0.4, seed=2)
    found = compared(a, b)
    assert found.average.verdict == UNDECIDED
    assert found.continuous is not None
    assert found.continuous.average.difference == pytest.approx(compared(a, b, "bits_per_byte").average.difference)
    assert found.continuous.times_low is not None and found.continuous.times_low > 1
    verdict = comparison_report([found]).parts[0].verdict
    assert verdict[1].startswith("Bits per byte: average -0.0")
    assert "lower is better, so b is better; for the same power it needs" in verdict[1]
    # Both outcomes clear: a ratio with an interval
    clear = comparison_report([compared(a, made("org/c", 8.0, seed=3))]).parts[0].verdict[1]
    assert "times fewer documents" in clear and "95 % interval" in clear.rpartition("needs")[2]


def test_the_line_where_nothing_is_shown_or_outcomes_contradict(made: Made, tmp_path: Path) -> None:
    a = made("org/a")
    same = comparison_report([compared(a, made("org/b", 0.0, 0.5, seed=5))]).parts[0].verdict[1]
    assert same.endswith("lower is better: undecided.")
    # More likely gold answers, and other answers that have become even more likely
    tables = {}
    for task in TASKS:
        rows = a.scores[a.scores["task"] == task].reset_index(drop=True)
        rows["ll_continuation"] += np.where(rows["choice"] == 0, 1.0, 15.0)
        tables[task] = rows
    worse = load_run(make_run(tmp_path / "runs", tables, model="org/likely"))
    found = compared(a, worse)
    assert found.average.verdict == WORSE
    line = comparison_report([found]).parts[0].verdict[1]
    assert line.endswith("so b is better, and the two outcomes contradict each other.")


def test_a_difference_as_small_as_rounding_is_none(made: Made, tmp_path: Path) -> None:
    """One checkpoint scored by two programs: every document differs in the same direction, by 1e-6 of its score."""
    a = made("org/a")
    tables = {task: a.scores[a.scores["task"] == task].reset_index(drop=True) for task in TASKS}
    for rows in tables.values():
        rows["ll_continuation"] *= 1 + 1e-6
    b = load_run(make_run(tmp_path / "runs", tables, model="org/b"))
    for key in ("bits_per_byte", "log_loss", "brier", "margin"):
        found = compared(a, b, key)
        assert {one.verdict for one in (*found.tasks, *found.averages)} == {UNDECIDED}, key
        assert {one.p for one in found.tasks} == {1.0}
        assert all(one.low <= 0 <= one.high for one in found.tasks)
    assert "are rounding" in printed(comparison_report([found]))


def test_letters_are_left_out_of_the_line_and_named_in_the_comparison(made: Made, tmp_path: Path) -> None:
    """Their bits per byte are several times those of sentences, and would decide the average."""
    a, runs = made("org/a"), []
    for name, shift in (("org/letters", 0.0), ("org/other", 0.4)):
        tables = {task: a.scores[a.scores["task"] == task].reset_index(drop=True) for task in TASKS}
        tables["piqa"]["bytes"] = 1
        for rows in tables.values():
            noise = np.random.default_rng(3).normal(0, 0.1, len(rows))
            rows["ll_continuation"] += np.where(rows["choice"] == 0, shift + noise, 0.0)
        tables["piqa"]["ll_continuation"] -= np.where(tables["piqa"]["choice"] == 0, 50 * shift, 0.0)
        runs.append(load_run(make_run(tmp_path / "runs", tables, model=name)))
    letters, other = runs
    found = compared(letters, other)
    assert found.continuous is not None and found.continuous.left_out == ("piqa",)
    assert found.continuous.average.verdict == BETTER
    line = comparison_report([found]).parts[0].verdict[1]
    assert line.startswith("Bits per byte, without PIQA, whose answers are letters: average -0.0")
    every = compared(letters, other, "bits_per_byte")
    assert every.average.verdict == WORSE and every.letters == ("piqa",)
    assert "answers of PIQA are letters" in printed(comparison_report([every]))
    assert compared(letters, other, "log_loss").letters == ()
