"""Comparisons in words: the primary verdict, the secondary sentences, and how numbers are written in them.

In: `Comparison`s. Out: sentences, and the `Unit` of a report's numbers (shares in percent and points, other measures in
their unit).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.differences import (
    EQUIVALENT,
    NOT_WORSE,
    TOO_FEW,
    UNDECIDED,
    WORSE,
    Comparison,
    Difference,
    tally,
)
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.numbers import SHARES, NumberFormat
from evalkit.stats.estimates import known_error
from evalkit.stats.significance import Spread

_LEAST_P = 0.0005
"""Smallest p value that three decimals can show."""


class Unit(NumberFormat):
    """Unit and decimals of the numbers in one report, whose errors have one more decimal."""

    def __init__(self, places: int, whole: float | None = None) -> None:
        super().__init__(places, whole, more_of_errors=1)

    @property
    def factor(self) -> float:
        return 100 if self.whole else 1

    @property
    def points(self) -> str:
        return " points" if self.whole else ""

    def error(self, stderr: float | Fraction | None) -> str:
        return super().error(None if stderr is None else known_error(float(stderr)))

    def difference(self, difference: float) -> str:
        return self.value(difference, signed=True)

    def interval(self, difference: Difference) -> str:
        return f"{self.difference(difference.low)} to {self.difference(difference.high)}"

    def cells(self, difference: Difference) -> list[str]:
        """Format both scores, the difference and its interval."""
        scores = map(self.value, (difference.score_a, difference.score_b))
        return [*scores, self.difference(difference.difference), self.interval(difference)]

    def estimate(self, difference: Difference, family: str = "") -> str:
        """Format a difference with its interval, which may hold for a family of differences."""
        value = f"{self.difference(difference.difference)}{self.points}"
        return f"{value} (95 % interval{family} {self.interval(difference)})"

    def words(self, difference: Difference, family: str = "") -> str:
        """Format a difference with its interval and p value, which may hold for a family of differences."""
        p = difference.p if difference.p_holm is None else difference.p_holm
        sign = "" if p is not None and p < _LEAST_P else "= "
        holm = f" (Holm{family})" if family else ""
        return f"{self.estimate(difference, family)}, p {sign}{p_text(p)}{holm}"


def unit_of(measure: Measure, errors: Iterable[float | None]) -> Unit:
    """Return the unit of a report. Measures other than shares have decimals for two digits of the smallest error."""
    if measure.is_share:
        return Unit(SHARES.places, SHARES.whole)
    least = min((error for error in errors if error is not None and 0 < error < math.inf), default=None)
    return Unit(3 if least is None else max(0, min(12, 1 - math.floor(math.log10(least)))))


def page_unit(compared: Comparison) -> Unit:
    return unit_of(compared.measure, [row.stderr for row in (*compared.tasks, *compared.averages)])


def p_text(p: float | None) -> str:
    """Format a p value with three decimals."""
    if p is None:
        return "–"
    return "<0.001" if p < _LEAST_P else fixed(p, 3)


def label(compared: Comparison, name: str) -> str:
    return compared.labels[name].full if name in compared.labels else name


def headline(compared: Comparison) -> str:
    """Return the primary verdict, on the average of the chosen outcome, after what else differs than checkpoints."""
    a, b, average, unit = compared.a, compared.b, compared.average, page_unit(compared)
    shown = f"{b} is {average.verdict} than {a}"
    if average.verdict == TOO_FEW:
        shown = f"too few documents for a verdict on {b} and {a}"
    elif average.verdict == UNDECIDED:
        shown = f"no difference between {b} and {a} is shown"
    numbers = unit.words(average, f" over {compared.sides} sides" * (compared.sides > 1))
    if average.verdict == UNDECIDED and average.detectable is not None:
        numbers += f"; could show {unit.value(average.detectable)}"
    return f"{compared.claim.caution} Primary verdict: {shown}; {_primary(compared)} {numbers}.".lstrip()


def looks_sentence(compared: Comparison) -> str | None:
    """Return at which looks intervals hold, and their price; None for a single look."""
    looks = compared.looks
    at = ["a sample that grows, however often it is looked at"] if looks.anytime else []
    at += [f"{looks.checkpoints} pairs of checkpoints"] if looks.checkpoints > 1 else []
    if not at:
        return None
    longer = f"that of the average is {fixed(compared.length_ratio, 2)} times as long as that of a single look"
    return f"Intervals and p values hold together at {' and at '.join(at)}; {longer}."


def _primary(compared: Comparison) -> str:
    """Return the quantity of the primary verdict."""
    name, tasks = compared.measure.name, compared.tasks
    if len(tasks) == 1:
        return f"{name} on {label(compared, tasks[0].name)}"
    over = "mean over layers" if compared.measure.layers else f"unweighted mean over {len(tasks)} tasks"
    return f"{name}, {over},"


def tasks_sentence(compared: Comparison) -> str | None:
    """Return on how many tasks, or layers, a difference is shown; None for a single task."""
    if (count := len(compared.tasks)) == 1:
        return None
    what = "layers" if compared.measure.layers else "tasks"
    counts = {verdict: compared.count(verdict) for verdict in compared.verdicts}
    listed = " and ".join(f"{verdict} on {number}" for verdict, number in counts.items() if number)
    shown = f"{compared.b} is {listed} of {count}" if listed else f"none of {count} shows a difference"
    too_few = compared.count(TOO_FEW)
    without = f"; on {too_few} there are too few documents for a verdict" if too_few else ""
    return f"Secondary, {what} after Holm's correction: {shown}{without}."


def margin_sentence(compared: Comparison) -> str | None:
    """Return what is shown about the margin; None without a margin."""
    if (on := compared.margin) is None:
        return None
    a, b, unit = compared.a, compared.b, page_unit(compared)
    size = f"{unit.value(on.margin)}{unit.points}"
    shown = {
        EQUIVALENT: f"{b} and {a} are equivalent: the interval lies between -{size} and +{size}",
        NOT_WORSE: f"{b} is not worse than {a} by that (non-inferior): the interval excludes it",
        WORSE: f"{b} is worse than {a} by more than that: the whole interval is",
        UNDECIDED: f"undecided whether {b} is worse than {a} by that: the interval contains it",
    }[on.verdict]
    if (count := len(compared.tasks)) > 1:
        listed = f" ({', '.join(label(compared, task) for task in on.worse)})" if on.worse else ""
        shown += f". Tasks after Holm's correction: {len(on.worse)} of {count} worse by more{listed}"
        shown += f", {len(on.not_worse)} not worse by that"
    return f"Margin of {size}: {shown}."


def continuous_sentence(compared: Comparison) -> str | None:
    """Return what the continuous outcome shows, and how many documents accuracy needs; None if there is none."""
    if (evidence := compared.continuous) is None:
        return None
    measure, average = evidence.measure, evidence.average
    tasks = ", ".join(compared.labels[task].full for task in evidence.left_out)
    without = f" without {tasks}, whose answers are letters" if tasks else ""
    sentence = f"Secondary, {measure.name}{without}: average {unit_of(measure, [average.stderr]).words(average)}"
    if average.verdict in (UNDECIDED, TOO_FEW):
        sentence = f"{sentence}: {average.verdict}"
    else:
        sentence = f"{sentence}: {compared.b} is {average.verdict} in {measure.name}"
        if compared.average.verdict not in (UNDECIDED, average.verdict):
            sentence += ", and the two outcomes contradict each other"
    low, high = evidence.times_low, evidence.times_high
    if compared.average.spread and average.spread and None not in (compared.average.stderr, average.stderr):
        of_bits, of_accuracy = map(_limit, (average.spread, compared.average.spread))
        return f"{sentence}; most of its error is due to {of_bits}, of accuracy's to {of_accuracy}."
    if low is None:
        return f"{sentence}."
    if not low and high is None:
        return f"{sentence}; how many times as many documents accuracy needs for the same power is not known."
    times = f"{_ratio(low)} to {_ratio(high)}" if high is not None else f"at least {_ratio(low)}"
    return f"{sentence}; for the same power accuracy needs {times} times as many documents (95 % interval)."


def _limit(spread: Spread) -> str:
    """Return whether seeds or documents have the larger part of a variance, with that part."""
    documents = max(spread.documents - spread.shared, 0.0)
    share = spread.seeds / ((spread.seeds + documents) or 1.0)
    what, part = ("seeds", share) if share >= 0.5 else ("documents", 1 - share)
    return f"{what} ({percent(part, 0)} % of the variance)"


def _ratio(times: float) -> str:
    return f"{round(times):,}" if times >= 10 else fixed(times, 1)


def prompt_of(rule: str) -> str:
    """Return the prompt of a rule's name."""
    return rule.partition("@")[2] or "mean over prompts"


def prompts_sentence(compared: Comparison) -> str:
    """Return whether B is better, or worse, than A under all prompts."""
    a, b, (better, worse) = compared.a, compared.b, compared.verdicts
    averages = {verdict.rule: verdict.average for verdict in compared.rules if "@" in verdict.rule}
    up, down = tally(average.verdict for average in averages.values())
    count = len(averages)
    prompts = f"{count} prompts" + " on average over the tasks" * (len(compared.tasks) > 1)
    if count in (up, down):
        rule, last = max(averages.items(), key=lambda item: 1.0 if item[1].p is None else item[1].p)
        test = f"intersection-union test: the largest p is {p_text(last.p)}, {prompt_of(rule)}"
        return f"{b} is {better if up else worse} than {a} under all {prompts} ({test})."
    if not up and not down:
        sign = -1 if compared.measure.higher_is_better is False else 1
        gains = [sign * average.difference for average in averages.values()]
        ahead, behind = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        shown = f"No difference between {b} and {a} is shown under any of {prompts}"
        return f"{shown}; {b} is ahead under {ahead}, {a} under {behind}."
    counts = {better: up, worse: down, "undecided": count - up - down}
    listed = ", ".join(f"{verdict} under {number}" for verdict, number in counts.items() if number)
    return f"Of {prompts}, {b} against {a} is {listed}: neither is shown to be {better} under all of them."
