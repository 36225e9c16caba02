"""Audit of the paper's tables: printed averages, marks and rows that contradict the printed numbers.

In: layouts and the numbers as printed. Out: findings. The audit checks three questions from the printed tables alone:

1. Is each printed average the mean of its parts, rounded half up? If not, could the rounding of the parts explain it
   (`decimals.could_print`)?
2. Is each mark at the cell that the table's own rule marks, given the recomputed numbers?
3. Do rows with the same description print the same numbers, and rows with different descriptions different ones? Rows
   are described by their keys in the layouts, which follow the paper's words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

from evalkit.reporting.decimals import could_print, half_up, to_text
from evalkit.reporting.markup import literal, parse, plain
from evalkit.reporting.table import Line, Section, Table
from evalkit.tables.fill import Contest, computed, contests
from evalkit.tables.layout import LayoutItem, TableLayout
from evalkit.tables.published import Numbers, Printed

HEADINGS = ("table", "row", "column", "printed", "recomputed", "why")

TOLERANCE = (
    "Rounding is decimal, half up. A printed number stands for any within half a unit of its last digit, so a printed "
    "average less than a whole unit away from the mean of its printed parts may still be right; farther away it is not."
)


class Finding(NamedTuple):
    """A printed value that contradicts the printed numbers."""

    table: str
    row: str
    column: str
    printed: str
    recomputed: str
    why: str


class Audited(NamedTuple):
    """A published table with its numbers, printed averages and marks."""

    layout: TableLayout
    numbers: Numbers
    printed: Printed


def audit(tables: Sequence[Audited]) -> list[Finding]:
    """Return all findings, table by table, followed by those between tables."""
    found = [finding for table in tables for finding in (*audit_averages(table), *audit_marks(table))]
    return found + list(audit_rows(tables))


def audit_averages(table: Audited) -> Iterator[Finding]:
    """Yield printed averages that differ from the mean of their parts."""
    layout, places = table.layout, table.layout.decimals
    cells = computed(layout, table.numbers)
    for model in layout.models:
        for measure in layout.measures:
            key = (model.key, measure.key)
            printed, number = table.printed.values.get(key), cells.get(key)
            if printed is None or number is None or printed == half_up(number.value, places):
                continue
            exact = f"the mean is {_exact(number.value)}"
            if could_print(printed, number.value, places):
                why = f"{exact}; the rounding of its parts can explain it"
            else:
                why = f"{exact}; no rounding of its parts explains it"
            row, column = _place(layout, model, measure)
            yield Finding(layout.name, row, column, to_text(printed, places), to_text(number.value, places), why)


def audit_marks(table: Audited) -> Iterator[Finding]:
    """Yield marks that contradict the table's rule."""
    layout = table.layout
    values = {key: number.value for key, number in computed(layout, table.numbers).items()}
    as_printed = values | table.printed.values
    by_printed = {(c.kind, c.measure, c.models): c.winners for c in contests(layout, as_printed)}
    for contest in contests(layout, values):
        marked = frozenset(
            m for m in contest.models if contest.kind in table.printed.marks.get((m, contest.measure), ())
        )
        if marked == contest.winners:
            continue
        agrees = marked == by_printed[contest.kind, contest.measure, contest.models]
        yield _mark_finding(table, contest, marked, agrees, values, as_printed)


def _mark_finding(
    table: Audited,
    contest: Contest,
    marked: frozenset[str],
    agrees: bool,
    values: Mapping[tuple[str, str], Fraction],
    as_printed: Mapping[tuple[str, str], Fraction],
) -> Finding:
    layout = table.layout
    measure = next(item for item in layout.measures if item.key == contest.measure)

    def shown(models: frozenset[str], numbers: Mapping[tuple[str, str], Fraction]) -> str:
        parts = [
            f"{_name(layout, m)} {to_text(numbers[m, contest.measure], layout.decimals)}"
            for m in contest.models
            if m in models
        ]
        return f"{contest.kind}: {', '.join(parts) or 'nothing'}"

    mark = layout.marks[contest.kind]
    why = f"{mark.extreme} in the {mark.scope}"
    if agrees:
        why += "; right by the printed averages"
    elif marked < contest.winners:
        why += "; a tie, marked in part"
    whole = len(contest.models) == len(layout.models)
    scope = "all" if whole else f"{_name(layout, contest.models[0])} to {_name(layout, contest.models[-1])}"
    row, column = (scope, plain(measure.label)) if layout.models_are_rows else (plain(measure.label), scope)
    return Finding(layout.name, row, column, shown(marked, as_printed), shown(contest.winners, values), why)


def audit_rows(tables: Sequence[Audited]) -> Iterator[Finding]:
    """Yield rows of different tables that contradict each other, or that are one row with two descriptions."""
    sources = list({table.layout.data: table for table in reversed(tables)}.values())[::-1]
    reported: set[tuple[frozenset[str], bool]] = set()
    rows = [
        (t, model, dict(t.numbers[model.key])) for t in sources for model in t.layout.models if model.key in t.numbers
    ]
    for (one, first, here), (other, second, there) in combinations(rows, 2):
        shared = [task for task in here if task in there]
        differing = [task for task in shared if here[task].value != there[task].value]
        if not shared or (first.key == second.key) == (not differing):
            continue
        if (pair := (frozenset((first.key, second.key)), not differing)) in reported:
            continue
        reported.add(pair)
        if first.key == second.key:
            why = f"described alike, but {len(differing)} of {len(shared)} numbers differ"
        else:
            why = "described otherwise, but every number is the same"
        row = f"{_name(other.layout, second)} ({second.key})"
        recomputed = f"{one.layout.name}, {_name(one.layout, first)} ({first.key}): {_listed(one, first, shared)}"
        yield Finding(other.layout.name, row, f"{len(shared)} tasks", _listed(other, second, shared), recomputed, why)


def as_table(findings: Sequence[Finding]) -> Table:
    """Return the findings as a `Table`."""
    lines = tuple(
        Line(finding.table, literal(finding.table), False, tuple(map(literal, finding[1:])), ()) for finding in findings
    )
    return Table(
        name="audit",
        caption=(),
        corner=literal(HEADINGS[0]),
        facts=tuple(map(literal, HEADINGS[1:])),
        columns=(),
        sections=(Section((), "line", lines),),
        notes=(parse(TOLERANCE, "audit"),),
    )


def _listed(table: Audited, model: LayoutItem, tasks: Sequence[str]) -> str:
    numbers = table.numbers[model.key]
    return " ".join(to_text(numbers[task].value, table.layout.decimals) for task in tasks)


def _name(layout: TableLayout, key: str | LayoutItem) -> str:
    """Return a model's label, prefixed by its section's title or its parent line where the label is ambiguous."""
    name = key.key if isinstance(key, LayoutItem) else key
    for group in layout.model_groups:
        above = plain(group.title) if group.style == "heading" or not layout.models_are_rows else ""
        for item in group.items:
            label = plain(item.label)
            if item.key == name:
                return f"{above} {label}" if above and (item.indent or not layout.models_are_rows) else label
            if layout.models_are_rows and not item.indent:
                above = label
    raise KeyError(name)


def _place(layout: TableLayout, model: LayoutItem, measure: LayoutItem) -> tuple[str, str]:
    names = _name(layout, model), plain(measure.label)
    return names if layout.models_are_rows else (names[1], names[0])


def _exact(value: Fraction) -> str:
    text = to_text(value, 4)
    return text.rstrip("0").rstrip(".") if Fraction(text) == value else f"{to_text(value, 3)}…"
