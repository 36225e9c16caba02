"""The records of a comparison: what is found of each task, of each average, and of all together.

Scores are fractions, differences B less A. Numbers only; `comparison.py` computes them, `view.py` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evalkit.benchmarks.outcomes import Label, Measure
from evalkit.brief import brief, counted
from evalkit.comparison.claim import Claim
from evalkit.stats.seeds import Spread

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
HIGHER, LOWER = "higher", "lower"
"""Of measures of which neither is better."""
UP, DOWN = (BETTER, HIGHER), (WORSE, LOWER)


@dataclass(frozen=True)
class Difference:
    """B less A."""

    name: str
    """A task's, or an average's."""
    score_a: float
    score_b: float
    difference: float
    low: float
    high: float
    """The 95 % interval."""
    stderr: float | None
    """None where there are too few documents to tell."""
    freedom: float | None
    """Degrees of freedom of the interval's t. With several runs of a side each part of the error has its own, and this
    is the t that has the same interval."""
    p: float | None
    spread: Spread | None
    """Where a side has several runs: how much is seeds, how much documents."""
    verdict: str
    """What B is: "better" or "worse" ("higher" or "lower" where neither is better), or "undecided"."""

    def __repr__(self) -> str:
        return brief(
            self, self.name, f"{self.difference:+.4g}", f"95 % {self.low:+.4g} to {self.high:+.4g}", self.verdict
        )


@dataclass(frozen=True, repr=False)
class TaskDifference(Difference):
    """One task, or one layer of it."""

    n: int
    sources: int
    """Sources that the documents come from; fewer than documents where some share one."""
    strata: int
    """Subjects; 1 for a task without."""
    dropped: int
    official: bool
    won: int
    """Documents that B scores better on, or higher where neither is better."""
    lost: int
    same: int
    test: str
    p_holm: float | None
    """Corrected over the tasks."""
    detectable: float | None
    """Smallest true difference that these documents show in four cases of five (without Holm); None if there is
    none."""
    layer: int | None = None
    """Of the model, where each has a line of its own."""


@dataclass(frozen=True, repr=False)
class AverageDifference(Difference):
    """An unweighted mean over tasks, which are taken as fixed."""


@dataclass(frozen=True)
class RuleVerdict:
    """What another rule says of the same quantity."""

    rule: str
    average: AverageDifference
    better: int
    """Tasks on which B is better, or higher where neither is."""
    worse: int


@dataclass(frozen=True)
class Comparison:
    """All of it."""

    a: str
    b: str
    runs_a: tuple[str, ...]
    """Folders."""
    runs_b: tuple[str, ...]
    rule: str
    measure: Measure
    tasks: tuple[TaskDifference, ...]
    averages: tuple[AverageDifference, ...]
    """Of the suite's groups, then of all tasks."""
    rules: tuple[RuleVerdict, ...]
    """Every rule for the same quantity that all runs can answer, this one too."""
    claim: Claim
    left_out: Mapping[str, str]
    """Tasks that are not compared, and why."""
    labels: Mapping[str, Label]
    """Line, or task that is left out → how it is printed."""

    def __repr__(self) -> str:
        average = f"average {self.average.difference:+.4g}: {self.average.verdict}"
        return brief(self, f"{self.b} against {self.a}", self.rule, counted(len(self.tasks), "task"), average)

    @property
    def verdicts(self) -> tuple[str, str]:
        """What B is where a difference is shown."""
        return (HIGHER, LOWER) if self.measure.higher_is_better is None else (BETTER, WORSE)

    @property
    def average(self) -> AverageDifference:
        """Over all tasks."""
        return self.averages[-1]

    def count(self, verdict: str) -> int:
        """How many tasks have this verdict."""
        return sum(task.verdict == verdict for task in self.tasks)
