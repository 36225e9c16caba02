"""`evalkit plan`: documents, seeds and outcomes against closed forms, and what it prints and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from evalkit.stats.power import mcnemar_power
from tests.cli.conftest import Command, complains
from tests.comparison.made import N, make_run, scores_of, three_tasks

Z = float(stats.norm.ppf(0.975) + stats.norm.ppf(0.8))
SIZES = (1267, 2376, 1172, 10042, 1838, 500, 3270, 14042)
"""Of the eight tasks."""


def planned(evalkit: Command, *words: object) -> dict[str, Any]:
    outcome = evalkit("plan", *words, "--format", "json")
    assert outcome.code == 0, outcome
    content: dict[str, Any] = json.loads(outcome.out)
    return content


def rows(content: dict[str, Any], outcome: str, of: str = "average", **equal: object) -> list[dict[str, Any]]:
    wanted = {"outcome": outcome, "of": of} | equal
    return [row for row in content["plan"] if all(row[name] == value for name, value in wanted.items())]


def test_a_guess_is_the_normal_approximation_and_the_exact_test(evalkit: Command) -> None:
    content = planned(evalkit, "--accuracy", 40, "--discordant", 15, "--difference", 1)
    needed = rows(content, "accuracy")[0]["needs"]
    assert f"--sample {needed}, " in content["verdict"]
    for row in rows(content, "accuracy"):
        variance = sum(0.15 / min(row["documents"], size) for size in SIZES) / 8**2
        assert row["detectable"] == pytest.approx(Z * math.sqrt(variance), rel=0.01)
    assert Z * math.sqrt(sum(0.15 / min(needed, size) for size in SIZES) / 8**2) == pytest.approx(0.01, rel=0.005)
    fewer = planned(evalkit, "--discordant", 15, "--difference", 2)  # so few that every task has as many
    assert rows(fewer, "accuracy")[0]["needs"] == pytest.approx(Z**2 * 0.15 / (8 * 0.02**2), rel=0.02)
    # At Holm's level the fourth of eight tasks: those with fewer documents than the row's count all of theirs
    for row in rows(content, "accuracy", "a task"):
        n = sorted(min(row["documents"], size) for size in SIZES)[4]
        assert mcnemar_power(n, max(0.15, row["detectable"]), row["detectable"], 0.05 / 8) == pytest.approx(
            0.8, abs=0.01
        )
    assert planned(evalkit, "--accuracy", 40)["plan"] == planned(evalkit, "--discordant", 48)["plan"]
    share = sum(min(needed, size) for size in SIZES) / sum(SIZES)
    assert f"{100 * share:.1f} % of zeroshot8" in content["verdict"]


def test_a_difference_that_the_benchmark_cannot_show(evalkit: Command) -> None:
    content = planned(evalkit, "--accuracy", 40, "--difference", 0.5)
    all_documents = rows(content, "accuracy", documents=max(SIZES))[0]
    assert all_documents["needs"] is None and all_documents["detectable"] > 0.005
    shown = f"all 34,507 documents detect {100 * all_documents['detectable']:.1f} points"
    assert shown in content["verdict"] and "more than zeroshot8 has" in content["verdict"]
    complains(evalkit("plan", "--discordant", 1, "--difference", 2), 2, "winogrande", "1.0 %")


def test_two_sides_and_their_outcomes(evalkit: Command, tmp_path: Path) -> None:
    """One task of the two has more documents than the runs; the observed variances are those of the closed form."""
    n, dice = 400, np.random.default_rng(1)
    right = {side: {task: (dice.random(n) < share).astype(int) for task in ("arc_easy", "piqa")}
             for side, share in (("a", 0.5), ("b", 0.6))}  # fmt: skip
    manifest = {"documents": {task: {"official": True, "source": "made up", "count": 400, "total": count}
                              for task, count in (("arc_easy", 5000), ("piqa", 0))}}  # fmt: skip
    runs = [make_run(tmp_path / "runs", {task: scores_of(task, list(of)) for task, of in tasks.items()}, model=side,
                     manifest=manifest) for side, tasks in right.items()]  # fmt: skip
    content = planned(evalkit, *runs, "--difference", 3)
    spread = [(right["b"][task] - right["a"][task]).var(ddof=1) for task in ("arc_easy", "piqa")]
    for row in rows(content, "accuracy (acc)"):
        counts = row["documents"], min(row["documents"], n)
        variance = sum(of / count for of, count in zip(spread, counts, strict=True)) / 4
        assert row["detectable"] == pytest.approx(Z * math.sqrt(variance), rel=0.02 if row["documents"] > 50 else 0.06)
    assert {row["documents"] for row in content["plan"]} == {50, 100, 200, 500, 1000, 5000}
    assert {row["expected"] for row in rows(content, "accuracy (acc)")} == {0.03}
    compared = json.loads(evalkit("compare", *runs, "--outcome", "log_loss", "--format", "json").out)["comparisons"][0]
    assert rows(content, "log loss")[0]["expected"] == compared["averages"][-1]["difference"]
    assert {row["outcome"] for row in content["plan"]} > {"accuracy (acc)", "bits per byte", "Brier score"}
    # A single outcome, and its own unit
    alone = planned(evalkit, *runs, "--outcome", "log_loss", "--difference", 0.1)
    assert {row["outcome"] for row in alone["plan"]} == {"log loss"} and "0.1" in alone["verdict"]
    # One run: the answers of another are taken as independent of its
    accuracies = [of.mean() for of in right["a"].values()]
    variance = sum(2 * p * (1 - p) / n for p, n in zip(accuracies, (5000, n), strict=True)) / 4
    guessed = planned(evalkit, runs[0])
    assert rows(guessed, "accuracy", documents=5000)[0]["detectable"] == pytest.approx(
        Z * math.sqrt(variance), rel=0.01
    )
    terminal = evalkit("plan", *runs).out
    assert "share of zeroshot8" in terminal and "5 % / tasks" in terminal


@pytest.mark.slow
def test_several_seeds(evalkit: Command, tmp_path: Path) -> None:
    names = {side: [three_tasks(tmp_path / "runs", f"{side}{seed}", share, seed=seed + 10 * (side == "b"))
                    for seed in range(1, 4)] for side, share in (("a", 0.4), ("b", 0.6))}  # fmt: skip
    groups = [f"--group={side}={','.join(map(str, runs))}" for side, runs in names.items()]
    content = planned(evalkit, *groups, "--difference", 5)
    of_seeds = rows(content, "accuracy (acc)", documents=max(N.values()))
    detectable = {row["seeds"]: row["detectable"] for row in of_seeds}
    assert detectable[1] is None and detectable[2] > detectable[3] > detectable[5] > detectable[8] > 0
    needed = of_seeds[-1]["needs"]
    assert f"{needed} seeds" in content["verdict"] and needed > 8
    complains(evalkit("plan", groups[0], names["b"][0]), 2, "several")


def test_options_that_do_not_fit(evalkit: Command, tmp_path: Path) -> None:
    runs = [three_tasks(tmp_path / "runs", name, seed=seed) for seed, name in enumerate("abc")]
    complains(evalkit("plan", *runs), 2, "two")
    complains(evalkit("plan", *runs[:2], "--discordant", 10), 2, "--discordant")
    complains(evalkit("plan", runs[0], "--outcome", "brier"), 2, "--outcome")
    complains(evalkit("plan", runs[0], "--accuracy", 40), 2, "--accuracy")
