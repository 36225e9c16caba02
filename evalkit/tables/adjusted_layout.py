"""Layouts adjusted to a paper: another outcome, no empty rows, another caption, other titles of sections.

In: a layout, and what is to be changed. Out: a layout. Averages and numbers do not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from evalkit.errors import UnknownNameError, UsageError
from evalkit.reporting.markup import Text, literal, parse, plain
from evalkit.scores.outcomes import ACCURACY, OUTCOMES
from evalkit.tables.layout import Group, LayoutItem, TableLayout

_DECIMALS = 3
"""Of continuous outcomes."""
_SCOPES = {"section": "each section", "table": "the table"}


def retitled(layout: TableLayout, caption: str | None, titles: Mapping[str, str], where: str) -> TableLayout:
    """Return a layout with another caption and other titles.

    Args:
        layout: the layout.
        caption: in markup; None: the layout's own.
        titles: title of a group of rows or columns, as plain text → its replacement, in markup.
        where: source of the texts, for messages.

    Raises:
        UnknownNameError: no group has such a title.
        TableError: the markup is invalid.
    """
    known = {plain(group.title) for group in (*layout.rows, *layout.columns) if group.title}
    if unknown := next((title for title in titles if title not in known), None):
        raise UnknownNameError(f"title of table {layout.name} ({where})", unknown, known)
    texts = {title: _text(given, f"{where}, title '{title}'") for title, given in titles.items()}

    def renamed(groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(replace(group, title=texts.get(plain(group.title), group.title)) for group in groups)

    return replace(
        layout,
        caption=layout.caption if caption is None else _text(caption, f"{where}, caption"),
        rows=renamed(layout.rows),
        columns=renamed(layout.columns),
    )


def of_outcome(layout: TableLayout, name: str) -> TableLayout:
    """Return a layout for the means of a continuous outcome: another caption, its decimals, and marks by its direction.

    Raises:
        UnknownNameError: there is no such outcome.
        UsageError: the layout does not show means.
    """
    if name not in OUTCOMES:
        raise UnknownNameError("outcome", name, (ACCURACY, *OUTCOMES))
    if layout.pairs:
        raise UsageError(f"table {layout.name} shows shares of documents, not means; omit --outcome {name}")
    outcome = OUTCOMES[name]
    turned = {"highest": "lowest", "lowest": "highest"}
    marks = {
        kind: mark if outcome.higher_is_better else replace(mark, extreme=turned[mark.extreme])
        for kind, mark in layout.marks.items()
    }
    direction = "higher" if outcome.higher_is_better else "lower"
    legend = [f"{kind.capitalize()}: {mark.extreme} in {_SCOPES[mark.scope]}." for kind, mark in marks.items()]
    title = f"{outcome.title[:1].upper()}{outcome.title[1:]} of suite {layout.suite}, mean over documents; {direction}"
    caption = " ".join([f"{title} is better.", *legend])
    return replace(layout, caption=literal(caption), decimals=_DECIMALS, unit="", marks=marks)


def without_empty(layout: TableLayout, filled: Collection[str]) -> TableLayout:
    """Return a layout without models that have no numbers, and without sections that have no models.

    A row stays if an indented row below it has numbers: "all layers" alone would be read as that of the row above.

    Args:
        layout: the layout.
        filled: keys of the models with numbers.
    """
    groups = tuple(
        replace(group, items=items)
        for group in layout.model_groups
        if (items := _filled(group.items, filled, layout.models_are_rows))
    )
    return replace(layout, rows=groups) if layout.models_are_rows else replace(layout, columns=groups)


def _filled(items: tuple[LayoutItem, ...], filled: Collection[str], indented: bool) -> tuple[LayoutItem, ...]:
    """Return the items with numbers, and those that an indented one with numbers belongs to."""
    kept, parent = set(filled), None
    for item in items:
        if not item.indent:
            parent = item.key
        elif indented and parent is not None and item.key in filled:
            kept.add(parent)
    return tuple(item for item in items if item.key in kept)


def _text(given: str, where: str) -> Text:
    return parse(" ".join(given.split()), where)
