"""A layout and numbers → a `Table`.

Averages are computed here from the tasks' numbers and are never read. A mean is taken only where none of its parts is
missing: an average of fewer tasks is another quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from evalkit.decimals import half_up, mean, to_text
from evalkit.tables.layout import Group, Item, Layout
from evalkit.tables.marks import best_marks
from evalkit.tables.markup import Text, superscript
from evalkit.tables.published import Number, Numbers, Printed
from evalkit.tables.table import Cell, ColumnGroup, Line, Section, Table

Key = tuple[str, str]
"""(model, measure)."""


@dataclass(frozen=True)
class Filling:
    """What goes into a layout."""

    numbers: Numbers
    published: Numbers | None = None
    """To print the difference to; None: no differences."""
    printed: Printed | None = None
    """The paper's own averages and marks, to show the table as it was printed."""
    leads: Callable[[str, str, str], bool] | None = None
    """(best model, next best model, measure) → whether the lead is significant."""
    spreads: bool = False
    """Print ± where there is a spread."""
    row_marks: Mapping[str, str] = field(default_factory=dict)
    """Model → a letter that refers to a note."""
    notes: tuple[Text, ...] = ()


def fill(layout: Layout, filling: Filling) -> Table:
    """The table, with its numbers rounded and its marks set."""
    numbers = computed(layout, filling.numbers)
    values = {key: number.value for key, number in numbers.items()}
    marks = best_marks(layout, values)
    if filling.printed is not None:
        values |= filling.printed.values
        numbers |= {key: Number(value) for key, value in filling.printed.values.items()}
        marks = filling.printed.marks
    published = computed(layout, filling.published) if filling.published is not None else {}

    def cell(model: str, measure: str) -> Cell:
        number = numbers.get((model, measure))
        if number is None:
            return Cell()
        mark = marks.get((model, measure), frozenset())
        return Cell(
            value=to_text(number.value, layout.decimals) + layout.unit,
            spread=to_text(number.spread, layout.decimals) if filling.spreads and number.spread is not None else "",
            difference=_difference(number, published.get((model, measure)), layout.decimals),
            bold="bold" in mark,
            underline="underline" in mark,
            significant="bold" in mark and _leads(layout, filling, values, model, measure),
        )

    return Table(
        name=layout.name,
        caption=layout.caption,
        corner=layout.corner,
        facts=layout.facts,
        columns=tuple(_column_group(layout, filling, group) for group in layout.columns),
        sections=tuple(_section(layout, filling, group, cell) for group in layout.rows),
        notes=filling.notes,
    )


def computed(layout: Layout, numbers: Numbers) -> dict[Key, Number]:
    """The numbers of the table's cells, averages included, each as (model, measure)."""
    found: dict[Key, Number] = {}
    for model in layout.models:
        row = numbers.get(model.key, {})
        for measure in layout.measures:
            parts = layout.averages.get(measure.key)
            if measure.key in row:
                found[model.key, measure.key] = row[measure.key]
            elif parts and all(part in row for part in parts):
                found[model.key, measure.key] = Number(mean([row[part].value for part in parts]))
    return found


def _difference(number: Number, published: Number | None, places: int) -> str:
    """Of the printed numbers, so that what stands side by side adds up."""
    if published is None:
        return ""
    return to_text(half_up(number.value, places) - half_up(published.value, places), places, signed=True)


def _leads(layout: Layout, filling: Filling, values: Mapping[Key, Fraction], best: str, measure: str) -> bool:
    """Whether the bold number's lead over the next best in its scope is significant."""
    if filling.leads is None:
        return False
    group = next(group for group in layout.model_groups if best in [item.key for item in group.items])
    scope = group.items if layout.marks["bold"].scope == "section" else layout.models
    others = [item.key for item in scope if item.key != best and (item.key, measure) in values]
    if not others:
        return False
    highest = layout.marks["bold"].extreme == "highest"
    runner_up = (max if highest else min)(others, key=lambda model: values[model, measure])
    return filling.leads(best, runner_up, measure)


def _label(filling: Filling, item: Item) -> Text:
    mark = filling.row_marks.get(item.key)
    return item.label + superscript(mark) if mark else item.label


def _column_group(layout: Layout, filling: Filling, group: Group) -> ColumnGroup:
    labels = tuple(_label(filling, item) if not layout.models_are_rows else item.label for item in group.items)
    return ColumnGroup(group.title, labels)


def _section(layout: Layout, filling: Filling, group: Group, cell: Callable[[str, str], Cell]) -> Section:
    across = [item.key for columns in layout.columns for item in columns.items]
    lines = []
    for item in group.items:
        keys = [(item.key, key) if layout.models_are_rows else (key, item.key) for key in across]
        label = _label(filling, item) if layout.models_are_rows else item.label
        lines.append(Line(item.key, label, item.indent, item.facts, tuple(cell(*key) for key in keys)))
    return Section(group.title, group.style, tuple(lines))
