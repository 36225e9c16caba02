"""Records of a comparison: differences by task, averages, and the whole comparison; and what a program exits with.

Scores are fractions, differences are B less A. `comparison.py` computes them, `comparison_report.py` prints them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, TypeAlias

from evalkit.benchmarks.outcomes import Label, Measure
from evalkit.comparison.sides import Claim
from evalkit.errors import UsageError
from evalkit.escape import brief, counted
from evalkit.stats.power import ALPHA
from evalkit.stats.significance import Spread

if TYPE_CHECKING:
    import pandas as pd

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
HIGHER, LOWER = "higher", "lower"
"""Verdicts for measures without a better direction."""
UP, DOWN = (BETTER, HIGHER), (WORSE, LOWER)


def tally(verdicts: Iterable[str]) -> tuple[int, int]:
    """Count the verdicts that are better, or higher, and those that are worse, or lower."""
    counts = Counter(verdicts)
    return counts[BETTER] + counts[HIGHER], counts[WORSE] + counts[LOWER]


def verdict_of(p: float | None, difference: float, higher_is_better: bool | None) -> str:
    """Return "better" or "worse" if p is at most 5 % ("higher" or "lower" if neither is better), else "undecided"."""
    if p is None or not p <= ALPHA:
        return UNDECIDED
    if higher_is_better is None:
        return HIGHER if difference > 0 else LOWER
    return BETTER if (difference > 0) == higher_is_better else WORSE


@dataclass(frozen=True)
class Difference:
    """Paired difference, B less A."""

    name: str
    score_a: float
    score_b: float
    difference: float
    low: float
    high: float
    """The 95 % interval."""
    stderr: float | None
    """None if there are too few documents to estimate it."""
    freedom: float | None
    """Degrees of freedom of the t interval. With several runs of a side each component of the error has its own; this
    is the value that gives the same interval."""
    p: float | None
    spread: Spread | None
    """Variance components, if a side has several runs."""
    verdict: str
    """On B: "better" or "worse" ("higher" or "lower" where neither is better), or "undecided"."""

    def __repr__(self) -> str:
        interval = f"95 % {self.low:+.4g} to {self.high:+.4g}"
        return brief(self, self.name, f"{self.difference:+.4g}", interval, self.verdict)


@dataclass(frozen=True, repr=False)
class TaskDifference(Difference):
    """One task, or one layer of it."""

    n: int
    sources: int
    strata: int
    """Subjects; 1 for a task without subjects."""
    dropped: int
    official: bool
    won: int
    """Documents that B scores better on, or higher where neither is better."""
    lost: int
    same: int
    test: str
    p_holm: float | None
    detectable: float | None
    """Smallest true difference that these documents detect with 80 % power (without Holm); None if there is none."""
    layer: int | None = None


@dataclass(frozen=True, repr=False)
class AverageDifference(Difference):
    """An unweighted mean over tasks, which are taken as fixed."""


Rows: TypeAlias = tuple[tuple[TaskDifference, ...], tuple[AverageDifference, ...]]
"""Differences of tasks, or of their layers, and of averages."""


@dataclass(frozen=True)
class RuleVerdict:
    """Verdict of one rule on the same measure."""

    rule: str
    average: AverageDifference
    better: int
    """Tasks on which B is better, or higher."""
    worse: int


@dataclass(frozen=True)
class ContinuousEvidence:
    """What a continuous outcome shows beside accuracy."""

    outcome: str
    measure: Measure
    average: AverageDifference
    """Over the same documents of all tasks but `left_out`; not corrected for being a second look."""
    left_out: tuple[str, ...]
    """Tasks whose answers are letters: they would outweigh the others, and mostly measure the format."""
    times: float | None
    """How many times fewer documents it needs than accuracy for the same power; None if that is not known."""
    times_low: float | None
    """The 95 % interval, which may have no upper end."""
    times_high: float | None


@dataclass(frozen=True)
class Comparison:
    """Comparison of two sides under a rule."""

    a: str
    b: str
    runs_a: tuple[str, ...]
    runs_b: tuple[str, ...]
    rule: str
    own_rules: tuple[str, ...]
    """The runs' own rules, if these differ and no rule was requested; then `rule` is the first that all support."""
    measure: Measure
    tasks: tuple[TaskDifference, ...]
    averages: tuple[AverageDifference, ...]
    """Averages of the suite's groups, then of all tasks."""
    rules: tuple[RuleVerdict, ...]
    """Every rule for the same measure that all runs support, including this one."""
    claim: Claim
    left_out: Mapping[str, str]
    """Task that is not compared → reason."""
    labels: Mapping[str, Label]
    """Line, or task that is not compared → printed label."""
    letters: tuple[str, ...] = ()
    """Tasks whose answers are letters, if the outcome is one that mostly measures their format."""
    continuous: ContinuousEvidence | None = None

    def __repr__(self) -> str:
        average = f"average {self.average.difference:+.4g}: {self.average.verdict}"
        return brief(self, f"{self.b} against {self.a}", self.rule, counted(len(self.tasks), "task"), average)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each task and each average, by name, with the fields of `TaskDifference`."""
        import pandas as pd

        return pd.DataFrame(map(vars, (*self.tasks, *self.averages))).drop(columns="spread").set_index("name")

    def _repr_html_(self) -> str:
        numbers = self.to_frame()[["n", "score_a", "score_b", "difference", "low", "high", "p", "verdict"]]
        return f"<p>{escape(repr(self))}</p>{numbers.to_html(float_format='{:.4g}'.format, na_rep='')}"

    @property
    def verdicts(self) -> tuple[str, str]:
        """Verdicts of a positive and a negative significant effect: better and worse, or higher and lower."""
        return (HIGHER, LOWER) if self.measure.higher_is_better is None else (BETTER, WORSE)

    @property
    def average(self) -> AverageDifference:
        """Over all tasks."""
        return self.averages[-1]

    def count(self, verdict: str) -> int:
        """Return the number of tasks with a verdict."""
        return sum(task.verdict == verdict for task in self.tasks)


def exit_code(comparisons: Sequence[Comparison], margin: float) -> int:
    """Return 0 if no side is worse than A by more than the margin (non-inferiority), 3 if one is, 4 if undecided.

    A side is worse if its average is (the whole interval is below -margin), or if a task is, after Holm's correction,
    by more than the margin. It is non-inferior if the whole interval of its average is above -margin. Without a margin
    a side that is equal to A is therefore undecided: no number of documents proves that two sides are equal.

    The margin is a fraction, or in the measure's unit. A measure without a better direction raises `UsageError`.
    """
    measure = comparisons[0].measure
    if measure.higher_is_better is None:
        raise UsageError(f"of {measure.name} neither higher nor lower is better; remove --fail-if-worse")
    sign, codes = 1 if measure.higher_is_better else -1, []
    for comparison in comparisons:
        worst, best = sorted((sign * comparison.average.low, sign * comparison.average.high))
        losses = [-sign * task.difference for task in comparison.tasks if task.verdict == WORSE]
        if best < -margin or max(losses, default=0.0) > margin:
            return 3
        codes.append(0 if worst > -margin else 4)
    return max(codes)
