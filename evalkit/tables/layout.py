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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.benchmarks.registry import kinds, suite_averages
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.inputs.yaml_reading import read_yaml
from evalkit.resources import resource
from evalkit.tables.markup import Text, parse

AVERAGE = "Average"
"""The mean over all tasks of the suite; LongBench's own average is another, the mean of its groups' means."""

_KEYS = {"caption", "suite", "data", "models", "corner", "facts", "decimals", "unit", "marks", "rows", "columns"}
_ITEM_KEYS = ("label", "indent", "facts", "model", "no_model")
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
    return _Reader(path).layout(read_yaml(path, TableError, "layout"))


class _Reader:
    """Checks a layout key by key; every complaint names the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def layout(self, raw: Any) -> TableLayout:
        raw = self._mapping(raw, "the file")
        for key in raw:
            if key not in _KEYS:
                raise TableError(f"layout {self.path}: {UnknownNameError('key', str(key), _KEYS)}")
        suite, averages = self._suite(raw.get("suite"))
        facts = self._mapping(raw.get("facts", {}), "facts")
        layout = TableLayout(
            name=self.path.stem,
            path=self.path,
            caption=self._text(raw.get("caption", ""), "caption"),
            suite=suite,
            averages=averages,
            data=self._data(str(raw.get("data", self.path.stem))),
            models_are_rows=self._one_of(raw.get("models", "rows"), "models", ("rows", "columns")) == "rows",
            corner=self._text(raw.get("corner", ""), "corner"),
            facts=tuple(self._text(label, f"facts.{key}") for key, label in facts.items()),
            decimals=self._decimals(raw.get("decimals", 1)),
            unit=str(raw.get("unit", "")),
            marks={str(k): self._mark(k, v) for k, v in self._mapping(raw.get("marks", {}), "marks").items()},
            rows=self._groups(raw, "rows", tuple(facts)),
            columns=self._groups(raw, "columns", tuple(facts)),
        )
        self._check(layout)
        return layout

    def _check(self, layout: TableLayout) -> None:
        for axis, items in (("models", layout.models), ("measures", layout.measures)):
            keys = [item.key for item in items]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise TableError(f"layout {self.path}: '{twice}' stands twice among its {axis}; give each its own key")
        if odd := next((item.key for item in layout.measures if item.models or item.no_model), None):
            raise TableError(f"layout {self.path}: '{odd}' is a measure, so it has no model; say it of what runs fill")
        if layout.suite is not None:
            known = (*layout.averages[AVERAGE], *layout.averages)
            for item in layout.measures:
                if item.key not in known:
                    raise TableError(f"layout {self.path}: {UnknownNameError('task', item.key, known)}")

    def _suite(self, given: Any) -> tuple[str | None, dict[str, tuple[str, ...]]]:
        """Its name, and average → tasks."""
        if given is None:
            return None, {}
        name = str(given)
        try:
            if name.endswith((".yaml", ".yml")):
                own = load_suite(str(self.path.parent / name))
                return own.name, {**own.groups, AVERAGE: own.tasks}
            return name, suite_averages(name)
        except UsageError as error:
            if name in kinds():
                raise TableError(
                    f"layout {self.path}: suite {name} has no averages and no list of tasks; leave 'suite' out and "
                    "give the numbers as a CSV"
                ) from error
            raise TableError(f"layout {self.path}: {error}") from error

    def _groups(self, raw: Mapping[str, Any], axis: str, facts: tuple[str, ...]) -> tuple[Group, ...]:
        given = raw.get(axis)
        if not isinstance(given, list) or not given:
            raise TableError(f"layout {self.path}: '{axis}' must be a list of groups, each with 'items'")
        return tuple(self._group(part, f"{axis}[{place}]", facts) for place, part in enumerate(given))

    def _group(self, raw: Any, where: str, facts: tuple[str, ...]) -> Group:
        raw = self._mapping(raw, where)
        for key in raw:
            if key not in ("title", "style", "items"):
                raise TableError(
                    f"layout {self.path}: {where} has the unknown key '{key}'; it may have title, style, items"
                )
        title = self._text(raw.get("title", ""), f"{where}.title")
        style = self._one_of(
            raw.get("style", "ruled" if title else "line"), f"{where}.style", ("ruled", "heading", "line")
        )
        items = self._mapping(raw.get("items"), f"{where}.items")
        if not items:
            raise TableError(f"layout {self.path}: {where}.items is empty; name at least one")
        return Group(title, style, tuple(self._item(str(k), v, f"{where}.items.{k}", facts) for k, v in items.items()))

    def _item(self, key: str, raw: Any, where: str, facts: tuple[str, ...]) -> LayoutItem:
        raw = raw if isinstance(raw, dict) else {"label": raw}
        for name in raw:
            if name not in _ITEM_KEYS:
                raise TableError(
                    f"layout {self.path}: {where} has the unknown key '{name}'; it may have {', '.join(_ITEM_KEYS)}"
                )
        own = self._mapping(raw.get("facts", {}), f"{where}.facts")
        if strange := next((name for name in own if name not in facts), None):
            raise TableError(f"layout {self.path}: {where}: {UnknownNameError('fact', str(strange), facts)}")
        return LayoutItem(
            key=key,
            label=self._text(key if raw.get("label") is None else raw["label"], where),
            indent=bool(raw.get("indent", False)),
            facts=tuple(self._text(own.get(name, ""), where) for name in facts),
            models=self._models(raw.get("model", []), f"{where}.model"),
            no_model=str(raw.get("no_model", "")),
        )

    def _models(self, given: Any, where: str) -> tuple[str, ...]:
        listed = given if isinstance(given, list) else [given]
        if not all(isinstance(name, str) and name for name in listed):
            raise TableError(f"layout {self.path}: {where} must be a model's name, or a list of names")
        return tuple(listed)

    def _mark(self, kind: Any, rule: Any) -> Mark:
        self._one_of(kind, "marks", ("bold", "underline"))
        extreme, _, scope = str(rule).partition(" in ")
        if extreme not in _EXTREMES or scope not in _SCOPES:
            raise TableError(
                f"layout {self.path}: marks.{kind} is '{rule}'; write 'highest in section', or lowest, or in table"
            )
        return Mark(extreme, scope)

    def _data(self, given: str) -> Path:
        own = given.endswith(".csv")
        return self.path.parent / given if own else resource("results", "published", f"{given}.csv")

    def _decimals(self, given: Any) -> int:
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= 9:
            raise TableError(f"layout {self.path}: decimals is '{given}'; write a whole number from 0 to 9")
        return given

    def _one_of(self, given: Any, key: str, known: tuple[str, ...]) -> str:
        if given not in known:
            raise TableError(f"layout {self.path}: {UnknownNameError(key, str(given), known)}")
        return str(given)

    def _text(self, given: Any, key: str) -> Text:
        if not isinstance(given, (str, int)) or isinstance(given, bool):
            shown = "" if isinstance(given, (dict, list)) else f", not the value {given}; put it in quotes"
            raise TableError(f"layout {self.path}: {key} must be a text{shown}")
        return parse(" ".join(str(given).split()), f"layout {self.path}: {key}")

    def _mapping(self, given: Any, key: str) -> dict[Any, Any]:
        if not isinstance(given, dict):
            raise TableError(f"layout {self.path}: {key} must hold keys and values")
        return given
