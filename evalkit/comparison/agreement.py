"""Agreement of two runs by document. In: a `Pairing` of single runs. Out: counts for each task."""

from __future__ import annotations

from dataclasses import dataclass

from evalkit.comparison.pairing import Pairing
from evalkit.errors import UsageError


@dataclass(frozen=True)
class Agreement:
    """Documents of a task by the scores of two runs, A and B."""

    task: str
    n: int
    a_higher: int
    """Scores that are right or wrong: A is right and B is wrong."""
    b_higher: int
    """Scores that are right or wrong: A is wrong and B is right."""
    both_right: int | None
    """None for scores between right and wrong."""
    both_wrong: int | None

    @property
    def equal(self) -> int:
        """Number of documents with the same score."""
        return self.n - self.a_higher - self.b_higher


def agreements(pairing: Pairing, rule: str) -> tuple[Agreement, ...]:
    """Return the agreement of two runs on each task.

    For a measure of several layers the score of a document is the mean over them.

    Args:
        pairing: two sides of one run each.
        rule: a rule that both support.

    Raises:
        UsageError: a side has several runs, or a run does not support the rule.
    """
    if len(pairing.graded) > 2:
        raise UsageError("agreement by document is of two runs; a side has several")
    graded, found = pairing.measure(rule).graded, []
    for task in pairing.tasks:
        [a], [b] = pairing.scores(task, rule)
        both = None if graded else int(((a == 1) & (b == 1)).sum())
        neither = None if graded else int(((a == 0) & (b == 0)).sum())
        found.append(Agreement(task.task, task.n, int((a > b).sum()), int((b > a).sum()), both, neither))
    return tuple(found)
