"""Levels of intervals that are looked at more than once.

In: the looks, and the level of a statement about all of them. Out: the nominal level of the interval at one look, so
that with a probability of the level at most any of these intervals misses.

A look's nominal level is given to the interval of a single look, with its own degrees of freedom and corrections. The
levels are those of means whose errors are normal, so of the joint distribution they are approximations; of a single
look they are as good as its interval (Jennison and Turnbull 2000, Group Sequential Methods, 3.3 and 11.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from evalkit.errors import UsageError

FIRST = 50
"""Documents of a task that set the shape of a confidence sequence: it is shortest, compared with the interval of a
single look, at eight times as many (1.55 times as long at 5 %; 1.6 at 200 and 1,600, 1.9 at 50)."""
_GRID = 201
"""Points of the numerical integration: an odd number, as Simpson's rule needs it."""


@dataclass(frozen=True)
class Looks:
    """The looks at which intervals and p values hold; by default a single one."""

    anytime: bool = False
    """Whether the sample may grow, and be looked at after any of its documents."""
    checkpoints: int = 1
    """Number of pairs of checkpoints that are looked at."""

    def __post_init__(self) -> None:
        if self.checkpoints < 1:
            raise UsageError(f"watch {self.checkpoints}: expected a number of checkpoints, 1 or more")


class Look(NamedTuple):
    """One of the looks."""

    looks: Looks
    growth: float
    """Information at it over that of `FIRST` documents of each task."""

    def level(self, level: float) -> float:
        """Return the nominal level of an interval.

        That of a growing sample is of the normal mixture's confidence sequence (Robbins 1970; Waudby-Smith et al. 2024,
        Time-uniform central limit theory and asymptotic confidence sequences), with |z| below
        √((1 + 1/g) log((1 + g) / level²)); that of several checkpoints is Bonferroni's.
        """
        from scipy.special import ndtr

        level /= self.looks.checkpoints
        if not self.looks.anytime:
            return level
        limit = math.sqrt((1 + 1 / self.growth) * math.log((1 + self.growth) / level**2))
        return float(2 * ndtr(-limit))

    def p(self, p: float | None) -> float | None:
        """Return the p value that holds at all looks: the smallest level whose interval excludes the hypothesis."""
        from scipy.special import ndtri

        if p is not None and self.looks.anytime:
            square = float(ndtri(p / 2)) ** 2
            p = math.sqrt(1 + self.growth) * math.exp(-square / 2 * self.growth / (1 + self.growth))
        return None if p is None else min(1.0, p * self.looks.checkpoints)


ONCE = Looks()


def planned_levels(information: Sequence[float], level: float) -> list[float]:
    """Return the nominal level of each of a fixed number of looks, of which the first that decides is the last.

    The error that is spent until a look is the level times its share of the information (Lan and DeMets 1983; Kim and
    DeMets 1987), by recursive integration over the path of a standard normal mean (Armitage, McPherson and Rowe 1969).

    Args:
        information: at each look, in any unit: 1 / variance. Increasing.
        level: two-sided, of all looks together.
    """
    from scipy.special import ndtr, ndtri

    times = np.array(information, float) / information[-1]
    levels, points, mass = list[float](), np.zeros(1), np.ones(1)
    for spent, step in zip(np.diff(times, prepend=0.0) * level, np.diff(times, prepend=0.0), strict=True):
        time, deviation = times[len(levels)], math.sqrt(step)
        low, high = 0.0, float(-ndtri(spent / 2))  # the limit of this look alone
        for _ in range(50):
            bound = (low + high) / 2 * math.sqrt(time)
            outside = mass @ (ndtr((points - bound) / deviation) + ndtr((-bound - points) / deviation))
            low, high = ((low + high) / 2, high) if outside > spent else (low, (low + high) / 2)
        levels.append(float(2 * ndtr(-high)))
        ahead = np.linspace(-1, 1, _GRID) * high * math.sqrt(time)
        weights = np.where(np.arange(_GRID) % 2, 4.0, 2.0) * (ahead[1] - ahead[0]) / 3
        weights[[0, -1]] /= 2
        density = np.exp(-(((ahead[:, None] - points) / deviation) ** 2) / 2) @ mass
        points, mass = ahead, weights * density / (deviation * math.sqrt(2 * math.pi))
    return levels
