"""Filling of a layout with numbers. In: a layout and numbers. Out: a `Table`.

Averages are computed here from the tasks' numbers and never read. An average with a missing part is omitted: an average
of fewer tasks is another quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from evalkit.reporting.decimals import half_up, mean, to_text
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, Text, superscript
from evalkit.tables.layout import LayoutItem, TableLayout
from evalkit.tables.published import CellKey, Number, Numbers, Printed


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
    sections = [tuple(group.items) for group in layout.model_groups]
    for kind, mark in layout.marks.items():
        choose = max if mark.extreme == "highest" else min
        for measure in layout.measures:
            for models in sections if mark.scope == "section" else [tuple(layout.models)]:
                shown = {
                    model: half_up(values[model, measure], layout.decimals)
                    for model in models
                    if (model, measure) in values
                }
                best = choose(shown.values()) if shown else None
                winners = frozenset(model for model, value in shown.items() if value == best)
                yield Contest(kind, measure, models, winners)


def best_marks(layout: TableLayout, values: Mapping[CellKey, Fraction]) -> dict[CellKey, frozenset[str]]:
    """Return the marks of each cell that has any."""
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


def fill(
    layout: TableLayout,
    numbers: Numbers,
    *,
    published: Numbers | None = None,
    printed: Printed | None = None,
    significant: Callable[[Sequence[Lead]], Collection[Lead]] | None = None,
    spreads: bool = False,
    row_marks: Mapping[str, str] | None = None,
    notes: tuple[Text, ...] = (),
) -> Table:
    """Fill a layout: round the numbers and set the marks.

    Args:
        layout: the layout.
        numbers: the numbers of its cells, without averages.
        published: numbers for differences; None: no differences are printed.
        printed: the paper's own averages and marks, to show the table as it was printed.
        significant: function from all leads of the table to those that are significant.
        spreads: print ± where there is a spread.
        row_marks: model → a letter that refers to a note.
        notes: lines below the table.
    """
    cells, places = computed(layout, numbers), layout.decimals
    values = {key: number.value for key, number in cells.items()}
    marks = best_marks(layout, values)
    leads = significant(list(_leads(layout, values))) if significant else ()
    leading = {(lead.best, lead.measure) for lead in leads}
    if printed is not None:
        cells |= {key: Number(value) for key, value in printed.values.items()}
        marks = printed.marks
    others = computed(layout, published) if published is not None else {}

    def cell(key: CellKey) -> Cell:
        if (number := cells.get(key)) is None:
            return Cell()
        difference = ""
        if key in others:  # of the rounded numbers, so that it agrees with the printed ones
            rounded = half_up(number.value, places) - half_up(others[key].value, places)
            difference = to_text(rounded, places, signed=True)
        return Cell(
            value=to_text(number.value, places) + layout.unit,
            spread=to_text(number.spread, places) if spreads and number.spread is not None else "",
            difference=difference,
            bold="bold" in marks.get(key, ()),
            underline="underline" in marks.get(key, ()),
            significant=key in leading,
        )

    def label(key: str, item: LayoutItem, of_model: bool) -> Text:
        mark = (row_marks or {}).get(key) if of_model else None
        return item.label + superscript(mark) if mark else item.label

    across = [key for group in layout.columns for key in group.items]

    def line(key: str, item: LayoutItem) -> Line:
        keys = [(key, other) if layout.models_are_rows else (other, key) for other in across]
        facts = tuple(item.facts.get(name, ()) for name in layout.facts)
        return Line(key, label(key, item, layout.models_are_rows), item.indent, facts, tuple(map(cell, keys)))

    return Table(
        name=layout.name,
        caption=layout.caption,
        corner=layout.corner,
        facts=tuple(layout.facts.values()),
        columns=tuple(
            ColumnGroup(group.title, tuple(label(*item, not layout.models_are_rows) for item in group.items.items()))
            for group in layout.columns
        ),
        sections=tuple(
            Section(group.title, group.drawn, tuple(line(*item) for item in group.items.items()))
            for group in layout.rows
        ),
        notes=notes,
    )


def computed(layout: TableLayout, numbers: Numbers) -> dict[CellKey, Number]:
    """Return the numbers of the table's cells by (model, measure), averages included."""
    rows = {model: with_averages(layout, numbers.get(model, {})) for model in layout.models}
    return {(model, measure): number for model, row in rows.items() for measure, number in row.items()}


def with_averages(layout: TableLayout, row: Mapping[str, Number]) -> dict[str, Number]:
    """Return the numbers of one model by measure, averages included."""
    cells: dict[str, Number] = {}
    for measure in layout.measures:
        parts = layout.averages.get(measure)
        if measure in row:
            cells[measure] = row[measure]
        elif parts and all(part in row for part in parts):
            cells[measure] = Number(mean([row[part].value for part in parts]))
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
