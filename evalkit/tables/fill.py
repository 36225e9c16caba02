"""Filling of a layout with numbers. In: a layout and numbers. Out: a `Table`.

Averages are computed here from the tasks' numbers and never read. An average with a missing part is omitted: an average
of fewer tasks is another quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from evalkit.reporting.decimals import half_up, mean, to_text
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, Text, superscript
from evalkit.tables.layout import LayoutItem, TableLayout
from evalkit.tables.published import Number, Numbers, Printed

CellKey = tuple[str, str]
"""(model, measure)."""


class Contest(NamedTuple):
    """Models whose numbers of one measure compete for a mark (bold, underline), and the winners."""

    kind: str
    measure: str
    models: tuple[str, ...]
    """In the table's order; some may have no number."""
    winners: frozenset[str]
    """Models with the extreme value: several if tied, none where there is no number."""


def contests(layout: TableLayout, values: Mapping[CellKey, Fraction]) -> Iterator[Contest]:
    """Yield every contest of a layout's marks."""
    everyone = tuple(item.key for item in layout.models)
    sections = [tuple(item.key for item in group.items) for group in layout.model_groups]
    for kind, mark in layout.marks.items():
        choose = max if mark.extreme == "highest" else min
        for measure in layout.measures:
            for models in sections if mark.scope == "section" else [everyone]:
                cells = {model: values[model, measure.key] for model in models if (model, measure.key) in values}
                shown = {model: half_up(value, layout.decimals) for model, value in cells.items()}
                best = choose(shown.values()) if shown else None
                winners = frozenset(model for model, value in shown.items() if value == best)
                yield Contest(kind, measure.key, models, winners)


def best_marks(layout: TableLayout, values: Mapping[CellKey, Fraction]) -> dict[CellKey, frozenset[str]]:
    marks: dict[CellKey, frozenset[str]] = {}
    for contest in contests(layout, values):
        for model in contest.winners:
            cell = (model, contest.measure)
            marks[cell] = marks.get(cell, frozenset()) | {contest.kind}
    return marks


class Lead(NamedTuple):
    """The single best model of a contest, and the next best."""

    best: str
    runner_up: str
    measure: str


@dataclass(frozen=True)
class Filling:
    """Numbers and options that fill a layout."""

    numbers: Numbers
    published: Numbers | None = None
    """Numbers for differences; None: no differences are printed."""
    printed: Printed | None = None
    """The paper's own averages and marks, to show the table as it was printed."""
    leads: Callable[[Sequence[Lead]], Set[Lead]] | None = None
    """All leads of the table → those that are significant."""
    spreads: bool = False
    """Print ± where there is a spread."""
    row_marks: Mapping[str, str] = field(default_factory=dict)
    """Model → a letter that refers to a note."""
    notes: tuple[Text, ...] = ()


def fill(layout: TableLayout, filling: Filling) -> Table:
    """Fill a layout: round the numbers and set the marks."""
    numbers = computed(layout, filling.numbers)
    values = {key: number.value for key, number in numbers.items()}
    marks = best_marks(layout, values)
    significant = filling.leads(list(_leads(layout, values))) if filling.leads else frozenset()
    leading = {(lead.best, lead.measure) for lead in significant}
    if filling.printed is not None:
        values |= filling.printed.values
        numbers |= {key: Number(value) for key, value in filling.printed.values.items()}
        marks = filling.printed.marks
    published = computed(layout, filling.published) if filling.published is not None else {}

    def cell(key: CellKey) -> Cell:
        number, places = numbers.get(key), layout.decimals
        if number is None:
            return Cell()
        difference = ""
        if key in published:  # of the rounded numbers, so that it agrees with the printed ones
            difference = to_text(
                half_up(number.value, places) - half_up(published[key].value, places), places, signed=True
            )
        return Cell(
            value=to_text(number.value, places) + layout.unit,
            spread=to_text(number.spread, places) if filling.spreads and number.spread is not None else "",
            difference=difference,
            bold="bold" in marks.get(key, ()),
            underline="underline" in marks.get(key, ()),
            significant=key in leading,
        )

    def label(item: LayoutItem, of_model: bool) -> Text:
        mark = filling.row_marks.get(item.key) if of_model else None
        return item.label + superscript(mark) if mark else item.label

    rows_are_models = layout.models_are_rows
    across = [item.key for group in layout.columns for item in group.items]

    def line(item: LayoutItem) -> Line:
        keys = [(item.key, other) if rows_are_models else (other, item.key) for other in across]
        return Line(item.key, label(item, rows_are_models), item.indent, item.facts, tuple(map(cell, keys)))

    return Table(
        name=layout.name,
        caption=layout.caption,
        corner=layout.corner,
        facts=layout.facts,
        columns=tuple(
            ColumnGroup(group.title, tuple(label(item, not rows_are_models) for item in group.items))
            for group in layout.columns
        ),
        sections=tuple(Section(group.title, group.style, tuple(map(line, group.items))) for group in layout.rows),
        notes=filling.notes,
    )


def computed(layout: TableLayout, numbers: Numbers) -> dict[CellKey, Number]:
    """Return the numbers of the table's cells by (model, measure), averages included."""
    cells: dict[CellKey, Number] = {}
    for model in layout.models:
        row = numbers.get(model.key, {})
        for measure in layout.measures:
            parts = layout.averages.get(measure.key)
            if measure.key in row:
                cells[model.key, measure.key] = row[measure.key]
            elif parts and all(part in row for part in parts):
                cells[model.key, measure.key] = Number(mean([row[part].value for part in parts]))
    return cells


def _leads(layout: TableLayout, values: Mapping[CellKey, Fraction]) -> Iterator[Lead]:
    """Yield every number that is the single best of its contest, with the next best."""
    for contest in contests(layout, values):
        known = [model for model in contest.models if (model, contest.measure) in values]
        others = [model for model in known if model not in contest.winners]
        if contest.kind != "bold" or len(contest.winners) != 1 or not others:
            continue
        nearest = max if layout.marks["bold"].extreme == "highest" else min
        runner_up = nearest(others, key=lambda model: values[model, contest.measure])
        yield Lead(next(iter(contest.winners)), runner_up, contest.measure)
