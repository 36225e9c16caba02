"""Seeds in pairs: their analysis against explicit computation, what cannot be a pair, and what a study declares."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

import evalkit
from evalkit.comparison.comparison_report import comparison_report
from evalkit.errors import UsageError
from evalkit.runs.folder import load_run
from evalkit.stats.power import seeds_needed
from evalkit.stats.significance import Spread
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
from tests.cli.conftest import Command, complains
from tests.comparison.made import compared, make_run, scores_of
from tests.marks import fast
from tests.printed import printed
from tests.studies.made import changed, write_study

SIZES = {"arc_easy": 300, "piqa": 200}


def drawn(seed: int, gain: float, dice: np.random.Generator) -> dict[str, np.ndarray]:
    """Right answers by task; a seed moves both sides of a pair by the same amount."""
    shift = float(np.random.default_rng(seed).normal(0, 0.1))
    difficulty = {task: np.random.default_rng(n).random(n) for task, n in SIZES.items()}
    return {task: (of + dice.normal(0, 0.15, len(of)) < 0.5 + shift + gain).astype(int)
            for task, of in difficulty.items()}  # fmt: skip


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[list[dict[str, np.ndarray]], list[list[Path]]]:
    """Answers of A's three seeds, then B's, and their runs."""
    dice = np.random.default_rng(1)
    answers = [drawn(seed, gain, dice) for gain in (0.0, 0.06) for seed in (1, 2, 3)]
    runs = [make_run(tmp_path / "made", {task: scores_of(task, right.tolist()) for task, right in of.items()},
                     model=f"{'ab'[n // 3]}-seed{n % 3 + 1}") for n, of in enumerate(answers)]  # fmt: skip
    return answers, [runs[:3], runs[3:]]


def test_the_differences_of_pairs_and_documents_are_the_errors(pairs: Any) -> None:
    answers, (a, b) = pairs
    average = compared(a, b, pair_seeds=True).average
    apart = [{task: b[task] - a[task] for task in SIZES} for a, b in zip(answers[:3], answers[3:], strict=True)]
    means = [np.mean([values.mean() for values in of.values()]) for of in apart]
    documents = sum(np.mean([of[task] for of in apart], axis=0).var(ddof=1) / n for task, n in SIZES.items()) / 4
    residuals = [of[task] - np.mean([other[task] for other in apart], axis=0) for of in apart for task in SIZES]
    shared = sum(values.var(ddof=1) / len(values) for values in residuals) / 6 / 4
    expected = (0.0, np.var(means, ddof=1) / 3, documents, shared, 1, 3)
    assert average.spread is not None and tuple(average.spread) == pytest.approx(expected)
    assert average.difference == pytest.approx(np.mean(means))

    def excess(p: float) -> float:
        """Banerjee's critical difference at a level, or that of documents alone, less the observed one."""
        of_seeds = expected[1] * stats.t.ppf(p / 2, 2) ** 2
        half = max(of_seeds + (documents - shared) * stats.norm.ppf(p / 2) ** 2, documents * stats.norm.ppf(p / 2) ** 2)
        return math.sqrt(half) - abs(average.difference)

    assert average.p == pytest.approx(optimize.brentq(excess, 1e-9, 1.0), rel=0.1)
    unpaired = compared(a, b).average
    assert unpaired.difference == pytest.approx(average.difference)
    assert unpaired.p is not None and unpaired.p > 5 * average.p
    assert average.high - average.low < 0.5 * (unpaired.high - unpaired.low)


def test_what_is_printed_of_pairs(pairs: Any) -> None:
    _, (a, b) = pairs
    text = printed(comparison_report([compared(a, b, pair_seeds=True)]))
    assert "3 pairs" in text and "SD of the pairs" in text and "before results are seen" in text
    assert "SD of A's runs" in printed(comparison_report([compared(a, b)]))
    single = compared(a[0], b[0])  # one pair has no spread
    assert compared(a[:1], b[:1], pair_seeds=True).tasks == single.tasks


def test_runs_that_are_no_pairs(pairs: Any) -> None:
    _, (a, b) = pairs
    with pytest.raises(UsageError, match=r"3 runs.*2 runs"):
        compared(a, b[:2], pair_seeds=True)
    with pytest.raises(UsageError, match=rf"{a[0].name}.*{b[1].name}"):
        compared(a, [b[1], b[0], b[2]], pair_seeds=True)
    with pytest.raises(UsageError, match="2 runs"):
        evalkit.compare(a[2], groups={"b": b[:2]}, pair_seeds=True)


@pytest.mark.parametrize(("differences", "deviations", "paired", "unpaired"), [
    ((-0.0100, -0.0178, -0.0036), (0.0326, 0.0278), 8, 179),
    ((0.1866, -0.0052, -0.0060), (0.0326, 0.0901), 41, 32),
    ((-0.0032, -0.0378, -0.0089), (0.0326, 0.0144), 16, 51),
])  # fmt: skip
def test_the_seeds_that_the_replication_needs(
    differences: tuple[float, ...], deviations: tuple[float, float], paired: int, unpaired: int
) -> None:
    """Of its three variants, at Holm's first level of three; docs/replication.md has the differences of each seed."""
    in_pairs = Spread(0.0, float(np.var(differences, ddof=1)) / 3, 4e-4**2, 0.0, 1, 3)
    apart = Spread(deviations[0] ** 2 / 3, deviations[1] ** 2 / 3, 4e-4**2, 0.0, 3, 3)
    for parts, needed in ((in_pairs, paired), (apart, unpaired)):
        found = seeds_needed(parts, float(np.mean(differences)), level=0.05 / 3)
        assert found is not None and found == pytest.approx(needed, rel=0.04, abs=1)


@pytest.mark.slow
def test_a_plan_of_pairs(evalkit: Command, pairs: Any) -> None:
    _, sides = pairs
    groups = [f"--group={name}={','.join(map(str, runs))}" for name, runs in zip("ab", sides, strict=True)]
    outcome = evalkit("plan", *groups, "--difference", 5, "--pair-seeds")
    without = evalkit("plan", *groups, "--difference", 5).out
    assert outcome.code == 0 and "in pairs, unpaired" in outcome.out and "unpaired" not in without
    [row] = [line.split() for line in outcome.out.splitlines() if line.startswith("accuracy (acc), unpaired")]
    [same] = [line.split() for line in without.splitlines() if line.startswith("accuracy (acc)") and "average" in line
              and line.split()[3] == "–"]  # fmt: skip
    assert row[3:] == same[2:]
    complains(evalkit("plan", "--accuracy", 40, "--pair-seeds"), 2, "--pair-seeds")


@pytest.mark.parametrize("declared_before", fast([True], [True, False]))
def test_a_study_declares_pairs(evalkit: Command, pairs: Any, tmp_path: Path, declared_before: bool) -> None:
    """In its file; its records say whether a run had results by then, and do not change afterwards."""
    _, (a, b) = pairs
    checkpoints = {"a": [f"gone/a-{n}" for n in (1, 2, 3)], "b": [f"gone/b-{n}" for n in (1, 2, 3)]}
    path = write_study(tmp_path / "study.yaml", checkpoints, {"zeroshot8": {}}, settings={}, pair_seeds=declared_before)
    study = read_study(path)
    for cell, folder in zip(study.runs, (*a, *b), strict=True):
        identity = load_run(folder).manifest["id"]
        save_record(study.output, cell, study.output / folder.name, identity)
        shutil.copytree(folder, study.output / folder.name)
    changed(path, pair_seeds=True)
    for cell, folder in zip(read_study(path).runs, (*a, *b), strict=True):
        save_record(study.output, cell, study.output / folder.name, load_run(folder).manifest["id"])
    outcome = evalkit("compare", "--study", path)
    assert outcome.code == 0 and "3 pairs" in outcome.out
    assert ("before these runs had results" in outcome.out) == declared_before
    assert ("had results already" in outcome.out) != declared_before
    page = evalkit("report", "--study", path, "--without-documents", "-o", tmp_path / "page.html")
    assert page.code == 0 and "SD of the pairs" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "needs" in evalkit("plan", "--study", path).out and "in pairs" in evalkit("plan", "--study", path).out
