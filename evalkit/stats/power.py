"""How small a difference the documents at hand could have shown.

In: the error that was found. Out: the smallest true difference that a two-sided test at 5 % finds in four cases of
five. None where no difference is that surely found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from evalkit.stats.estimates import Codes, Floats, t_quantile

ALPHA = 0.05
"""Level of every test."""
POWER = 0.8

_ONE_TAIL = 5.0
_MOST_SHIFT = 30.0
"""Standard errors; even one degree of freedom finds so many in four cases of five."""


def t_power(shift: float, freedom: float) -> float:
    """How often a two-sided t test at 5 % finds a difference of `shift` standard errors (noncentral t)."""
    from scipy.special import nctdtr

    critical = t_quantile(1 - ALPHA / 2, freedom)
    # The wrong tail is below 1e-9 there, and scipy's noncentral t may give anything for it
    wrong = float(nctdtr(freedom, shift, -critical)) if shift < _ONE_TAIL else 0.0
    return 1 - float(nctdtr(freedom, shift, critical)) + wrong


def t_detectable(stderr: float, freedom: float, most: float = 1.0) -> float | None:
    """For a t test, in the unit of the standard error; None where it is more than scores can differ by (`most`)."""
    if not stderr > 0:
        return None
    found = _first(lambda shift: t_power(shift, freedom), _MOST_SHIFT)
    return None if found is None or found * stderr > most else found * stderr


def sign_flip_detectable(sums: Floats, weights: Floats, stderr: float, most: float = 1.0) -> float | None:
    """For the sign-flip test of whole sources.

    That of a t, as if of so many equal sources as these weigh, with the error that was found. Where few sources differ,
    what the steps of the exact test allow is more.

    Args:
        sums: [clusters] of differences.
        weights: [clusters] documents.
        stderr: of the mean difference of a document.
        most: that scores can differ by.
    """
    n, count = float(weights.sum()), len(sums)
    smooth = 0.0 if stderr == 0 else t_detectable(stderr, n**2 / float((weights**2).sum()) - 1, most)
    differing = np.abs(sums[sums != 0])
    exact = mcnemar_detectable(count, len(differing))
    if smooth is None or exact is None:
        return None
    size = float(differing.mean()) if len(differing) else n / count
    return max(smooth, exact * size * count / n)


def mcnemar_power(n: int, discordance: float, difference: float) -> float:
    """How often the exact McNemar test finds a true difference, by summing over all outcomes.

    Args:
        n: documents.
        discordance: share of documents that only one side gets right.
        difference: share won less share lost; at most the discordance.
    """
    from scipy.special import bdtr

    mean, spread = n * discordance, math.sqrt(n * discordance * (1 - discordance))
    # Six standard deviations and a few hold all but 1e-9 of the probability
    counts = np.arange(max(1, int(mean - 6 * spread - 10)), min(n, int(mean + 6 * spread + 30)) + 1)
    most = _most_losses(int(counts[0]), int(counts[-1]))
    few, won = np.maximum(most, 0), (1 + difference / discordance) / 2
    either = np.where(most >= 0, bdtr(few, counts, 1 - won) + bdtr(few, counts, won), 0.0)
    return float((_binomial(counts, n, discordance) * either).sum())


def mcnemar_detectable(n: int, discordant: int) -> float | None:
    """For the exact McNemar test, if as many documents are discordant as found (or as the difference needs, if
    more)."""
    found = discordant / n
    return _first(lambda difference: mcnemar_power(n, max(found, difference), difference), 1.0)


@lru_cache(maxsize=64)
def _most_losses(first: int, last: int) -> Floats:
    """For each number of discordant documents, the most losses (or wins) that are significant; -1 where none are."""
    from scipy.special import bdtr, bdtrik

    counts = np.arange(first, last + 1)
    most = np.nan_to_num(np.floor(bdtrik(ALPHA / 2, counts, 0.5)), nan=-1.0)
    significant: Floats = np.where(bdtr(np.maximum(most, 0), counts, 0.5) > ALPHA / 2, most - 1, most)
    return significant


def _binomial(counts: Codes, n: int, probability: float) -> Floats:
    from scipy.special import gammaln, xlog1py, xlogy

    choose = gammaln(n + 1) - gammaln(counts + 1) - gammaln(n - counts + 1)
    probabilities: Floats = np.exp(choose + xlogy(counts, probability) + xlog1py(n - counts, -probability))
    return probabilities


def _first(power: Callable[[float], float], most: float) -> float | None:
    """The smallest argument in (0, most] at which a rising function reaches `POWER`; None if it never does."""
    low, high = 0.0, most / 32
    under, over = -POWER, power(high) - POWER
    while not over >= 0:
        if high >= most:
            return None
        low, under, high = high, over, 2 * high
        over = power(high) - POWER
    # False position, halving the end that stays (the Illinois rule)
    side = 0
    while high - low > 1e-7 * high:
        middle = high - over * (high - low) / (over - under)
        found = power(middle) - POWER
        if abs(found) < 1e-9:
            return middle
        if found > 0:
            high, over, under = middle, found, under / 2 if side > 0 else under
            side = 1
        else:
            low, under, over = middle, found, over / 2 if side < 0 else over
            side = -1
    return high
