"""What evalkit knows about models by their description: shapes, sizes and settings. No weights, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evalkit.errors import CheckpointError, UnknownNameError
from evalkit.inputs import values
from evalkit.models.loading.configuration import remarks_of
from evalkit.models.loading.locate import Checkpoint, looks_like_path, read_config
from evalkit.models.variants.settings import KEYS, Differential, Integral
from evalkit.models.zoo.named import SUFFIXES, models, named_model
from evalkit.models.zoo.readings import CLEAR, ScoredReading
from evalkit.models.zoo.shapes import (
    ModelShape,
    cache_bytes_per_token,
    flops_per_token,
    layer_ranges,
    parameters,
    read_shape,
)
from evalkit.reporting.decimals import fixed
from evalkit.reporting.numbers import MEANS
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table


def models_report() -> Report:
    """Return the models shipped with evalkit, one row each."""
    rows, content = [], list[dict[str, Any]]()
    for model in models():
        shape, variant = model.shape, model.shape.variant
        layers, heads = shape.attention.layers, shape.attention.heads
        signals = variant.settings.num_signals if isinstance(variant.settings, Integral) else None
        total, ranges = parameters(shape).total, layer_ranges(variant.layers)
        content.append({
            "name": model.name, "description": model.description, "backbone": shape.backbone, "attention": variant.name,
            "layers": list(variant.layers), "of_layers": layers, "heads": heads, "signals": signals,
            "parameters": total,
        })  # fmt: skip
        rows.append([model.name, variant.name, f"{ranges}/{layers}" if variant.layers else "",
                     model.description, f"{heads} × {signals}" if signals else str(heads), f"{total:,}"])  # fmt: skip
    headers = ("name", "attention", "layers", "of the paper's", "heads × signals", "parameters")
    records = [record | {"layers": layer_ranges(record["layers"])} for record in content]
    return Report((simple_table("models", headers, rows, texts=4),), content=content, records=records)


def model_report(given: str) -> Report:
    """Return shapes, sizes and attention settings of a named model, a model in a user's file, or a checkpoint folder.

    Raises:
        UsageError: the model is not found, or its description is invalid.
        CheckpointError: the folder's config.json is for another architecture, or invalid.
    """
    folder = values.path("model", given).expanduser()
    if not looks_like_path(given) or given.partition(":")[0].endswith(SUFFIXES):
        try:
            named = named_model(given)
            return Report(_facts(named.config, named.shape), (f"{named.name}: {named.description}", str(named.source)))
        except UnknownNameError:
            if not folder.is_dir():
                raise
    if not folder.is_dir():
        raise CheckpointError(f"{given}: folder not found")
    config = read_config(folder)
    try:
        facts = _facts(config, read_shape(config))
        return Report(facts, (given,), notes=remarks_of(Checkpoint(given, "folder", folder)))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def _facts(config: dict[str, Any], shape: ModelShape) -> tuple[Table, ...]:
    attention, variant, count = shape.attention, shape.variant, parameters(shape)
    where = f"{variant.name} in layers {layer_ranges(variant.layers)} (from 0)" if variant.layers else "vanilla"
    others = ", vanilla in the others" if 0 < len(variant.layers) < attention.layers else ""
    heads, settings = f"{attention.heads} of {attention.head_size} channels", variant.settings
    if attention.kv_heads != attention.heads:
        heads += f", {attention.kv_heads} of keys and values"
    if isinstance(settings, Integral):
        heads += f"; {settings.num_signals} signals of {settings.size(attention.head_size)} in each (d_h)"
    elif isinstance(settings, Differential):
        size = settings.size(attention.head_size)
        pairs = attention.heads * attention.head_size // (2 * size)
        heads += f"; {pairs} pairs of maps of {size} (d_h), with values of {2 * size}"
    rows = [
        ("backbone", f"{shape.backbone}; model type {config['model_type']}"),
        ("layers", f"{attention.layers}; hidden size {shape.hidden:,}, intermediate size {shape.intermediate:,}"),
        ("vocabulary", f"{shape.vocabulary:,}, output head {'tied' if shape.tied else 'of its own'}"),
        ("window", f"{shape.window:,} tokens"),
        ("attention", where + others),
        ("heads", heads),
        ("parameters", f"{count.total:,}: {count.embedding:,} in the embedding, {count.rest:,} in the rest"),
        ("FLOPs", f"{flops_per_token(shape, shape.window):,} per token forward, at {shape.window:,} tokens"),
        ("", "2 (layers × matrices + vocabulary × hidden) + 2 × layers × heads × head size × (tokens + 1)"),
        ("KV cache", ", ".join(f"{cache_bytes_per_token(shape, name):,} bytes per token in {name}"
                               for name in ("bfloat16", "float32"))),
        ("", "2 × layers × key-value heads × head size × bytes"),
    ]  # fmt: skip
    facts = simple_table("model", ["what", "value"], rows, texts=2)
    if not KEYS[variant.name]:
        return (facts,)
    title = "As set in config.json (docs/reference/models.md has what else each could be)"
    readings = [(key, str(config[key])) for key in KEYS[variant.name]]
    return facts, simple_table("settings", ["key", "value"], readings, texts=2, title=title)


def readings(scored: Sequence[ScoredReading]) -> Report:
    """Return the perplexity of each reading of a checkpoint's weights; the first is the one that was converted."""
    own, rows, records = scored[0].settings, [], []
    for reading in sorted(scored, key=lambda reading: reading.difference):
        settings, is_first = reading.settings, reading is scored[0]
        # Of the others, what differs from the converted reading
        words = [value if name == "attention" else f"{name} {value}" for name, value in settings.items()
                 if value and (is_first or own.get(name) != value)]  # fmt: skip
        verdict = "converted" if is_first else "clearly better" if reading.is_better else ""
        difference = "" if is_first else MEANS.with_error(reading.difference, reading.stderr)
        rows.append([", ".join(words), fixed(reading.perplexity, 2), difference, verdict])
        records.append({**settings, "perplexity": reading.perplexity, "difference": reading.difference,
                        "stderr": reading.stderr, "verdict": verdict, "options": reading.options})  # fmt: skip
    sentence = "No other reading of the weights is clearly better."
    if better := [row[0] for row in rows if row[3] == "clearly better"]:
        options = next(record["options"] for record in records if record["verdict"] == "clearly better")
        sentence = (
            f"Warning: another reading of the same weights is clearly better: {better[0]}; convert with {options}"
        )
    notes = (
        "nats per token: mean loss less that of the converted reading, ± its paired standard error over tokens",
        f"clearly better: by more than {CLEAR:g} standard errors",
    )
    table = simple_table("readings", ("reading", "perplexity", "nats per token", ""), rows)
    return Report((table,), (sentence,), notes=notes, content=records, records=records)
