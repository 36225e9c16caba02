"""Table layouts: YAML files that define the content and style of a table.

In: `configs/tables/NAME.yaml` or a user's file of the same form. Out: a `TableLayout`. The form:

    caption: text in markup (tables/markup.py)
    suite: zeroshot8            # or longbench, or a suite's file, relative to this one: tasks and averages; omitted
                                # where all numbers come from a CSV
    data: main_res              # results/published/main_res.csv; or a path ending in .csv, relative to this file
    models: rows                # which axis the runs fill: rows or columns
    corner: "**Model**"         # heading of the labels
    facts: {parameters: "#P"}   # text columns after the labels
    decimals: 1
    unit: ""                    # after every number
    marks: {bold: highest in section, underline: lowest in table}
    rows:                       # groups of lines
      - title: "*125M parameters*"
        style: ruled            # title between rules; heading: title on a line; line: a rule and no title
        items:
          vanilla_125m: {label: ~Vanilla~, model: llama-125m-vanilla}    # of `evalkit models ls`, or FILE.yaml:NAME
          intg_125m: {label: ~Intg~, indent: true, facts: {parameters: 1.2B}, model: [one, or another]}
          cosmo: {label: cosmo, no_model: why it is none of them}
    columns:                    # groups of columns, titles over them
      - {title: Reasoning, items: {winogrande: Winogrd, arc_easy: ARCe}}
      - {items: {Average: Avg.}}

A section, for marks, is a group of models. `model` assigns runs to rows; a run of another model is marked. A layout
with `pairs` compares models with a baseline (`paired_sizes.py`), and `model` then names a model of each size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, model_validator

from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.benchmarks.registry import kinds, suite_averages
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.inputs.validated import FileSettings, Listed, Named, read_settings
from evalkit.paths import resource
from evalkit.reporting.markup import Text, parse
from evalkit.tables.paired_sizes import BASELINE, Models, PairedSize, PairedSizeFile, check_pairs, names, paired_sizes

AVERAGE = "Average"
"""The mean over all tasks of the suite. LongBench's own average is different: the mean of its groups' means."""

_EXTREMES, _SCOPES = ("highest", "lowest"), ("section", "table")


@dataclass(frozen=True)
class LayoutItem:
    """A row or a column of a table."""

    key: str
    """Key of the model or the measure."""
    label: Text
    indent: bool = False
    facts: tuple[Text, ...] = ()
    """Text cells after the label, one for each of the layout's facts."""
    models: tuple[str, ...] = ()
    """Models of its runs, as `zoo.named_model` accepts, files relative to the layout; empty: any model."""
    no_model: str = ""
    """Why no named model belongs to it."""
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Size → its models, in a layout with `pairs`; `models` is then empty."""


@dataclass(frozen=True)
class Group:
    """Rows or columns with a common title."""

    title: Text
    style: str
    items: tuple[LayoutItem, ...]


@dataclass(frozen=True)
class Mark:
    """Rule for marking a number of each measure."""

    extreme: str
    """highest or lowest."""
    scope: str
    """section or table: the models that are compared."""


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
    """CSV of its published numbers; it need not exist."""
    models_are_rows: bool
    corner: Text
    facts: tuple[Text, ...]
    decimals: int
    unit: str
    marks: dict[str, Mark]
    """bold, underline → rule."""
    rows: tuple[Group, ...]
    columns: tuple[Group, ...]
    pairs: tuple[PairedSize, ...] = ()
    """Sizes with a baseline each: the numbers are shares of documents on which a model exceeds it."""

    @property
    def model_groups(self) -> tuple[Group, ...]:
        """Return the sections: groups of models."""
        return self.rows if self.models_are_rows else self.columns

    @property
    def measure_groups(self) -> tuple[Group, ...]:
        """Return the groups of tasks and averages."""
        return self.columns if self.models_are_rows else self.rows

    @property
    def models(self) -> tuple[LayoutItem, ...]:
        """Return the models, in order."""
        return tuple(item for group in self.model_groups for item in group.items)

    @property
    def assigned(self) -> tuple[LayoutItem, ...]:
        """Return the items that runs are assigned to: the models, or with `pairs` each size's baseline and models."""
        if not self.pairs:
            return self.models
        return tuple(
            LayoutItem(size.key(item.key), item.label, models=models)
            for size in self.pairs
            for item in (LayoutItem(BASELINE, (), sizes={size.name: size.baseline}), *self.models)
            if (models := item.sizes.get(size.name))
        )

    @property
    def measures(self) -> tuple[LayoutItem, ...]:
        """Return tasks and averages, in order."""
        return tuple(item for group in self.measure_groups for item in group.items)

    @property
    def printed(self) -> Path:
        """Return the CSV of printed averages and marks, which need not exist."""
        return self.data.parent / "printed" / f"{self.name}.csv"

    @property
    def in_percent(self) -> bool:
        """Return whether its numbers are percentages, by its suite or its unit."""
        return self.suite is not None or self.unit == "%"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the measures that are read, including the parts of averages."""
        read = [part for item in self.measures for part in self.averages.get(item.key, (item.key,))]
        return tuple(dict.fromkeys(read))


def layout_names() -> list[str]:
    """Return the names of the layouts that evalkit ships."""
    return sorted(path.stem for path in resource("configs", "tables").glob("*.yaml"))


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
    return _layout(path, read_settings(path, _LayoutFile, TableError, "layout"))


def _markup(given: object) -> Text:
    """Parse a text in markup, on one line; an integer is converted to text."""
    if not isinstance(given, (str, int)) or isinstance(given, bool):
        shown = "" if isinstance(given, (dict, list)) else f"; put the value {given} in quotes"
        raise ValueError(f"expected a text{shown}")
    try:
        return parse(" ".join(str(given).split()), "markup")
    except TableError as error:
        raise ValueError(str(error)) from error


def _mark(given: object) -> Mark:
    extreme, _, scope = str(given).partition(" in ")
    if extreme not in _EXTREMES or scope not in _SCOPES:
        raise ValueError(
            f"'{given!s:.60}' is not a mark; write 'highest in section', 'lowest in section', 'highest in table' or "
            "'lowest in table'"
        )
    return Mark(extreme, scope)


_Markup = Annotated[Text, PlainValidator(_markup)]


class _ItemFile(FileSettings):
    """Schema of a row or a column."""

    label: _Markup | None = None
    indent: bool = False
    facts: Named[_Markup] = Field(default_factory=dict)
    model: Models | Named[Models] = ()
    no_model: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_label(cls, given: object) -> object:
        """Expand a label without further keys to an item."""
        return given if isinstance(given, dict) else {"label": given}


class _GroupFile(FileSettings):
    """Schema of a group."""

    title: _Markup = ()
    style: Literal["ruled", "heading", "line"] | None = None
    items: Annotated[Named[_ItemFile], Field(min_length=1)]


class _LayoutFile(FileSettings):
    """Schema of a layout file; see the module's docstring."""

    caption: _Markup = ()
    suite: str | None = None
    data: str | None = None
    models: Literal["rows", "columns"] = "rows"
    corner: _Markup = ()
    facts: Named[_Markup] = Field(default_factory=dict)
    decimals: Annotated[int, Field(ge=0, le=9)] = 1
    unit: str = ""
    marks: dict[Literal["bold", "underline"], Annotated[Mark, PlainValidator(_mark)]] = Field(default_factory=dict)
    pairs: Named[PairedSizeFile] = Field(default_factory=dict)
    rows: Annotated[Listed[_GroupFile], Field(min_length=1)]
    columns: Annotated[Listed[_GroupFile], Field(min_length=1)]


def _layout(path: Path, content: _LayoutFile) -> TableLayout:
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
        facts=tuple(content.facts.values()),
        decimals=content.decimals,
        unit=content.unit,
        marks={str(kind): mark for kind, mark in content.marks.items()},
        rows=tuple(_group(path, group, content.facts) for group in content.rows),
        columns=tuple(_group(path, group, content.facts) for group in content.columns),
        pairs=paired_sizes(content.pairs),
    )
    _check(layout)
    return layout


def _suite(path: Path, given: str | None, paired: bool) -> tuple[str | None, dict[str, tuple[str, ...]]]:
    """Return the suite's name, and average → tasks; the path of a suite's file is relative to the layout.

    The measures of a layout with `pairs` are its own, and no tasks or averages.
    """
    if given is None:
        return None, {}
    try:
        if given.endswith((".yaml", ".yml")):
            own = load_suite(str(path.parent / given))
            return own.name, {} if paired else {**own.groups, AVERAGE: own.tasks}
        return given, {} if paired else suite_averages(given)
    except UsageError as error:
        if given in kinds():
            raise TableError(
                f"layout {path}: suite {given} has no averages and no list of tasks; remove 'suite' and give the "
                "numbers as a CSV"
            ) from error
        raise TableError(f"layout {path}: {error}") from error


def _group(path: Path, group: _GroupFile, facts: Collection[str]) -> Group:
    style = group.style or ("ruled" if group.title else "line")
    return Group(group.title, style, tuple(_item(path, key, item, facts) for key, item in group.items.items()))


def _item(path: Path, key: str, item: _ItemFile, facts: Collection[str]) -> LayoutItem:
    if unknown := next((name for name in item.facts if name not in facts), None):
        raise TableError(f"layout {path}: '{key}': {UnknownNameError('fact', unknown, facts)}")
    return LayoutItem(
        key=key,
        label=_markup(key) if item.label is None else item.label,
        indent=item.indent,
        facts=tuple(item.facts.get(name, ()) for name in facts),
        models=() if isinstance(item.model, dict) else names(item.model),
        no_model=item.no_model,
        sizes={size: names(models) for size, models in item.model.items()} if isinstance(item.model, dict) else {},
    )


def _check(layout: TableLayout) -> None:
    for axis, items in (("models", layout.models), ("measures", layout.measures)):
        keys = [item.key for item in items]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise TableError(f"layout {layout.path}: '{twice}' occurs twice among its {axis}; give each its own key")
    if misplaced := next((i.key for i in layout.measures if i.models or i.sizes or i.no_model), None):
        raise TableError(f"layout {layout.path}: '{misplaced}' is a measure; 'model' and 'no_model' are keys of models")
    check_pairs(layout)
    if layout.suite is not None and not layout.pairs:
        known = (*layout.averages[AVERAGE], *layout.averages)
        for item in layout.measures:
            if item.key not in known:
                raise TableError(f"layout {layout.path}: {UnknownNameError('task', item.key, known)}")
