"""Comparisons and curves in a page. In: sides, or curves. Out: a `Panel` for each comparison, and one for curves."""

from __future__ import annotations

from collections.abc import Sequence
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

    `suite` is added to the titles, and `name` is the beginning of the panels' anchors.
    """
    from evalkit.comparison.plots import forest

    panels: list[Panel] = []
    graded: dict[str, Comparable] = {}
    baseline, *others = sides
    for number, other in enumerate(others, 1):
        address, title = f"{name}-{number}", f"{other.name} against {baseline.name}" + (f": {suite}" if suite else "")
        try:
            pairing = pair(baseline, other, graded)
            compared = compare(pairing, rule)
            lines = "layer" if compared.measure.layers else "task"
            words = f"Difference on each {lines} with its 95 % interval. {headline(compared)}"
            figure = PageFigure(f"{address}-forest", words, svg_of(partial(forest, [compared])))
            inner = []
            if len(pairing.graded) == 2:
                report = _agreement_report(pairing, compared)
                inner.append(Panel(f"{address}-agreement", "Agreement by document", (report,)))
            with_subjects = (task for task in pairing.tasks if task.strata is not None)
            for of_task, task in enumerate(with_subjects, 1):
                report, label = _subject_report(pairing, task, compared), pairing.label(task.task).full
                inner.append(Panel(f"{address}-subjects-{of_task}", f"{label} by subject", (report,)))
            panels.append(Panel(address, title, comparison_report([compared]).parts, (figure,), panels=tuple(inner)))
        except EvalkitError as error:
            reason = f"{other.name} is not compared with {baseline.name}: {str(error).rstrip('.')}."
            panels.append(Panel(address, title, (Report((), facts=(reason,)),)))
    return tuple(panels)


def curve_panel(curves: Sequence[Curve], suite: str = "", name: str = "curves") -> Panel:
    from evalkit.comparison.plots import curves as draw

    measure, names = curves[0].measure.name, ", ".join(each.name for each in curves)
    words = f"{measure[:1].upper()}{measure[1:]} by training step of {names}, with 95 % intervals."
    figure = PageFigure(f"{name}-figure", words, svg_of(partial(draw, curves)))
    about = f", {suite}" if suite else ""
    return Panel(name, f"Training curves{about}: {names}", (curve_report(curves),), (figure,))


def _agreement_report(pairing: Pairing, compared: Comparison) -> Report:
    title, rows = f"Documents by the answers of both, rule {compared.rule}", []
    counts = ["both right", "A right, B wrong", "A wrong, B right", "both wrong"]
    if graded := compared.measure.graded:
        title = f"Documents by which score is higher ({pairing.measure(compared.rule).name})"
        counts = ["A higher", "equal", "B higher"]
    for task in pairing.tasks:
        [a], [b] = pairing.scores(task, compared.rule)
        flags = [(a == 1) & (b == 1), a > b, b > a, (a == 0) & (b == 0)]
        if graded:
            flags = [a > b, ~((a > b) | (b > a)), b > a]
        rows.append([pairing.label(task.task).full, f"{task.n:,}", *(f"{int(flag.sum()):,}" for flag in flags)])
    table = simple_table("agreement", ["task", "n", *counts], rows, title=title)
    return Report((table,), facts=_sides(compared))


def _sides(compared: Comparison) -> tuple[str, str]:
    return f"A: {compared.a}", f"B: {compared.b}"


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
            *map(unit.value, (subject.score_a, subject.score_b)),
            unit.difference(subject.difference),
            unit.interval(subject),
            p_text(subject.p_holm),
            "" if subject.verdict == UNDECIDED else subject.verdict,
        ]
        for subject in subjects
    ]
    headers = ["subject", "n", "A", "B", "B − A", "95 % interval", "p (Holm)", "B is"]
    return Report((simple_table(f"subjects-{task.task}", headers, rows),), (verdict,), _sides(compared), notes)
