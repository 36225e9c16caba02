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
from evalkit.comparison.differences import (
    UNDECIDED,
    AverageDifference,
    Comparison,
    ContinuousEvidence,
    MarginVerdict,
    RuleVerdict,
    TaskDifference,
    on_margin,
    tally,
    verdict_of,
)
from evalkit.comparison.line import (
    ScoredLine,
    average_difference,
    by_task,
    efficiency,
    length_ratio,
    line_label,
    line_name,
    line_of,
    look_at_average,
)
from evalkit.comparison.naming import find_groups, find_runs
from evalkit.comparison.pairing import PairedTask, Pairing, common_key, own_rules, pair
from evalkit.comparison.sides import Side, autocorrelation_sentence, claim_of, sides_of
from evalkit.errors import UsageError
from evalkit.escape import part_name
from evalkit.inputs import values
from evalkit.paths import RUNS
from evalkit.runs.continuous import lacks_rule, outcome_key
from evalkit.runs.folder import Run
from evalkit.runs.notes import notes_of_runs
from evalkit.stats.noise import autocorrelation
from evalkit.stats.power import ALPHA
from evalkit.stats.sequential import ONCE, Looks
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
    [opened] = find_runs([values.name_or_path("run", run)], values.path("root", root), finished=False)
    return opened


@overload
def compare(
    a: GivenRun,
    b: GivenRun,
    /,
    *,
    rule: str | None = None,
    outcome: str | None = None,
    margin: float | None = None,
    anytime: bool = False,
    watch: int = 1,
    root: str | Path = RUNS,
) -> Comparison: ...


@overload
def compare(
    *runs: GivenRun,
    groups: Mapping[str, Sequence[GivenRun]] | None = None,
    rule: str | None = None,
    outcome: str | None = None,
    margin: float | None = None,
    pair_seeds: bool = False,
    anytime: bool = False,
    watch: int = 1,
    root: str | Path = RUNS,
) -> Comparison | list[Comparison]: ...


def compare(
    *runs: GivenRun,
    groups: Mapping[str, Sequence[GivenRun]] | None = None,
    rule: str | None = None,
    outcome: str | None = None,
    margin: float | None = None,
    pair_seeds: bool = False,
    anytime: bool = False,
    watch: int = 1,
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
        margin: an acceptable loss of B, as a fraction or in the outcome's unit; `Comparison.margin` says whether B is
            not worse by more, or equivalent.
        pair_seeds: whether the n-th runs of all groups have the same seed, that is the same order of data.
        anytime: whether intervals hold at every look at a growing sample (`--sample` of the same seed).
        watch: number of pairs of checkpoints that are looked at, at all of which intervals hold.
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
    given = [(name, _given(members)) for name, members in (groups or {}).items()]
    sides = sides_of(*find_groups(_given(runs), given, values.path("root", root)))
    looks = Looks(anytime, values.whole("watch", watch, 1))
    comparisons = compare_sides(sides, outcome_key(outcome, rule), margin, pair_seeds, looks=looks)
    return comparisons[0] if len(comparisons) == 1 else comparisons


def _given(runs: Sequence[GivenRun]) -> list[str | Run]:
    return [run if isinstance(run, Run) else values.name_or_path("run", run) for run in runs]


def compare_sides(
    sides: Sequence[Side],
    rule: str | None = None,
    margin: float | None = None,
    in_pairs: bool = False,
    in_points: bool = False,
    looks: Looks = ONCE,
) -> list[Comparison]:
    """Compare the first side with each other one; `in_points`: of shares the margin is in percentage points."""
    if len(sides) < 2:
        alone = f"there is nothing to compare {sides[0].name} with: " if sides else ""
        raise UsageError(f"{alone}name two runs or groups, or more (evalkit ls runs lists the runs)")
    baseline, *others = sides
    graded: dict[str, Comparable] = {}
    pairings = [replace(pair(baseline, other, graded, in_pairs), looks=looks) for other in others]
    key, own = rule_of(pairings, rule)
    if margin is not None and in_points and pairings[0].measure(key).is_share:
        margin /= 100
    return decided_together([compare_pairing(pairing, key, own, len(others), margin) for pairing in pairings])


def decided_together(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons with one baseline and their primary verdicts, on the averages: Holm's method over the sides.

    The intervals of the averages miss with a probability of 5 % / sides. They contain the simultaneous intervals that
    belong to Holm's method (Strassburger and Bretz 2008) once they agree with its decisions about zero, so what they
    say about a margin is true of all sides together, too. Dunnett's method would be hardly shorter (2.35 against 2.39
    standard errors for three sides), and does not apply to seeds, whose variances differ.
    """
    absent = [1.0] * (comparisons[0].sides - len(comparisons)) if comparisons else []
    ps = holm([*(1.0 if each.average.p is None else each.average.p for each in comparisons), *absent])
    decided = []
    for compared, p in zip(comparisons, ps, strict=False):
        average, better = compared.average, compared.measure.higher_is_better
        if average.p is not None:
            verdict, low, high = verdict_of(p, average.difference, better), average.low, average.high
            if verdict == UNDECIDED:
                low, high = min(low, 0.0), max(high, 0.0)
            else:
                low, high = (max(low, 0.0), high) if average.difference > 0 else (low, min(high, 0.0))
            average = replace(average, p_holm=p, verdict=verdict, low=low, high=high)
        on = compared.margin
        if on is not None:
            on = replace(on, verdict=on_margin(average, on.margin, 1 if better else -1))
        decided.append(replace(compared, averages=(*compared.averages[:-1], average), margin=on))
    return decided


def rule_of(pairings: Sequence[Pairing], rule: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the one key for all pairs of sides, see `common_key`, and `Comparison.own_rules`."""
    graded = [run for pairing in pairings for run in pairing.graded]
    own = own_rules(graded)
    return common_key(graded, rule), tuple(own) if lacks_rule(rule) and len(own) > 1 else ()


def compare_pairing(
    pairing: Pairing,
    rule: str | None = None,
    own_rules: tuple[str, ...] = (),
    sides: int = 1,
    margin: float | None = None,
) -> Comparison:
    """Compare two sides under one rule, and under every other rule for agreement.

    `rule` is a rule's name, or a continuous outcome (`runs.continuous.outcome_key`); None: that of `common_key`. A
    rule that a run does not support raises `UsageError`. `sides` is the number of sides that are compared with A;
    `decided_together` takes the primary verdict.
    """
    rule = pairing.key(rule)
    measure, letters = pairing.measure(rule), pairing.graded[0].of_letters(rule)
    lines, tested = _lines(pairing, rule)
    tasks, rules = _family(tested, with_power=True), []
    for name in pairing.alternatives(rule):
        of_rule, others = (lines, tested) if name == rule else _lines(pairing, name)
        counts = tally(task.verdict for task in (tasks if name == rule else _family(others, with_power=False)))
        rules.append(RuleVerdict(name, _averages(pairing, of_rule)[-1], *counts))
    claim = claim_of(pairing.a, pairing.b, pairing.in_pairs)
    if (last := pairing.a.each) > 1:
        seeds = max(pairing.a.trainings, pairing.b.trainings)
        worth = autocorrelation_sentence(last, [autocorrelation(pairing.windows(rule), seeds)])
        claim = replace(claim, sentence=f"{claim.sentence} {worth}")
    labels = {task: pairing.label(task) for task in (*pairing.names, *pairing.left_out)}
    for task, layer in product([*labels], measure.layers):
        labels[line_name(task, layer)] = line_label(labels[task], layer)
    averages = _averages(pairing, lines, sides, with_power=True)
    named = ((side.name, run.manifest) for side in (pairing.a, pairing.b) for run in side.runs)
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
        continuous=_continuous(pairing, rule, lines),
        sides=sides,
        looks=pairing.looks,
        length_ratio=length_ratio(look_at_average(lines).level(ALPHA / sides), ALPHA / sides, averages[-1].freedom),
        margin=None if margin is None else margin_verdict(tested, margin),
        remarks=tuple(notes_of_runs(named)),
    )


def margin_verdict(lines: Sequence[ScoredLine], margin: float) -> MarginVerdict:
    """Return which lines are worse by more than the margin, and which are not; the average is still undecided."""
    higher = lines[0].measure.higher_is_better
    if higher is None:
        raise UsageError(f"of {lines[0].measure.name} neither higher nor lower is better, so there is no margin")
    least, shown = -margin if higher else margin, dict[str, bool]()
    ps = holm([1.0 if (p := line.p_against(least)) is None else p for line in lines])
    for line, p in zip(lines, ps, strict=True):
        if p <= ALPHA:
            shown[line.name] = (line.adjusted.value > least) == higher
    worse, not_worse = (tuple(name for name, above in shown.items() if above == which) for which in (False, True))
    return MarginVerdict(margin, UNDECIDED, worse, not_worse)


def p_value(pairing: Pairing, tasks: Sequence[str], rule: str) -> float:
    """Return the uncorrected p value of one task's difference, or of the unweighted mean over several tasks.

    A task that is not in every run, or a rule that a run does not support, raises `UsageError`.
    """
    by_name = {task.task: task for task in pairing.tasks}
    if absent := [task for task in tasks if task not in by_name]:
        sides = f"{pairing.a.name} and {pairing.b.name}"
        raise UsageError(f"{sides} cannot be compared on {absent[0]}: not every run has it")
    lines = by_task(replace(pairing, tasks=tuple(by_name[task] for task in tasks)), rule)
    p = lines[0].p if len(lines) == 1 else average_difference("", lines).p
    return 1.0 if p is None else p


def subject_differences(pairing: Pairing, task: PairedTask, rule: str) -> tuple[TaskDifference, ...]:
    """Return the difference of each subject of a task that has any, named by it, in the order of the documents.

    p values are corrected by Holm's method over the task's subjects; intervals are not. For a measure of several
    layers the score of a document is the mean over them.
    """
    assert task.strata is not None
    names = pairing.graded[0].documents["subtask"].to_numpy()[task.rows[0]]
    lines = []
    for number in range(int(task.strata.max()) + 1):
        of_subject = task.strata == number
        clusters = None if task.clusters is None else task.clusters[of_subject]
        rows, name = tuple(rows[of_subject] for rows in task.rows), str(names[of_subject][0])
        subject = replace(task, task=name, clusters=clusters, strata=None, rows=rows, dropped=0)
        lines.append(line_of(pairing, subject, rule))
    return _family(lines, with_power=False)


def _family(lines: Sequence[ScoredLine], with_power: bool) -> tuple[TaskDifference, ...]:
    """Return the differences of lines that are tested together: their p values are corrected by Holm's method."""
    corrected, level = holm([1.0 if line.p is None else line.p for line in lines]), ALPHA / len(lines)
    return tuple(line.difference(p, level if with_power else None) for line, p in zip(lines, corrected, strict=True))


def _lines(pairing: Pairing, rule: str) -> tuple[list[ScoredLine], list[ScoredLine]]:
    """Return a line for each task, and the lines that are tested: these, or those of the tasks' layers."""
    lines = by_task(pairing, rule)
    layers = enumerate(lines[0].measure.layers)
    return lines, [line_of(pairing, line.paired, rule, layer) for line, layer in product(lines, layers)] or lines


def _averages(
    pairing: Pairing, lines: Sequence[ScoredLine], sides: int = 1, with_power: bool = False
) -> tuple[AverageDifference, ...]:
    """Return the differences of groups of tasks, uncorrected, and of all, whose interval is that for so many sides."""
    groups, sizes = pairing.graded[0].groups, pairing.graded[0].group_sizes
    by_name = {line.paired.task: line for line in lines}
    averaged = [(name, sizes[name], group) for name, group in groups.items()] if len(groups) > 1 else []
    averages = []
    for name, size, group in [*averaged, ("Average", sum(sizes.values()), by_name)]:
        members = [by_name[task] for task in group if task in by_name]
        if len(members) > 1 or group is by_name:
            level, is_primary = (ALPHA / sides, with_power) if group is by_name else (ALPHA, False)
            averages.append(average_difference(part_name(name, len(members), size), members, level, is_primary))
    return tuple(averages)


def _continuous(pairing: Pairing, rule: str, of_rule: Sequence[ScoredLine]) -> ContinuousEvidence | None:
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
    average, kept = (
        average_difference("Average", lines),
        [line for line in of_rule if line.paired.task in pairing.names],
    )
    # The ratio is that of a single look at documents alone
    is_plain = average.spread is None and pairing.looks == ONCE
    ratio = efficiency(kept, lines) if is_plain else None
    _, low, high = ratio or (None, None, None)
    return ContinuousEvidence(outcome, lines[0].measure, average, left_out, low, None if high == math.inf else high)
