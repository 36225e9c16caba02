"""Models as text for a terminal: the table of names, and everything about one.

In: named models, or a checkpoint's folder. Out: strings. Neither torch nor transformers is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError, UnknownNameError
from evalkit.inputs import values
from evalkit.models.locate import looks_like_path, read_config
from evalkit.models.shapes import (
    ModelShape,
    cache_bytes_per_token,
    flops_per_token,
    layer_ranges,
    parameters,
    read_shape,
)
from evalkit.models.variants.settings import KEYS, Differential, Integral
from evalkit.models.zoo import SUFFIXES, NamedModel, models, named_model
from evalkit.reporting.escape import printable
from evalkit.reporting.page import aligned

_HEADERS = ("name", "backbone", "attention", "in layers", "heads", "signals", "parameters", "of the paper's")


def table() -> str:
    """The models that evalkit ships, one a line."""
    rows = [_row(model) for model in models()]
    right = ("right",) * 3
    return aligned(rows, _HEADERS, tablefmt="plain", colalign=(*("left",) * 4, *right, "left"))


def description(given: str) -> str:
    """Shapes, sizes and open readings of a named model, of one in a user's file, or of a checkpoint's folder.

    Raises:
        UsageError: no such model, or one that cannot be.
        CheckpointError: the folder's config.json is of another architecture, or describes what cannot be.
    """
    folder = values.path("model", given).expanduser()
    if looks_like_path(given) and not given.partition(":")[0].endswith(SUFFIXES):
        return _of_folder(given, folder)
    try:
        model = named_model(given)
    except UnknownNameError:
        if not folder.is_dir():
            raise
        return _of_folder(given, folder)
    heading = f"{printable(f'{model.name}: {model.description}')}\n{printable(str(model.source))}"
    return f"{heading}\n\n{_facts(model.config, model.shape)}"


def _row(model: NamedModel) -> list[str]:
    shape = model.shape
    settings = shape.variant.settings
    return [
        model.name,
        shape.backbone,
        shape.variant.name,
        f"{layer_ranges(shape.variant.layers)} of {shape.attention.layers}" if shape.variant.layers else "",
        str(shape.attention.heads),
        str(settings.signals) if isinstance(settings, Integral) else "",
        f"{parameters(shape).total:,}",
        model.description,
    ]


def _of_folder(given: str, folder: Path) -> str:
    if not folder.is_dir():
        raise CheckpointError(f"{given}: no such folder")
    config = read_config(folder)
    try:
        return f"{printable(given)}\n\n{_facts(config, read_shape(config))}"
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def _facts(config: dict[str, Any], shape: ModelShape) -> str:
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
    text = aligned(rows, tablefmt="plain")
    if not KEYS[variant.name]:
        return text
    readings = [(key, config[key]) for key in KEYS[variant.name]]
    listed = aligned(readings, tablefmt="plain")
    return f"{text}\n\nas set in config.json; docs/reference/models.md has what else each could be\n{listed}"


def _heads(shape: ModelShape) -> str:
    """What a head is made of, in this attention."""
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
