"""Numbers stored as CSV: the paper's (`results/published/`), or users' own in the same form.

In: a CSV with models in its first column and a measure in each further column. Out: numbers. The paper's printed
averages and marks are in files in `printed/`, which are read only to print or audit a table as printed.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from evalkit.errors import TableError, UsageError
from evalkit.inputs.reading import MOST_BYTES, Unreadable, decoded, read_as
from evalkit.reporting.decimals import parse_number
from evalkit.tables.layout import TableLayout

CellKey = tuple[str, str]
"""(model, measure)."""


@dataclass(frozen=True)
class Number:
    """A measured or published number, in the table's unit (percent for accuracies)."""

    value: Fraction
    spread: Fraction | None = None
    """A standard error, or the standard deviation over seeds."""


Numbers = Mapping[str, Mapping[str, Number]]
"""Model → measure → number, without keys for missing numbers."""


class Printed(NamedTuple):
    """Averages and marks (bold, underline) as the paper printed them."""

    values: dict[CellKey, Fraction]
    marks: dict[CellKey, frozenset[str]]


def read_numbers(path: Path, in_percent: bool = False) -> dict[str, dict[str, Number]]:
    """Read a CSV of numbers, which are from 0 to 100 if `in_percent`.

    Raises:
        TableError: it cannot be read, a name occurs twice, or a cell is not such a number; names row and column.
    """

    def parse(data: bytes) -> dict[str, dict[str, Number]]:
        (_, (_, *measures)), *lines = _lines(data) or [(1, [""])]
        if len(set(measures)) != len(measures) or "" in measures:
            raise Unreadable("every column but the first must have a name of its own", 1)
        numbers: dict[str, dict[str, Number]] = {}
        for line, (model, *cells) in lines:
            if model in numbers:
                raise Unreadable(f"row '{model}' occurs twice; remove one", line)
            if len(cells) != len(measures):
                raise Unreadable(f"row '{model}': {len(cells)} cells for {len(measures)} columns", line)
            numbers[model] = {}
            for measure, cell in zip(measures, cells, strict=True):
                if (value := _number(cell, line, model, measure)) is not None:
                    if in_percent and not 0 <= value <= 100:
                        where = f"row '{model}', column '{measure}'"
                        raise Unreadable(f"{where}: {cell} is not a percentage, a number from 0 to 100", line)
                    numbers[model][measure] = Number(value)
        return numbers

    numbers: dict[str, dict[str, Number]] = read_as(path, TableError, "", MOST_BYTES, parse)
    return numbers


def read_printed(path: Path) -> Printed:
    """Read printed averages and marks: lines of model, measure, printed, marks. Raises `TableError`."""

    def parse(data: bytes) -> Printed:
        (_, header), *lines = _lines(data) or [(1, [""])]
        if header != ["model", "measure", "printed", "marks"]:
            raise Unreadable("expected the columns model,measure,printed,marks", 1)
        content = Printed({}, {})
        for line, cells in lines:
            if len(cells) != 4:
                raise Unreadable(f"expected 4 cells, found {len(cells)}", line)
            model, measure, printed, marks = cells
            if (value := _number(printed, line, model, measure)) is not None:
                content.values[model, measure] = value
            if strange := set(marks.split()) - {"bold", "underline"}:
                raise Unreadable(f"mark '{min(strange)}' is neither bold nor underline", line)
            if marks:
                content.marks[model, measure] = frozenset(marks.split())
        return content

    printed: Printed = read_as(path, TableError, "", MOST_BYTES, parse)
    return printed


def published_numbers(layout: TableLayout) -> dict[str, dict[str, Number]]:
    """Read a layout's published numbers.

    Raises:
        UsageError: it has none.
        TableError: they cannot be read, or their columns do not fit the layout.
    """
    if not layout.data.is_file():
        raise UsageError(
            f"table {layout.name} has no published numbers ({layout.data} does not exist): fill it from runs with "
            "--source runs, or name a CSV under 'data' in its layout"
        )
    numbers = read_numbers(layout.data, layout.in_percent)
    columns = {column for row in numbers.values() for column in row}
    if stored := columns & layout.averages.keys():
        raise TableError(f"{layout.data}: column '{min(stored)}' is an average, which is computed; remove it")
    if missing := [task for task in layout.tasks if task not in columns]:
        raise TableError(f"{layout.data} has no numbers in a column '{missing[0]}', which layout {layout.path} shows")
    return numbers


def printed_cells(layout: TableLayout) -> Printed:
    """Read a layout's averages and marks as they were printed; a `UsageError` where there is no such file."""
    path = layout.data.parent / "printed" / f"{layout.name}.csv"
    if not path.is_file():
        raise UsageError(f"table {layout.name} has no printed averages and marks ({path} does not exist)")
    return read_printed(path)


def _number(cell: str, line: int, model: str, measure: str) -> Fraction | None:
    try:
        return parse_number(cell)
    except ValueError as error:
        reason = f"{error}; write digits with a decimal point, or leave the cell empty where there is no number"
        raise Unreadable(f"row '{model}', column '{measure}': {reason}", line) from error


def _lines(data: bytes) -> list[tuple[int, list[str]]]:
    """Return (line number, cells) of each line that is not empty."""
    reader = csv.reader(decoded(data.removeprefix(codecs.BOM_UTF8)).splitlines())
    try:
        return [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    except csv.Error as error:
        raise Unreadable(f"not valid CSV: {error}", reader.line_num) from error
