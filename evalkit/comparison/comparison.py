"""Comparison of two sides.

In: a `Pairing`. Out: a `Comparison`: for each task the difference with its standard error, confidence interval and
test, Holm's correction over the tasks, averages, and the same under every other rule; differences by subject; agreement
by document. Scores are fractions, differences are B less A.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from evalkit.benchmarks.outcomes import Comparable, Measure
from evalkit.comparison.differences import (
    BETTER,
    DOWN,
    HIGHER,
    LOWER,
    UNDECIDED,
    UP,
    WORSE,
    AverageDifference,
    Comparison,
    ContinuousEvidence,
    RuleVerdict,
    TaskDifference,
)
from evalkit.comparison.line import ScoredLine, by_layer, by_task, efficiency, line_label, line_name, nan_to_none
from evalkit.comparison.pairing import PairedTask, Pairing, pair
from evalkit.comparison.sides import Side, claim_of
from evalkit.errors import UsageError
from evalkit.runs.continuous import MARGIN
from evalkit.stats.adjusted import adjusted_average, at_least_task_intervals
from evalkit.stats.estimates import Estimate, Floats, average, interval
from evalkit.stats.power import ALPHA
from evalkit.stats.significance import Spread, between, crossed, crossed_p_value, holm, t_test


def compare(pairing: Pairing, rule: str | None = None) -> Comparison:
    """Compare two sides under one rule, and under every other rule for agreement.

    `rule` is a rule's name, or a continuous outcome (`runs.outcomes.outcome_key`); None: the rule of all runs.

    Raises:
        UsageError: no rule is given and the runs have different ones, or a run does not support it.
    """
    rule = rule or _own_rule(pairing)
    if rule == MARGIN:
        rule = f"{MARGIN}:{_own_rule(pairing)}"
    measure = pairing.measure(rule)
    letters = pairing.graded[0].of_letters(rule)
    tasks, averages = _differences(pairing, rule, True)
    others = [
        (name, *((tasks, averages) if name == rule else _differences(pairing, name, False)))
        for name in pairing.alternatives(rule)
    ]
    labels = {task: pairing.label(task) for task in (*(one.task for one in pairing.tasks), *pairing.left_out)}
    for task, layer in product([*labels], measure.layers):
        labels[line_name(task, layer)] = line_label(labels[task], layer)
    return Comparison(
        a=pairing.a.name,
        b=pairing.b.name,
        runs_a=tuple(str(run.folder) for run in pairing.a.runs),
        runs_b=tuple(str(run.folder) for run in pairing.b.runs),
        rule=rule,
        measure=measure,
        tasks=tasks,
        averages=averages,
        rules=tuple(
            RuleVerdict(name, means[-1], *(sum(task.verdict in v for task in found) for v in (UP, DOWN)))
            for name, found, means in others
        ),
        claim=claim_of(pairing.a, pairing.b),
        left_out=pairing.left_out,
        labels=labels,
        letters=tuple(one.task for one in pairing.tasks if one.task in letters),
        continuous=_continuous(pairing, rule),
    )


def compare_sides(sides: Sequence[Side], rule: str | None = None) -> list[Comparison]:
    """Compare the first side with each other one.

    Raises:
        EvalkitError: two sides cannot be paired, or as `compare`.
    """
    baseline, *others = sides
    graded: dict[str, Comparable] = {}
    return [compare(pair(baseline, other, graded), rule) for other in others]


def p_value(pairing: Pairing, tasks: Sequence[str], rule: str) -> float:
    """Return the uncorrected p value of one task's difference, or of the unweighted mean over several tasks.

    Raises:
        UsageError: a task is not in every run, or a run does not support the rule.
    """
    by_name = {task.task: task for task in pairing.tasks}
    if absent := [task for task in tasks if task not in by_name]:
        raise UsageError(
            f"{pairing.a.name} and {pairing.b.name} cannot be compared on {absent[0]}: not every run has it"
        )
    measure = pairing.measure(rule)
    found = [ScoredLine(by_name[task], *pairing.scores(by_name[task], rule), measure) for task in tasks]
    p = found[0].p if len(found) == 1 else _average("", found, measure).p
    return 1.0 if p is None else p


def _verdict(p: float | None, difference: float, higher_is_better: bool | None = True) -> str:
    """Return "better" or "worse" if p is at most 5 % ("higher" or "lower" if neither is better), else "undecided"."""
    if p is None or not p <= ALPHA:
        return UNDECIDED
    if higher_is_better is None:
        return HIGHER if difference > 0 else LOWER
    return BETTER if (difference > 0) == higher_is_better else WORSE


def _own_rule(pairing: Pairing) -> str:
    rules = list(dict.fromkeys(one.run.manifest["rule"] for one in pairing.graded))
    if len(rules) > 1:
        common = ", ".join(pairing.rules) or "no rule"
        raise UsageError(
            f"the runs have different rules ({', '.join(rules)}); name one with --rule: all runs support {common}"
        )
    return str(rules[0])


def _continuous(pairing: Pairing, rule: str) -> ContinuousEvidence | None:
    """Return what the continuous outcome of the runs shows on the same documents; None if a run has none."""
    outcomes = {one.beside(rule) for one in pairing.graded}
    outcome = outcomes.pop()
    if outcome is None or outcomes:
        return None
    measure, letters = pairing.measure(outcome), pairing.graded[0].of_letters(outcome)
    accuracy, lines = (
        [one for one in by_task(pairing, key) if one.paired.task not in letters] for key in (rule, outcome)
    )
    if not lines:
        return None
    found = efficiency(accuracy, lines)
    times, low, high = (None, None, None) if found is None else found
    return ContinuousEvidence(
        outcome,
        measure,
        _average("Average", lines, measure),
        tuple(one.task for one in pairing.tasks if one.task in letters),
        *(None if one is not None and math.isinf(one) else one for one in (times, low, high)),
    )


def _differences(
    pairing: Pairing, rule: str, with_power: bool
) -> tuple[tuple[TaskDifference, ...], tuple[AverageDifference, ...]]:
    measure, measured = pairing.measure(rule), by_task(pairing, rule)
    lines = by_layer(pairing, rule) if measure.layers else measured
    ps = holm([1.0 if one.p is None else one.p for one in lines])
    tasks = tuple(_task_difference(one, p, measure, with_power) for one, p in zip(lines, ps, strict=True))
    by_name = {one.paired.task: one for one in measured}
    groups, sizes = pairing.graded[0].groups, pairing.graded[0].group_sizes
    averages = []
    if len(groups) > 1:
        for name, members in groups.items():
            present = [by_name[task] for task in members if task in by_name]
            if len(present) > 1:
                averages.append(_average(_title(name, len(present), sizes[name]), present, measure))
    averages.append(_average(_title("Average", len(measured), sum(sizes.values())), measured, measure))
    return tasks, tuple(averages)


def _title(name: str, count: int, size: int) -> str:
    return name if count == size else f"{name} ({count} of {size})"


def _task_difference(one: ScoredLine, p_holm: float, measure: Measure, with_power: bool) -> TaskDifference:
    """Return the record of a line; the smallest detectable difference, which is slow, only if `with_power`."""
    paired = one.paired
    return TaskDifference(
        **_common(one.name, one.a, one.b, one.estimate, one.adjusted, one.p, measure),
        spread=one.spread,
        n=paired.n,
        sources=paired.sources,
        strata=1 if paired.strata is None else len(np.unique(paired.strata)),
        dropped=paired.dropped,
        official=paired.official,
        won=one.lost if measure.higher_is_better is False else one.won,
        lost=one.won if measure.higher_is_better is False else one.lost,
        same=paired.n - one.won - one.lost,
        test=one.test,
        p_holm=None if one.p is None else p_holm,
        verdict=_verdict(None if one.p is None else p_holm, one.estimate.value, measure.higher_is_better),
        detectable=one.detectable() if with_power else None,
        layer=one.layer,
    )


def _average(name: str, members: Sequence[ScoredLine], measure: Measure) -> AverageDifference:
    """Compare the mean over tasks; a seed answers all tasks, so its variance is that between the runs' averages."""
    a, b = (np.stack([getattr(one, side).mean(axis=1) for one in members]).mean(axis=0) for side in "ab")
    estimate = average([one.documents for one in members])
    of_tasks = [one.of_documents for one in members]
    if measure.bounds:
        sources, sizes = [one.paired.sources for one in members], [one.size for one in members]
        adjusted = adjusted_average(estimate, of_tasks, sources, sizes)
    else:
        adjusted = at_least_task_intervals(estimate, of_tasks)
    parts = None
    if members[0].several:
        shared = sum(one.spread.shared for one in members if one.spread is not None) / len(members) ** 2
        parts = Spread(between(a), between(b), estimate.variance, shared, len(a), len(b))
        p = nan_to_none(crossed_p_value(adjusted, parts))
        estimate, adjusted = crossed(estimate, parts), crossed(adjusted, parts)
    else:
        p = members[0].p if len(members) == 1 else nan_to_none(t_test(adjusted))
    if abs(estimate.value) <= sum(one.rounding for one in members) / len(members) and measure.resolution:
        p = 1.0
    common = _common(name, a[:, None], b[:, None], estimate, adjusted, p, measure)
    return AverageDifference(**common, spread=parts, verdict=_verdict(p, estimate.value, measure.higher_is_better))


def _common(
    name: str, a: Floats, b: Floats, estimate: Estimate, adjusted: Estimate, p: float | None, measure: Measure
) -> dict[str, Any]:
    """Return the fields common to tasks and averages; the adjusted interval is clipped to possible differences.

    An exact test may be not significant where the t interval excludes zero. The interval is then extended to zero, so
    that the two agree.
    """
    bounds, span = interval(adjusted), measure.span
    low, high = (-span, span) if math.isnan(bounds.low) else (max(-span, bounds.low), min(span, bounds.high))
    if p is None or p > ALPHA:
        low, high = min(low, 0.0), max(high, 0.0)
    return {
        "name": name,
        "score_a": float(a.mean()),
        "score_b": float(b.mean()),
        "difference": estimate.value,
        "low": low,
        "high": high,
        "stderr": nan_to_none(estimate.stderr),
        "freedom": nan_to_none(adjusted.freedom),
        "p": p,
    }


def subject_differences(pairing: Pairing, task: PairedTask, rule: str) -> tuple[TaskDifference, ...]:
    """Return the difference of each subject of a task, named by the subject, in the order of the documents.

    p values are corrected by Holm's method over the task's subjects; intervals are not. For a measure of several
    layers the score of a document is the mean over them.

    Raises:
        UsageError: a run does not support the rule.
    """
    measure = pairing.measure(rule)
    lines = [ScoredLine(one, *pairing.scores(one, rule), measure) for one in _subjects(pairing, task)]
    corrected = holm([1.0 if one.p is None else one.p for one in lines])
    return tuple(_task_difference(one, p, measure, with_power=False) for one, p in zip(lines, corrected, strict=True))


def _subjects(pairing: Pairing, task: PairedTask) -> Iterator[PairedTask]:
    """Yield the documents of each subject as a task of its own."""
    assert task.strata is not None, f"{task.task} has no subjects"
    names = pairing.graded[0].documents["subtask"].to_numpy()[task.rows[0]]
    for number in range(int(task.strata.max()) + 1):
        places = np.flatnonzero(task.strata == number)
        clusters = None if task.clusters is None else task.clusters[places]
        rows = tuple(rows[places] for rows in task.rows)
        yield replace(task, task=str(names[places[0]]), clusters=clusters, strata=None, rows=rows, dropped=0)


@dataclass(frozen=True)
class Agreement:
    """Documents of a task by the scores of two runs, A and B."""

    task: str
    n: int
    a_higher: int
    """Scores that are right or wrong: A is right and B is wrong."""
    b_higher: int
    """Scores that are right or wrong: A is wrong and B is right."""
    both_right: int | None
    """None for scores between right and wrong."""
    both_wrong: int | None

    @property
    def equal(self) -> int:
        """Number of documents with the same score."""
        return self.n - self.a_higher - self.b_higher


def agreements(pairing: Pairing, rule: str) -> tuple[Agreement, ...]:
    """Return the agreement of two runs on each task.

    For a measure of several layers the score of a document is the mean over them.

    Raises:
        UsageError: a side has several runs, or a run does not support the rule.
    """
    if len(pairing.graded) > 2:
        raise UsageError("agreement by document is of two runs; a side has several")
    graded, rows = pairing.measure(rule).graded, []
    for task in pairing.tasks:
        [a], [b] = pairing.scores(task, rule)
        both, neither = (None if graded else int(((a == right) & (b == right)).sum()) for right in (1, 0))
        rows.append(Agreement(task.task, task.n, int((a > b).sum()), int((b > a).sum()), both, neither))
    return tuple(rows)
