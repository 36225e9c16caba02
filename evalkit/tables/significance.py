"""Whether a best number's lead is more than chance. A stopgap behind one interface: `LeadTest`.

`lead_p_value` is the plainest valid test: it takes documents as independent and does not correct for the number of
comparisons. Whatever else has its signature can stand in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from evalkit.errors import UsageError
from evalkit.rules import decide, find_rule

if TYPE_CHECKING:
    from evalkit.runs import Run

LeadTest = Callable[["Run", "Run", Sequence[str], str], float]
"""(first run, second run, tasks, rule) → two-sided p-value that their mean accuracies over the tasks are equal."""


def lead_p_value(first: Run, second: Run, tasks: Sequence[str], rule: str) -> float:
    """Exact McNemar for one task; for a mean over several, z of the mean paired difference, tasks fixed.

    Source: McNemar 1947; the mean's error is √(Σ SE²) / T over the tasks' paired differences.

    Raises:
        UsageError: the two did not score the same documents.
    """
    differences = [_paired(first, second, task, rule) for task in tasks]
    if len(differences) == 1:
        [found] = differences
        return mcnemar(found.count(1), found.count(-1))
    means = [sum(found) / len(found) for found in differences]
    variances = [
        sum((value - middle) ** 2 for value in found) / (len(found) - 1) / len(found) if len(found) > 1 else 0.0
        for found, middle in zip(differences, means, strict=True)
    ]
    error = math.sqrt(sum(variances))
    return math.erfc(abs(sum(means)) / error / math.sqrt(2)) if error else 1.0


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided exact p-value that documents decided otherwise fall either way alike."""
    n = wins + losses
    tail: int = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * float(Fraction(tail, 2**n)))


def _paired(first: Run, second: Run, task: str, rule: str) -> list[int]:
    """Of each document: 1 where only the first run is right, -1 where only the second is."""
    decided = []
    for run in (first, second):
        table = decide(run.scores[run.scores["task"] == task], find_rule(rule))
        decided.append(table.set_index(["subtask", "doc_id"])["correct"].sort_index())
    one, two = decided
    if not one.index.equals(two.index):
        raise UsageError(f"{first.folder} and {second.folder} did not score the same documents of {task}")
    return [int(value) for value in (one - two)]
