"""Numbers of a table that compare rows document by document: shares above a baseline, and significant leads.

In: a layout and the runs of its rows. Shares (section 5.3 of the paper): the share of documents whose measure is
greater in the row's run than in the baseline's; equal values do not count, and all documents have the same weight. With
several seeds, each run of the row is compared with each of the baseline, and the number is the mean over these pairs.

Leads: those of best numbers over the next best that are significant, by the test of `evalkit compare`
(docs/compare.md), after Holm's correction over all leads of the table. The selection of the best and next best rows
needs no further correction: the error rate of a two-sided test between them does not exceed its level (Gutmann and
Maymin 1987, Hung and Fithian 2019; for independent samples).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache

import numpy as np

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.comparison import p_value
from evalkit.comparison.pairing import Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.reporting.decimals import mean, of_float
from evalkit.runs.folder import Run
from evalkit.stats.estimates import error_of_mean
from evalkit.stats.power import ALPHA
from evalkit.stats.significance import holm
from evalkit.tables.fill import Lead
from evalkit.tables.layout import TableLayout, without_baseline
from evalkit.tables.published import Number

_PERCENT = 100


def paired_numbers(layout: TableLayout, runs: Mapping[str, tuple[Run, ...]]) -> dict[str, dict[str, Number]]:
    """Return row → measure → share of documents in percent, of the runs of each row and size, and of each baseline.

    Raises:
        UsageError: a baseline has no run, or a row was not measured on the documents of its baseline.
    """
    for key, size in without_baseline(layout, runs).items():
        raise UsageError(
            f"table {layout.name}: row '{key}' has a run, but the baseline that it is compared with has none: "
            f"{' or '.join(size.baseline)}; give its run too (row '{size.baseline_key}')"
        )
    graded: dict[str, Comparable] = {}
    numbers: dict[str, dict[str, Number]] = {}
    for item in layout.models:
        for size in layout.pairs:
            if (key := size.key(item.key)) not in runs:
                continue
            pairing = pair(Side(size.baseline_key, runs[size.baseline_key]), Side(key, runs[key]), graded)
            _check_complete(pairing)
            row = numbers.setdefault(item.key, {})
            for measure, rule in size.rules.items():
                try:
                    row[measure] = _exceeding_share(pairing, rule)
                except UsageError as error:
                    raise UsageError(f"table {layout.name}, '{measure}' of row '{key}': {error}") from error
    return numbers


def _exceeding_share(pairing: Pairing, rule: str) -> Number:
    """Return the share of documents on which B exceeds A under a rule, in percent, with its standard error.

    The error of one run of B is that of a mean over documents: √(p (1 - p) / (n - 1)) if A has one run too. Of several
    seeds it is the standard deviation of their shares.
    """
    scores = [pairing.scores(task, rule) for task in pairing.tasks]
    baseline, ours = (np.concatenate(side, axis=1) for side in zip(*scores, strict=True))
    exceeds = ours[:, None] > baseline[None]  # [runs of B, runs of A, documents]
    shares = [_PERCENT * Fraction(int(of_run.sum()), of_run.size) for of_run in exceeds]
    if len(shares) > 1:
        return Number(mean(shares), of_float(statistics.stdev(map(float, shares))))
    error = error_of_mean(exceeds[0].mean(axis=0))
    return Number(shares[0], None if error is None else of_float(_PERCENT * error))


def _check_complete(pairing: Pairing) -> None:
    if lost := [*pairing.left_out, *(task.task for task in pairing.tasks if task.dropped)]:
        first, other = (side.runs[0].folder.name for side in (pairing.b, pairing.a))
        raise UsageError(
            f"row '{pairing.b.name}': run {first} was not measured on the same documents of {', '.join(lost)} as its "
            f"baseline {other}; run both with the same tasks and the same sample"
        )


def significant_leads(
    layout: TableLayout, runs: Mapping[str, tuple[Run, ...]], rule: str | None, leads: Sequence[Lead]
) -> frozenset[Lead]:
    """Return the significant leads among those between rows of runs.

    Raises:
        UsageError: the runs have different rules (`rule` is None), or two rows were not measured on the same documents.
    """
    tested = [lead for lead in leads if lead.best in runs and lead.runner_up in runs]
    if tested and rule is None:
        raise UsageError(
            "--significance tests all rows under one rule, but the runs have several; name one with --rule"
        )
    graded: dict[str, Comparable] = {}

    @cache
    def paired(best: str, runner_up: str) -> Pairing:
        return pair(Side(best, runs[best]), Side(runner_up, runs[runner_up]), graded)

    ps = []
    for lead in tested:
        pairing, tasks = paired(lead.best, lead.runner_up), layout.averages.get(lead.measure, (lead.measure,))
        for task in pairing.tasks:
            if task.task in tasks and task.dropped:
                raise UsageError(
                    f"rows '{lead.best}' and '{lead.runner_up}' were not measured on the same documents of "
                    f"{task.task}, so --significance cannot test their lead; omit it, or run both on the same documents"
                )
        ps.append(p_value(pairing, tasks, str(rule)))
    return frozenset(lead for lead, p in zip(tested, holm(ps), strict=True) if p <= ALPHA)
