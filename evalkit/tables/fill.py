"""Numbers of a table, and a layout filled with them.

In: a layout, and numbers of runs (`measured.py`) or of a CSV: the paper's (`results/published/`), or a user's with
models in the first column and a measure in each further column. Out: a `Table`. Averages are computed here from the
tasks' numbers and never read; one with a missing part is omitted, since an average of fewer tasks is another quantity.
The averages and marks that the paper printed are in `printed/`, read only to print or audit a table as printed.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from evalkit.errors import TableError, UsageError, reading_as
from evalkit.inputs.reading import MOST_BYTES, read_bytes
from evalkit.reporting.decimals import half_up, mean, parse_number, to_text
from evalkit.reporting.numbers import NumberFormat
from evalkit.reporting.table import Cell, ColumnGroup, Line, Section, Table, Text, superscript
from evalkit.tables.layout import LayoutItem, Mark, TableLayout

CellKey = tuple[str, str]


class Number(NamedTuple):
    """A measured or published number, in the table's unit (percent for accuracies)."""

    value: Fraction
    spread: Fraction | None = None
    """A standard error, or the standard deviation over seeds."""


Numbers = Mapping[str, Mapping[str, Number]]


class Printed(NamedTuple):
    """Averages and marks (bold, underline) as the paper printed them."""

    values: dict[CellKey, Fraction]
    marks: dict[CellKey, frozenset[str]]


def read_numbers(path: Path, in_percent: bool = False) -> dict[str, dict[str, Number]]:
    """Read a CSV of numbers, from 0 to 100 if `in_percent`; a `TableError` names row and column."""
    (_, (_, *measures)), *rows = _rows(path) or [(1, [""])]
    if len(set(measures)) != len(measures) or "" in measures:
        raise TableError(f"{path}, line 1: every column but the first must have a name of its own")
    numbers: dict[str, dict[str, Number]] = {}
    for line, (model, *cells) in rows:
        where = f"{path}, line {line}: row '{model}'"
        if model in numbers:
            raise TableError(f"{where} occurs twice; remove one")
        if len(cells) != len(measures):
            raise TableError(f"{where}: {len(cells)} cells for {len(measures)} columns")
        numbers[model] = {}
        for measure, cell in zip(measures, cells, strict=True):
            with reading_as(f"{where}, column '{measure}'", "digits with a decimal point, or empty", TableError):
                if (value := parse_number(cell)) is not None:
                    numbers[model][measure] = Number(value)
                    if in_percent and not 0 <= value <= 100:
                        raise ValueError(f"{cell} is no percentage, a number from 0 to 100")
    return numbers


def published_numbers(layout: TableLayout) -> dict[str, dict[str, Number]]:
    """Read a layout's published numbers; a `UsageError` if it has none."""
    path = layout.data_file
    if not path.is_file():
        why = f"table {layout.name} has no published numbers ({path} does not exist)"
        raise UsageError(f"{why}: fill it with --source runs, or name a CSV under 'data' in its layout")
    numbers = read_numbers(path, layout.in_percent)
    columns = {column for row in numbers.values() for column in row}
    if stored := columns & layout.averages.keys():
        raise TableError(f"{path}: column '{min(stored)}' is an average, which is computed; remove it")
    if missing := [task for task in layout.tasks if task not in columns]:
        raise TableError(f"{path} has no numbers in a column '{missing[0]}', which layout {layout.path} shows")
    return numbers


def printed_cells(layout: TableLayout) -> Printed:
    """Read a layout's averages and marks as printed: lines of model, measure, printed, marks."""
    path = layout.printed_file
    if not path.is_file():
        raise UsageError(f"table {layout.name} has no printed averages and marks ({path} does not exist)")
    (_, header), *rows = _rows(path) or [(1, [])]
    if header != ["model", "measure", "printed", "marks"]:
        raise TableError(f"{path}, line 1: expected the columns model,measure,printed,marks")
    printed = Printed({}, {})
    for line, cells in rows:
        with reading_as(f"{path}, line {line}", "model, measure, number, and marks bold or underline", TableError):
            model, measure, number, marks = cells
            if (value := parse_number(number)) is not None:
                printed.values[model, measure] = value
            if unknown := set(marks.split()) - {"bold", "underline"}:
                raise ValueError(f"mark '{min(unknown)}'")
            if marks:
                printed.marks[model, measure] = frozenset(marks.split())
    return printed


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return (line number, cells) of each line that is not empty."""
    with reading_as(path, "CSV in UTF-8", TableError):
        reader = csv.reader(read_bytes(path, MOST_BYTES).decode("utf-8-sig").splitlines())
        return [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]


def computed(layout: TableLayout, numbers: Numbers) -> dict[CellKey, Number]:
    """Return the numbers of the table's cells by (model, measure), averages included."""
    rows = {model: with_averages(layout, numbers.get(model, {})) for model in layout.model_items}
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


class Contest(NamedTuple):
    """Models whose numbers of one measure compete for a mark (bold, underline), and the winners."""

    mark: Mark
    measure: str
    models: tuple[str, ...]
    """In the table's order; some may have no number."""
    winners: frozenset[str]
    """Models with the extreme value: several if tied, none where fewer than two models have a number."""


def contests(layout: TableLayout, values: Mapping[CellKey, Fraction]) -> Iterator[Contest]:
    sections = [tuple(group.items) for group in layout.model_groups]
    for mark, rule in layout.marks.items():
        choose = max if rule.startswith("highest") else min
        for measure in layout.measures:
            for models in sections if rule.endswith("section") else [tuple(layout.model_items)]:
                known = [model for model in models if (model, measure) in values]
                shown = {model: half_up(values[model, measure], layout.decimals) for model in known}
                best = choose(shown.values()) if len(shown) > 1 else None
                winners = frozenset(model for model, value in shown.items() if value == best)
                yield Contest(mark, measure, models, winners)


def leads(layout: TableLayout, numbers: Numbers) -> Iterator[tuple[str, str, str]]:
    """Yield (best, next best, measure) of every number that is the single best of its contest for bold."""
    values = {key: number.value for key, number in computed(layout, numbers).items()}
    for mark, measure, models, winners in contests(layout, values):
        others = [model for model in models if (model, measure) in values and model not in winners]
        if mark == "bold" and len(winners) == 1 and others:
            nearest = max if layout.marks["bold"].startswith("highest") else min
            yield min(winners), nearest(others, key=lambda model: values[model, measure]), measure


def fill(
    layout: TableLayout,
    numbers: Numbers,
    published: Numbers | None = None,
    printed: Printed | None = None,
    significant: Collection[CellKey] = (),
    spreads: bool = False,
    row_marks: Mapping[str, str] | None = None,
    notes: tuple[Text, ...] = (),
) -> Table:
    """Fill a layout: round the numbers and set the marks.

    `numbers` are without averages; differences from `published` and, with `spreads`, ± are printed beside them.
    `printed` are the paper's own averages and marks, to show the table as printed. `row_marks` are letters by model.
    """
    cells, places = computed(layout, numbers), layout.decimals
    # At least a decimal, so that the error of a share in whole percent is not printed as 0
    errors = NumberFormat(max(places, 1))
    marks: dict[CellKey, frozenset[str]] = defaultdict(frozenset)
    for mark, measure, models, winners in contests(layout, {key: number.value for key, number in cells.items()}):
        if all(model in winners for model in models if (model, measure) in cells):
            continue  # all are equal; the paper marks these too
        for model in winners:
            marks[model, measure] |= {mark}
    if printed is not None:
        cells |= {key: Number(value) for key, value in printed.values.items()}
        marks = printed.marks
    others = computed(layout, published) if published is not None else {}

    def cell(key: CellKey) -> Cell:
        if (number := cells.get(key)) is None:
            return Cell()
        spread = errors.spread(number.spread) if spreads else ""
        difference, kinds = "", marks.get(key, ())
        if key in others:  # of the rounded numbers, so that it agrees with the printed ones
            rounded = half_up(number.value, places) - half_up(others[key].value, places)
            difference = to_text(rounded, places, signed=True)
        value = to_text(number.value, places) + layout.unit
        return Cell(value, spread, difference, "bold" in kinds, "underline" in kinds, key in significant)

    letters = {key: superscript(letter) for key, letter in (row_marks or {}).items()}
    of_rows, of_columns = (letters, {}) if layout.models_are_rows else ({}, letters)
    across = [key for group in layout.columns for key in group.items]

    def line(key: str, item: LayoutItem) -> Line:
        keys = [(key, other) if layout.models_are_rows else (other, key) for other in across]
        facts = tuple(item.facts.get(name, ()) for name in layout.facts)
        return Line(key, item.label + of_rows.get(key, ()), item.indent, facts, tuple(map(cell, keys)))

    columns, sections = [], []
    for group in layout.columns:
        labels = tuple(item.label + of_columns.get(key, ()) for key, item in group.items.items())
        columns.append(ColumnGroup(group.title, labels))
    for group in layout.rows:
        sections.append(Section(group.title, group.drawn, tuple(line(*item) for item in group.items.items())))
    facts = tuple(layout.facts.values())
    return Table(layout.name, layout.caption, layout.corner, facts, tuple(columns), tuple(sections), notes)
