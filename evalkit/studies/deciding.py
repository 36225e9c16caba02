"""`evalkit decide`: two checkpoints are scored on growing samples until a verdict holds.

In: two checkpoints and the settings of their runs. Out: a `Decision`, and its report. The samples are nested, so that
each look scores the documents that are new; all looks' intervals hold together (`planned_levels`), so the first verdict
is final.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from evalkit.benchmarks.outcomes import Measure, flat_fields
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.run import planned, request_type
from evalkit.benchmarks.session import ModelHolder, run_plan
from evalkit.cache import remembering
from evalkit.comparison.differences import (
    BETTER,
    EQUIVALENT,
    UNDECIDED,
    WORSE,
    AverageDifference,
    on_margin,
)
from evalkit.comparison.line import ScoredLine, average_difference, by_task, length_ratio
from evalkit.comparison.pairing import pair
from evalkit.comparison.sentences import Unit, unit_of
from evalkit.comparison.sides import claim_of, sides_of
from evalkit.display import Progress, doing
from evalkit.errors import UsageError
from evalkit.escape import counted
from evalkit.inputs.settings import settings_of
from evalkit.reporting.decimals import percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.stats.power import ALPHA
from evalkit.stats.sequential import planned_levels
from evalkit.suites.suites import DEFAULT_SUITE

LEAST = 200
"""Least documents of each task at the first look: on fewer, likelihoods may miss their level."""
GROWTH = math.sqrt(2)
"""Ratio of the documents of each task at two successive looks."""


@dataclass(frozen=True)
class Step:
    """One sample, and the average difference on it, whose interval holds together with those of all other looks."""

    sample: int
    """Documents of each task."""
    documents: int
    average: AverageDifference
    verdict: str


@dataclass(frozen=True)
class Decision:
    """The steps until a verdict, or to the largest sample."""

    a: str
    b: str
    runs: tuple[str, str]
    """Folders of the runs on the last sample."""
    caution: str
    """As of `Claim`."""
    measure: Measure
    margin: float
    steps: tuple[Step, ...]
    most: int
    """Documents of the largest sample."""
    length_ratio: float
    """How many times as long the interval of the last planned look is as that of a single look."""

    @property
    def verdict(self) -> str:
        return self.steps[-1].verdict

    @property
    def exit_code(self) -> int:
        """3 if B is worse, 4 if it is undecided, else 0."""
        return {WORSE: 3, UNDECIDED: 4}.get(self.verdict, 0)


def samples(sizes: Collection[int], most: int | None) -> list[int]:
    """Return the documents of each task at each look, for tasks of these sizes; the last one is `most`, or all."""
    largest = min(most or max(sizes), max(sizes))
    count = max(0, math.floor(math.log(largest / LEAST, GROWTH) + 1e-9))
    return [math.ceil(largest / GROWTH**step - 1e-9) for step in range(count, -1, -1)]


def level_of(sizes: Sequence[int], looks: Sequence[int], number: int, lines: Sequence[ScoredLine]) -> float:
    """Return the nominal level of a look, for the information of all looks by the variances that are known at this one.

    Args:
        sizes: documents of each task.
        looks: documents of each task at each look.
        number: index of the look.
        lines: of the tasks, at this look.
    """
    variances = np.array([line.documents.variance * line.paired.n for line in lines])
    if not variances.sum() > 0:
        variances[:] = 1.0
    taken = np.minimum(np.array(sizes), np.array(looks)[:, None])
    return planned_levels(1 / (variances / taken).sum(axis=1), ALPHA)[number]


def verdict_on(average: AverageDifference, margin: float, sign: int) -> str:
    """Return what an interval shows: better, worse, equivalent or undecided; `sign`: -1 if lower is better, else 1."""
    if average.low > 0 or average.high < 0:
        return BETTER if average.low * sign > 0 else WORSE
    return EQUIVALENT if on_margin(average, margin, sign) == EQUIVALENT else UNDECIDED


def decide(
    models: Sequence[str],
    options: Mapping[str, Any],
    margin: float,
    most: int | None,
    key: str | None,
    progress: Progress,
) -> Decision:
    """Score growing samples of two checkpoints until B is shown to be better, worse, or equivalent within a margin.

    Args:
        models: A and B.
        options: of their runs, as of `evalkit.evaluate`.
        margin: of equivalence, in percentage points of a share, else in the outcome's unit.
        most: documents of each task on which the verdict is given up; None: all.
        key: rule or outcome, as of `compare_pairing`.
        progress: receives messages and progress.

    Both models stay in memory, and the runs of all samples in their folder. Raises `UsageError` for benchmarks whose
    samples cannot grow.
    """
    holders, steps = [ModelHolder() for _ in models], list[Step]()
    with remembering():
        sizes = _sizes(models[0], options, progress)
        looks = samples(sizes.values(), most)
        for number, sample in enumerate(looks):
            of_look = {**options, "sample": sample}
            plans = [planned(model, of_look, progress.say, looks[:number]) for model in models]
            runs = [run_plan(plan, progress, holder) for plan, holder in zip(plans, holders, strict=True)]
            with doing("comparing"):
                a, b = sides_of(runs, [])
                pairing = pair(a, b, {})
                measure = pairing.measure(key := pairing.key(key))
                if measure.higher_is_better is None:
                    raise UsageError(f"of {measure.name} neither higher nor lower is better, so nothing can be decided")
                lines = by_task(pairing, key)
                level = level_of([sizes[task] for task in pairing.names], looks, number, lines)
                average = average_difference("Average", lines, level)
            width = margin / 100 if measure.is_share else margin
            verdict = verdict_on(average, width, 1 if measure.higher_is_better else -1)
            steps.append(Step(sample, sum(task.n for task in pairing.tasks), average, verdict))
            shown = _unit(measure, steps).estimate(average)
            progress.say(f"{counted(sample, 'document')} of each task: {shown}: {verdict}")
            if verdict != UNDECIDED:
                break
    last = level_of([sizes[task] for task in pairing.names], looks, -1, lines)
    documents = sum(min(sizes[task], looks[-1]) for task in pairing.names)
    folders, ratio = (str(runs[0].folder), str(runs[1].folder)), length_ratio(last, ALPHA, average.freedom)
    caution = claim_of(a, b).caution
    return Decision(a.name, b.name, folders, caution, measure, width, tuple(steps), documents, ratio)


def _sizes(model: str, options: Mapping[str, Any], progress: Progress) -> dict[str, int]:
    """Return the documents that each task has. Raises `UsageError` if samples of the benchmark cannot grow."""
    if "sample" in settings_of(request_type(options)):
        plan = planned(model, {**options, "sample": LEAST}, progress.say)
        if benchmark(plan.manifest["kind"]).computation.shared_rows(plan):
            return {task: int(about["total"]) for task, about in plan.manifest["documents"].items()}
    suite = options.get("suite") or options.get("requests") or DEFAULT_SUITE
    raise UsageError(f"suite {suite} has no samples that grow; choose another")


def _unit(measure: Measure, steps: Sequence[Step]) -> Unit:
    return unit_of(measure, [step.average.stderr for step in steps])


def decision_report(decision: Decision) -> Report:
    """Build the report: the verdict, and a line for each look."""
    a, b, steps, unit = decision.a, decision.b, decision.steps, _unit(decision.measure, decision.steps)
    last, margin = steps[-1], f"{unit.value(decision.margin)}{unit.points}"
    share = percent(last.documents / decision.most, 0)
    shown = {
        EQUIVALENT: f"{b} and {a} are equivalent within {margin}",
        UNDECIDED: f"no difference between {b} and {a} is shown, nor that they are equivalent within {margin}",
    }.get(last.verdict, f"{b} is {last.verdict} than {a}")
    spent = f"{last.documents:,} of {decision.most:,} documents of each checkpoint were used ({share} %)"
    verdict = f"Verdict: {shown}; {decision.measure.name}, average {unit.estimate(last.average)}. {spent}."
    rows = [
        [
            f"{step.sample:,}",
            f"{step.documents:,}",
            *unit.cells(step.average),
            unit.error(step.average.stderr),
            step.verdict,
        ]
        for step in steps
    ]
    headers = ("documents of each task", "all", "A", "B", "B − A", "95 % interval", "± SE", "B is")
    early = ["after an early end the difference is too large on average; its interval is not too short"] * (
        last.documents < decision.most and last.verdict != UNDECIDED
    )
    notes = (
        "the intervals of all looks hold together (Lan and DeMets's alpha spending, in proportion to the information); "
        f"that of the last planned look is {decision.length_ratio:.2f} times as long as that of a single look",
        *early,
        f"evalkit compare {' '.join(decision.runs)} shows the tasks; its verdicts are of a single look",
    )
    facts = tuple(f"{letter}: {name} ({run})" for letter, name, run in zip("AB", (a, b), decision.runs, strict=True))
    content = {"verdict": decision.verdict} | asdict(decision, dict_factory=flat_fields)
    records = [{"a": a, "b": b} | {name: getattr(step, name) for name in ("sample", "documents", "verdict")}
               | {name: getattr(step.average, name) for name in ("difference", "low", "high", "stderr")}
               for step in steps]  # fmt: skip
    report = Report((simple_table("decision", headers, rows),), (verdict,), facts, notes, content, records)
    return report.with_caution(decision.caution)
