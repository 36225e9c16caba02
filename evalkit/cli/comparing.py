"""`evalkit compare` and `plan`: differences between finished runs, and what a difference needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from evalkit.cli.parameters import command, exclude, option, require, typed_option
from evalkit.cli.running import (
    BENCHMARK,
    GROUPS,
    OUTCOME,
    PLOT,
    RUNS_GIVEN,
    STUDY,
    STUDY_IN,
    Printer,
    Source,
    named_run,
)
from evalkit.display import doing
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.comparison.curves import Curve
    from evalkit.comparison.sides import Side

PAIR_SEEDS = option(
    False, "The n-th runs of all sides have one seed, the same data in the same order.", "as the study declares"
)


@command()
def compare(
    *,
    runs: tuple[str, ...] = RUNS_GIVEN,
    groups: tuple[str, ...] = GROUPS,
    study: Path | None = STUDY,
    benchmark: str | None = BENCHMARK,
    rule: str | None = option(None, "How the answer is chosen (evalkit ls rules); of attention a measure, as rank@-1.",
                              "the runs' own"),
    outcome: str | None = OUTCOME,
    last: int | None = option(None, "Means over the last N checkpoints of each training; a group is one training.",
                              metavar="N", least=2, shows_least=True),
    curve: bool = option(False, "The runs are checkpoints of one training (of one each group): the outcome by step."),
    printer: Printer,
    plot: Path | None = PLOT,
    fail_if_worse: bool = option(False, "Exit with 3 where a later side is worse, with 4 where it is undecided."),
    margin: float | None = typed_option(None, "Acceptable loss, in points or the outcome's unit: is B not worse by "
                                        "that, or equivalent?"),
    pair_seeds: bool = PAIR_SEEDS,
    anytime: bool = option(False, "Intervals that hold at every look at a sample that grows."),
    watch: int = option(1, "Intervals that hold at N pairs of checkpoints, at all of which you look.", metavar="N",
                        least=1, shows_least=True),
    root: Path | None = STUDY_IN,
) -> int:  # fmt: skip
    """Compare runs on the same documents: paired differences, intervals, tests, and the smallest detectable difference.

    RUNS are run folders, or ids, names or checkpoints of runs in --in (evalkit ls runs); of several runs of a
    checkpoint, those that are measured alike. The first is the baseline
    A; each other one is compared with it. The primary verdict is on the average, corrected over the sides; all else is
    secondary. With --study they are names of its checkpoints, NAME or NAME@STEP, whose seeds are the runs of a side;
    without any, all of them.

    \b
    evalkit compare RUN_A RUN_B
    evalkit compare RUN_A RUN_B RUN_C --rule acc_norm --plot forest.pdf
    evalkit compare RUN_A RUN_B --outcome bits_per_byte                finer than right or wrong
    evalkit compare --group old=RUN,RUN,RUN --group new=RUN,RUN,RUN     several seeds: the claim is about architectures
    evalkit compare RUN_A RUN_B --fail-if-worse --margin 1             in continuous integration
    evalkit compare RUN_A RUN_B --anytime                              with --sample 100, then 200, …, until it decides
    evalkit compare step1000-a step1000-b --watch 20                   while both train, at 20 steps
    evalkit compare --curve RUN RUN RUN --plot curve.png               checkpoints of one training
    evalkit compare --study study.yaml intg vanilla                    names of a study, with all their seeds
    evalkit compare --study study.yaml --curve intg                    its steps, a curve for each seed
    evalkit compare --study study.yaml intg vanilla --last 5           means over their last 5 checkpoints
    """
    from evalkit.comparison.comparison import compare_sides
    from evalkit.comparison.comparison_report import comparison_report
    from evalkit.comparison.curves import curve_report
    from evalkit.comparison.differences import exit_code
    from evalkit.runs.continuous import outcome_key
    from evalkit.stats.sequential import Looks

    of_two: dict[str, object] = {"fail_if_worse": fail_if_worse, "margin": margin, "pair_seeds": pair_seeds or None}
    of_two |= {"last": last, "anytime": anytime or None, "watch": watch if watch > 1 else None}
    for name, value in of_two.items():
        exclude(curve=curve, **{name: value})
    if margin is not None and not (isfinite(margin) and margin >= 0):
        raise UsageError(f"--margin {margin}: expected a finite number, 0 or more")
    source, key, notes = Source(study, benchmark, groups, root), outcome_key(outcome, rule), list[str]()
    with doing("reading and comparing runs"):
        if not curve:
            sides, key, notes = _sides(source, runs, key, last)
            in_pairs, looks = pair_seeds or source.pairs_seeds, Looks(anytime, watch)
            comparisons = compare_sides(sides, key, margin, in_pairs, in_points=True, looks=looks)
            if fail_if_worse and (own_rules := comparisons[0].own_rules):
                raise UsageError(f"the runs have different rules ({', '.join(own_rules)}); give --rule")
            shown = comparison_report(comparisons)
        else:
            curves, notes = _curves(source, runs, key)
            shown = curve_report(curves)
    printer(shown.with_notes(tuple(notes)))
    if plot:
        from evalkit.comparison import plots

        if curve:
            plots.curves(curves, plot)
        else:
            plots.forest(comparisons, plot)
    return exit_code(comparisons) if fail_if_worse else 0


def _curves(source: Source, runs: Sequence[str], key: str | None) -> tuple[list[Curve], list[str]]:
    """Return the curves of the trainings that a command names, and notes."""
    from evalkit.comparison.curves import curve
    from evalkit.comparison.sides import trainings_of
    from evalkit.runs.continuous import with_default_rule

    if not (results := source.results):
        return [curve(side, key) for side in trainings_of(*source.named(runs))], []
    from evalkit.studies.results import study_trainings

    measured = results.study.benchmark(source.benchmark)
    trainings, key = study_trainings(results, runs, measured), with_default_rule(key, measured.rule)
    curves = [curve(training.side, key, training.steps, training.model) for training in trainings]
    return curves, [note for training in trainings for note in training.notes]


@command()
def plan(
    *,
    runs: tuple[str, ...] = RUNS_GIVEN,
    groups: tuple[str, ...] = GROUPS,
    study: Path | None = STUDY,
    benchmark: str | None = BENCHMARK,
    rule: str | None = option(None, "How the answer is chosen (evalkit ls rules).", "the runs' own"),
    outcome: str | None = OUTCOME,
    difference: float | None = typed_option(None, "Expected difference: points, or the outcome's unit.",
                                            "of two sides the observed one; else 1"),
    discordant: float | None = typed_option(None, "Without two sides: documents that only one will get right, in %.",
                                            "as of independent answers"),
    pair_seeds: bool = PAIR_SEEDS,
    accuracy: float | None = typed_option(None, "Without runs: of both sides, in %.", "50"),
    printer: Printer,
    root: Path | None = STUDY_IN,
) -> None:  # fmt: skip
    """Plan a comparison: the documents, the seeds and the outcome that a difference needs, before it is computed.

    From two finished sides, named as for evalkit compare: of a small sample, or of similar checkpoints. Or from one
    run, or none (the eight tasks), and a guess of how often both sides' answers differ.

    \b
    evalkit plan RUN_A RUN_B --difference 1
    evalkit plan --group old=RUN,RUN,RUN --group new=RUN,RUN,RUN       also the number of seeds
    evalkit plan RUN --discordant 15 --difference 1
    evalkit plan --accuracy 40 --difference 2                          40 % right, answers independent
    """
    from evalkit.comparison.pairing import pair
    from evalkit.comparison.planning import plan_guess, plan_pairing
    from evalkit.runs.continuous import outcome_key

    for name, share in (("--accuracy", accuracy), ("--discordant", discordant)):
        if share is not None and not 0 < share <= 100:
            raise UsageError(f"{name} {share:g}: expected a share above 0, at most 100 %")
    if difference is not None and not (isfinite(difference) and difference):
        raise UsageError(f"--difference {difference:g}: expected a number other than 0")
    source, notes, is_guess = (
        Source(study, benchmark, groups, root),
        list[str](),
        not (groups or study or len(runs) > 1),
    )
    if (discordant is not None and not is_guess) or (accuracy is not None and (runs or not is_guess)):
        raise UsageError("--discordant and --accuracy are guesses of what runs show; leave them out")
    with doing("reading runs"):
        if not is_guess:
            sides, key, notes = _sides(source, runs, outcome_key(outcome, rule))
            if len(sides) != 2:
                raise UsageError(f"a plan is about two sides; name two of {', '.join(side.name for side in sides)}")
            pairing = pair(sides[0], sides[1], {}, pair_seeds or source.pairs_seeds)
            if difference is not None and pairing.measure(pairing.key(key)).is_share:
                difference /= 100
            shown = plan_pairing(pairing, key, difference)
        else:
            require("two sides", False, outcome=outcome, pair_seeds=pair_seeds or None)
            require("a run", bool(runs), rule=rule)
            run = named_run(runs[0], root) if runs else None
            share = None if discordant is None else discordant / 100
            shown = plan_guess(
                run,
                rule,
                (50 if accuracy is None else accuracy) / 100,
                share,
                (1 if difference is None else difference) / 100,
            )
    printer(shown.with_notes(tuple(notes)))


def _sides(
    source: Source, runs: Sequence[str], key: str | None, last: int | None = None
) -> tuple[Sequence[Side], str | None, list[str]]:
    """Return the sides that a command names, the key under a study's default rule, and notes."""
    from evalkit.benchmarks.registry import has_default_measure
    from evalkit.comparison.sides import last_checkpoints, sides_of
    from evalkit.runs.continuous import with_default_rule

    if results := source.results:
        from evalkit.studies.results import study_sides

        name, notes = source.benchmark, list[str]()
        choices = [each.name for each in results.study.benchmarks if has_default_measure(each.kind)]
        if name is None and key is None and len(choices) == 1 < len(results.study.benchmarks):
            [name] = choices
            notes = [f"benchmark {name}; --benchmark chooses another"]
        measured = results.study.benchmark(name)
        chosen = study_sides(results, runs, measured, last or 1)
        return chosen.sides, with_default_rule(key, measured.rule), [*notes, *chosen.notes]
    sides = sides_of(*source.named(runs, lambda run: key is not None or has_default_measure(run.kind)))
    return sides if last is None else [last_checkpoints(side, last) for side in sides], key, []
