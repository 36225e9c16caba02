"""`evalkit decide`: two checkpoints are scored on growing samples until a verdict holds.

In: two checkpoints and the settings of their runs. Out: a `Decision`, and its report. The samples are nested, so that
each look scores the documents that are new; all looks' intervals hold together (`planned_levels`), so the first verdict
is final.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.outcomes import Measure
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import remembering
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import ModelHolder, run_plan
from evalkit.comparison.differences import (
    BETTER,
    EQUIVALENT,
    UNDECIDED,
    WORSE,
    AverageDifference,
    on_margin,
)
from evalkit.comparison.line import average_difference, by_task
from evalkit.comparison.pairing import pair
from evalkit.comparison.sentences import Unit, unit_of
from evalkit.comparison.sides import sides_of
from evalkit.display import Progress, doing
from evalkit.errors import UsageError
from evalkit.escape import counted
from evalkit.reporting.decimals import percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.stats.estimates import t_quantile
from evalkit.stats.power import ALPHA
from evalkit.stats.sequential import planned_levels

LEAST = 200
"""Least documents of each task at the first look: on fewer, likelihoods miss their level (`Measure.least_documents`)."""
GROWTH = math.sqrt(2)
"""Ratio of the documents of each task at two successive looks."""


@dataclass(frozen=True)
class Look:
    """One sample, and the average difference on it, whose interval holds together with those of all other looks."""

    sample: int
    """Documents of each task."""
    documents: int
    average: AverageDifference
    verdict: str


@dataclass(frozen=True)
class Decision:
    """The looks until a verdict, or at all samples."""

    a: str
    b: str
    runs: tuple[str, str]
    """Folders of the runs on the last sample."""
    measure: Measure
    margin: float
    looks: tuple[Look, ...]
    most: int
    """Documents of the largest sample."""
    longer: float
    """How many times as long the interval of the last planned look is as that of a single look."""

    @property
    def verdict(self) -> str:
        return self.looks[-1].verdict

    @property
    def exit_code(self) -> int:
        """3 if B is worse, 4 if it is undecided, else 0."""
        return {WORSE: 3, UNDECIDED: 4}.get(self.verdict, 0)


def samples(sizes: Sequence[int], most: int | None) -> list[int]:
    """Return the documents of each task at each look, for tasks of these sizes; the last one is `most`, or all."""
    largest = min(most or max(sizes), max(sizes))
    count = max(0, math.floor(math.log(largest / LEAST, GROWTH) + 1e-9))
    return [math.ceil(largest / GROWTH**step - 1e-9) for step in range(count, -1, -1)]


def levels_of(sizes: Sequence[int], looks: Sequence[int]) -> list[float]:
    """Return the nominal level of each look; a task counts as if all had the same variance of a document."""
    return planned_levels([1 / sum(1 / min(size, sample) for size in sizes) for sample in looks], ALPHA)


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

    Both models stay in memory. Raises `UsageError` for benchmarks whose samples cannot grow.
    """
    holders, looks, earlier = [ModelHolder() for _ in models], list[Look](), list[Run]()
    with remembering():
        sizes = _sizes(planned(models[0], options, progress.say))
        planned_looks = samples(sizes, most)
        levels = levels_of(sizes, planned_looks)
        for sample, level in zip(planned_looks, levels, strict=True):
            plans = [planned(model, {**options, "sample": sample}, progress.say) for model in models]
            new = [not plan.folder.exists() for plan in plans]
            runs = [run_plan(plan, progress, holder) for plan, holder in zip(plans, holders, strict=True)]
            for run in earlier:
                shutil.rmtree(run.folder, ignore_errors=True)  # the larger sample's run contains its scores
            earlier = [run for run, is_new in zip(runs, new, strict=True) if is_new]
            with doing("comparing"):
                a, b = sides_of(runs, [])
                pairing = pair(a, b, {})
                measure = pairing.measure(key := pairing.key(key))
                if measure.higher_is_better is None:
                    raise UsageError(f"of {measure.name} neither higher nor lower is better, so nothing can be decided")
                width = margin / 100 if measure.is_share else margin
                average = average_difference("Average", by_task(pairing, key), level)
            verdict = verdict_on(average, width, 1 if measure.higher_is_better else -1)
            looks.append(Look(sample, sum(task.n for task in pairing.tasks), average, verdict))
            unit = _unit(measure, looks)
            shown = f"{unit.difference(average.difference)}{unit.points} (95 % interval {unit.interval(average)})"
            progress.say(f"{counted(sample, 'document')} of each task: {shown}: {verdict}")
            if verdict != UNDECIDED:
                break
    of_last, of_one = (t_quantile(1 - level / 2, average.freedom or math.inf) for level in (levels[-1], ALPHA))
    documents = sum(min(size, planned_looks[-1]) for size in sizes)
    folders = str(runs[0].folder), str(runs[1].folder)
    return Decision(a.name, b.name, folders, measure, width, tuple(looks), documents, of_last / of_one)


def _sizes(plan: Plan) -> list[int]:
    """Return the documents that each task has. Raises `UsageError` if samples of the benchmark cannot grow."""
    if not benchmark(plan.manifest["kind"]).keys(plan):
        raise UsageError(f"suite {plan.manifest['specification']['suite']} has no samples that grow; choose another")
    return [int(task["count"]) for task in plan.manifest["documents"].values()]


def _unit(measure: Measure, looks: Sequence[Look]) -> Unit:
    return unit_of(measure, [look.average.stderr for look in looks])


def decision_report(decision: Decision) -> Report:
    """Build the report: the verdict, and a line for each look."""
    a, b, looks, unit = decision.a, decision.b, decision.looks, _unit(decision.measure, decision.looks)
    last, margin = looks[-1], f"{unit.value(decision.margin)}{unit.points}"
    share = percent(last.documents / decision.most, 0)
    shown = {
        EQUIVALENT: f"{b} and {a} are equivalent within {margin}",
        UNDECIDED: f"no difference between {b} and {a} is shown, nor that they are equivalent within {margin}",
    }.get(last.verdict, f"{b} is {last.verdict} than {a}")
    average = last.average
    value = f"{unit.difference(average.difference)}{unit.points} (95 % interval {unit.interval(average)})"
    spent = f"{last.documents:,} of {decision.most:,} documents of each checkpoint were scored ({share} %)"
    verdict = f"Verdict: {shown}; {decision.measure.name}, average {value}. {spent}."
    rows = [
        [
            f"{look.sample:,}",
            f"{look.documents:,}",
            *unit.cells(look.average),
            unit.error(look.average.stderr),
            look.verdict,
        ]
        for look in looks
    ]
    headers = ("documents of each task", "all", "A", "B", "B − A", "95 % interval", "± SE", "B is")
    notes = (
        "the intervals of all looks hold together (Lan and DeMets's alpha spending, in proportion to the information); "
        f"that of the last planned look is {decision.longer:.2f} times as long as that of a single look",
        "after an early end the difference itself is too large on average; its interval is not too short",
        f"evalkit compare {' '.join(decision.runs)} shows the tasks, which are secondary: not corrected for the looks",
    )
    facts = tuple(f"{letter}: {name} ({run})" for letter, name, run in zip("AB", (a, b), decision.runs, strict=True))
    content = {"verdict": decision.verdict} | asdict(decision)
    records = [{"a": a, "b": b} | {name: getattr(look, name) for name in ("sample", "documents", "verdict")}
               | {name: getattr(look.average, name) for name in ("difference", "low", "high", "stderr")}
               for look in looks]  # fmt: skip
    return Report((simple_table("decision", headers, rows),), (verdict,), facts, notes, content, records)
