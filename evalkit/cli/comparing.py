"""`evalkit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.activity import doing
from evalkit.cli.options import MARGIN, OUTPUT, PLOT, argument, option, typed_option
from evalkit.cli.printing import PRINTING, print_report

if TYPE_CHECKING:
    from evalkit.reporting.formats import Format


@click.command()
@argument("runs", nargs=-1)
@typed_option("--group", "groups", multiple=True, metavar="NAME=RUN,RUN,…",
              help="Several seeds or checkpoints of one side; repeat for each side.")  # fmt: skip
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: the runs' own]")
@option("--curve", is_flag=True, help="The runs are checkpoints of one training (of one each group): accuracy by step.")
@PRINTING
@PLOT
@option("--fail-if-worse", is_flag=True, help="Exit with 3 where a later side is worse, with 4 where it is undecided.")
@option("--margin", type=MARGIN, default=0.0, help="With --fail-if-worse: points by which the average "
        "may be lower.")  # fmt: skip
@OUTPUT
def compare(
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    rule: str | None,
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
    A; each other one is compared with it, with Holm's correction over the tasks of each pair.

    \b
    evalkit compare RUN_A RUN_B
    evalkit compare RUN_A RUN_B RUN_C --rule acc_norm --plot forest.pdf
    evalkit compare --group old=RUN,RUN,RUN --group new=RUN,RUN,RUN     several seeds: the claim is about architectures
    evalkit compare RUN_A RUN_B --fail-if-worse --margin 1             in continuous integration
    evalkit compare --curve RUN RUN RUN --plot curve.png               checkpoints of one training
    """
    _check(curve, fail_if_worse, margin)
    if curve:
        _curves(runs, groups, rule, form, standalone, plot, output)
        return 0
    with doing("reading and comparing runs"):
        from evalkit.comparison.comparison import compare_sides
        from evalkit.comparison.comparison_report import comparison_report
        from evalkit.comparison.decision import exit_code
        from evalkit.comparison.sides import find_sides

        found = compare_sides(find_sides(runs, groups, output), rule)
        report = comparison_report(found)
    print_report(report, form, standalone)
    if plot:
        from evalkit.comparison.plots import forest

        forest(found, plot)
    # Percentage points for shares, else the measure's own unit
    scale = 100 if found[0].measure.is_share else 1
    return exit_code(found, margin / scale) if fail_if_worse else 0


def _curves(
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    rule: str | None,
    form: Format,
    standalone: bool,
    plot: Path | None,
    output: Path,
) -> None:
    from evalkit.comparison.curve_report import curve_report
    from evalkit.comparison.curves import curve
    from evalkit.comparison.sides import find_trainings

    with doing("reading runs"):
        found = [curve(side, rule) for side in find_trainings(runs, groups, output)]
    print_report(curve_report(found), form, standalone)
    if plot:
        from evalkit.comparison.plots import curves as draw

        draw(found, plot)


def _check(curve: bool, fail_if_worse: bool, margin: float) -> None:
    from evalkit.errors import UsageError

    if curve and fail_if_worse:
        raise UsageError("--fail-if-worse compares two sides; it does not go with --curve")
    if margin and not fail_if_worse:
        raise UsageError("--margin is an argument of --fail-if-worse; give both, or neither")
