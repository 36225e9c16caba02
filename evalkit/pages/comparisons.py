"""Comparisons and curves in a page. In: sides, or curves. Out: a `Panel` for each comparison, and one for curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.comparison import compare, subject_differences
from evalkit.comparison.comparison_report import comparison_report, headline, p_text, unit_of
from evalkit.comparison.curves import Curve, curve_report
from evalkit.comparison.differences import UNDECIDED, Comparison
from evalkit.comparison.pairing import PairedTask, Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.errors import EvalkitError
from evalkit.pages.page import PageFigure, Panel, svg_of
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table


def comparison_panels(
    sides: Sequence[Side], rule: str | None = None, suite: str = "", name: str = "comparison"
) -> tuple[Panel, ...]:
    """Return a panel for each side but the first, the baseline; with the reason for a side that cannot be compared.

    `suite` is added to the titles of a page with several, and `name` is the beginning of the panels' anchors.
    """
    baseline, *others = sides
    graded: dict[str, Comparable] = {}
    titles = (f"{other.name} against {baseline.name}" + (f": {suite}" if suite else "") for other in others)
    return tuple(
        _comparison_panel(f"{name}-{number}", title, baseline, other, graded, rule)
        for number, (title, other) in enumerate(zip(titles, others, strict=True), 1)
    )


def curve_panel(curves: Sequence[Curve], suite: str = "", name: str = "curves") -> Panel:
    """Return the panel of training curves. `suite` and `name`: see `comparison_panels`."""
    from evalkit.comparison.plots import curves as draw

    measure, names = curves[0].measure.name, ", ".join(each.name for each in curves)
    words = f"{measure[:1].upper()}{measure[1:]} by training step of {names}, with 95 % intervals."
    figure = PageFigure(f"{name}-figure", words, svg_of(partial(draw, curves)))
    about = f", {suite}" if suite else ""
    return Panel(name, f"Training curves{about}: {names}", (curve_report(curves),), (figure,))


def _comparison_panel(
    name: str, title: str, a: Side, b: Side, graded: dict[str, Comparable], rule: str | None
) -> Panel:
    try:
        pairing = pair(a, b, graded)
        compared = compare(pairing, rule)
        figure = _forest(f"{name}-forest", compared)
        panels = (*_agreement_panels(name, pairing, compared), *_subject_panels(name, pairing, compared))
        return Panel(name, title, comparison_report([compared]).parts, (figure,), panels=panels)
    except EvalkitError as error:
        reason = str(error).rstrip(".")
        return Panel(name, title, (Report((), facts=(f"{b.name} is not compared with {a.name}: {reason}.",)),))


def _forest(name: str, compared: Comparison) -> PageFigure:
    from evalkit.comparison.plots import forest

    lines = "layer" if compared.measure.layers else "task"
    words = f"Difference on each {lines} with its 95 % interval. {headline(compared)}"
    return PageFigure(name, words, svg_of(partial(forest, [compared])))


def _agreement_panels(name: str, pairing: Pairing, compared: Comparison) -> Iterator[Panel]:
    """Yield the panel of agreement by document; none for groups of runs."""
    if len(pairing.graded) != 2:
        return
    graded, counts, rows = (
        compared.measure.graded,
        ["both right", "A right, B wrong", "A wrong, B right", "both wrong"],
        [],
    )
    title = f"Documents by the answers of both, rule {compared.rule}"
    if graded:
        title = f"Documents by which score is higher ({pairing.measure(compared.rule).name})"
        counts = ["A higher", "equal", "B higher"]
    for task in pairing.tasks:
        [a], [b] = pairing.scores(task, compared.rule)
        flags = (
            (a > b, ~((a > b) | (b > a)), b > a) if graded else ((a == 1) & (b == 1), a > b, b > a, (a == 0) & (b == 0))
        )
        rows.append([pairing.label(task.task).full, f"{task.n:,}", *(f"{int(flag.sum()):,}" for flag in flags)])
    table = simple_table("agreement", ["task", "n", *counts], rows, title=title)
    yield Panel(f"{name}-agreement", "Agreement by document", (Report((table,), facts=_sides(compared)),))


def _sides(compared: Comparison) -> tuple[str, str]:
    return f"A: {compared.a}", f"B: {compared.b}"


def _subject_panels(name: str, pairing: Pairing, compared: Comparison) -> Iterator[Panel]:
    """Yield a panel for each task with subjects."""
    for number, task in enumerate(task for task in pairing.tasks if task.strata is not None):
        title = f"{pairing.label(task.task).full} by subject"
        yield Panel(f"{name}-subjects-{number + 1}", title, (_subject_report(pairing, task, compared),))


def _subject_report(pairing: Pairing, task: PairedTask, compared: Comparison) -> Report:
    subjects = subject_differences(pairing, task, compared.rule)
    better, worse = (sum(subject.verdict == verdict for subject in subjects) for verdict in compared.verdicts)
    verdict = (
        f"{compared.b} is {compared.verdicts[0]} than {compared.a} on {better} of {len(subjects)} subjects and "
        f"{compared.verdicts[1]} on {worse}, after Holm's correction over them."
    )
    notes = (
        "p: corrected by Holm's method over the subjects of this task; intervals are not corrected",
        "the comparison of the tasks does not depend on this table, which is for exploration",
    )
    unit = unit_of(compared.measure, [subject.stderr for subject in subjects])
    rows = [
        [
            subject.name.removeprefix(f"{task.task}_"),
            f"{subject.n:,}",
            unit.value(subject.score_a),
            unit.value(subject.score_b),
            unit.difference(subject.difference),
            unit.interval(subject),
            p_text(subject.p_holm),
            "" if subject.verdict == UNDECIDED else subject.verdict,
        ]
        for subject in subjects
    ]
    headers = ["subject", "n", "A", "B", "B − A", "95 % interval", "p (Holm)", "B is"]
    table = simple_table(f"subjects-{task.task}", headers, rows)
    return Report((table,), (verdict,), _sides(compared), notes)
