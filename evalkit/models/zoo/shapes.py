"""Model size and cost, computed from the config alone.

In: the keys of a config.json. Out: a `ModelShape`, and from it parameters, floating-point operations and bytes. Neither
torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, Literal, NamedTuple, get_args

from evalkit.errors import CheckpointError
from evalkit.models.loading.files import safetensors_header
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.variants import settings
from evalkit.models.variants.settings import KEYS, PREFIX, VANILLA, Differential, positive_integer

Backbone = Literal["llama", "qwen2", "gpt_neox"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_GGUF_BYTES = 1.1
"""Bytes of a parameter in a GGUF file of 8 bits, which most have."""


@dataclass(frozen=True)
class ModelShape:
    backbone: str
    vocabulary: int
    hidden: int
    intermediate: int
    window: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    attention: settings.Shape
    variant: settings.Variant


class Parameters(NamedTuple):
    """Parameter counts; tied parameters count once."""

    embedding: int
    """The embedding, and the output head if it is untied."""
    rest: int

    @property
    def total(self) -> int:
        return self.embedding + self.rest


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from a config.json; missing keys have transformers' defaults.

    Raises `ValueError` for another architecture, a required key that is missing or no integer, or an invalid attention.
    """
    kind = str(config.get("model_type"))
    backbone = kind.removeprefix(PREFIX)
    if backbone not in get_args(Backbone):
        raise ValueError(
            f"model_type is '{kind}'; expected {', '.join(get_args(Backbone))}, or one of these with prefix {PREFIX}"
        )
    is_neox, attention = backbone == "gpt_neox", settings.read_attention(config, backbone)
    stock = {"attention_variant": VANILLA, "variant_layers": []}
    return ModelShape(
        backbone=backbone,
        vocabulary=positive_integer(config, "vocab_size"),
        hidden=positive_integer(config, "hidden_size"),
        intermediate=positive_integer(config, "intermediate_size"),
        window=positive_integer(config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", is_neox)),
        mlp_bias=bool(config.get("mlp_bias", False)) if backbone == "llama" else is_neox,
        attention=attention,
        variant=settings.read_variant(config if kind != backbone else stock, attention),
    )


def shape_facts(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a model's backbone, sizes and attention for a run's manifest: JSON values under config.json's keys.

    Two models with equal facts differ only in weights, window and settings of training or rotation (`rope_theta`, the
    norms' epsilon). None if the config is for another architecture.
    """
    try:
        shape = read_shape(config)
    except ValueError:
        return None
    attention, variant = shape.attention, shape.variant
    return {
        "backbone": shape.backbone,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": attention.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_size,
        "partial_rotary_factor": attention.rotary_share,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "attention_variant": variant.name,
        "variant_layers": list(variant.layers),
        **{key: config[key] for key in KEYS[variant.name]},
    }


def parameters(shape: ModelShape) -> Parameters:
    layers, hidden = shape.attention.layers, shape.hidden
    # Two norms per layer and one after the last layer: a weight each, in GPT-NeoX also a bias
    norm = 2 * hidden if shape.backbone == "gpt_neox" else hidden
    inner = shape.attention.head_size * (shape.attention.heads + 2 * shape.attention.kv_heads)
    biases = 0
    if shape.backbone == "qwen2":
        biases += inner  # none on the output projection
    elif shape.attention_bias:
        biases += inner + hidden
    if shape.mlp_bias:
        biases += hidden + shape.intermediate * (1 if shape.backbone == "gpt_neox" else 2)
    layer = _matrices(shape) + biases + 2 * norm
    rest = layers * layer + norm
    variant = shape.variant.settings
    if isinstance(variant, Differential):
        size = variant.size(shape.attention.head_size)
        # The four vectors of λ, and the weight of the norm over a pair
        rest += len(shape.variant.layers) * (4 * size + (2 * size if variant.diff_subln == "affine" else 0))
    return Parameters(shape.vocabulary * hidden * (1 if shape.tied else 2), rest)


def flops_per_token(shape: ModelShape, length: int) -> int:
    """Floating-point operations of a forward pass, per token of a sequence of `length` tokens.

    2 (layers × matrices of a layer + vocabulary × hidden) + 2 × layers × heads × head size × (length + 1): each
    matrix parameter is used in one multiplication and one addition; queries are multiplied with keys, and attention
    weights with values, of (length + 1) / 2 tokens on average. All four attentions have the same count; operations that
    an implementation repeats are not included.
    """
    attention = shape.attention
    products = attention.layers * _matrices(shape) + shape.vocabulary * shape.hidden
    return 2 * products + 2 * attention.layers * attention.heads * attention.head_size * (length + 1)


def cache_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Bytes of the KV cache per token: 2 × layers × key-value heads × head size × bytes of the dtype."""
    attention = shape.attention
    return 2 * attention.layers * attention.kv_heads * attention.head_size * BYTES[dtype]


def _matrices(shape: ModelShape) -> int:
    attention = shape.attention
    projections = 2 * shape.hidden * attention.head_size * (attention.heads + attention.kv_heads)
    feed_forward = shape.hidden * shape.intermediate * (2 if shape.backbone == "gpt_neox" else 3)
    return projections + feed_forward


def layer_ranges(layers: Sequence[int]) -> str:
    # Within a range, the difference of layer and index is constant
    groups = groupby(enumerate(layers), lambda entry: entry[1] - entry[0])
    ranges = [[layer for _, layer in group] for _, group in groups]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges)


def parameter_count(checkpoint: Checkpoint) -> int | None:
    """Return the number of parameters; an estimate for GGUF and pickled files, None if the files are unreadable."""
    try:
        if checkpoint.gguf is not None:
            return int(checkpoint.gguf.stat().st_size / _GGUF_BYTES)
        return sum(
            sum(prod(shape) for _, shape in safetensors_header(path).values())
            if path.suffix == ".safetensors"
            else path.stat().st_size // BYTES["float32"]
            for path in checkpoint.weights()
        )
    except (CheckpointError, OSError):
        return None
