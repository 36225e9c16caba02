"""Shares of documents on which models exceed their baseline (section 5.3 of the paper).

In: a layout with `pairs`, and the runs of its rows and baselines. Out: numbers in percent. A document is counted if its
measure is greater in the row's run than in the baseline's; equal values do not count. All documents have the same
weight, whatever their tasks.

With several seeds, each run of the row is compared with each of the baseline, and the number is the mean over these
pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.pairing import Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.reporting.decimals import mean, of_float
from evalkit.runs.folder import Run
from evalkit.stats.estimates import error_of_mean
from evalkit.tables.layout import TableLayout
from evalkit.tables.paired_sizes import without_baseline
from evalkit.tables.published import Number

_PERCENT = 100


def paired_numbers(layout: TableLayout, runs: Mapping[str, tuple[Run, ...]]) -> dict[str, dict[str, Number]]:
    """Return row → measure → share of documents.

    Args:
        layout: a layout with `pairs`.
        runs: key of a row and size, or of a size's baseline → its runs.

    Raises:
        UsageError: a baseline has no run, or a row was not measured on the documents of its baseline.
        RunError: a table is damaged.
    """
    for key, size in without_baseline(layout, runs).items():
        raise UsageError(
            f"table {layout.name}: row '{key}' has a run, but the baseline that it is compared with has none: "
            f"{' or '.join(size.baseline)}; give its run too (row '{size.baseline_key}')"
        )
    graded: dict[str, Comparable] = {}
    found: dict[str, dict[str, Number]] = {}
    for item in layout.models:
        for size in layout.pairs:
            if (key := size.key(item.key)) not in runs:
                continue
            pairing = pair(Side(size.baseline_key, runs[size.baseline_key]), Side(key, runs[key]), graded)
            _check_complete(pairing)
            row = found.setdefault(item.key, {})
            for measure, rule in size.rules.items():
                try:
                    row[measure] = exceeding_share(pairing, rule)
                except UsageError as error:
                    raise UsageError(f"table {layout.name}, '{measure}' of row '{key}': {error}") from error
    return found


def exceeding_share(pairing: Pairing, rule: str) -> Number:
    """Return the share of documents on which B exceeds A under a rule, in percent, with its standard error.

    The error of one run of B is that of a mean over documents: √(p (1 - p) / (n - 1)) if A has one run too. Of several
    seeds it is the standard deviation of their shares.

    Args:
        pairing: the baseline and the side that is compared with it.
        rule: measure of documents.

    Raises:
        UsageError: a run has no such measure, or not of every document.
    """
    scores = [pairing.scores(task, rule) for task in pairing.tasks]
    baseline, ours = (np.concatenate(side, axis=1) for side in zip(*scores, strict=True))
    exceeds = ours[:, None] > baseline[None]  # [runs of B, runs of A, documents]
    shares = [_PERCENT * Fraction(int(one.sum()), one.size) for one in exceeds]
    if len(shares) > 1:
        return Number(mean(shares), of_float(statistics.stdev(map(float, shares))))
    error = error_of_mean(exceeds[0].mean(axis=0))
    return Number(shares[0], None if error is None else of_float(_PERCENT * error))


def _check_complete(pairing: Pairing) -> None:
    """Raise `UsageError` if some documents were measured in one of the runs only."""
    if lost := [*pairing.left_out, *(task.task for task in pairing.tasks if task.dropped)]:
        first, other = (side.runs[0].folder.name for side in (pairing.b, pairing.a))
        raise UsageError(
            f"row '{pairing.b.name}': run {first} was not measured on the same documents of {', '.join(lost)} as its "
            f"baseline {other}; run both with the same tasks and the same sample"
        )
