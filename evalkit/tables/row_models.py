"""Assignment of runs to rows of a table by their model's shape, not by any name.

In: a layout, whose rows name models (`models/zoo.py`), and runs, whose manifests have their model's shape. Out: the
rows of runs without a mapping, and mismatches between a mapped run and its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from evalkit.comparison.sides import steps_of
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.models.shapes import layer_ranges, parameters, shape_facts
from evalkit.models.variants.settings import KEYS
from evalkit.models.zoo import SUFFIXES, NamedModel, models, named_model
from evalkit.runs.folder import Run
from evalkit.runs.traits import is_imported
from evalkit.tables.layout import LayoutItem, TableLayout

_READINGS = {key for keys in KEYS.values() for key in keys} - {"num_signals", "signal_domain", "cog_keep_last"}
"""Settings that the papers leave open, so that no two rows of their tables differ in them."""


def find_rows(layout: TableLayout, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return row → its runs, in the layout's order; several runs of a row are seeds.

    Raises:
        UsageError: a run's manifest has no model shape, its model matches no row or several, or the runs of a row are
            steps of one training.
    """
    rows: dict[str, list[Run]] = {item.key: [] for item in layout.assigned}
    for run in runs:
        keys = rows_of(layout, run)
        if len(keys) != 1:
            what = f"rows {' and '.join(sorted(keys))} of" if keys else "no row of"
            raise UsageError(
                f"run {run.folder.name}: its model ({_of_run(run)}) is that of {what} table {layout.name}; "
                "name the row in a --runs FILE.yaml, or leave the run out"
            )
        rows[keys[0]].append(run)
    for key, members in rows.items():
        if len(set(steps_of(members) or ())) > 1:
            raise UsageError(
                f"runs {members[0].folder.name} and {members[1].folder.name} are of row '{key}' of table {layout.name} "
                "and have different training steps; remove one, or list them as seeds in a --runs FILE.yaml"
            )
    return {key: members for key, members in rows.items() if members}


def row_mismatch(layout: TableLayout, item: LayoutItem, run: Run) -> str:
    """Describe how a run's model differs from its row's; empty if it does not, or if the manifest has no shape."""
    named, loaded = _named(layout, item), run.manifest.get("loaded") or {}
    if not named or "parameters" not in loaded:
        return ""
    ours: dict[str, Any] = loaded.get("shape") or {}
    if any(ours == _facts(model) for model in named):
        return ""
    if alike := next((model for model in named if _alike(ours, model)), None):
        theirs = _facts(alike)
        other = [key for key in theirs if ours.get(key) != theirs[key]]
        return "; ".join(f"{key} is {ours.get(key)}, in {alike.name} {theirs[key]}" for key in other)
    first, count = named[0], parameters(named[0].shape).total
    if "shape" not in loaded and loaded["parameters"] == count:
        return ""  # an imported log has no shape
    row, ours_in_words = _words(_facts(first), count), _of_run(run)
    keys = [] if row != ours_in_words else [key for key, value in _facts(first).items() if ours.get(key) != value]
    apart = f" (they differ in {', '.join(keys)})" if keys else ""
    return f"row '{item.key}' is {first.name}, {row}; the run's model is {ours_in_words}{apart}"


def rows_of(layout: TableLayout, run: Run) -> list[str]:
    """Return the rows whose model a run's is, in the layout's order; a `UsageError` if its manifest has no shape."""
    ours = (run.manifest.get("loaded") or {}).get("shape")
    if ours is None:
        raise UsageError(
            f"run {run.folder.name}: its manifest lacks the model's sizes and attention, which determine its row of "
            f"table {layout.name}; name the row in a --runs FILE.yaml"
        )
    named = [(item.key, model) for item in layout.assigned for model in _named(layout, item)]
    rows = [key for key, model in named if ours == _facts(model)]
    return list(dict.fromkeys(rows or [key for key, model in named if _alike(ours, model)]))


@cache
def _shipped() -> dict[str, NamedModel]:
    return {model.name: model for model in models()}


def _named(layout: TableLayout, item: LayoutItem) -> list[NamedModel]:
    """Return the models of a row; paths of files are relative to the layout's folder."""
    return [_shipped().get(name) or _model(layout, item, name) for name in item.models]


def _model(layout: TableLayout, item: LayoutItem, name: str) -> NamedModel:
    in_file = name.partition(":")[0].endswith(SUFFIXES)
    try:
        return named_model(str(layout.path.parent / name) if in_file else name)
    except (UnknownNameError, UsageError) as error:
        raise TableError(f"layout {layout.path}, model of '{item.key}': {error}") from error


def _facts(model: NamedModel) -> dict[str, Any]:
    return shape_facts(model.config) or {}


def _alike(ours: Mapping[str, Any], model: NamedModel) -> bool:
    """Return whether a shape differs from a model's only in settings that the papers leave open."""
    theirs = _facts(model)
    return all(ours.get(key) == theirs.get(key) for key in (ours.keys() | theirs.keys()) - _READINGS)


def _of_run(run: Run) -> str:
    loaded = run.manifest["loaded"]
    if loaded.get("shape"):
        return _words(loaded["shape"], loaded["parameters"])
    architecture = loaded.get("architecture", "an unknown architecture" if is_imported(run.manifest) else None)
    return f"{architecture} of {loaded['parameters']:,} parameters"


def _words(facts: Mapping[str, Any], count: int) -> str:
    """Describe a model: backbone, size, heads, attention and its layers."""
    signals = f" of {facts['num_signals']} signals" if "num_signals" in facts else ""
    domain = " (of probabilities)" if facts.get("signal_domain") == "probabilities" else ""
    layers = f" in layers {layer_ranges(facts['variant_layers'])} of {facts['num_hidden_layers']}"
    return (
        f"{facts['backbone']} of {count:,} parameters and {facts['num_attention_heads']} heads with "
        f"{facts['attention_variant']} attention{signals}{domain}{layers if facts['variant_layers'] else ''}"
    )
