"""The sentence on a continuous outcome below the verdict of a comparison by accuracy."""

from __future__ import annotations

from evalkit.comparison.difference_texts import difference_text
from evalkit.comparison.differences import UNDECIDED, Comparison, ContinuousEvidence
from evalkit.comparison.units import unit_of
from evalkit.reporting.decimals import fixed

_SMALL = 10
"""Ratios below it are printed with a decimal."""


def continuous_sentence(found: Comparison) -> str | None:
    """Return what the continuous outcome shows, and how many times fewer documents it needs; None if there is none."""
    one = found.continuous
    if one is None:
        return None
    unit, average = unit_of(one.measure, [one.average.stderr]), one.average
    tasks = ", ".join(found.labels[task].full for task in one.left_out)
    without = f", without {tasks}, whose answers are letters" if tasks else ""
    name = f"{one.measure.name[:1].upper()}{one.measure.name[1:]}"
    numbers = f"{name}{without}: average {difference_text(average, unit)}"
    direction = "lower" if one.measure.higher_is_better is False else "higher"
    if average.verdict == UNDECIDED:
        return f"{numbers}; {direction} is better: undecided."
    said = f"{numbers}; {direction} is better, so {found.b} is {average.verdict}"
    if found.average.verdict not in (UNDECIDED, average.verdict):
        return f"{said}, and the two outcomes contradict each other."
    return f"{said}{_documents(one)}."


def _documents(one: ContinuousEvidence) -> str:
    if one.times_low is None:
        return ""
    if one.times_high is None:
        if one.times_low < 1:
            return ""
        return f"; for the same power it needs at least {_ratio(one.times_low)} times fewer documents than accuracy"
    assert one.times is not None
    interval = f"95 % interval {_ratio(one.times_low)} to {_ratio(one.times_high)}"
    if one.times >= 1:
        return f"; for the same power it needs {_ratio(one.times)} times fewer documents than accuracy ({interval})"
    turned = f"95 % interval {_ratio(1 / one.times_high)} to {_ratio(1 / one.times_low)}"
    return f"; for the same power accuracy needs {_ratio(1 / one.times)} times fewer documents ({turned})"


def _ratio(times: float) -> str:
    return f"{round(times):,}" if times >= _SMALL else fixed(times, 1)
