"""Table layouts: content and style of a table.

In: a YAML file of `configs/tables/`, or a user's of the same form (docs/tables.md; `pairs`: docs/reference/tables.md).
Out: a `TableLayout`. `model` assigns runs to rows; with `pairs` a row has a model of each size, and the numbers are
shares of documents on which it exceeds the size's baseline (`measured.py`). Runs then belong to a row and a size
(`diff/125m`), or to a baseline (`baseline/125m`), which no row shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator

from evalkit.benchmarks.registry import suite_averages
from evalkit.errors import TableError, UnknownNameError, UsageError, check_known
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty, read_settings
from evalkit.paths import resource
from evalkit.reporting.table import Text, parse, plain
from evalkit.suites.suites import load_suite

AVERAGE = "Average"
"""The mean over all tasks of the suite. LongBench's own average is different: the mean of its groups' means."""
BASELINE = "baseline"
"""Stands for the row in the key of a baseline's runs."""


def _markup(text: object) -> object:
    """Parse markup on one line; an integer is converted to text, and parsed text stays."""
    if isinstance(text, tuple):
        return text
    if not isinstance(text, (str, int)) or isinstance(text, bool):
        shown = "" if isinstance(text, (dict, list)) else f"; put the value {text} in quotes"
        raise ValueError(f"expected a text{shown}")
    try:
        return parse(" ".join(str(text).split()), "markup")
    except TableError as error:
        raise ValueError(str(error)) from error


def _labelled(items: object) -> object:
    """Give every item its label: the text that stands for the item, or its key."""
    if not isinstance(items, dict):
        return items
    full = {key: item if isinstance(item, dict) else {"label": item} for key, item in items.items()}
    return {key: item if item.get("label") is not None else item | {"label": key} for key, item in full.items()}


Mark = Literal["bold", "underline"]
MarkRule = Literal["highest in section", "lowest in section", "highest in table", "lowest in table"]
Markup = Annotated[Text, PlainValidator(_markup)]
OneOrMore = Annotated[Listed[NonEmpty], BeforeValidator(lambda names: [names] if isinstance(names, str) else names)]
BySize = Annotated[Named[OneOrMore], BeforeValidator(lambda names: names if isinstance(names, dict) else {"": names})]


class LayoutItem(FileSettings):
    label: Markup
    indent: bool = False
    facts: Named[Markup] = Field(default_factory=dict)
    """Text cells after the label, by the layout's facts."""
    model: BySize = Field(default_factory=dict)
    """Models of its runs, as `zoo.named_model` accepts, files relative to the layout; with `pairs`, by size."""
    no_model: str = ""
    """Why no named model belongs to it; without a run it then has its published numbers, marked as quoted."""


class Group(FileSettings):
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


class _LayoutFile(FileSettings):
    caption: Markup = ()
    published: Markup = ()
    """A sentence on the published numbers alone, printed wherever they are."""
    suite: str | None = None
    data: str | None = None
    models: Literal["rows", "columns"] = "rows"
    corner: Markup = ()
    facts: Named[Markup] = Field(default_factory=dict)
    decimals: Annotated[int, Field(ge=0, le=9)] = 1
    unit: str = ""
    marks: dict[Mark, MarkRule] = Field(default_factory=dict)
    pairs: Named[PairedSize] = Field(default_factory=dict)
    rows: Annotated[Listed[Group], Field(min_length=1)]
    columns: Annotated[Listed[Group], Field(min_length=1)]


class TableLayout(_LayoutFile):
    name: str
    path: Path
    averages: dict[str, tuple[str, ...]]
    """Computed measure → the tasks it is the mean of."""

    @property
    def data_file(self) -> Path:
        """CSV of its published numbers; it need not exist."""
        data = self.data or self.path.stem
        return self.path.parent / data if data.endswith(".csv") else resource("results", "published", f"{data}.csv")

    @property
    def printed_file(self) -> Path:
        """CSV of its averages and marks as printed; it need not exist."""
        return self.data_file.parent / "printed" / f"{self.name}.csv"

    @property
    def models_are_rows(self) -> bool:
        return self.models == "rows"

    @property
    def model_groups(self) -> tuple[Group, ...]:
        return self.rows if self.models_are_rows else self.columns

    @property
    def measure_groups(self) -> tuple[Group, ...]:
        return self.columns if self.models_are_rows else self.rows

    @property
    def model_items(self) -> dict[str, LayoutItem]:
        return {key: item for group in self.model_groups for key, item in group.items.items()}

    @property
    def measures(self) -> dict[str, LayoutItem]:
        return {key: item for group in self.measure_groups for key, item in group.items.items()}

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part for key in self.measures for part in self.averages.get(key, (key,))))

    @property
    def in_percent(self) -> bool:
        """Whether its numbers are percentages, by its suite or its unit."""
        return self.suite is not None or self.unit == "%"

    @property
    def assigned(self) -> dict[str, tuple[str, ...]]:
        """Key of runs → their models: that of a row, or with `pairs` of a size's baseline and of its rows."""
        if not self.pairs:
            return {key: item.model.get("", ()) for key, item in self.model_items.items()}
        keys: dict[str, tuple[str, ...]] = {}
        for size, pair in self.pairs.items():
            models = {BASELINE: pair.baseline} | {row: item.model.get(size) for row, item in self.model_items.items()}
            keys |= {run_key(row, size): names for row, names in models.items() if names}
        return keys

    def retitled(self, caption: str | None, titles: Mapping[str, str], where: str) -> Self:
        """Return the layout with another caption (None: its own) and other titles of groups, in markup.

        `titles` are by the layout's titles as plain text; `where` names the source of the texts in errors.
        """
        known = {plain(group.title) for group in (*self.rows, *self.columns) if group.title}
        check_known(f"title of table {self.name} ({where})", titles, known)
        texts = {old: parse(" ".join(new.split()), f"{where}, title '{old}'") for old, new in titles.items()}

        def titled(group: Group) -> Group:
            title = texts.get(plain(group.title), group.title)
            return group.model_copy(update={"title": title, "style": group.drawn})

        rows, columns = (tuple(map(titled, groups)) for groups in (self.rows, self.columns))
        text = self.caption if caption is None else parse(" ".join(caption.split()), f"{where}, caption")
        return self.model_copy(update={"rows": rows, "columns": columns, "caption": text})

    def without_empty(self, filled: Collection[str]) -> Self:
        """Return the layout without models that have no numbers, and without sections that have no models.

        A row stays if an indented row below it has numbers: "all layers" alone would be read as that of the row above.
        """
        groups = []
        for group in self.model_groups:
            kept, parent = set(filled), ""
            for key, item in group.items.items():
                if not item.indent:
                    parent = key
                elif self.models_are_rows and key in filled:
                    kept.add(parent)
            if items := {key: item for key, item in group.items.items() if key in kept}:
                groups.append(group.model_copy(update={"items": items}))
        return self.model_copy(update={self.models: tuple(groups)})


def run_key(row: str, size: str) -> str:
    return f"{row}/{size}"


def rows_by_key(layout: TableLayout) -> dict[str, str]:
    """Return the key of runs → the row that shows them; baselines, which no row shows, are not in it."""
    if not layout.pairs:
        return {row: row for row in layout.model_items}
    return {run_key(row, size): row for size in layout.pairs for row in layout.model_items}


def without_baseline(layout: TableLayout, keys: Collection[str]) -> dict[str, str]:
    """Return, of the keys with runs, those of rows whose baseline has none, with their size."""
    lacking = [size for size in layout.pairs if run_key(BASELINE, size) not in keys]
    return {key: size for row in layout.model_items for size in lacking if (key := run_key(row, size)) in keys}


def layout_names() -> list[str]:
    return sorted(path.stem for path in resource("configs", "tables").glob("*.yaml"))


def load_layout(name: str) -> TableLayout:
    """Read a layout by name, or from a user's YAML file; a `TableError` names the key."""
    path = Path(name)
    if name in layout_names():
        path = resource("configs", "tables", f"{name}.yaml")
    elif path.suffix not in (".yaml", ".yml"):
        raise UnknownNameError("table", name, layout_names())
    content = read_settings(path, _LayoutFile, TableError, "layout")
    suite = content.suite
    averages: dict[str, tuple[str, ...]] = {}
    try:
        if suite is not None and suite.endswith((".yaml", ".yml")):
            of_user = load_suite(str(path.parent / suite))
            suite, averages = of_user.name, of_user.averages()
        elif suite is not None and not content.pairs:
            averages = suite_averages(suite)
    except UsageError as error:
        raise TableError(f"layout {path}: {error}") from error
    # Measures of a layout with pairs are its own, so it has no averages
    derived = {"suite": suite, "averages": {} if content.pairs else averages}
    layout = TableLayout(name=path.stem, path=path, **{**dict(content), **derived})
    if problem := next(_problems(layout), None):
        raise TableError(f"layout {path}: {problem}")
    return layout


def _problems(layout: TableLayout) -> Iterator[str]:
    for groups in (layout.model_groups, layout.measure_groups):
        keys = [key for group in groups for key in group.items]
        yield from (f"'{key}' occurs twice; give each item its own key" for key in keys if keys.count(key) > 1)
    for key, item in (layout.model_items | layout.measures).items():
        for fact in sorted(item.facts.keys() - layout.facts.keys()):
            yield f"'{key}': {UnknownNameError('fact', fact, layout.facts)}"
        if key in layout.measures and (item.model or item.no_model):
            yield f"'{key}' is a measure; 'model' and 'no_model' are keys of models"
        for size in sorted(item.model.keys() - {"", *layout.pairs}):
            yield f"'{key}': model of '{size}': {UnknownNameError('size', size, layout.pairs)} (under 'pairs')"
    if not layout.pairs:
        known = (*layout.averages.get(AVERAGE, ()), *layout.averages)
        unknown = [key for key in layout.measures if layout.suite is not None and key not in known]
        yield from (str(UnknownNameError("task", key, known)) for key in unknown)
        return
    if layout.suite is None:
        yield "'pairs' are of runs of one suite; add 'suite'"
    for key, item in layout.model_items.items():
        if not any(item.model) and not item.no_model:
            yield f"'{key}' needs its model of each size: 'model: {{{next(iter(layout.pairs))}: NAME}}'"
        if key == BASELINE:
            yield f"'{BASELINE}' stands for the models of 'pairs'; give the row another key"
    listed = [measure for size in layout.pairs.values() for measure in size.measures]
    for measure in [*listed, *layout.measures]:
        if measure not in layout.measures:
            yield f"'pairs': {UnknownNameError('measure', measure, layout.measures)}"
        elif (count := listed.count(measure)) != 1:
            yield f"'{measure}' is in {count} sizes of 'pairs'; name it in one"
