"""Marks of the best numbers of a table.

In: a layout and its numbers. Out: the cells that its rule marks. Numbers are compared as printed, so that equal printed
numbers get equal marks: 39.84 and 39.79 are both printed as 39.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from evalkit.reporting.decimals import half_up
from evalkit.tables.layout import TableLayout

CellKey = tuple[str, str]
"""(model, measure)."""


class Contest(NamedTuple):
    """Cells of one measure that compete for one kind of mark, and the winners."""

    kind: str
    """bold or underline."""
    measure: str
    models: tuple[str, ...]
    """The competing models, in the table's order; some may have no number."""
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
    """Return the marks of each marked cell."""
    marks: dict[CellKey, frozenset[str]] = {}
    for contest in contests(layout, values):
        for model in contest.winners:
            cell = (model, contest.measure)
            marks[cell] = marks.get(cell, frozenset()) | {contest.kind}
    return marks
