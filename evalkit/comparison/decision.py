"""Exit code of comparisons, for continuous integration.

In: `Comparison`s and a margin. Out: 0, 3 or 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from evalkit.comparison.differences import WORSE, Comparison
from evalkit.errors import UsageError

FINE, IS_WORSE, IS_UNDECIDED = 0, 3, 4


def exit_code(found: Sequence[Comparison], margin: float) -> int:
    """Return 0 if no side is worse than A by more than the margin (non-inferiority), 3 if one is, 4 if undecided.

    A side is worse if its average is (the whole interval is below -margin), or if a task is, after Holm's correction,
    by more than the margin. It is non-inferior if the whole interval of its average is above -margin. Without a margin
    a side that is equal to A is therefore undecided: no number of documents proves that two sides are equal.

    Args:
        found: comparisons with the same baseline.
        margin: largest acceptable loss of the average: a fraction, or in the measure's unit.

    Raises:
        UsageError: the measure has no better direction.
    """
    if (measure := found[0].measure).higher_is_better is None:
        raise UsageError(
            f"of {measure.name} neither higher nor lower is better, so no side can be worse; remove --fail-if-worse"
        )
    codes = [_one(comparison, margin) for comparison in found]
    return IS_WORSE if IS_WORSE in codes else max(codes)


def _one(found: Comparison, margin: float) -> int:
    sign = 1 if found.measure.higher_is_better else -1
    worst, best = sorted((sign * found.average.low, sign * found.average.high))
    if best < -margin or any(t.verdict == WORSE and sign * t.difference < -margin for t in found.tasks):
        return IS_WORSE
    return FINE if worst > -margin else IS_UNDECIDED
