"""Which numbers of a table are best.

In: a layout and its numbers. Out: the cells that its rule marks. Numbers are compared as they are printed, so that what
looks equal is marked equal: a reader cannot tell 39.84 from 39.79 where both stand as 39.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from evalkit.reporting.decimals import half_up
from evalkit.tables.layout import TableLayout

Cell = tuple[str, str]
"""(model, measure)."""


class Contest(NamedTuple):
    """The cells of one measure among which one kind of mark is given, and the winners."""

    kind: str
    """bold or underline."""
    measure: str
    models: tuple[str, ...]
    """All that take part, in the table's order; some may have no number."""
    winners: frozenset[str]
    """Those at the extreme: several where they are printed alike, none where there is no number."""


def contests(layout: TableLayout, values: Mapping[Cell, Fraction]) -> Iterator[Contest]:
    """Every place where the layout's rule marks something."""
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


def best_marks(layout: TableLayout, values: Mapping[Cell, Fraction]) -> dict[Cell, frozenset[str]]:
    """Marks by cell, where there are any."""
    marks: dict[Cell, frozenset[str]] = {}
    for contest in contests(layout, values):
        for model in contest.winners:
            cell = (model, contest.measure)
            marks[cell] = marks.get(cell, frozenset()) | {contest.kind}
    return marks
