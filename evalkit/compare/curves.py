"""Checkpoints of one training: accuracy against step.

In: runs whose folders, revisions or checkpoints tell their step. Out: a `Curve` with a band about every point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evalkit.compare.claim import refuse_mixture
from evalkit.compare.graded import Generated, Graded
from evalkit.compare.pairing import pair
from evalkit.compare.sides import Side
from evalkit.compare.steps import step_of
from evalkit.errors import UsageError
from evalkit.runs import Run
from evalkit.stats.estimates import Estimate, average, interval, mean


@dataclass(frozen=True)
class Point:
    """One checkpoint, on one task or on average; a fraction with its 95 % interval."""

    step: int
    accuracy: float
    stderr: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """One training."""

    name: str
    rule: str
    runs: tuple[str, ...]
    """Folders, by step."""
    tasks: dict[str, tuple[Point, ...]]
    documents: dict[str, int]
    """How many documents of each task all checkpoints have."""
    chance: dict[str, float]
    """Accuracy of a uniform guess on each task, and on average; empty where answers are not chosen."""
    average: tuple[Point, ...]


def curve(side: Side, rule: str | None = None) -> Curve:
    """Accuracy of every checkpoint of a training, on the documents that all of them have.

    Raises:
        UsageError: a run tells no step, two tell the same, there is only one, or they are of different models or
            documents, or were not measured alike.
    """
    by_step: dict[int, Run] = {}
    for run in side.runs:
        step = step_of(run)
        if step is None:
            raise UsageError(
                f"run {run.folder.name} tells no step: expected one in its model's folder or revision (step1000, "
                "checkpoint-500) or in its trainer_state.json"
            )
        if step in by_step:
            raise UsageError(f"runs {by_step[step].folder.name} and {run.folder.name} are both of step {step:,}")
        by_step[step] = run
    if len(by_step) < 2:
        raise UsageError("a curve needs two checkpoints or more")
    steps = sorted(by_step)
    first, *later = (by_step[step] for step in steps)
    graded: dict[str, Graded | Generated] = {}
    pairing = pair(Side(side.name, (first,)), Side(side.name, tuple(later)), graded)
    refuse_mixture(side, besides=("limit",))  # only documents that all runs have count
    rules = {run.manifest["rule"] for run in by_step.values()}
    if rule is None and len(rules) > 1:
        raise UsageError(
            f"the runs were made with different rules ({', '.join(sorted(rules))}); name one with --rule: "
            f"all can answer {', '.join(pairing.rules)}"
        )
    chosen = rule or str(rules.pop())
    found: dict[str, list[Estimate]] = {}
    for task in pairing.tasks:
        start, rest = pairing.scores(task, chosen)
        found[task.task] = [mean(scores, task.clusters, task.strata) for scores in (*start, *rest)]
    documents, chance = pairing.graded[0].documents, {}
    if "choices" in documents:
        guess = 1 / documents["choices"].to_numpy(float)
        chance = {task.task: float(guess[task.rows[0]].mean()) for task in pairing.tasks}
        chance["Average"] = sum(chance.values()) / len(chance)
    means = [average([estimates[place] for estimates in found.values()]) for place in range(len(steps))]
    return Curve(
        name=side.name,
        rule=chosen,
        runs=tuple(str(by_step[step].folder) for step in steps),
        tasks={task: _points(steps, estimates) for task, estimates in found.items()},
        documents={task.task: task.n for task in pairing.tasks},
        chance=chance,
        average=_points(steps, means),
    )


def _points(steps: Sequence[int], estimates: Sequence[Estimate]) -> tuple[Point, ...]:
    points = []
    for step, estimate in zip(steps, estimates, strict=True):
        band = interval(estimate)
        points.append(Point(step, estimate.value, estimate.stderr, max(0.0, band.low), min(1.0, band.high)))
    return tuple(points)
