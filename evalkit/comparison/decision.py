"""What continuous integration makes of comparisons: an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from evalkit.comparison.differences import WORSE, Comparison
from evalkit.errors import UsageError

FINE, IS_WORSE, IS_UNDECIDED = 0, 3, 4


def exit_code(found: Sequence[Comparison], margin: float) -> int:
    """0 where every later side is shown to be no worse than A by more than the margin; 3 where one is; 4 if unclear.

    A side is worse where its average is (the whole interval lies beyond the margin), or where a task is, after Holm, by
    more than the margin. It is fine where the whole interval of its average lies above -margin. So without a margin a
    side that does as well as A is undecided: no number of documents shows that two are equal.

    Args:
        found: comparisons with the same baseline.
        margin: what the average may be worse by: a fraction, or in the measure's own unit.

    Raises:
        UsageError: of what is measured neither more nor less is better.
    """
    if (measure := found[0].measure).higher_is_better is None:
        raise UsageError(
            f"of {measure.name} neither higher nor lower is better, so no side can be worse; leave out --fail-if-worse"
        )
    codes = [_one(comparison, margin) for comparison in found]
    return IS_WORSE if IS_WORSE in codes else max(codes)


def _one(found: Comparison, margin: float) -> int:
    sign = 1 if found.measure.higher_is_better else -1
    worst, best = sorted((sign * found.average.low, sign * found.average.high))
    if best < -margin or any(t.verdict == WORSE and sign * t.difference < -margin for t in found.tasks):
        return IS_WORSE
    return FINE if worst > -margin else IS_UNDECIDED
