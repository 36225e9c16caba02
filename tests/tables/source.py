"""The paper's tables read from LaTeX, independently of evalkit's code: a small reader of tabular bodies."""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Printed(NamedTuple):
    """One cell of a tabular, whatever commands made it."""

    text: str
    bold: bool
    underline: bool


class Row(NamedTuple):
    label: str
    cells: tuple[Printed, ...]


class Body(NamedTuple):
    """A tabular: the labels of its columns, the titles of groups of columns and of rows, and its rows."""

    heading: tuple[str, ...]
    titles: tuple[str, ...]
    rows: tuple[Row, ...]


def words(source: str) -> str:
    """The characters that a piece of a label prints, in lower case."""
    text = re.sub(r"\\(hspace|phantom|cmidrule\(lr\))\{[^}]*\}", "", source)
    text = re.sub(r"\\(multirow|multicolumn)\{[^}]*\}\{[^}]*\}", "", text)
    text = re.sub(r"\\([a-z]+)\s*", "", text)
    return re.sub(r"\s+", " ", re.sub(r"[{}$\\]", "", text)).strip().lower()


def cell(source: str) -> Printed:
    bold = r"\bf" in source or r"\textbf" in source
    return Printed(words(source).replace(" ", ""), bold, r"\underline" in source)


def read_tabular(source: str) -> Body:
    content = source.split(r"\toprule", 1)[1].split(r"\bottomrule")[0]
    content = re.sub(r"\\(midrule|cmidrule\(lr\)\{[^}]*\})", "", content)
    heading: tuple[str, ...] = ()
    titles: list[str] = []
    rows: list[Row] = []
    for line in re.split(r"(?<!\\)\\\\", content):
        parts = [part.strip() for part in line.split("&")]
        titles += [words(part) for part in parts if r"\multicolumn" in part]
        cells = [part for part in parts[1:] if r"\multicolumn" not in part]
        if any(re.search(r"\d", part) for part in cells) and heading:
            rows.append(Row(words(parts[0]), tuple(map(cell, parts[1:]))))
        elif len(cells) == len(parts) - 1 and len(parts) > 1 and not heading:
            heading = tuple(map(words, parts[1:]))
        elif len(parts) > 1 and not any(cells) and words(parts[0]) and heading:
            titles.append(words(parts[0]))  # a line of a label alone
    return Body(heading, tuple(title for title in titles if title), tuple(rows))


def read_paper(source: str) -> dict[str, Body]:
    """Every table of the paper's source, by its label."""
    return {
        label[1]: read_tabular(source[source.rindex(r"\begin{table", 0, label.start()) : label.start()])
        for label in re.finditer(r"\\label\{tab:(\w+)\}", source)
    }


def to_json(body: Body) -> dict[str, list[Any]]:
    """As the fixtures have it: a row is its label and its cells, a cell its text and its marks."""

    def marked(cell: Printed) -> str:
        return " ".join([cell.text, *["bold"] * cell.bold, *["underlined"] * cell.underline])

    rows = [[row.label, *map(marked, row.cells)] for row in body.rows]
    return {"heading": [*body.heading], "titles": [*body.titles], "rows": rows}
