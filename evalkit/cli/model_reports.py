"""What evalkit knows about models by their description: shapes, sizes and settings. No weights, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError, UnknownNameError
from evalkit.inputs import values
from evalkit.models.loading.locate import looks_like_path, read_config
from evalkit.models.variants.settings import KEYS, Differential, Integral
from evalkit.models.zoo.named import SUFFIXES, NamedModel, models, named_model
from evalkit.models.zoo.shapes import (
    ModelShape,
    cache_bytes_per_token,
    flops_per_token,
    layer_ranges,
    parameters,
    read_shape,
)
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table

_HEADERS = ("name", "backbone", "attention", "layers", "of the paper's", "heads × signals", "parameters")


def models_report() -> Report:
    """Report on the models shipped with evalkit, one row each."""
    records = [_record(model) for model in models()]
    table = simple_table("models", _HEADERS, [_row(record) for record in records], texts=5)
    return Report(
        (table,), content=records, records=[record | {"layers": layer_ranges(record["layers"])} for record in records]
    )


def model_report(given: str) -> Report:
    """Report shapes, sizes and attention settings of a named model, a model in a user's file, or a checkpoint folder.

    Raises:
        UsageError: the model is not found, or its description is invalid.
        CheckpointError: the folder's config.json is for another architecture, or invalid.
    """
    folder = values.path("model", given).expanduser()
    if looks_like_path(given) and not given.partition(":")[0].endswith(SUFFIXES):
        return _folder_report(given, folder)
    try:
        model = named_model(given)
    except UnknownNameError:
        if not folder.is_dir():
            raise
        return _folder_report(given, folder)
    return Report(_facts(model.config, model.shape), (f"{model.name}: {model.description}", str(model.source)))


def _record(model: NamedModel) -> dict[str, Any]:
    shape = model.shape
    settings = shape.variant.settings
    return {
        "name": model.name,
        "description": model.description,
        "backbone": shape.backbone,
        "attention": shape.variant.name,
        "layers": list(shape.variant.layers),
        "of_layers": shape.attention.layers,
        "heads": shape.attention.heads,
        "signals": settings.signals if isinstance(settings, Integral) else None,
        "parameters": parameters(shape).total,
    }


def _row(record: dict[str, Any]) -> list[str]:
    layers = f"{layer_ranges(record['layers'])}/{record['of_layers']}" if record["layers"] else ""
    heads = f"{record['heads']} × {record['signals']}" if record["signals"] else str(record["heads"])
    about = [record[key] for key in ("name", "backbone", "attention")]
    return [*about, layers, record["description"], heads, f"{record['parameters']:,}"]


def _folder_report(given: str, folder: Path) -> Report:
    if not folder.is_dir():
        raise CheckpointError(f"{given}: folder not found")
    config = read_config(folder)
    try:
        return Report(_facts(config, read_shape(config)), (given,))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def _facts(config: dict[str, Any], shape: ModelShape) -> tuple[Table, ...]:
    attention, variant, count = shape.attention, shape.variant, parameters(shape)
    where = f"{variant.name} in layers {layer_ranges(variant.layers)} (from 0)" if variant.layers else "vanilla"
    others = ", vanilla in the others" if 0 < len(variant.layers) < attention.layers else ""
    rows = [
        ("backbone", f"{shape.backbone}; model type {config['model_type']}"),
        ("layers", f"{attention.layers}; hidden size {shape.hidden:,}, intermediate size {shape.intermediate:,}"),
        ("vocabulary", f"{shape.vocabulary:,}, output head {'tied' if shape.tied else 'of its own'}"),
        ("window", f"{shape.window:,} tokens"),
        ("attention", where + others),
        ("heads", _heads(shape)),
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


def _heads(shape: ModelShape) -> str:
    """Describe the heads of the model's attention."""
    attention, settings = shape.attention, shape.variant.settings
    text = f"{attention.heads} of {attention.head_size} channels"
    if attention.kv_heads != attention.heads:
        text += f", {attention.kv_heads} of keys and values"
    if isinstance(settings, Integral):
        text += f"; {settings.signals} signals of {settings.size(attention.head_size)} in each (d_h)"
    elif isinstance(settings, Differential):
        size = settings.size(attention.head_size)
        pairs = attention.heads * attention.head_size // (2 * size)
        text += f"; {pairs} pairs of maps of {size} (d_h), with values of {2 * size}"
    return text
