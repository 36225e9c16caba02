"""Layouts: small YAML files that say what a table shows and how it looks.

In: `configs/tables/NAME.yaml` or a user's file of the same form. Out: a `TableLayout`. The form:

    caption: text in markup (tables/markup.py)
    suite: zeroshot8            # or longbench, or a suite's file, seen from this one: tasks and averages; left out
                                # where the numbers come from a CSV alone
    data: main_res              # results/published/main_res.csv; or a path ending in .csv, seen from this file
    models: rows                # which axis the runs fill: rows or columns
    corner: "**Model**"         # over the labels
    facts: {parameters: "#P"}   # columns of text beside the labels
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

A section, for marks, is a group of models. By `model` a run finds its row, and a run of another model is marked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, model_validator

from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.benchmarks.registry import kinds, suite_averages
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.inputs.settings import FileSettings, Listed, Named, NonEmpty, read_settings
from evalkit.reporting.markup import Text, parse
from evalkit.resources import resource

AVERAGE = "Average"
"""The mean over all tasks of the suite; LongBench's own average is another, the mean of its groups' means."""

_EXTREMES, _SCOPES = ("highest", "lowest"), ("section", "table")


@dataclass(frozen=True)
class LayoutItem:
    """A line or a column."""

    key: str
    """Of the model or the measure."""
    label: Text
    indent: bool = False
    facts: tuple[Text, ...] = ()
    """Texts beside the label, one for each of the layout's facts."""
    models: tuple[str, ...] = ()
    """What its runs are of, as `zoo.named_model` takes it, files seen from the layout; anything where it is empty."""
    no_model: str = ""
    """Why it shows no model that has a name."""


@dataclass(frozen=True)
class Group:
    """Lines or columns that belong together."""

    title: Text
    style: str
    items: tuple[LayoutItem, ...]


@dataclass(frozen=True)
class Mark:
    """Which number of each measure is marked."""

    extreme: str
    """highest or lowest."""
    scope: str
    """Among the models of a section, or of the table."""


@dataclass(frozen=True)
class TableLayout:
    """What a table shows."""

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
    """bold, underline → what is so marked."""
    rows: tuple[Group, ...]
    columns: tuple[Group, ...]

    @property
    def model_groups(self) -> tuple[Group, ...]:
        """The sections: groups of what a run fills."""
        return self.rows if self.models_are_rows else self.columns

    @property
    def measure_groups(self) -> tuple[Group, ...]:
        """Groups of tasks and averages."""
        return self.columns if self.models_are_rows else self.rows

    @property
    def models(self) -> tuple[LayoutItem, ...]:
        """What a run fills, in order."""
        return tuple(item for group in self.model_groups for item in group.items)

    @property
    def measures(self) -> tuple[LayoutItem, ...]:
        """Tasks and averages, in order."""
        return tuple(item for group in self.measure_groups for item in group.items)

    @property
    def printed(self) -> Path:
        """CSV of what the paper printed in computed cells, and of its marks; it need not exist."""
        return self.data.parent / "printed" / f"{self.name}.csv"

    @property
    def in_percent(self) -> bool:
        """Whether its numbers are shares of a whole: scores of a suite, or what its unit says."""
        return self.suite is not None or self.unit == "%"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Measures that are read, those that its averages are made of included."""
        read = [part for item in self.measures for part in self.averages.get(item.key, (item.key,))]
        return tuple(dict.fromkeys(read))


def layout_names() -> list[str]:
    """Names of the layouts that evalkit ships."""
    return sorted(path.stem for path in resource("configs", "tables").glob("*.yaml"))


def load_layout(name: str) -> TableLayout:
    """Read a layout by name, or from a user's YAML file.

    Raises:
        UnknownNameError: neither a known name nor a file; or a measure that its suite does not have.
        TableError: the file is not a layout; says which key is wrong.
    """
    path = Path(name)
    if name in layout_names():
        path = resource("configs", "tables", f"{name}.yaml")
    elif path.suffix not in (".yaml", ".yml"):
        raise UnknownNameError("table", name, layout_names())
    return _layout(path, read_settings(path, _LayoutFile, TableError, "layout"))


def _markup(given: object) -> Text:
    """A text in markup, on one line; a whole number is one too."""
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
        raise ValueError(f"'{given!s:.60}' is no mark; write 'highest in section', or lowest, or in table")
    return Mark(extreme, scope)


_Markup = Annotated[Text, PlainValidator(_markup)]


class _ItemFile(FileSettings):
    """What the file says of a line or a column."""

    label: _Markup | None = None
    indent: bool = False
    facts: Named[_Markup] = Field(default_factory=dict)
    model: NonEmpty | Listed[NonEmpty] = ()
    no_model: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_label(cls, given: object) -> object:
        """A label alone stands for an item that has no more."""
        return given if isinstance(given, dict) else {"label": given}


class _GroupFile(FileSettings):
    """What it says of several."""

    title: _Markup = ()
    style: Literal["ruled", "heading", "line"] | None = None
    items: Annotated[Named[_ItemFile], Field(min_length=1)]


class _LayoutFile(FileSettings):
    """See the module."""

    caption: _Markup = ()
    suite: str | None = None
    data: str | None = None
    models: Literal["rows", "columns"] = "rows"
    corner: _Markup = ()
    facts: Named[_Markup] = Field(default_factory=dict)
    decimals: Annotated[int, Field(ge=0, le=9)] = 1
    unit: str = ""
    marks: dict[Literal["bold", "underline"], Annotated[Mark, PlainValidator(_mark)]] = Field(default_factory=dict)
    rows: Annotated[Listed[_GroupFile], Field(min_length=1)]
    columns: Annotated[Listed[_GroupFile], Field(min_length=1)]


def _layout(path: Path, content: _LayoutFile) -> TableLayout:
    data = content.data or path.stem
    suite, averages = _suite(path, content.suite)
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
    )
    _check(layout)
    return layout


def _suite(path: Path, given: str | None) -> tuple[str | None, dict[str, tuple[str, ...]]]:
    """The suite's name, and average → tasks; a suite's file lies beside the layout, or where its path says."""
    if given is None:
        return None, {}
    try:
        if given.endswith((".yaml", ".yml")):
            own = load_suite(str(path.parent / given))
            return own.name, {**own.groups, AVERAGE: own.tasks}
        return given, suite_averages(given)
    except UsageError as error:
        if given in kinds():
            raise TableError(
                f"layout {path}: suite {given} has no averages and no list of tasks; leave 'suite' out and give the "
                "numbers as a CSV"
            ) from error
        raise TableError(f"layout {path}: {error}") from error


def _group(path: Path, group: _GroupFile, facts: Collection[str]) -> Group:
    style = group.style or ("ruled" if group.title else "line")
    return Group(group.title, style, tuple(_item(path, key, item, facts) for key, item in group.items.items()))


def _item(path: Path, key: str, item: _ItemFile, facts: Collection[str]) -> LayoutItem:
    if strange := next((name for name in item.facts if name not in facts), None):
        raise TableError(f"layout {path}: '{key}': {UnknownNameError('fact', strange, facts)}")
    return LayoutItem(
        key=key,
        label=_markup(key) if item.label is None else item.label,
        indent=item.indent,
        facts=tuple(item.facts.get(name, ()) for name in facts),
        models=(item.model,) if isinstance(item.model, str) else item.model,
        no_model=item.no_model,
    )


def _check(layout: TableLayout) -> None:
    for axis, items in (("models", layout.models), ("measures", layout.measures)):
        keys = [item.key for item in items]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise TableError(f"layout {layout.path}: '{twice}' stands twice among its {axis}; give each its own key")
    if odd := next((item.key for item in layout.measures if item.models or item.no_model), None):
        raise TableError(f"layout {layout.path}: '{odd}' is a measure, so it has no model; say it of what runs fill")
    if layout.suite is not None:
        known = (*layout.averages[AVERAGE], *layout.averages)
        for item in layout.measures:
            if item.key not in known:
                raise TableError(f"layout {layout.path}: {UnknownNameError('task', item.key, known)}")
