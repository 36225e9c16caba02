"""Comparisons and curves in a page. In: sides, or curves. Out: a `Panel` for each comparison, and one for curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.comparison import agreements, compare, subject_differences
from evalkit.comparison.comparison_report import comparison_report, headline
from evalkit.comparison.curves import Curve, curve_report
from evalkit.comparison.differences import UNDECIDED, Comparison, TaskDifference, interval_text, p_text, unit_of
from evalkit.comparison.pairing import PairedTask, Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.errors import EvalkitError
from evalkit.pages.page import PageFigure, Panel, svg_of
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table


def comparison_panels(
    sides: Sequence[Side], rule: str | None = None, suite: str = "", name: str = "comparison"
) -> tuple[Panel, ...]:
    """Return a panel for each side but the first, which it is compared with.

    A side that cannot be compared has a panel with the reason, so that the others are still shown.

    Args:
        sides: the baseline and at least one other, as `comparison.sides` makes them.
        rule: scoring rule; None: the runs' own.
        suite: added to the titles of a page with several.
        name: beginning of the panels' anchors.
    """
    baseline, *others = sides
    graded: dict[str, Comparable] = {}
    about = f": {suite}" if suite else ""
    return tuple(
        _comparison_panel(
            f"{name}-{number}", f"{other.name} against {baseline.name}{about}", baseline, other, graded, rule
        )
        for number, other in enumerate(others, 1)
    )


def curve_panel(curves: Sequence[Curve], suite: str = "", name: str = "curves") -> Panel:
    """Return the panel of training curves. `suite` and `name`: see `comparison_panels`."""
    from evalkit.comparison.plots import curves as draw

    measure, names = curves[0].measure.name, ", ".join(one.name for one in curves)
    words = f"{measure[:1].upper()}{measure[1:]} by training step of {names}, with 95 % intervals."
    figure = PageFigure(f"{name}-figure", words, svg_of(partial(draw, curves)))
    about = f", {suite}" if suite else ""
    return Panel(name, f"Training curves{about}: {names}", (curve_report(curves),), (figure,))


def _comparison_panel(
    name: str, title: str, a: Side, b: Side, graded: dict[str, Comparable], rule: str | None
) -> Panel:
    try:
        pairing = pair(a, b, graded)
        found = compare(pairing, rule)
        return Panel(
            name,
            title,
            comparison_report([found]).parts,
            (_forest(f"{name}-forest", found),),
            panels=(*_agreement_panels(name, pairing, found), *_subject_panels(name, pairing, found)),
        )
    except EvalkitError as error:
        reason = str(error).rstrip(".")
        return Panel(name, title, (Report((), facts=(f"{b.name} is not compared with {a.name}: {reason}.",)),))


def _forest(name: str, found: Comparison) -> PageFigure:
    from evalkit.comparison.plots import forest

    lines = "layer" if found.measure.layers else "task"
    words = f"Difference on each {lines} with its 95 % interval. {headline(found)}"
    return PageFigure(name, words, svg_of(partial(forest, [found])))


def _agreement_panels(name: str, pairing: Pairing, found: Comparison) -> Iterator[Panel]:
    """Yield the panel of agreement by document; none for groups of runs."""
    if len(pairing.graded) == 2:
        table = _graded_table if found.measure.graded else _right_table
        report = Report((table(pairing, found.rule),), facts=(f"A: {found.a}", f"B: {found.b}"))
        yield Panel(f"{name}-agreement", "Agreement by document", (report,))


def _right_table(pairing: Pairing, rule: str) -> Table:
    rows = [
        [pairing.label(one.task).full, *_counts(one.n, one.both_right, one.a_higher, one.b_higher, one.both_wrong)]
        for one in agreements(pairing, rule)
    ]
    headers = ["task", "n", "both right", "A right, B wrong", "A wrong, B right", "both wrong"]
    return simple_table("agreement", headers, rows, title=f"Documents by the answers of both, rule {rule}")


def _graded_table(pairing: Pairing, rule: str) -> Table:
    rows = [
        [pairing.label(one.task).full, *_counts(one.n, one.a_higher, one.equal, one.b_higher)]
        for one in agreements(pairing, rule)
    ]
    title = f"Documents by which score is higher ({pairing.measure(rule).name})"
    return simple_table("agreement", ["task", "n", "A higher", "equal", "B higher"], rows, title=title)


def _counts(*counts: int | None) -> list[str]:
    return [f"{count:,}" for count in counts if count is not None]


def _subject_panels(name: str, pairing: Pairing, found: Comparison) -> Iterator[Panel]:
    """Yield a panel for each task with subjects."""
    for number, task in enumerate(task for task in pairing.tasks if task.strata is not None):
        title = f"{pairing.label(task.task).full} by subject"
        yield Panel(f"{name}-subjects-{number + 1}", title, (_subject_report(pairing, task, found),))


def _subject_report(pairing: Pairing, task: PairedTask, found: Comparison) -> Report:
    subjects = subject_differences(pairing, task, found.rule)
    better, worse = (sum(one.verdict == verdict for one in subjects) for verdict in found.verdicts)
    verdict = (
        f"{found.b} is {found.verdicts[0]} than {found.a} on {better} of {len(subjects)} subjects and "
        f"{found.verdicts[1]} on {worse}, after Holm's correction over them."
    )
    notes = (
        "p: corrected by Holm's method over the subjects of this task; intervals are not corrected",
        "the comparison of the tasks does not depend on this table, which is for exploration",
    )
    return Report((_subject_table(task, subjects, found),), (verdict,), (f"A: {found.a}", f"B: {found.b}"), notes)


def _subject_table(task: PairedTask, subjects: Sequence[TaskDifference], found: Comparison) -> Table:
    unit = unit_of(found.measure, [one.stderr for one in subjects])
    rows = [
        [
            one.name.removeprefix(f"{task.task}_"),
            f"{one.n:,}",
            unit.value(one.score_a),
            unit.value(one.score_b),
            unit.difference(one.difference),
            interval_text(one, unit),
            p_text(one.p_holm),
            "" if one.verdict == UNDECIDED else one.verdict,
        ]
        for one in subjects
    ]
    headers = ["subject", "n", "A", "B", "B − A", "95 % interval", "p (Holm)", "B is"]
    return simple_table(f"subjects-{task.task}", headers, rows)
