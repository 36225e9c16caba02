"""Size and coverage where sources are of very unequal size: Zipf's law, one giant, and strata of such.

The documents of a source lean to one side or the other, by as much as `lean`; over all sources there is no lean.
"""

from __future__ import annotations

import numpy as np
import pytest

from evalkit.stats.estimates import Codes, Estimate, interval, mean
from evalkit.stats.power import sign_flip_detectable
from evalkit.stats.significance import cluster_sums, sign_flip, t_test
from tests.stats.test_simulation import Drawn, adjusted, allowed

DISCORDANT = 0.4


def zipf(n: int, count: int) -> Codes:
    """[n] the source of each document; the k-th has 1 / k as many as the first."""
    shares = 1 / np.arange(1, count + 1)
    sizes = np.maximum(1, np.floor(n * shares / shares.sum()).astype(int))
    sizes[0] += n - sizes.sum()
    return np.repeat(np.arange(count), sizes)


def giant(n: int, count: int, share: float) -> Codes:
    """[n] one source with this share of the documents, the others alike."""
    first = int(share * n)
    return np.concatenate([np.zeros(first, int), 1 + np.arange(n - first) % (count - 1)])


SOURCES = {
    "equal": np.repeat(np.arange(40), 7),
    "zipf": zipf(300, 40),
    "zipf of 150": zipf(300, 150),
    "giant": giant(300, 20, 0.5),
    "large": giant(300, 40, 0.3),
    "three": np.repeat(np.arange(3), 100),
}


def leaning(clusters: Codes, lean: float, difference: float, dice: np.random.Generator) -> Drawn:
    leans = dice.choice([-lean, lean], clusters.max() + 1)[clusters]
    toss = dice.random(len(clusters))
    won = toss < (DISCORDANT + difference) / 2 + leans
    return np.where(won, 1.0, np.where(toss < DISCORDANT, -1.0, 0.0)), clusters


def rates(names: list[str], lean: float, difference: float, times: int) -> tuple[float, float]:
    """(how often the t finds something, how often the interval covers) of the average over such tasks."""
    dice = np.random.default_rng(len(names))
    finds = covers = 0
    for _ in range(times):
        found = adjusted([leaning(SOURCES[name], lean, difference, dice) for name in names])
        low, high = interval(found)
        finds += t_test(found) <= 0.05
        covers += low <= difference <= high
    return finds / times, covers / times


TASKS = [
    ["zipf"],
    ["zipf"] * 3,
    ["giant", "zipf", "equal", "equal"],
    ["giant"] * 3,
    ["zipf of 150"] * 2,
    ["three", *["zipf"] * 7],
]
LEANS = [0.0, 0.05, 0.1]


@pytest.mark.parametrize("names", TASKS, ids=", ".join)
def test_the_t_holds_where_sources_are_of_very_unequal_size(names: list[str]) -> None:
    """Liang and Zeger's error with G - 1 degrees of freedom finds something in 9 to 17 %.

    With a task of three sources, Satterthwaite's degrees of freedom alone find something in 20 %.
    """
    times = 500
    found, covered = rates(names, 0.2 if "three" in names else 0.05, 0.0, times)
    assert found <= 0.05 + allowed(0.05, times) / 2
    assert covered == pytest.approx(1 - found)


@pytest.mark.slow
@pytest.mark.parametrize("difference", [0.0, 0.08])
@pytest.mark.parametrize("lean", LEANS)
@pytest.mark.parametrize("names", [["zipf"], ["zipf"] * 8, TASKS[2], ["giant"] * 3], ids=", ".join)
def test_the_t_holds_often_simulated(names: list[str], lean: float, difference: float) -> None:
    times = 4000
    found, covered = rates(names, lean, difference, times)
    assert covered >= 0.945 - allowed(0.05, times) / 2
    if difference == 0:
        assert found <= 0.055 + allowed(0.05, times) / 2


@pytest.mark.parametrize("name", ["equal", "zipf", "giant"])
def test_the_standard_error_is_right_on_average(name: str) -> None:
    """Sources that lean are what the correction for their size needs to know of."""
    dice = np.random.default_rng(3)
    found = [mean(*leaning(SOURCES[name], 0.1, 0.0, dice)) for _ in range(2000)]
    true = np.std([one.value for one in found])
    assert np.sqrt(np.mean([one.variance for one in found])) == pytest.approx(true, rel=0.06)


def test_strata_of_unequal_sources() -> None:
    """Four subjects, each with Zipf's sources, of unlike difficulty."""
    dice, times, hits = np.random.default_rng(4), 500, 0
    clusters = np.concatenate([zipf(75, 15) + 15 * place for place in range(4)])
    strata = np.repeat(np.arange(4), 75)
    offsets = np.array([-0.15, -0.05, 0.05, 0.15])[strata]
    for _ in range(times):
        values = leaning(clusters, 0.05, 0.0, dice)[0] + offsets
        low, high = interval(mean(values, clusters, strata))
        hits += low <= 0 <= high
    assert hits / times >= 0.95 - allowed(0.05, times) / 2


@pytest.mark.parametrize("name", ["zipf", "giant", "zipf of 150"])
def test_sign_flips_of_whole_sources_hold_for_any_sizes(name: str) -> None:
    dice, times = np.random.default_rng(5), 1500
    ps = [sign_flip(cluster_sums(*leaning(SOURCES[name], 0.1, 0.0, dice))) for _ in range(times)]
    found = float(np.mean(np.array(ps) <= 0.05))
    assert 0.03 <= found <= 0.05 + allowed(0.05, times) / 2


@pytest.mark.parametrize("name", ["equal", "zipf", "large"])
def test_what_sign_flips_can_show(name: str) -> None:
    """About four times in five, where a t with the degrees of freedom of the interval would be far off."""
    dice, clusters = np.random.default_rng(6), SOURCES[name]
    weights = np.bincount(clusters).astype(float)

    def promised(drawn: Drawn, error: Estimate) -> float:
        return sign_flip_detectable(cluster_sums(*drawn), weights, error.stderr) or 1.0

    drawn = [leaning(clusters, 0.05, 0.0, dice) for _ in range(100)]
    difference = float(np.median([promised(one, mean(*one)) for one in drawn]))
    ps = [sign_flip(cluster_sums(*leaning(clusters, 0.05, difference, dice))) for _ in range(500)]
    assert float(np.mean(np.array(ps) <= 0.05)) == pytest.approx(0.8, abs=0.1)
