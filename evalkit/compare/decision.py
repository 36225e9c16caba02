"""What continuous integration makes of comparisons: an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from evalkit.compare.comparison import WORSE, Comparison

FINE, IS_WORSE, IS_UNDECIDED = 0, 3, 4


def exit_code(found: Sequence[Comparison], margin: float) -> int:
    """0 where every later side is shown to be no worse than A by more than the margin; 3 where one is; 4 if unclear.

    A side is worse where its average is (the whole interval lies below -margin), or where a task is, after Holm, by
    more than the margin. It is fine where the whole interval of its average lies above -margin. So without a margin a
    side that does as well as A is undecided: no number of documents shows that two are equal.

    Args:
        found: comparisons with the same baseline.
        margin: what the average may be lower by, a fraction.
    """
    codes = [_one(comparison, margin) for comparison in found]
    return IS_WORSE if IS_WORSE in codes else max(codes)


def _one(found: Comparison, margin: float) -> int:
    if found.average.high < -margin or any(t.verdict == WORSE and t.difference < -margin for t in found.tasks):
        return IS_WORSE
    return FINE if found.average.low > -margin else IS_UNDECIDED
