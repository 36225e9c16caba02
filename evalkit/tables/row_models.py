"""Assignment of runs to rows of a table by their model's shape, not by any name.

In: a layout, whose rows name models (`models/zoo`), and runs, whose manifests have their model's shape. Out: the
rows of runs without a mapping, and mismatches between a mapped run and its row. For tables of models beside their
baseline: shares of documents on which a model exceeds it (section 5.3 of the paper), and significant leads.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from evalkit.benchmarks.outcomes import Comparable
from evalkit.comparison.comparison import p_value
from evalkit.comparison.pairing import Pairing, pair
from evalkit.comparison.sides import Side, steps_of
from evalkit.errors import TableError, UnknownNameError, UsageError
from evalkit.models.variants.settings import KEYS
from evalkit.models.zoo.named import SUFFIXES, NamedModel, models, named_model
from evalkit.models.zoo.shapes import layer_ranges, parameters, shape_facts
from evalkit.reporting.decimals import mean, of_float
from evalkit.runs.folder import Run
from evalkit.runs.traits import is_imported
from evalkit.stats.estimates import error_of_mean
from evalkit.stats.power import ALPHA
from evalkit.stats.significance import holm
from evalkit.tables.fill import Lead
from evalkit.tables.layout import BASELINE, TableLayout, run_key, without_baseline
from evalkit.tables.published import Number

_READINGS = {key for keys in KEYS.values() for key in keys} - {"num_signals", "signal_domain", "cog_keep_last"}
"""Settings that the papers leave open, so that no two rows of their tables differ in them."""


def find_rows(layout: TableLayout, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return row → its runs, in the layout's order; several runs of a row are seeds.

    Raises:
        UsageError: a run's manifest has no model shape, its model matches no row or several, or the runs of a row are
            steps of one training.
    """
    rows: dict[str, list[Run]] = {key: [] for key in layout.assigned}
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


def row_mismatch(layout: TableLayout, key: str, run: Run) -> str:
    """Describe how a run's model differs from its row's; empty if it does not, or if the manifest has no shape."""
    named, loaded = _named(layout, key), run.manifest.get("loaded") or {}
    if not named or "parameters" not in loaded:
        return ""
    ours: dict[str, Any] = loaded.get("shape") or {}
    if any(ours == _facts(model) for model in named):
        return ""
    if alike := next((model for model in named if _alike(ours, model)), None):
        differing = {name: value for name, value in _facts(alike).items() if ours.get(name) != value}
        return "; ".join(f"{name} is {ours.get(name)}, in {alike.name} {value}" for name, value in differing.items())
    first, count = named[0], parameters(named[0].shape).total
    if "shape" not in loaded and loaded["parameters"] == count:
        return ""  # an imported log has no shape
    row, ours_in_words = _words(_facts(first), count), _of_run(run)
    keys = [] if row != ours_in_words else [name for name, value in _facts(first).items() if ours.get(name) != value]
    apart = f" (they differ in {', '.join(keys)})" if keys else ""
    return f"row '{key}' is {first.name}, {row}; the run's model is {ours_in_words}{apart}"


def rows_of(layout: TableLayout, run: Run) -> list[str]:
    """Return the rows whose model a run's is, in the layout's order; a `UsageError` if its manifest has no shape."""
    ours = (run.manifest.get("loaded") or {}).get("shape")
    if ours is None:
        raise UsageError(
            f"run {run.folder.name}: its manifest lacks the model's sizes and attention, which determine its row of "
            f"table {layout.name}; name the row in a --runs FILE.yaml"
        )
    named = [(key, model) for key in layout.assigned for model in _named(layout, key)]
    rows = [key for key, model in named if ours == _facts(model)]
    return list(dict.fromkeys(rows or [key for key, model in named if _alike(ours, model)]))


@cache
def _shipped() -> dict[str, NamedModel]:
    return {model.name: model for model in models()}


def _named(layout: TableLayout, key: str) -> list[NamedModel]:
    """Return the models of a row; paths of files are relative to the layout's folder."""
    return [_shipped().get(name) or _model(layout, key, name) for name in layout.assigned[key]]


def _model(layout: TableLayout, key: str, name: str) -> NamedModel:
    in_file = name.partition(":")[0].endswith(SUFFIXES)
    try:
        return named_model(str(layout.path.parent / name) if in_file else name)
    except (UnknownNameError, UsageError) as error:
        raise TableError(f"layout {layout.path}, model of '{key}': {error}") from error


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


def paired_numbers(layout: TableLayout, runs: Mapping[str, tuple[Run, ...]]) -> dict[str, dict[str, Number]]:
    """Return row → measure → share of documents in percent, of the runs of each row and size, and of each baseline.

    Raises:
        UsageError: a baseline has no run, or a row was not measured on the documents of its baseline.
    """
    for key, size in without_baseline(layout, runs).items():
        raise UsageError(
            f"table {layout.name}: row '{key}' has a run, but the baseline that it is compared with has none: "
            f"{' or '.join(layout.pairs[size].baseline)}; give its run too (row '{run_key(BASELINE, size)}')"
        )
    graded: dict[str, Comparable] = {}
    numbers: dict[str, dict[str, Number]] = {}
    for row in layout.models:
        for size, compared in layout.pairs.items():
            key, baseline = run_key(row, size), run_key(BASELINE, size)
            if key not in runs:
                continue
            pairing = pair(Side(baseline, runs[baseline]), Side(key, runs[key]), graded)
            if lost := [*pairing.left_out, *(task.task for task in pairing.tasks if task.dropped)]:
                raise UsageError(
                    f"row '{key}': run {runs[key][0].folder.name} was not measured on the same documents of "
                    f"{', '.join(lost)} as its baseline {runs[baseline][0].folder.name}; run both with the same tasks "
                    "and the same sample"
                )
            for measure, rule in compared.measures.items():
                try:
                    numbers.setdefault(row, {})[measure] = _exceeding_share(pairing, rule)
                except UsageError as error:
                    raise UsageError(f"table {layout.name}, '{measure}' of row '{key}': {error}") from error
    return numbers


def _exceeding_share(pairing: Pairing, rule: str) -> Number:
    """Return the share of documents on which B exceeds A under a rule, in percent, with its standard error.

    The error of one run of B is that of a mean over documents: √(p (1 - p) / (n - 1)) if A has one run too. Of several
    seeds it is the standard deviation of their shares.
    """
    scores = [pairing.scores(task, rule) for task in pairing.tasks]
    baseline, ours = (np.concatenate(side, axis=1) for side in zip(*scores, strict=True))
    exceeds = ours[:, None] > baseline[None]  # [runs of B, runs of A, documents]
    shares = [100 * Fraction(int(of_run.sum()), of_run.size) for of_run in exceeds]
    if len(shares) > 1:
        return Number(mean(shares), of_float(statistics.stdev(map(float, shares))))
    error = error_of_mean(exceeds[0].mean(axis=0))
    return Number(shares[0], None if error is None else of_float(100 * error))


def significant_leads(
    layout: TableLayout, runs: Mapping[str, tuple[Run, ...]], rule: str | None, leads: Sequence[Lead]
) -> frozenset[Lead]:
    """Return the significant leads among those between rows of runs.

    Raises:
        UsageError: the runs have different rules (`rule` is None), or two rows were not measured on the same documents.
    """
    tested = [lead for lead in leads if lead.best in runs and lead.runner_up in runs]
    if tested and rule is None:
        raise UsageError(
            "--significance tests all rows under one rule, but the runs have several; name one with --rule"
        )
    graded: dict[str, Comparable] = {}

    @cache
    def paired(best: str, runner_up: str) -> Pairing:
        return pair(Side(best, runs[best]), Side(runner_up, runs[runner_up]), graded)

    ps = []
    for lead in tested:
        pairing, tasks = paired(lead.best, lead.runner_up), layout.averages.get(lead.measure, (lead.measure,))
        if dropped := next((task.task for task in pairing.tasks if task.task in tasks and task.dropped), None):
            raise UsageError(
                f"rows '{lead.best}' and '{lead.runner_up}' were not measured on the same documents of {dropped}, so "
                "--significance cannot test their lead; omit it, or run both on the same documents"
            )
        ps.append(p_value(pairing, tasks, str(rule)))
    return frozenset(lead for lead, p in zip(tested, holm(ps), strict=True) if p <= ALPHA)
