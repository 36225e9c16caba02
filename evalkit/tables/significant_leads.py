"""Significance of a best number's lead over the next best.

In: the leads of a table and the runs of its rows. Out: the leads that are significant after Holm's correction over all
of them. The test is that of `evalkit compare` (docs/compare.md): paired on documents, clustered by source, and for rows
of several seeds also over seeds.

The selection of the best and next best rows needs no further correction: the error rate of a two-sided test between
them does not exceed its level (Gutmann and Maymin 1987, Hung and Fithian 2019; for independent samples).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.comparison import p_value
from evalkit.comparison.pairing import Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.stats.power import ALPHA
from evalkit.stats.significance import holm
from evalkit.tables.fill import Lead
from evalkit.tables.layout import TableLayout
from evalkit.tables.measured import Measured


def significant(layout: TableLayout, found: Measured, leads: Sequence[Lead]) -> frozenset[Lead]:
    """Return the significant leads among those between rows of runs.

    Raises:
        UsageError: the runs have different rules, or two rows were not measured on the same documents.
    """
    tested = [lead for lead in leads if lead.best in found.runs and lead.runner_up in found.runs]
    if tested and found.rule is None:
        raise UsageError(
            "--significance tests all rows under one rule, but the runs have several; name one with --rule"
        )
    graded: dict[str, Comparable] = {}

    @cache
    def paired(best: str, runner_up: str) -> Pairing:
        return pair(Side(best, found.runs[best]), Side(runner_up, found.runs[runner_up]), graded)

    ps = [
        lead_p_value(
            paired(lead.best, lead.runner_up),
            layout.averages.get(lead.measure, (lead.measure,)),
            str(found.rule),
        )
        for lead in tested
    ]
    return frozenset(lead for lead, p in zip(tested, holm(ps), strict=True) if p <= ALPHA)


def lead_p_value(pairing: Pairing, tasks: Sequence[str], rule: str) -> float:
    """Return the two-sided p-value of equal mean accuracies of two rows over the tasks, before correction.

    Raises:
        UsageError: some documents were scored in one of the rows only, so the test would not be of their lead.
    """
    for task in pairing.tasks:
        if task.task in tasks and task.dropped:
            raise UsageError(
                f"rows '{pairing.a.name}' and '{pairing.b.name}' were not measured on the same documents of "
                f"{task.task}, so --significance cannot test their lead; omit it, or run both on the same documents"
            )
    return p_value(pairing, tasks, rule)
