"""Table layouts: content and style of a table.

In: a YAML file of `configs/tables/`, or a user's of the same form (docs/tables.md; `pairs`: docs/reference/tables.md).
Out: a `TableLayout`. `model` assigns runs to rows; with `pairs` a row has a model of each size, and the numbers are
shares of documents on which it exceeds the size's baseline (`row_models.py`). Runs then belong to a row and a size
(`diff/125m`), or to a baseline (`baseline/125m`), which no row shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PlainValidator

from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.benchmarks.registry import suite_averages
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty, read_settings
from evalkit.paths import resource
from evalkit.reporting.table import Text, parse

AVERAGE = "Average"
"""The mean over all tasks of the suite. LongBench's own average is different: the mean of its groups' means."""
BASELINE = "baseline"
"""Stands for the row in the key of a baseline's runs."""


def _markup(given: object) -> Text:
    """Parse a text in markup, on one line; an integer is converted to text."""
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        shown = "" if isinstance(given, (dict, list)) else f"; put the value {given} in quotes"
        raise ValueError(f"expected a text{shown}")
    try:
        return parse(" ".join(str(given).split()), "markup")
    except TableError as error:
        raise ValueError(str(error)) from error


def _labelled(items: object) -> object:
    """Give every item its label: the text that stands for the item, or its key."""
    if not isinstance(items, dict):
        return items
    given = {key: item if isinstance(item, dict) else {"label": item} for key, item in items.items()}
    return {key: item if item.get("label") is not None else item | {"label": key} for key, item in given.items()}


Markup = Annotated[Text, PlainValidator(_markup)]
OneOrMore = Annotated[Listed[NonEmpty], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
"""A name, or a list of names."""


class LayoutItem(FileSettings):
    """A row or a column of a table: a model or a measure."""

    label: Markup
    indent: bool = False
    facts: Named[Markup] = Field(default_factory=dict)
    """Text cells after the label, by the layout's facts."""
    model: NonEmpty | Listed[NonEmpty] | Named[OneOrMore] = ()
    """Models of its runs, as `zoo.named_model` accepts, files relative to the layout; with `pairs`, by size."""
    no_model: str = ""
    """Why no named model belongs to it."""

    @property
    def by_size(self) -> dict[str, tuple[str, ...]]:
        """Size → its models; the size is empty without `pairs`."""
        if isinstance(self.model, dict):
            return self.model
        names = (self.model,) if isinstance(self.model, str) else self.model
        return {"": names} if names else {}


class Group(FileSettings):
    """Rows or columns with a common title."""

    title: Markup = ()
    style: Literal["ruled", "heading", "line"] | None = None
    items: Annotated[Named[LayoutItem], Field(min_length=1), BeforeValidator(_labelled)]

    @property
    def drawn(self) -> str:
        """The style, as in `reporting.table.Section`; by default ruled with a title, otherwise line."""
        return self.style or ("ruled" if self.title else "line")


class PairedSize(FileSettings):
    """Models of one size that are compared with a baseline, document by document."""

    baseline: OneOrMore
    measures: Annotated[Named[NonEmpty], Field(min_length=1)]
    """Measure of the layout → measure of documents, as `Comparable.by_rule` takes it."""


class Mark(NamedTuple):
    """Rule for marking a number of each measure: the highest or lowest in a section or the table."""

    extreme: str
    scope: str


@dataclass(frozen=True)
class TableLayout:
    """Content and style of a table."""

    name: str
    path: Path
    caption: Text
    suite: str | None
    averages: dict[str, tuple[str, ...]]
    """Computed measure → the tasks it is the mean of."""
    data: Path
    """CSV of its published numbers; it need not exist, as that of printed averages and marks in `printed/`."""
    models_are_rows: bool
    corner: Text
    facts: dict[str, Text]
    """Headings of text columns after the labels."""
    decimals: int
    unit: str
    marks: dict[str, Mark]
    rows: tuple[Group, ...]
    columns: tuple[Group, ...]
    pairs: Mapping[str, PairedSize]

    @property
    def model_groups(self) -> tuple[Group, ...]:
        return self.rows if self.models_are_rows else self.columns

    @property
    def measure_groups(self) -> tuple[Group, ...]:
        return self.columns if self.models_are_rows else self.rows

    @property
    def models(self) -> dict[str, LayoutItem]:
        return {key: item for group in self.model_groups for key, item in group.items.items()}

    @property
    def measures(self) -> dict[str, LayoutItem]:
        return {key: item for group in self.measure_groups for key, item in group.items.items()}

    @property
    def assigned(self) -> dict[str, tuple[str, ...]]:
        """Key of runs → their models: that of a row, or with `pairs` of a size's baseline and of its rows."""
        if not self.pairs:
            return {key: item.by_size.get("", ()) for key, item in self.models.items()}
        by_size = {
            size: {BASELINE: pair.baseline} | {key: item.by_size.get(size, ()) for key, item in self.models.items()}
            for size, pair in self.pairs.items()
        }
        return {run_key(row, size): names for size, rows in by_size.items() for row, names in rows.items() if names}

    @property
    def in_percent(self) -> bool:
        """Whether its numbers are percentages, by its suite or its unit."""
        return self.suite is not None or self.unit == "%"

    @property
    def tasks(self) -> tuple[str, ...]:
        """The measures that are read, including the parts of averages."""
        return tuple(dict.fromkeys(part for key in self.measures for part in self.averages.get(key, (key,))))


def run_key(row: str, size: str) -> str:
    """Return the key of the runs of a row, or of `BASELINE`, and a size."""
    return f"{row}/{size}"


def rows_by_key(layout: TableLayout) -> dict[str, str]:
    """Return the key of runs → the row that shows them; baselines, which no row shows, are not in it."""
    if not layout.pairs:
        return {row: row for row in layout.models}
    return {run_key(row, size): row for size in layout.pairs for row in layout.models}


def without_baseline(layout: TableLayout, given: Collection[str]) -> dict[str, str]:
    """Return, of the `given` keys with runs, those of rows whose baseline has none, with their size."""
    lacking = [size for size in layout.pairs if run_key(BASELINE, size) not in given]
    return {key: size for row in layout.models for size in lacking if (key := run_key(row, size)) in given}


def layout_names() -> list[str]:
    """Names of the layouts that evalkit ships."""
    return sorted(path.stem for path in resource("configs", "tables").glob("*.yaml"))


class _LayoutFile(FileSettings):
    caption: Markup = ()
    suite: str | None = None
    data: str | None = None
    models: Literal["rows", "columns"] = "rows"
    corner: Markup = ()
    facts: Named[Markup] = Field(default_factory=dict)
    decimals: Annotated[int, Field(ge=0, le=9)] = 1
    unit: str = ""
    marks: dict[
        Literal["bold", "underline"],
        Literal["highest in section", "lowest in section", "highest in table", "lowest in table"],
    ] = Field(default_factory=dict)
    pairs: Named[PairedSize] = Field(default_factory=dict)
    rows: Annotated[Listed[Group], Field(min_length=1)]
    columns: Annotated[Listed[Group], Field(min_length=1)]


def load_layout(name: str) -> TableLayout:
    """Read a layout by name, or from a user's YAML file.

    Raises:
        UnknownNameError: neither a known name nor a file; or a measure that its suite does not have.
        TableError: the file is not a valid layout; names the key.
    """
    path = Path(name)
    if name in layout_names():
        path = resource("configs", "tables", f"{name}.yaml")
    elif path.suffix not in (".yaml", ".yml"):
        raise UnknownNameError("table", name, layout_names())
    content = read_settings(path, _LayoutFile, TableError, "layout")
    data = content.data or path.stem
    suite, averages = _suite(path, content.suite, bool(content.pairs))
    layout = TableLayout(
        name=path.stem,
        path=path,
        caption=content.caption,
        suite=suite,
        averages=averages,
        data=path.parent / data if data.endswith(".csv") else resource("results", "published", f"{data}.csv"),
        models_are_rows=content.models == "rows",
        corner=content.corner,
        facts=content.facts,
        decimals=content.decimals,
        unit=content.unit,
        marks={str(kind): Mark(*rule.split(" in ")) for kind, rule in content.marks.items()},
        rows=content.rows,
        columns=content.columns,
        pairs=content.pairs,
    )
    if problem := next(_problems(layout), None):
        raise TableError(f"layout {path}: {problem}")
    return layout


def _suite(path: Path, given: str | None, paired: bool) -> tuple[str | None, dict[str, tuple[str, ...]]]:
    """Return the suite's name, and average → tasks; a layout with `pairs` has measures of its own, and no averages."""
    if given is None:
        return None, {}
    try:
        if given.endswith((".yaml", ".yml")):
            suite = load_suite(str(path.parent / given))
            return suite.name, {} if paired else {**suite.groups, AVERAGE: suite.tasks}
        return given, {} if paired else suite_averages(given)
    except UsageError as error:
        raise TableError(f"layout {path}: {error}") from error


def _problems(layout: TableLayout) -> Iterator[str]:
    for axis, groups in (("models", layout.model_groups), ("measures", layout.measure_groups)):
        keys = [key for group in groups for key in group.items]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            yield f"'{twice}' occurs twice among its {axis}; give each its own key"
    for key, item in (layout.models | layout.measures).items():
        if unknown := next((name for name in item.facts if name not in layout.facts), None):
            yield f"'{key}': {UnknownNameError('fact', unknown, layout.facts)}"
    if misplaced := next((key for key, item in layout.measures.items() if item.model or item.no_model), None):
        yield f"'{misplaced}' is a measure; 'model' and 'no_model' are keys of models"
    yield from _problems_of_pairs(layout, list(layout.pairs))
    if layout.suite is not None and not layout.pairs:
        known = (*layout.averages[AVERAGE], *layout.averages)
        yield from (str(UnknownNameError("task", key, known)) for key in layout.measures if key not in known)


def _problems_of_pairs(layout: TableLayout, sizes: Sequence[str]) -> Iterator[str]:
    for key, item in layout.models.items():
        if unknown := next((size for size in item.by_size if size and size not in sizes), None):
            pairs = str(UnknownNameError("size", unknown, sizes)) if sizes else "the layout has no 'pairs'"
            yield f"'{key}': model of '{unknown}': {pairs}"
        if sizes and not any(item.by_size) and not item.no_model:
            yield f"'{key}' needs its model of each size: 'model: {{{sizes[0]}: NAME}}'"
        if sizes and key == BASELINE:
            yield f"'{BASELINE}' stands for the models of 'pairs'; give the row another key"
    if not sizes:
        return
    if layout.suite is None:
        yield "'pairs' are of runs of one suite; add 'suite'"
    given = [measure for size in layout.pairs.values() for measure in size.measures]
    yield from (f"'pairs': {UnknownNameError('measure', key, layout.measures)}" for key in given
                if key not in layout.measures)  # fmt: skip
    for measure in layout.measures:
        if (count := given.count(measure)) != 1:
            yield f"'{measure}' is in {count} sizes of 'pairs'; name it in one"
