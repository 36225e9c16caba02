"""`evalkit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from evalkit.activity import doing
from evalkit.cli.options import FOLDER, MARGIN, OUTPUT, argument, option, typed_option

if TYPE_CHECKING:
    from evalkit.compare.comparison import Comparison

_FORMATS = ("terminal", "markdown", "latex", "csv", "json")


@click.command()
@argument("runs", nargs=-1)
@typed_option("--group", "groups", multiple=True, metavar="NAME=RUN,RUN,…",
              help="Several seeds or checkpoints of one side; repeat for each side.")  # fmt: skip
@option("--rule", help="How the answer is chosen (evalkit ls rules).  [default: the runs' own]")
@option("--curve", is_flag=True, help="The runs are checkpoints of one training (of one each group): accuracy by step.")
@option("--format", "form", type=click.Choice(_FORMATS), default="terminal", help="Of the result.")
@option("--plot", type=FOLDER, help="Also draw it, as .pdf or .png.")
@option("--fail-if-worse", is_flag=True, help="Exit with 3 where a later side is worse, with 4 where it is undecided.")
@option("--margin", type=MARGIN, default=0.0, help="With --fail-if-worse: points by which the average "
        "may be lower.")  # fmt: skip
@OUTPUT
def compare(
    runs: tuple[str, ...],
    groups: tuple[str, ...],
    rule: str | None,
    curve: bool,
    form: str,
    plot: Path | None,
    fail_if_worse: bool,
    margin: float,
    output: Path,
) -> int:
    """Is B better than A? Paired on the same documents, with intervals, tests, and what they could have shown.

    RUNS are run folders, or ids, names or checkpoints of runs in --output (evalkit ls runs). The first is the baseline
    A; each other one is compared with it, with Holm's correction over the tasks of each pair.

    \b
    evalkit compare RUN_A RUN_B
    evalkit compare RUN_A RUN_B RUN_C --rule acc_norm --plot forest.pdf
    evalkit compare --group old=RUN,RUN,RUN --group new=RUN,RUN,RUN     several seeds: the claim is about architectures
    evalkit compare RUN_A RUN_B --fail-if-worse --margin 1             in continuous integration
    evalkit compare --curve RUN RUN RUN --plot curve.png               checkpoints of one training
    """
    from evalkit.compare.sides import find_sides

    _check(curve, plot, fail_if_worse, margin)
    if curve:
        _curves(runs, groups, rule, form, plot, output)
        return 0
    with doing("reading and comparing runs"):
        from evalkit.benchmarks.outcomes import Comparable
        from evalkit.compare.comparison import compare as compare_sides
        from evalkit.compare.decision import exit_code
        from evalkit.compare.pairing import pair

        baseline, *others = find_sides(runs, groups, output)
        graded: dict[str, Comparable] = {}
        found = [compare_sides(pair(baseline, other, graded), rule) for other in others]
    _print(found, form)
    if plot:
        from evalkit.compare.plots import forest

        forest(found, plot)
    # Points of shares, or whatever else is measured
    scale = 100 if found[0].measure.is_share else 1
    return exit_code(found, margin / scale) if fail_if_worse else 0


def _print(found: list[Comparison], form: str) -> None:
    from dataclasses import asdict

    from evalkit.compare.view import comparison_page, comparison_records, headline
    from evalkit.reporting.page import PAGES, csv_text, json_text

    if form == "json":
        click.echo(json_text({"comparisons": [{"verdict": headline(one)} | asdict(one) for one in found]}))
    elif form == "csv":
        click.echo(csv_text([record for one in found for record in comparison_records(one)]))
    else:
        letters = [chr(ord("A") + place) if place < 26 else str(place) for place in range(len(found) + 1)]
        pages = [comparison_page(one, "A", letter) for one, letter in zip(found, letters[1:], strict=True)]
        click.echo("\n\n\n".join(PAGES[form](page) for page in pages))


def _curves(
    runs: tuple[str, ...], groups: tuple[str, ...], rule: str | None, form: str, plot: Path | None, output: Path
) -> None:
    from dataclasses import asdict

    from evalkit.compare.curves import curve
    from evalkit.compare.sides import find_trainings
    from evalkit.compare.view import curve_page, curve_records
    from evalkit.reporting.page import PAGES, csv_text, json_text

    with doing("reading runs"):
        found = [curve(side, rule) for side in find_trainings(runs, groups, output)]
    if form == "json":
        click.echo(json_text({"curves": [asdict(one) for one in found]}))
    elif form == "csv":
        click.echo(csv_text(list(curve_records(found))))
    else:
        click.echo(PAGES[form](curve_page(found)))
    if plot:
        from evalkit.compare.plots import curves as draw

        draw(found, plot)


def _check(curve: bool, plot: Path | None, fail_if_worse: bool, margin: float) -> None:
    from evalkit.errors import UsageError

    if plot and plot.suffix not in (".pdf", ".png"):
        raise UsageError(f"--plot {plot}: name a file that ends in .pdf or .png")
    if curve and fail_if_worse:
        raise UsageError("--fail-if-worse compares two sides; it does not go with --curve")
    if margin and not fail_if_worse:
        raise UsageError("--margin is what --fail-if-worse allows; give both, or neither")
