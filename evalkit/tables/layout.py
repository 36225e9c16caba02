"""Table layouts: YAML files that define the content and style of a table.

In: `configs/tables/NAME.yaml` or a user's file of the same form. Out: a `TableLayout`. The form:

    caption: text in markup (reporting/table.py)
    suite: zeroshot8            # or longbench, or a suite's file, relative to this one: tasks and averages; omitted
                                # where all numbers come from a CSV
    data: main_res              # results/published/main_res.csv; or a path ending in .csv, relative to this file
    models: rows                # which axis the runs fill: rows or columns
    corner: "**Model**"         # heading of the labels
    facts: {parameters: "#P"}   # text columns after the labels
    decimals: 1
    unit: ""                    # after every number
    marks: {bold: highest in section, underline: lowest in table}    # a section is a group of models
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

`model` assigns runs to rows; a run of another model is marked. With `pairs`, a row names its model of each size, and
the numbers are shares of documents on which the model exceeds the size's baseline (`row_models.py`). Runs then belong
to a row and a size (`diff/125m`), or to a baseline (`baseline/125m`), which no row shows:

    pairs:
      125m: {baseline: llama-125m-vanilla, measures: {125m_last1: rank@-1}}    # column → rule of `evalkit compare`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PlainValidator, model_validator

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


@dataclass(frozen=True)
class LayoutItem:
    """A row or a column of a table: a model or a measure."""

    key: str
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


class Group(NamedTuple):
    """Rows or columns with a common title."""

    title: Text
    style: str
    items: tuple[LayoutItem, ...]


@dataclass(frozen=True)
class PairedSize:
    """Models of one size that are compared with a baseline, document by document."""

    name: str
    baseline: tuple[str, ...]
    """Models of the baseline's runs, as in `LayoutItem`."""
    rules: Mapping[str, str]
    """Measure of the layout → measure of documents, as `Comparable.by_rule` takes it."""

    @property
    def baseline_key(self) -> str:
        return self.key(BASELINE)

    def key(self, row: str) -> str:
        return f"{row}/{self.name}"


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
    facts: tuple[Text, ...]
    decimals: int
    unit: str
    marks: dict[str, Mark]
    rows: tuple[Group, ...]
    columns: tuple[Group, ...]
    pairs: tuple[PairedSize, ...] = ()

    @property
    def model_groups(self) -> tuple[Group, ...]:
        return self.rows if self.models_are_rows else self.columns

    @property
    def measure_groups(self) -> tuple[Group, ...]:
        return self.columns if self.models_are_rows else self.rows

    @property
    def models(self) -> tuple[LayoutItem, ...]:
        return tuple(item for group in self.model_groups for item in group.items)

    @property
    def assigned(self) -> tuple[LayoutItem, ...]:
        """Items that runs are assigned to: the models, or with `pairs` each size's baseline and models."""
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
        return tuple(item for group in self.measure_groups for item in group.items)

    @property
    def in_percent(self) -> bool:
        """Whether its numbers are percentages, by its suite or its unit."""
        return self.suite is not None or self.unit == "%"

    @property
    def tasks(self) -> tuple[str, ...]:
        """The measures that are read, including the parts of averages."""
        read = [part for item in self.measures for part in self.averages.get(item.key, (item.key,))]
        return tuple(dict.fromkeys(read))


def rows_by_key(layout: TableLayout) -> dict[str, str]:
    """Return the key of runs → the row that shows them; baselines, which no row shows, are not in it."""
    if not layout.pairs:
        return {item.key: item.key for item in layout.models}
    return {size.key(item.key): item.key for size in layout.pairs for item in layout.models}


def without_baseline(layout: TableLayout, given: Collection[str]) -> dict[str, PairedSize]:
    """Return, of the `given` keys with runs, those of rows whose baseline has none, with their size."""
    lacking = [size for size in layout.pairs if size.baseline_key not in given]
    return {key: size for item in layout.models for size in lacking if (key := size.key(item.key)) in given}


def layout_names() -> list[str]:
    """Names of the layouts that evalkit ships."""
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


_Markup = Annotated[Text, PlainValidator(_markup)]
_MarkRule = Literal["highest in section", "lowest in section", "highest in table", "lowest in table"]
_Models = NonEmpty | Listed[NonEmpty]
"""A model's name, or several that belong to one row."""


def _names(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given


class _ItemFile(FileSettings):
    label: _Markup | None = None
    indent: bool = False
    facts: Named[_Markup] = Field(default_factory=dict)
    model: _Models | Named[_Models] = ()
    no_model: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_label(cls, given: object) -> object:
        return given if isinstance(given, dict) else {"label": given}


class _GroupFile(FileSettings):
    title: _Markup = ()
    style: Literal["ruled", "heading", "line"] | None = None
    items: Annotated[Named[_ItemFile], Field(min_length=1)]


class _PairedSizeFile(FileSettings):
    baseline: _Models
    measures: Annotated[Named[NonEmpty], Field(min_length=1)]


class _LayoutFile(FileSettings):
    caption: _Markup = ()
    suite: str | None = None
    data: str | None = None
    models: Literal["rows", "columns"] = "rows"
    corner: _Markup = ()
    facts: Named[_Markup] = Field(default_factory=dict)
    decimals: Annotated[int, Field(ge=0, le=9)] = 1
    unit: str = ""
    marks: dict[Literal["bold", "underline"], _MarkRule] = Field(default_factory=dict)
    pairs: Named[_PairedSizeFile] = Field(default_factory=dict)
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
        marks={str(kind): Mark(*rule.split(" in ")) for kind, rule in content.marks.items()},
        rows=tuple(_group(path, group, content.facts) for group in content.rows),
        columns=tuple(_group(path, group, content.facts) for group in content.columns),
        pairs=tuple(PairedSize(name, _names(size.baseline), size.measures) for name, size in content.pairs.items()),
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
        models=() if isinstance(item.model, dict) else _names(item.model),
        no_model=item.no_model,
        sizes={size: _names(models) for size, models in item.model.items()} if isinstance(item.model, dict) else {},
    )


def _problems(layout: TableLayout) -> Iterator[str]:
    for axis, items in (("models", layout.models), ("measures", layout.measures)):
        keys = [item.key for item in items]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            yield f"'{twice}' occurs twice among its {axis}; give each its own key"
    if misplaced := next((i.key for i in layout.measures if i.models or i.sizes or i.no_model), None):
        yield f"'{misplaced}' is a measure; 'model' and 'no_model' are keys of models"
    yield from _problems_of_pairs(layout)
    if layout.suite is not None and not layout.pairs:
        known = (*layout.averages[AVERAGE], *layout.averages)
        yield from (str(UnknownNameError("task", i.key, known)) for i in layout.measures if i.key not in known)


def _problems_of_pairs(layout: TableLayout) -> Iterator[str]:
    sizes = [size.name for size in layout.pairs]
    for item in layout.models:
        if unknown := next((size for size in item.sizes if size not in sizes), None):
            pairs = str(UnknownNameError("size", unknown, sizes)) if sizes else "the layout has no 'pairs'"
            yield f"'{item.key}': model of '{unknown}': {pairs}"
        if sizes and not item.sizes and not item.no_model:
            yield f"'{item.key}' needs its model of each size: 'model: {{{sizes[0]}: NAME}}'"
        if sizes and item.key == BASELINE:
            yield f"'{BASELINE}' stands for the models of 'pairs'; give the row another key"
    if not sizes:
        return
    if layout.suite is None:
        yield "'pairs' are of runs of one suite; add 'suite'"
    given = [measure for size in layout.pairs for measure in size.rules]
    shown = [item.key for item in layout.measures]
    yield from (f"'pairs': {UnknownNameError('measure', key, shown)}" for key in given if key not in shown)
    for measure in shown:
        if (count := given.count(measure)) != 1:
            yield f"'{measure}' is in {count} sizes of 'pairs'; name it in one"
