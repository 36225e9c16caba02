"""Rows of the journal. In: a window and the log-probabilities of its tokens. Out: sums by position."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.perplexity.windows import TextWindow

WIDTH = 64
"""Positions of a bin. Windows of usual models and their halves are multiples of it."""
KEY = ("document", "window", "is_last")
"""Columns that identify a window. With `is_last`, the windows in the journal show whether a document is finished."""


class PositionRow(NamedTuple):
    """Sums over the scored tokens of a window in one bin of positions.

    A token's position is the number of tokens before it in its window, with the prefix.
    """

    document: int
    window: int
    is_last: bool
    position: int
    """First position of the bin: 1, 65, 129, …"""
    tokens: int
    bytes: int
    nats: float
    """Sum of -ln p, in float64."""


def rows_of(window: TextWindow, logprobs: NDArray[np.float32]) -> list[PositionRow]:
    """Return the rows of a window.

    Args:
        window: the window.
        logprobs: [length] of its tokens; those of the context are not read.
    """
    bins = (np.arange(window.context, len(window.tokens)) - 1) // WIDTH
    first = int(bins[0])
    tokens = np.bincount(bins - first)
    sizes = np.bincount(bins - first, window.bytes)
    nats = np.bincount(bins - first, -logprobs[window.context :].astype(np.float64))
    return [
        PositionRow(
            window.document,
            window.number,
            window.is_last,
            (first + number) * WIDTH + 1,
            int(tokens[number]),
            int(sizes[number]),
            float(nats[number]),
        )
        for number in range(len(tokens))
    ]
