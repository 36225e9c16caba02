"""Numbers stored as CSV: the paper's (`results/published/`), or users' own in the same form.

In: a CSV with models in its first column and a measure in each further column. Out: numbers. The paper's printed
averages and marks are in files in `printed/`, which are read only to print or audit a table as printed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from evalkit.errors import TableError, UsageError
from evalkit.inputs.reading import MOST_BYTES, Unreadable, read_bytes
from evalkit.reporting.decimals import parse_number
from evalkit.tables.layout import TableLayout


@dataclass(frozen=True)
class Number:
    """A measured or published number, in the table's unit (percent for accuracies)."""

    value: Fraction
    spread: Fraction | None = None
    """A standard error, or the standard deviation over seeds."""


Numbers = Mapping[str, Mapping[str, Number]]
"""Model → measure → number, without keys for missing numbers."""


class Printed(NamedTuple):
    """Averages and marks as the paper printed them."""

    values: dict[tuple[str, str], Fraction]
    """(model, measure) → the printed mean."""
    marks: dict[tuple[str, str], frozenset[str]]
    """(model, measure) → bold, underline."""


def read_numbers(path: Path, in_percent: bool = False) -> dict[str, dict[str, Number]]:
    """Read a CSV of numbers, which are from 0 to 100 if `in_percent`.

    Raises:
        TableError: it cannot be read, a name occurs twice, or a cell is not such a number; names row and column.
    """
    lines = _lines(path)
    _, header = next(lines, (1, [""]))
    measures = header[1:]
    if len(set(measures)) != len(measures) or "" in measures:
        raise TableError(f"{path}, line 1: every column but the first must have a name of its own")
    numbers: dict[str, dict[str, Number]] = {}
    for place, (model, *cells) in lines:
        if model in numbers:
            raise TableError(f"{path}, line {place}: row '{model}' occurs twice; remove one")
        if len(cells) != len(measures):
            raise TableError(f"{path}, line {place}, row '{model}': {len(cells)} cells for {len(measures)} columns")
        numbers[model] = {}
        for measure, cell in zip(measures, cells, strict=True):
            if (value := _number(cell, path, model, measure)) is not None:
                if in_percent and not 0 <= value <= 100:
                    raise TableError(
                        f"{path}, line {place}, row '{model}', column '{measure}': {cell} is not a percentage; this "
                        "table has numbers from 0 to 100"
                    )
                numbers[model][measure] = Number(value)
    return numbers


def read_printed(path: Path) -> Printed:
    """Read printed averages and marks: lines of model, measure, printed, marks."""
    lines = _lines(path)
    _, header = next(lines, (1, []))
    if header != ["model", "measure", "printed", "marks"]:
        raise TableError(f"{path}, line 1: expected the columns model,measure,printed,marks")
    content = Printed({}, {})
    for place, cells in lines:
        if len(cells) != 4:
            raise TableError(f"{path}, line {place}: expected 4 cells, found {len(cells)}")
        model, measure, printed, marks = cells
        if (value := _number(printed, path, model, measure)) is not None:
            content.values[model, measure] = value
        kinds = frozenset(marks.split())
        if strange := kinds - {"bold", "underline"}:
            raise TableError(f"{path}, line {place}: mark '{min(strange)}' is neither bold nor underline")
        if kinds:
            content.marks[model, measure] = kinds
    return content


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


def _number(cell: str, path: Path, model: str, measure: str) -> Fraction | None:
    try:
        return parse_number(cell)
    except ValueError as error:
        raise TableError(
            f"{path}, row '{model}', column '{measure}': {error}; write digits with a decimal point, "
            "or leave the cell empty where there is no number"
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each line that is not empty."""
    try:
        text = read_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except Unreadable as error:
        raise TableError(f"{path} {error}") from error
    except OSError as error:
        raise TableError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not UTF-8 text; save it as CSV in UTF-8") from error
    reader = csv.reader(text.splitlines())
    try:
        for cells in reader:
            if any(cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise TableError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from error
