"""Noise of a benchmark's scores: between checkpoints, between seeds, over documents, and what it does to decisions.

In: trainings of several models, whose checkpoints were evaluated on the same documents. Out: `NoiseLine`s, one for
each task and one for their average. `noise_report.py` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import isnan, nan
from typing import NamedTuple, TypeAlias

import numpy as np

from evalkit.benchmarks.differences import differences
from evalkit.comparison.pairing import PairedTask, pair
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.continuous import keys_beside
from evalkit.runs.folder import Run
from evalkit.stats import noise as measuring
from evalkit.stats.estimates import Codes, Estimate, Floats, average, mean
from evalkit.stats.noise import UNKNOWN, Bounded

AVERAGE = "Average"
LEAST_SIGNAL = 1.96 * 2**0.5
"""Standard deviations by which two checkpoints of equal models differ in 5 % of pairs."""
CARRIED, NOT_CARRIED, OPEN = "yes", "no", "not shown"

Trainings: TypeAlias = Mapping[str, Mapping[int, Mapping[int, Run]]]
"""Model → number of its seed → step → run."""


@dataclass(frozen=True)
class NoiseLine:
    """Noise of one outcome on one task, or on average. Deviations are in the unit of the scores."""

    outcome: str
    task: str
    n: int
    """Documents."""
    score: float
    """Mean over models of their last checkpoints."""
    checkpoints: Bounded
    """Standard deviation between the last checkpoints of a training, without what documents add to it."""
    seeds: Bounded
    """The same between seeds of a model: what the last checkpoints of a training have in common."""
    documents: Bounded
    """Standard error of a score over other documents."""
    paired: Bounded
    """Its part that models on the same documents do not share: the error of their difference, over √2."""
    signal_to_noise: Bounded
    """As published; unknown where scores may be zero or negative."""
    signal_to_seeds: Bounded
    """Largest difference between models over the standard deviation, between seeds and checkpoints, of a difference of
    two models of one seed at one step, over √2."""
    monotonicity: Bounded
    """Spearman's correlation of score and step, positive where scores improve: mean, least and greatest training."""
    decided: Bounded
    """Share of pairs of models decided as at the last step, mean over the last checkpoints before it."""
    larger: Bounded
    """Share of pairs of models decided as by their larger counterparts, by means over the last checkpoints."""
    autocorrelation: Bounded
    """Of neighbouring checkpoints."""
    by_step: tuple[float, ...]
    """Share of pairs of models decided as at the last step, by step."""

    @property
    def carries(self) -> str:
        """Whether the largest difference is shown to exceed what noise alone yields: yes, no, or not shown."""
        signal = self.signal_to_noise if isnan(self.signal_to_seeds.value) else self.signal_to_seeds
        return CARRIED if signal.low > LEAST_SIGNAL else NOT_CARRIED if signal.high < LEAST_SIGNAL else OPEN


class TaskScores(NamedTuple):
    """Scores of a task, reduced over its documents; or the mean over tasks."""

    n: int
    scores: Floats
    """[models, seeds, steps]."""
    larger: Floats
    """[models] of the larger ones."""
    within: float
    """What documents add to the variance between checkpoints of a training."""
    between: float
    """What documents add to the variance between seeds."""
    documents: Estimate
    paired: Estimate
    """Half of the mean variance of a difference between two models."""
    pairs: Floats
    """[models, models] variances of these differences."""


def reduced(
    scores: Floats, last: int, clusters: Codes | None = None, strata: Codes | None = None, larger: Floats | None = None
) -> TaskScores:
    """Reduce [models, seeds, steps, n] scores over documents, which may share sources and have strata.

    `last` is the number of the last checkpoints that count, `larger` are [models, n] scores of larger models.
    """

    def variance(rows: Floats) -> float:
        """Return what documents add to the variance between rows, [rows, n]."""
        return sum(mean(row, clusters, strata).variance for row in rows - rows.mean(axis=0)) / max(len(rows) - 1, 1)

    windows = scores[:, :, -last:]
    means, models = windows.mean(axis=2), windows.mean(axis=(1, 2))
    within = float(np.mean([variance(training) for model in windows for training in model]))
    between = float(np.mean(list(map(variance, means))))
    alone = [measuring.document_error(model, clusters, strata) for model in models]
    pairs, errors = np.zeros((len(models),) * 2), list[Estimate]()
    for a, b in combinations(range(len(models)), 2):
        errors.append(measuring.document_error(models[b] - models[a], clusters, strata))
        pairs[a, b] = pairs[b, a] = errors[-1].variance
    documents, paired = (
        Estimate(0.0, float(np.mean([each.variance for each in of])) / share, min(each.freedom for each in of))
        for of, share in ((alone, 1), (errors, 2))
    )
    of_larger = models[:0, 0] if larger is None else larger.mean(axis=1)
    return TaskScores(scores.shape[3], scores.mean(axis=3), of_larger, within, between, documents, paired, pairs)


def mean_of_tasks(tasks: Sequence[TaskScores]) -> TaskScores:
    """Return the unweighted mean over tasks, whose documents are independent."""

    def of(name: str, power: int) -> Floats:
        total: Floats = np.sum([getattr(task, name) for task in tasks], axis=0) / len(tasks) ** power
        return total

    documents, paired = (average([getattr(task, name) for task in tasks]) for name in ("documents", "paired"))
    parts = float(of("within", 2)), float(of("between", 2)), documents, paired, of("pairs", 2)
    return TaskScores(int(of("n", 0)), of("scores", 1), of("larger", 1), *parts)


def noise_line(
    outcome: str, task: str, of: TaskScores, last: int, steps: Sequence[int], is_lower_better: bool = False,
    small: Sequence[int] = (),
) -> NoiseLine:  # fmt: skip
    """Return the noise of one outcome; `small` are the models, by number, of which there are larger ones."""
    windows, trainings = of.scores[:, :, -last:], of.scores.reshape(-1, len(steps))
    models, means = windows.mean(axis=(1, 2)), windows.mean(axis=2)
    checkpoints = measuring.window_variance(windows).plus(-of.within)
    seeds = measuring.seed_variance(means).plus(-of.between).less(checkpoints.times(1 / last))
    # What models of a seed share at a step does not matter to their difference
    apart = (windows - windows.mean(axis=0)) * (len(models) / (len(models) - 1)) ** 0.5
    noise = measuring.seed_variance(apart.mean(axis=2)).less(measuring.window_variance(apart).times(1 / last - 1))
    largest = measuring.largest_difference(models, of.pairs, of.paired.freedom)
    signal_to_noise = UNKNOWN
    if (windows > 0).all():
        relative = measuring.window_variance(windows / means[:, :, None]).root()
        signal_to_noise = largest.times(1 / float(models.mean())).over(relative)
    sign = -1 if is_lower_better else 1
    ranks = [sign * measuring.rank_correlation(np.array(steps, float), training) for training in trainings]
    ranks = [rank for rank in ranks if not isnan(rank)] or [nan]
    by_step = [measuring.decided_alike(step, of.scores[:, :, -1].mean(axis=1)) for step in of.scores.mean(axis=1).T]
    alike = measuring.decided_alike(models[list(small)], of.larger) if small else 0.0
    return NoiseLine(
        outcome=outcome,
        task=task,
        n=of.n,
        score=float(models.mean()),
        checkpoints=checkpoints.root(),
        seeds=seeds.root(),
        documents=measuring.variance_interval(of.documents.variance, of.documents.freedom).root(),
        paired=measuring.variance_interval(of.paired.variance, of.paired.freedom).root(),
        signal_to_noise=signal_to_noise,
        signal_to_seeds=largest.over(noise.root()),
        monotonicity=Bounded(float(np.mean(ranks)), min(ranks), max(ranks)),
        decided=measuring.decision_accuracy(float(np.mean(by_step[-last:-1])), len(models)),
        larger=measuring.decision_accuracy(alike, len(small)) if small else UNKNOWN,
        autocorrelation=measuring.autocorrelation(windows.reshape(-1, last), windows.shape[1]),
        by_step=tuple(by_step),
    )


class NoiseStudy:
    """Trainings of models, and of the same models at a larger size, paired by document.

    `left_out` is the number of runs of seeds and steps that not every model has. `larger`: model → its name at the
    larger size.

    Raises:
        UsageError: fewer than two models, no common seed, fewer than `last` common steps, an unknown model, or runs
            that are not measured alike.
    """

    def __init__(self, trainings: Trainings, last: int, larger: Mapping[str, str]) -> None:
        if unknown := [name for name in chain(*larger.items()) if name not in trainings]:
            raise UsageError(f"--larger: '{unknown[0]}' is none of the models {', '.join(trainings)}")
        self.models = [name for name in trainings if name not in larger.values()]
        if min(len(self.models), len(larger or self.models)) < 2:
            raise UsageError("noise is weighed against differences between models; name two or more of one size")
        self.last, self.small = last, [self.models.index(name) for name in larger]
        self.seeds, self.steps, runs = _common(trainings, self.models, last)
        self._larger = _common(trainings, [*larger.values()], last) if larger else None
        runs = runs + (self._larger[2] if self._larger else [])
        self.left_out = sum(len(steps) for seeds in trainings.values() for steps in seeds.values()) - len(runs)
        for run in runs[1:]:
            if refused := [mine.name for mine, _ in differences(runs[0], run) if mine.refused and mine.name != "rule"]:
                raise UsageError(f"{runs[0].folder.name} and {run.folder.name} differ in {', '.join(refused)}")
        self.pairing = pair(Side("first", tuple(runs[:1])), Side("others", tuple(runs[1:])), {})

    def label(self, task: str) -> str:
        return task if task == AVERAGE else self.pairing.label(task).full

    def keys(self, rule: str | None) -> list[str]:
        """Return the key of an outcome; or of a rule, by default the runs' own, and of the outcomes beside it."""
        key = self.pairing.key(rule)
        return [key, *(keys_beside(key) if self.pairing.graded[0].beside(key) else ())]

    def lines(self, key: str) -> list[NoiseLine]:
        """Return the noise under a rule or an outcome, without tasks whose answers are letters if it measures these."""
        letters, is_lower = self.pairing.graded[0].of_letters(key), self.pairing.measure(key).higher_is_better is False
        tasks = {task.task: self._reduced(task, key) for task in self.pairing.tasks if task.task not in letters}
        whole = {AVERAGE: mean_of_tasks([*tasks.values()])} if len(tasks) > 1 else {}
        return [noise_line(key, task, scores, self.last, self.steps, is_lower, self.small)
                for task, scores in (tasks | whole).items()]  # fmt: skip

    def _reduced(self, task: PairedTask, key: str) -> TaskScores:
        scores = np.concatenate(self.pairing.scores(task, key))
        shape, larger = (len(self.models), len(self.seeds), len(self.steps)), None
        count = int(np.prod(shape))
        if self._larger:
            seeds, steps, _ = self._larger
            larger = scores[count:].reshape(-1, len(seeds), len(steps), task.n)[:, :, -self.last :].mean(axis=(1, 2))
        return reduced(scores[:count].reshape(*shape, task.n), self.last, task.clusters, task.strata, larger)


def _common(trainings: Trainings, models: Sequence[str], last: int) -> tuple[list[int], list[int], list[Run]]:
    """Return the seeds and steps that all models have, and the runs of each model, seed by seed."""
    seeds = sorted(set.intersection(*(set(trainings[model]) for model in models)))
    steps = [set(trainings[model][seed]) for model, seed in product(models, seeds)]
    common = sorted(set.intersection(*steps)) if steps else []
    if len(common) < last:
        counts = f"{len(seeds)} seeds and {len(common)} finished steps"
        raise UsageError(f"{', '.join(models)} have {counts} in common; --last {last} needs a seed and {last} steps")
    return seeds, common, [trainings[model][seed][step] for model, seed, step in product(models, seeds, common)]
