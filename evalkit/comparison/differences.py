"""Records of a comparison: differences by task, averages, and the whole comparison; and what a program exits with.

Scores are fractions, differences are B less A. `comparison.py` computes them, `comparison_report.py` prints them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from evalkit.benchmarks.outcomes import Measure
from evalkit.comparison.sides import Claim
from evalkit.errors import UsageError
from evalkit.escape import brief, counted
from evalkit.stats.power import ALPHA
from evalkit.stats.sequential import ONCE, Looks
from evalkit.stats.significance import Spread
from evalkit.suites.suites import Label

if TYPE_CHECKING:
    import pandas as pd

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
TOO_FEW = "too few"
"""Verdict on a task with too few documents for its measure (`Measure.least_documents`)."""
EQUIVALENT, NOT_WORSE = "equivalent", "not worse"
"""Verdicts on a margin, beside worse and undecided; a side that is equivalent is not worse either."""
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
    """The 95 % interval; that of the average over all tasks, where several sides are compared with A, holds for all
    sides together."""
    stderr: float | None
    """None if there are too few documents to estimate it."""
    freedom: float | None
    """Degrees of freedom of the t interval. With several runs of a side each component of the error has its own; this
    is the value that gives the same interval."""
    p: float | None
    spread: Spread | None
    """Variance components, if a side has several runs; of runs in pairs those of the differences, as B's."""
    verdict: str
    """On B: "better" or "worse" ("higher" or "lower" where neither is better), "undecided" or "too few"."""
    p_holm: float | None = None
    """p corrected for what is decided together: the tasks; or the sides, for the average over all tasks."""
    detectable: float | None = None
    """Smallest true difference that is found with 80 % power, after the correction; None if there is none."""
    has_caveats: bool = False
    """Whether a run has caveats of the task, or of a task of the average."""

    def __repr__(self) -> str:
        interval = f"95 % {self.low:+.4g} to {self.high:+.4g}"
        return brief(self, self.name, f"{self.difference:+.4g}", interval, self.verdict)


@dataclass(frozen=True, repr=False, kw_only=True)
class TaskDifference(Difference):
    """One task, or one layer of it."""

    n: int
    sources: int
    strata: int
    """Subjects; 1 for a task without subjects."""
    dropped: int
    total: int
    """Documents that the benchmark has; 0: unknown."""
    official: bool
    won: int
    """Documents that B scores better on, or higher where neither is better."""
    lost: int
    same: int
    test: str
    dominance: float
    """Share of the variance over documents that is due to a single source."""
    layer: int | None = None


@dataclass(frozen=True, repr=False)
class AverageDifference(Difference):
    """An unweighted mean over tasks, which are taken as fixed."""


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
    """What a continuous outcome shows beside accuracy: a secondary outcome."""

    outcome: str
    measure: Measure
    average: AverageDifference
    """Over the same documents of all tasks but `left_out`; not corrected for being a second look."""
    left_out: tuple[str, ...]
    """Tasks whose answers are letters: they would outweigh the others, and mostly measure the format."""
    times_low: float | None
    """How many times as many documents accuracy needs for the same power: the 95 % interval, which may have no upper
    end. None if a side has several runs: then it may be seeds that limit the power."""
    times_high: float | None


@dataclass(frozen=True)
class MarginVerdict:
    """What is shown about a loss of B of more than a margin."""

    margin: float
    """A fraction, or in the measure's unit."""
    verdict: str
    """Of the average: "equivalent" (the interval is within the margin on both sides), "not worse" (above it),
    "worse" (by more than the margin), or "undecided"."""
    worse: tuple[str, ...]
    """Tasks that are worse by more than the margin, after Holm's correction."""
    not_worse: tuple[str, ...]
    """Tasks that are not, after the same correction."""


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
    sides: int = 1
    """Number of sides that are compared with A, over which the verdict on the average is corrected."""
    looks: Looks = ONCE
    """Those at which intervals and p values hold."""
    length_ratio: float = 1.0
    """How many times as long the interval of the average is for that as that of a single look."""
    margin: MarginVerdict | None = None
    remarks: tuple[str, ...] = ()
    """Notes of the runs, after the names of their sides."""

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
        """Over all tasks: its verdict is the primary one."""
        return self.averages[-1]

    def count(self, verdict: str) -> int:
        """Return the number of tasks with a verdict."""
        return sum(task.verdict == verdict for task in self.tasks)


def on_margin(average: AverageDifference, margin: float, sign: int) -> str:
    """Return the verdict of an average's interval on a margin; `sign`: 1 if higher is better, else -1."""
    worst, best = sorted((sign * average.low, sign * average.high))
    if best < -margin:
        return WORSE
    if worst <= -margin:
        return UNDECIDED
    return EQUIVALENT if best < margin else NOT_WORSE


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """Return 0 if every side is shown not to be worse than A by more than the margin, 3 if one is worse, else 4.

    The average decides (`Comparison.margin`; without a margin its verdict: better is 0). A task that is shown to be
    worse by more than the margin turns a 0 into 4, never into 3: a side is then neither worse nor free of a loss.

    A measure without a better direction raises `UsageError`.
    """
    measure, codes = comparisons[0].measure, []
    if measure.higher_is_better is None:
        raise UsageError(f"of {measure.name} neither higher nor lower is better; remove --fail-if-worse")
    for each in comparisons:
        verdict, lost = each.average.verdict, each.count(WORSE) > 0
        if each.margin is not None:
            verdict, lost = each.margin.verdict, bool(each.margin.worse)
        passes = verdict in (BETTER, EQUIVALENT, NOT_WORSE) and not lost
        codes.append(3 if verdict == WORSE else 0 if passes else 4)
    return 3 if 3 in codes else max(codes)
