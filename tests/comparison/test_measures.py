"""Measures other than shares: signed, unbounded, per layer, lower is better, or without a better direction."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from evalkit.benchmarks.registry import benchmark
from evalkit.comparison.comparison import compare
from evalkit.comparison.comparison_report import comparison_report, headline
from evalkit.comparison.curves import curve, curve_report
from evalkit.comparison.differences import BETTER, HIGHER, LOWER, UNDECIDED, WORSE, exit_code
from evalkit.comparison.line import SIGN_FLIP
from evalkit.comparison.pairing import pair
from evalkit.comparison.plots import curves as draw_curves
from evalkit.comparison.plots import forest
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import Run, load_run
from tests.benchmarks.conftest import install_plugin
from tests.comparison.made import compared
from tests.plugin.copying import COPYING, LAYERS, LEAD, MEASURES, SURPLUS
from tests.plugin.made import make_copying
from tests.printed import printed

N = 60
_NUMBERS = count()


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package of the benchmark."""
    folder = str(install_plugin(tmp_path_factory.mktemp("installed")))
    sys.path.insert(0, folder)
    benchmark.cache_clear()
    yield
    sys.path.remove(folder)
    benchmark.cache_clear()


def drawn(seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    """Signed values far from any share."""
    return scale * (np.random.default_rng(seed).normal(3, 5, N) + shift)


def made(root: Path, model: str, sources: Sequence[str] | None = None, **columns: Any) -> Run:
    """A run with values under each measure."""
    every = {SURPLUS: np.zeros(N)} | {f"{LEAD} {layer}": np.zeros(N) for layer in LAYERS}
    named = {name.replace("_", " "): values for name, values in columns.items()}
    return load_run(make_copying(root / str(next(_NUMBERS)), every | named, model=f"org/{model}", sources=sources))


def test_intervals_and_tests_are_those_of_paired_differences(tmp_path: Path) -> None:
    first, second = drawn(1), drawn(1) + np.random.default_rng(2).normal(40, 30, N)
    found = compared(made(tmp_path, "a", surplus=first), made(tmp_path, "b", surplus=second), SURPLUS)
    [task] = found.tasks
    apart = second - first
    assert task.difference == pytest.approx(apart.mean())
    assert task.stderr == pytest.approx(stats.sem(apart))
    # No clipping at one and no pseudo-source: there is no bound near which the interval would be too short
    low, high = stats.t.interval(0.95, N - 1, apart.mean(), stats.sem(apart))
    assert (task.low, task.high) == pytest.approx((low, high), rel=1e-9)
    assert task.low > 1
    assert task.test == SIGN_FLIP
    found = TTestPower().solve_power(nobs=N, alpha=0.05, power=0.8) * apart.std(ddof=1)
    assert task.detectable == pytest.approx(found, rel=1e-4)
    assert task.detectable > 1


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_unit_changes_no_verdict(tmp_path: Path, scale: float) -> None:
    """Means, errors and intervals scale; p values, which have no unit, do not change."""
    shared = [str(n // 3) for n in range(N)]
    for sources in (None, shared):
        found = [
            compared(
                made(tmp_path, "a", sources, surplus=drawn(1, scale=one)),
                made(tmp_path, "b", sources, surplus=drawn(2, 1.5, scale=one)),
                SURPLUS,
            ).tasks[0]
            for one in (1.0, scale)
        ]
        assert 0.001 < found[0].p < 0.999
        assert found[1].p == pytest.approx(found[0].p, abs=1e-9)
        for name in ("score_a", "difference", "low", "high", "stderr", "detectable"):
            assert getattr(found[1], name) == pytest.approx(scale * getattr(found[0], name), rel=1e-6), name


@pytest.mark.parametrize(("shift", "verdict", "code"), [(9.0, WORSE, 3), (-9.0, BETTER, 0), (0.0, UNDECIDED, 4)])
def test_lower_is_better(tmp_path: Path, shift: float, verdict: str, code: int) -> None:
    noise = np.random.default_rng(3).normal(0, 1, N)
    a, b = made(tmp_path, "a", surplus=drawn(1)), made(tmp_path, "b", surplus=drawn(1, shift) + noise - noise.mean())
    found = compared(a, b, SURPLUS)
    [task] = found.tasks
    assert task.verdict == verdict
    assert verdict == UNDECIDED or (task.won > task.lost) == (verdict == BETTER)
    assert exit_code([found], 0.0) == code
    assert exit_code([found], 20.0) == 0  # a margin in the measure's own unit
    text = printed(comparison_report([found]))
    assert "won, lost: documents on which B, or A, scores lower" in text
    assert " points" not in text
    if verdict != UNDECIDED:
        assert headline(found).startswith(f"b is {verdict} than a on 1 of 1 task: ")


def test_neither_is_better(tmp_path: Path) -> None:
    noise = np.random.default_rng(3).normal(0, 1, (2, N))
    a = made(tmp_path, "a", lead_0=drawn(1), lead_1=drawn(2), lead_2=drawn(3))
    b = made(tmp_path, "b", lead_0=drawn(1) + 5 + noise[0], lead_1=drawn(2) - 2 + noise[1], lead_2=drawn(3))
    found = compared(a, b, LEAD)
    assert [task.verdict for task in found.tasks] == [HIGHER, LOWER, UNDECIDED]
    same = found.tasks[2]
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)
    assert headline(found).startswith("b is higher than a on 1 of 3 layers and lower on 1 after Holm's correction; ")
    # Of each document's mean over the layers, so that what layers share is not counted three times
    apart = (5 + noise[0] - 2 + noise[1]) / 3
    assert found.average.difference == pytest.approx(apart.mean())
    assert found.average.stderr == pytest.approx(stats.sem(apart))
    assert [record["layer"] for record in comparison_report([found]).records] == [0, 1, 2, None]
    text = printed(comparison_report([found]))
    assert "higher, lower: documents on which B, or A, scores higher" in text
    with pytest.raises(UsageError, match="of lead neither higher nor lower is better"):
        exit_code([found], 0.0)
    forest([found], tmp_path / "forest.png")
    assert (tmp_path / "forest.png").stat().st_size > 1000


def test_models_of_other_layers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = made(tmp_path, "a", surplus=drawn(1)), made(tmp_path, "b", surplus=drawn(2))
    served = benchmark(COPYING)
    one, other = served.comparable(a), served.comparable(b)
    monkeypatch.setattr(other, "_measures", MEASURES | {LEAD: MEASURES[SURPLUS]})
    graded = {str(a.folder): one, str(b.folder): other}
    with pytest.raises(UsageError, match=r"lead is of 3 layers in run .* of 0 layers in run"):
        compare(pair(Side("a", (a,)), Side("b", (b,)), graded), LEAD)


def test_a_curve_is_in_the_measures_unit(tmp_path: Path) -> None:
    runs = tuple(made(tmp_path, f"step{n}", lead_0=drawn(n), lead_1=drawn(n, 50), lead_2=drawn(n, -50)) for n in (1, 2))
    found = curve(Side("training", runs), LEAD)
    assert list(found.tasks) == [f"{COPYING} layer {layer}" for layer in LAYERS]
    for n, point in zip((1, 2), found.tasks[f"{COPYING} layer 2"], strict=True):
        values = drawn(n, -50)
        low, high = stats.t.interval(0.95, N - 1, values.mean(), stats.sem(values))
        assert (point.low, point.high) == pytest.approx((low, high), rel=1e-9)
    assert found.average[0].accuracy == pytest.approx(drawn(1).mean())
    assert "Copy, layer 1" in printed(curve_report([found]))
    draw_curves([found], tmp_path / "curve.png")
