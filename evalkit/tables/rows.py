"""Assignment of runs to the rows of a table: by a YAML file, or by the shape of their models, not by any name.

    rule: acc_norm                     # default: each run's own, which must then be the same
    rows:                              # model of the layout → run folder, or the run folders of its seeds
      vanilla_125m: results/runs/vanilla-…
      intg_125m: [results/runs/seed1-…, results/runs/seed2-…, results/runs/seed3-…]
    values: measured.csv               # numbers without a run; rows and columns named as in the layout

In: such a file; or runs, whose manifests have their model's shape, and a layout, whose rows name models (`models/zoo`).
Out: a `RunMapping`. `row_mismatch` describes how the model of a mapped run differs from its row's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from evalkit.comparison.naming import find_groups
from evalkit.comparison.sides import steps_of
from evalkit.errors import RunError, TableError, UsageError
from evalkit.inputs.validated import FileSettings, Named, NonEmpty, read_settings
from evalkit.inputs.values import path as valid_path
from evalkit.models.variants.settings import KEYS
from evalkit.models.zoo.named import SUFFIXES, NamedModel, named_model
from evalkit.models.zoo.shapes import layer_ranges, parameters, shape_facts
from evalkit.runs.finding import root_of_runs
from evalkit.runs.folder import Run
from evalkit.runs.traits import is_imported
from evalkit.suites.suites import filled
from evalkit.tables.layout import OneOrMore, TableLayout

_READINGS = {key for keys in KEYS.values() for key in keys} - {"num_signals", "signal_domain", "cog_keep_last"}
"""Settings that the papers leave open, so that no two rows of their tables differ in them."""


class RunMapping(NamedTuple):
    rule: str | None
    rows: Mapping[str, Sequence[Run]]
    values: Path | None = None
    """CSV of numbers without a run."""


class _MappingFile(FileSettings):
    rule: NonEmpty | None = None
    rows: Named[Annotated[OneOrMore, Field(min_length=1)]] | None = None
    values: NonEmpty | None = None

    @model_validator(mode="after")
    def _fills_something(self) -> Self:
        if not self.model_fields_set & {"rows", "values"}:
            raise ValueError("it must have 'rows', of models and their run folders, or 'values'")
        return self


def read_mapping(layout: TableLayout, path: Path, root: Path | None = None) -> RunMapping:
    """Read a mapping file for a layout, and open its runs, by default in the default folder; errors name the key."""
    if not path.is_file():
        raise UsageError(f"--runs {path}: no such file; give one that maps rows to runs, or the runs themselves")
    where, content = f"mapping of runs {path}", read_settings(path, _MappingFile, TableError, "mapping of runs")
    given = content.rows or {}
    names = []
    for row, of_row in given.items():
        names.append((row, [str(valid_path(f"{where}, row '{row}'", name)) for name in of_row]))
    usable = partial(has_suite_of, layout)
    try:
        _, rows = find_groups([], names, root or root_of_runs(), usable, may_differ=True)
    except (UsageError, RunError) as error:
        raise (UsageError if isinstance(error, UsageError) else RunError)(f"{where}: {error}") from error
    values = None if content.values is None else valid_path(f"{where}: 'values'", content.values)
    return RunMapping(content.rule, dict(rows), values)


def map_runs(layout: TableLayout, runs: Sequence[Run]) -> RunMapping:
    """Map runs to rows by their models, in the layout's order; several runs of a row are seeds.

    A `UsageError` if a run's model matches no row or several, or the runs of a row are steps of one training.
    """
    rows: dict[str, list[Run]] = {key: [] for key in layout.assigned}
    for run in runs:
        check_suite(layout, run)
        keys = rows_of(layout, run)
        if len(keys) != 1:
            what = f"rows {' and '.join(sorted(keys))} of" if keys else "no row of"
            is_of = f"its model ({_of_run(run)}) is that of {what} table {layout.name}"
            raise UsageError(f"run {run.folder.name}: {is_of}; name the row in a --runs FILE.yaml")
        rows[keys[0]].append(run)
    for key, seeds in rows.items():
        if len(set(steps_of(seeds) or ())) > 1:
            both = f"runs {seeds[0].folder.name} and {seeds[1].folder.name} are of row '{key}' of table {layout.name}"
            raise UsageError(f"{both} and have different training steps; remove one")
    return RunMapping(None, {key: seeds for key, seeds in rows.items() if seeds})


def check_suite(layout: TableLayout, run: Run, where: str = "") -> None:
    """Raise a `UsageError` if a run is of another suite than a layout's; `where` begins its message."""
    if layout.suite is None:
        csv = "give its numbers as a CSV, with 'values: FILE.csv' in the mapping"
        raise UsageError(f"{where}table {layout.name} has no suite, so run {run.folder} cannot fill it; {csv}")
    if not has_suite_of(layout, run):
        shown = f"table {layout.name} shows suite {layout.suite}"
        raise UsageError(f"{where}run {run.folder} is of suite {run.suite}, but {shown}; name a run of that suite")


def has_suite_of(layout: TableLayout, run: Run) -> bool:
    """Whether a run is of a layout's suite, or of one that fills its tables."""
    return layout.suite in (run.suite, filled(run.suite)[0])


def rows_of(layout: TableLayout, run: Run) -> list[str]:
    """Return the rows whose model a run's is, in the layout's order; a `UsageError` if its manifest has no shape."""
    shape = (run.manifest.get("loaded") or {}).get("shape")
    if shape is None:
        lacking = "its manifest lacks the model's sizes and attention, which determine its row"
        raise UsageError(f"run {run.folder.name}: {lacking} of table {layout.name}; name it in a --runs FILE.yaml")
    models = [(key, model) for key in layout.assigned for model in _models(layout, key)]
    rows = [key for key, model in models if shape == _facts(model)]
    return list(dict.fromkeys(rows or [key for key, model in models if _alike(shape, model)]))


def row_mismatch(layout: TableLayout, key: str, run: Run) -> str:
    """Describe how a run's model differs from its row's; empty if it does not, or if the manifest has no shape."""
    models, loaded = _models(layout, key), run.manifest.get("loaded") or {}
    if not models or "parameters" not in loaded:
        return ""
    shape: dict[str, Any] = loaded.get("shape") or {}
    if any(shape == _facts(model) for model in models):
        return ""
    if alike := next((model for model in models if _alike(shape, model)), None):
        differing = {name: value for name, value in _facts(alike).items() if shape.get(name) != value}
        return "; ".join(f"{name} is {shape.get(name)}, in {alike.name} {value}" for name, value in differing.items())
    first, count = models[0], parameters(models[0].shape).total
    if "shape" not in loaded and loaded["parameters"] == count:
        return ""  # an imported log has no shape
    expected, actual = _words(_facts(first), count), _of_run(run)
    keys = [] if expected != actual else [name for name, value in _facts(first).items() if shape.get(name) != value]
    apart = f" (they differ in {', '.join(keys)})" if keys else ""
    variants = [facts.get("attention_variant") for facts in (shape, _facts(first))]
    warning = "another attention: " if None not in variants and variants[0] != variants[1] else ""
    return f"{warning}row '{key}' is {first.name}, {expected}; the run's model is {actual}{apart}"


def _models(layout: TableLayout, key: str) -> list[NamedModel]:
    models = []
    for name in layout.assigned[key]:
        in_file = name.partition(":")[0].endswith(SUFFIXES)
        try:
            models.append(named_model(str(layout.path.parent / name) if in_file else name))
        except UsageError as error:
            raise TableError(f"layout {layout.path}, model of '{key}': {error}") from error
    return models


def _facts(model: NamedModel) -> dict[str, Any]:
    return shape_facts(model.config) or {}


def _alike(shape: Mapping[str, Any], model: NamedModel) -> bool:
    """Whether a shape differs from a model's only in settings that the papers leave open."""
    facts = _facts(model)
    return all(shape.get(key) == facts.get(key) for key in (shape.keys() | facts.keys()) - _READINGS)


def _of_run(run: Run) -> str:
    loaded = run.manifest["loaded"]
    if loaded.get("shape"):
        return _words(loaded["shape"], loaded["parameters"])
    architecture = loaded.get("architecture", "an unknown architecture" if is_imported(run.manifest) else None)
    return f"{architecture} of {loaded['parameters']:,} parameters"


def _words(facts: Mapping[str, Any], count: int) -> str:
    signals = f" of {facts['num_signals']} signals" if "num_signals" in facts else ""
    domain = " (of probabilities)" if facts.get("signal_domain") == "probabilities" else ""
    layers = f" in layers {layer_ranges(facts['variant_layers'])} of {facts['num_hidden_layers']}"
    attention = f"{facts['attention_variant']} attention{signals}{domain}{layers if facts['variant_layers'] else ''}"
    return f"{facts['backbone']} of {count:,} parameters and {facts['num_attention_heads']} heads with {attention}"
