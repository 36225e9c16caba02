"""Sizes of models that a table compares with a baseline, document by document.

In: `pairs` of a layout file. Out: `PairedSize`s. The numbers of such a table (`shares.py`) are shares of documents:

    suite: attention
    pairs:
      125m:                               # name of the size
        baseline: llama-125m-vanilla      # `model` of the row that all others are compared with, which is not shown
        measures: {125m_last1: rank@-1}   # column → measure of documents, as a rule of `evalkit compare`

A row names its model of each size. Runs belong to a row and a size (`diff/125m`), or to a size's baseline
(`baseline/125m`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from evalkit.errors import TableError, UnknownNameError
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty

if TYPE_CHECKING:
    from evalkit.tables.layout import TableLayout

BASELINE = "baseline"
"""Stands for the row in the key of a baseline."""

Models = NonEmpty | Listed[NonEmpty]
"""A model's name, or several that belong to one row."""


@dataclass(frozen=True)
class PairedSize:
    """Models of one size and their baseline."""

    name: str
    baseline: tuple[str, ...]
    """Models of the baseline's runs, as in `LayoutItem`."""
    rules: Mapping[str, str]
    """Measure of the layout → measure of documents, as `Comparable.by_rule` takes it."""

    @property
    def baseline_key(self) -> str:
        """Return the key of the baseline's runs."""
        return self.key(BASELINE)

    def key(self, row: str) -> str:
        """Return the key of a row's runs of this size."""
        return f"{row}/{self.name}"


class PairedSizeFile(FileSettings):
    """Schema of a size; see the module's docstring."""

    baseline: Models
    measures: Annotated[Named[NonEmpty], Field(min_length=1)]


def paired_sizes(content: Mapping[str, PairedSizeFile]) -> tuple[PairedSize, ...]:
    """Return the sizes of a layout file."""
    return tuple(PairedSize(name, names(one.baseline), one.measures) for name, one in content.items())


def names(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of one model or of several."""
    return (given,) if isinstance(given, str) else given


def check_pairs(layout: TableLayout) -> None:
    """Check that rows and sizes fit each other.

    Raises:
        TableError: a row names a size that is not among `pairs`, or none; a measure is not of exactly one size.
    """
    where, sizes = f"layout {layout.path}", [size.name for size in layout.pairs]
    for item in layout.models:
        if unknown := next((size for size in item.sizes if size not in sizes), None):
            pairs = str(UnknownNameError("size", unknown, sizes)) if sizes else "the layout has no 'pairs'"
            raise TableError(f"{where}: '{item.key}': model of '{unknown}': {pairs}")
        if sizes and not item.sizes and not item.no_model:
            raise TableError(f"{where}: '{item.key}' needs its model of each size: 'model: {{{sizes[0]}: NAME}}'")
        if sizes and item.key == BASELINE:
            raise TableError(f"{where}: '{BASELINE}' stands for the models of 'pairs'; give the row another key")
    if layout.pairs:
        _check_measures(layout, where)


def _check_measures(layout: TableLayout, where: str) -> None:
    given = [measure for size in layout.pairs for measure in size.rules]
    shown = [item.key for item in layout.measures]
    if layout.suite is None:
        raise TableError(f"{where}: 'pairs' are of runs of one suite; add 'suite'")
    if unknown := next((measure for measure in given if measure not in shown), None):
        raise TableError(f"{where}: 'pairs': {UnknownNameError('measure', unknown, shown)}")
    if wrong := next((measure for measure in shown if given.count(measure) != 1), None):
        raise TableError(f"{where}: '{wrong}' is in {given.count(wrong)} sizes of 'pairs'; name it in one")


def without_baseline(layout: TableLayout, given: Collection[str]) -> dict[str, PairedSize]:
    """Return the keys of rows with runs whose baseline has none, with their size.

    Args:
        layout: the layout.
        given: keys with runs.
    """
    lacking = [size for size in layout.pairs if size.baseline_key not in given]
    return {key: size for item in layout.models for size in lacking if (key := size.key(item.key)) in given}


def rows_by_key(layout: TableLayout) -> dict[str, str]:
    """Return the key of runs → the row that shows them; baselines, which no row shows, are not in it."""
    if not layout.pairs:
        return {item.key: item.key for item in layout.models}
    return {size.key(item.key): item.key for size in layout.pairs for item in layout.models}
