"""Comparison of runs, and of two sides.

In: `Run`s or references to them, as on the command line; or a `Pairing`. Out: `Comparison`s: for each task the
difference with its standard error, confidence interval and test, Holm's correction over the tasks, averages, and the
same under every other rule; differences by subject. Scores are fractions, differences are B less A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeAlias, overload

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.differences import Comparison, ContinuousEvidence, Rows, RuleVerdict, TaskDifference, tally
from evalkit.comparison.line import ScoredLine, average_difference, by_task, efficiency, line_label, line_name
from evalkit.comparison.pairing import PairedTask, Pairing, common_key, own_rules, pair
from evalkit.comparison.sides import Side, autocorrelation_sentence, claim_of, sides_of
from evalkit.errors import UsageError
from evalkit.inputs import values
from evalkit.paths import RUNS
from evalkit.runs.finding import find_any_run
from evalkit.runs.folder import Run
from evalkit.runs.score_table import MARGIN, outcome_key
from evalkit.stats.noise import autocorrelation
from evalkit.stats.significance import holm

GivenRun: TypeAlias = Run | str | Path


def load_run(run: str | Path, root: str | Path = RUNS) -> Run:
    """Open a run, finished or not.

    Args:
        run: its folder, its name or id or a prefix of either, or its checkpoint.
        root: folder of run folders, in which names are looked up.

    Raises:
        UsageError: several runs match; lists them.
        UnknownNameError: no run matches.
        RunError: the run is damaged, or the folder is not a run folder.
    """
    return find_any_run(values.name_or_path("run", run), values.path("root", root))


@overload
def compare(
    a: GivenRun, b: GivenRun, /, *, rule: str | None = None, outcome: str | None = None, root: str | Path = RUNS
) -> Comparison: ...


@overload
def compare(
    *runs: GivenRun,
    groups: Mapping[str, Sequence[GivenRun]] | None = None,
    rule: str | None = None,
    outcome: str | None = None,
    root: str | Path = RUNS,
) -> Comparison | list[Comparison]: ...


def compare(
    *runs: GivenRun,
    groups: Mapping[str, Sequence[GivenRun]] | None = None,
    rule: str | None = None,
    outcome: str | None = None,
    root: str | Path = RUNS,
) -> Comparison | list[Comparison]:
    """Compare finished runs on the same documents, as `evalkit compare` does.

    The first run, or without runs the first group, is the baseline A. Each other side is a B that is compared with it.

    Args:
        *runs: runs, each a side of the comparison.
        groups: name → the runs of one side: several seeds, or checkpoints of one model.
        rule: scoring rule; None: the runs' own, or of several the first that all support.
        outcome: "accuracy", "bits_per_byte", "log_loss", "brier" or "margin"; None: accuracy. A margin is that of the
            rule, the others depend on none.
        root: folder of run folders, in which names are looked up.

    Returns:
        Of two sides their comparison; of more a list, for each side but the first, in their order. Differences are B
            less A, of fractions, or in the unit of the outcome.

    Raises:
        EvalkitError: a run is not found or not finished, a side is named twice, or two sides cannot be paired.
    """
    for name, members in (groups or {}).items():
        if isinstance(members, (str, Path, Run)):
            raise UsageError(f"groups: '{name}' is one run; give a list of runs")
    singles = [_finished(run, root) for run in runs]
    named = [(name, [_finished(run, root) for run in members]) for name, members in (groups or {}).items()]
    comparisons = compare_sides(sides_of(singles, named), outcome_key(outcome, rule))
    return comparisons[0] if len(comparisons) == 1 else comparisons


def _finished(given: GivenRun, root: str | Path) -> Run:
    run = given if isinstance(given, Run) else load_run(given, root)
    run.require_finished()
    return run


def compare_sides(sides: Sequence[Side], rule: str | None = None) -> list[Comparison]:
    """Compare the first side with each other one."""
    if len(sides) < 2:
        alone = f"there is nothing to compare {sides[0].name} with: " if sides else ""
        raise UsageError(f"{alone}name two runs or groups, or more (evalkit ls runs lists the runs)")
    baseline, *others = sides
    graded: dict[str, Comparable] = {}
    pairings = [pair(baseline, other, graded) for other in others]
    key, own = rule_of(pairings, rule)
    return [compare_pairing(pairing, key, own) for pairing in pairings]


def rule_of(pairings: Sequence[Pairing], rule: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the one key for all pairs of sides, see `common_key`, and `Comparison.own_rules`."""
    graded = [run for pairing in pairings for run in pairing.graded]
    own = own_rules(graded)
    return common_key(graded, rule), tuple(own) if rule in (None, MARGIN) and len(own) > 1 else ()


def compare_pairing(pairing: Pairing, rule: str | None = None, own_rules: tuple[str, ...] = ()) -> Comparison:
    """Compare two sides under one rule, and under every other rule for agreement.

    `rule` is a rule's name, or a continuous outcome (`runs.score_table.outcome_key`); None: that of `common_key`. A
    rule that a run does not support raises `UsageError`.
    """
    rule = pairing.key(rule)
    measure, letters = pairing.measure(rule), pairing.graded[0].of_letters(rule)
    tasks, averages = _differences(pairing, rule, with_power=True)
    rules = []
    for name in pairing.alternatives(rule):
        of_rule, means = (tasks, averages) if name == rule else _differences(pairing, name, with_power=False)
        rules.append(RuleVerdict(name, means[-1], *tally(task.verdict for task in of_rule)))
    claim = claim_of(pairing.a, pairing.b)
    if (last := pairing.a.each) > 1:
        seeds = max(pairing.a.trainings, pairing.b.trainings)
        worth = autocorrelation_sentence(last, [autocorrelation(pairing.windows(rule), seeds)])
        claim = replace(claim, sentence=f"{claim.sentence} {worth}")
    labels = {task: pairing.label(task) for task in (*pairing.names, *pairing.left_out)}
    for task, layer in product([*labels], measure.layers):
        labels[line_name(task, layer)] = line_label(labels[task], layer)
    return Comparison(
        a=pairing.a.name,
        b=pairing.b.name,
        runs_a=tuple(str(run.folder) for run in pairing.a.runs),
        runs_b=tuple(str(run.folder) for run in pairing.b.runs),
        rule=rule,
        own_rules=own_rules,
        measure=measure,
        tasks=tasks,
        averages=averages,
        rules=tuple(rules),
        claim=claim,
        left_out=pairing.left_out,
        labels=labels,
        letters=tuple(task for task in pairing.names if task in letters),
        continuous=_continuous(pairing, rule),
    )


def p_value(pairing: Pairing, tasks: Sequence[str], rule: str) -> float:
    """Return the uncorrected p value of one task's difference, or of the unweighted mean over several tasks.

    A task that is not in every run, or a rule that a run does not support, raises `UsageError`.
    """
    by_name = {task.task: task for task in pairing.tasks}
    if absent := [task for task in tasks if task not in by_name]:
        sides = f"{pairing.a.name} and {pairing.b.name}"
        raise UsageError(f"{sides} cannot be compared on {absent[0]}: not every run has it")
    measure = pairing.measure(rule)
    lines = [ScoredLine(by_name[task], *pairing.scores(by_name[task], rule), measure) for task in tasks]
    p = lines[0].p if len(lines) == 1 else average_difference("", lines).p
    return 1.0 if p is None else p


def subject_differences(pairing: Pairing, task: PairedTask, rule: str) -> tuple[TaskDifference, ...]:
    """Return the difference of each subject of a task that has any, named by it, in the order of the documents.

    p values are corrected by Holm's method over the task's subjects; intervals are not. For a measure of several
    layers the score of a document is the mean over them.
    """
    assert task.strata is not None
    names = pairing.graded[0].documents["subtask"].to_numpy()[task.rows[0]]
    measure, lines = pairing.measure(rule), []
    for number in range(int(task.strata.max()) + 1):
        of_subject = task.strata == number
        clusters = None if task.clusters is None else task.clusters[of_subject]
        rows, name = tuple(rows[of_subject] for rows in task.rows), str(names[of_subject][0])
        subject = replace(task, task=name, clusters=clusters, strata=None, rows=rows, dropped=0)
        lines.append(ScoredLine(subject, *pairing.scores(subject, rule), measure))
    return _family(lines, with_power=False)


def _family(lines: Sequence[ScoredLine], with_power: bool) -> tuple[TaskDifference, ...]:
    """Return the differences of lines that are tested together: their p values are corrected by Holm's method."""
    corrected = holm([1.0 if line.p is None else line.p for line in lines])
    return tuple(line.difference(p, with_power) for line, p in zip(lines, corrected, strict=True))


def _differences(pairing: Pairing, rule: str, with_power: bool) -> Rows:
    """Return the differences of tasks, or of their layers, and those of groups of tasks and of all, uncorrected."""
    lines = by_task(pairing, rule)
    layered = []
    for line, (number, layer) in product(lines, enumerate(lines[0].measure.layers)):
        layered.append(ScoredLine(line.paired, *pairing.scores(line.paired, rule, number), line.measure, layer))
    groups, sizes = pairing.graded[0].groups, pairing.graded[0].group_sizes
    by_name = {line.paired.task: line for line in lines}
    averaged = [(name, sizes[name], group) for name, group in groups.items()] if len(groups) > 1 else []
    averages = []
    for name, size, group in [*averaged, ("Average", sum(sizes.values()), by_name)]:
        members = [by_name[task] for task in group if task in by_name]
        if len(members) > 1 or group is by_name:
            part = "" if len(members) == size else f" ({len(members)} of {size})"
            averages.append(average_difference(name + part, members))
    return _family(layered or lines, with_power), tuple(averages)


def _continuous(pairing: Pairing, rule: str) -> ContinuousEvidence | None:
    """Return what the continuous outcome of the runs shows on the same documents; None if a run has none."""
    outcome, *others = {run.beside(rule) for run in pairing.graded}
    if outcome is None or others:
        return None
    letters = pairing.graded[0].of_letters(outcome)
    left_out = tuple(task for task in pairing.names if task in letters)
    pairing = replace(pairing, tasks=tuple(paired for paired in pairing.tasks if paired.task not in letters))
    if not pairing.tasks:
        return None
    lines = by_task(pairing, outcome)
    ratio = efficiency(by_task(pairing, rule), lines) or (None, None, None)
    times = (None if number is not None and math.isinf(number) else number for number in ratio)
    return ContinuousEvidence(outcome, lines[0].measure, average_difference("Average", lines), left_out, *times)
