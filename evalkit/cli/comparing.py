"""`evalkit compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.cli.options import BENCHMARK, GROUP, OUTCOME, OUTPUT, PLOT, STUDY, check_study
from evalkit.cli.parameters import MARGIN, argument, is_typed, option
from evalkit.cli.running import PRINTING, print_report
from evalkit.display import doing
from evalkit.errors import UsageError

if TYPE_CHECKING:
    from evalkit.comparison.curves import Curve
    from evalkit.comparison.sides import Side
    from evalkit.reporting.markup import Format


@click.command()
@argument("runs", nargs=-1)
@GROUP
@STUDY
@BENCHMARK
@option(
    "--rule",
    help="How the answer is chosen (evalkit ls rules); of attention a measure, as rank@-1.  [default: the runs' own]",
)
@OUTCOME
@option(
    "--curve", is_flag=True, help="The runs are checkpoints of one training (of one each group): the outcome by step."
)
@PRINTING
@PLOT
@option("--fail-if-worse", is_flag=True, help="Exit with 3 where a later side is worse, with 4 where it is undecided.")
@option("--margin", type=MARGIN, default=0.0, help="With --fail-if-worse: points, or the outcome's "
        "unit, by which the average may be worse.")  # fmt: skip
@OUTPUT
@click.pass_context
def compare(
    ctx: click.Context,
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    study: Path | None,
    benchmark: str | None,
    rule: str | None,
    outcome: str | None,
    curve: bool,
    form: Format,
    standalone: bool,
    plot: Path | None,
    fail_if_worse: bool,
    margin: float,
    output: Path,
) -> int:
    """Compare runs on the same documents: paired differences, intervals, tests, and the smallest detectable difference.

    RUNS are run folders, or ids, names or checkpoints of runs in --output (evalkit ls runs). The first is the baseline
    A; each other one is compared with it, with Holm's correction over the tasks of each pair. With --study they are
    names of its checkpoints, NAME or NAME@STEP, whose seeds are the runs of a side; without any, all of them.

    \b
    evalkit compare RUN_A RUN_B
    evalkit compare RUN_A RUN_B RUN_C --rule acc_norm --plot forest.pdf
    evalkit compare RUN_A RUN_B --outcome bits_per_byte                finer than right or wrong
    evalkit compare --group old=RUN,RUN,RUN --group new=RUN,RUN,RUN     several seeds: the claim is about architectures
    evalkit compare RUN_A RUN_B --fail-if-worse --margin 1             in continuous integration
    evalkit compare --curve RUN RUN RUN --plot curve.png               checkpoints of one training
    evalkit compare --study study.yaml intg vanilla                    names of a study, with all their seeds
    evalkit compare --study study.yaml --curve intg                    its steps, a curve for each seed
    """
    if curve and fail_if_worse:
        raise UsageError("--fail-if-worse compares two sides; it does not go with --curve")
    if margin and not fail_if_worse:
        raise UsageError("--margin is an argument of --fail-if-worse; give both, or neither")
    check_study(study, benchmark, groups)
    if study is not None and is_typed(ctx, "output"):
        raise UsageError("--output is for runs; a study file names its own folder of runs: omit --output")
    from evalkit.runs.outcomes import outcome_key

    key = outcome_key(outcome, rule)
    if curve:
        from evalkit.comparison.curves import curve_report

        with doing("reading runs"):
            curves, notes = _curves(runs, groups, study, benchmark, key, output)
        print_report(curve_report(curves).with_notes(notes), form, standalone)
        if plot:
            from evalkit.comparison.plots import curves as draw_curves

            draw_curves(curves, plot)
        return 0
    from evalkit.comparison.comparison import compare_sides
    from evalkit.comparison.comparison_report import comparison_report
    from evalkit.comparison.differences import exit_code

    with doing("reading and comparing runs"):
        sides, notes, key = _sides(runs, groups, study, benchmark, key, output)
        found = compare_sides(sides, key)
        report = comparison_report(found).with_notes(notes)
    print_report(report, form, standalone)
    if plot:
        from evalkit.comparison.plots import forest

        forest(found, plot)
    # Percentage points for shares, else the measure's own unit
    scale = 100 if found[0].measure.is_share else 1
    return exit_code(found, margin / scale) if fail_if_worse else 0


def _sides(
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    study: Path | None,
    benchmark: str | None,
    key: str | None,
    output: Path,
) -> tuple[Sequence[Side], tuple[str, ...], str | None]:
    """Return sides, notes, and the key of the outcome, of a study under the benchmark's rule by default."""
    if study is None:
        from evalkit.comparison.sides import find_sides

        return find_sides(runs, groups, output), (), key
    from evalkit.runs.outcomes import with_default_rule
    from evalkit.studies.results import read_results
    from evalkit.studies.sides import study_sides

    results = read_results(study)
    chosen = results.study.benchmark(benchmark)
    found = study_sides(results, runs, chosen)
    return found.sides, found.notes, with_default_rule(key, chosen.rule)


def _curves(
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    study: Path | None,
    benchmark: str | None,
    key: str | None,
    output: Path,
) -> tuple[list[Curve], tuple[str, ...]]:
    """Return a curve for each training, and notes."""
    from evalkit.comparison.curves import curve

    if study is None:
        from evalkit.comparison.sides import find_trainings

        return [curve(side, key) for side in find_trainings(runs, groups, output)], ()
    from evalkit.runs.outcomes import with_default_rule
    from evalkit.studies.results import read_results
    from evalkit.studies.sides import study_trainings

    results = read_results(study)
    chosen = results.study.benchmark(benchmark)
    found = study_trainings(results, runs, chosen)
    key = with_default_rule(key, chosen.rule)
    return [curve(one.side, key, one.steps) for one in found], tuple(note for one in found for note in one.notes)
