"""Bits per byte by position. In: the table of positions. Out: a value with its standard error for each bin.

A position is the number of tokens before a token in its window. A bin's value is a ratio: bits over bytes of all
tokens in the bin. Its standard error is that of a ratio of sums over documents, since the tokens of a document are not
independent: the residuals of the documents, bits less ratio times bytes, over all bytes (Cochran, Sampling Techniques,
6.3; documents of a task are taken as a random sample).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from evalkit.benchmarks.perplexity.rows import WIDTH
from evalkit.stats.estimates import Estimate, Floats, mean

BIN = ("task", "document", "position")
MOST = 16
"""Bins in reports."""


class PositionBin(NamedTuple):
    """All scored tokens in a bin of positions."""

    first: int
    last: int
    """Positions of the bin, both included."""
    documents: int
    tokens: int
    bytes: int
    nats: float
    bits_per_byte: float | None
    """None if the tokens have no bytes."""
    stderr: float | None
    """None of one document."""
    freedom: float | None
    """Degrees of freedom of the standard error."""

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood of a token."""
        return self.nats / self.tokens


def by_position(positions: pd.DataFrame, width: int | None = None, most: int = MOST) -> list[PositionBin]:
    """Return the bins of all documents.

    Args:
        positions: the table.
        width: positions of a bin, a multiple of `WIDTH`; None: `width_of`.
        most: maximum number of bins where no width is given.
    """
    width = width or width_of(positions, most)
    groups = positions.assign(bin=(positions["position"] - 1) // width)
    found = groups.groupby(["bin", "task", "document"], sort=True)[["tokens", "bytes", "nats"]].sum().reset_index()
    return [_bin(int(members["bin"].iloc[0]), width, members) for _, members in found.groupby("bin")]


def width_of(positions: pd.DataFrame, most: int = MOST) -> int:
    """Return the positions of a bin for at most so many bins: `WIDTH` times a power of two."""
    width = WIDTH
    while positions["position"].max() > most * width:
        width *= 2
    return width


def ratio(values: Floats, weights: Floats) -> Estimate:
    """Estimate the ratio of two sums over documents.

    Args:
        values: [documents].
        weights: [documents]; their sum is not 0.

    Returns:
        The ratio; its variance is NaN of one document.
    """
    total = float(weights.sum())
    value = float(values.sum()) / total
    residuals = mean((values - value * weights) * len(values) / total)
    return Estimate(value, residuals.variance, residuals.freedom)


def _bin(number: int, width: int, members: pd.DataFrame) -> PositionBin:
    size, nats = int(members["bytes"].sum()), float(members["nats"].sum())
    value = stderr = freedom = None
    if size:
        found = ratio(members["nats"].to_numpy(np.float64) / math.log(2), members["bytes"].to_numpy(np.float64))
        value = found.value
        if not math.isnan(found.variance):
            stderr, freedom = found.stderr, found.freedom
    first = number * width + 1
    documents, tokens = len(members), int(members["tokens"].sum())
    return PositionBin(first, first + width - 1, documents, tokens, size, nats, value, stderr, freedom)
