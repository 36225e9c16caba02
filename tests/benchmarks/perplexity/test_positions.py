"""Bits per byte by position, compared with sums by hand and with a simulation."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.perplexity.results import position_bins, ratio
from evalkit.benchmarks.perplexity.windows import WIDTH, TextWindow, rows_of


def test_the_sums_of_a_window() -> None:
    """A token with p tokens before it is in the bin that begins at p rounded down to 1, 65, 129, …"""
    dice = np.random.default_rng(0)
    length, context = 300, 70
    logprobs = -dice.exponential(size=length).astype(np.float32)
    logprobs[:context] = np.nan
    sizes = dice.integers(0, 5, length - context).astype(np.int32)
    rows = rows_of(TextWindow(4, 2, True, context, np.zeros(length, np.int32), sizes), logprobs)
    expected: dict[int, list[float]] = {}
    for place in range(context, length):
        first = (place - 1) // 64 * 64 + 1
        sums = expected.setdefault(first, [0, 0, 0.0])
        sums[0] += 1
        sums[1] += int(sizes[place - context])
        sums[2] -= float(logprobs[place])
    assert [row.position for row in rows] == list(expected) == [65, 129, 193, 257]
    for row in rows:
        assert [row.tokens, row.bytes, row.nats] == pytest.approx(expected[row.position], rel=1e-12)
        assert (row.document, row.window, row.is_last) == (4, 2, True)


def table(documents: int, bins: int, seed: int = 0) -> pd.DataFrame:
    dice = np.random.default_rng(seed)
    places = [(n, WIDTH * b + 1) for n in range(documents) for b in range(bins)]
    sizes = dice.integers(100, 400, len(places))
    return pd.DataFrame(
        {
            "task": "t",
            "document": [n for n, _ in places],
            "position": [position for _, position in places],
            "tokens": WIDTH,
            "bytes": sizes,
            "nats": sizes * dice.uniform(0.5, 1.0, len(places)),
        }
    )


def test_bins_are_merged_for_readers() -> None:
    positions = table(3, 33)
    [narrow], [found] = position_bins([positions], 33), position_bins([positions], 16)
    assert [one.last for one in narrow] == list(range(WIDTH, 34 * WIDTH, WIDTH))
    assert [(one.first, one.last) for one in found] == [(start, start + 255) for start in range(1, 2200, 256)]
    assert sum(one.nats for one in found) == pytest.approx(positions["nats"].sum(), rel=1e-12)
    assert sum(one.bytes for one in found) == positions["bytes"].sum()
    inside = positions[(positions["position"] >= 257) & (positions["position"] <= 512)]
    value = inside["nats"].sum() / math.log(2) / inside["bytes"].sum()
    assert found[1].bits_per_byte == pytest.approx(value, rel=1e-12)
    assert (found[1].documents, found[1].tokens) == (3, 12 * WIDTH)
    # The error by hand: residuals of three documents
    sums = inside.groupby("document")[["nats", "bytes"]].sum()
    residuals = sums["nats"] / math.log(2) - value * sums["bytes"]
    assert found[1].stderr == pytest.approx(math.sqrt(3 / 2 * (residuals**2).sum()) / inside["bytes"].sum(), rel=1e-12)
    assert found[1].freedom == 2


def test_one_document_has_no_error() -> None:
    [[one]] = position_bins([table(1, 1)])
    assert (one.stderr, one.freedom) == (None, None)


def test_tokens_without_bytes_have_no_value() -> None:
    [[one]] = position_bins([table(2, 1).assign(bytes=0)])
    assert (one.bits_per_byte, one.tokens) == (None, 2 * WIDTH)


def test_the_error_is_the_spread_of_the_ratio() -> None:
    """Over many samples of 40 documents whose lengths and losses are related."""
    dice = np.random.default_rng(1)
    sizes = dice.lognormal(6, 0.7, (4000, 40))
    bits = sizes * (1.0 + 0.2 * dice.standard_normal(sizes.shape)) + 20 * np.log(sizes)
    found = [ratio(one, weights) for one, weights in zip(bits, sizes, strict=True)]
    spread = np.std([one.value for one in found])
    assert np.sqrt(np.mean([one.variance for one in found])) == pytest.approx(spread, rel=0.06)
