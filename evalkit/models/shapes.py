"""How large a model is, and what it costs, from its config alone.

In: the keys of a config.json. Out: a `ModelShape`, and from it parameters, floating-point operations and bytes. Neither
torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from evalkit.models.variants.settings import KEYS, VANILLA, Differential, Shape, Variant, read_variant

Backbone = Literal["llama", "qwen2", "gpt_neox"]
BACKBONES: tuple[str, ...] = get_args(Backbone)
_PREFIX = "evalkit_"
"""Of the model types that have another attention than the backbone's own."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST_LAYERS = 10_000
"""Of any model; lists of as many are made where an attention is described."""
_NEOX_ROTARY_SHARE = 0.25
"""What transformers assumes where a GPT-NeoX config says nothing."""


@dataclass(frozen=True)
class ModelShape:
    """What decides a model's size."""

    backbone: str
    """"llama", "qwen2" or "gpt_neox"."""
    vocabulary: int
    """Rows of the embedding."""
    hidden: int
    intermediate: int
    window: int
    """Tokens."""
    tied: bool
    """Whether the output head is the embedding."""
    attention_bias: bool
    mlp_bias: bool
    attention: Shape
    variant: Variant


class Parameters(NamedTuple):
    """Counts of numbers; tied ones once."""

    embedding: int
    """The embedding, and the output head where it is one of its own."""
    rest: int

    @property
    def total(self) -> int:
        """All."""
        return self.embedding + self.rest


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes; a key that it lacks is what transformers takes it for.

    Raises:
        ValueError: another architecture, a key that is missing or no whole number, or an attention that cannot be.
    """
    kind = str(config.get("model_type"))
    backbone = kind.removeprefix(_PREFIX)
    if backbone not in BACKBONES:
        raise ValueError(
            f"model_type is '{kind}'; sizes are known of {', '.join(BACKBONES)}, and of the same with {_PREFIX} before"
        )
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    own = backbone != "gpt_neox" and config.get("head_dim") is not None
    if not own and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    kv_heads = heads
    if backbone != "gpt_neox" and config.get("num_key_value_heads") is not None:
        kv_heads = whole(config, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")
    attention = Shape(
        layers=layer_count(config),
        heads=heads,
        kv_heads=kv_heads,
        head_size=whole(config, "head_dim") if own else hidden // heads,
        rotary_share=_rotary_share(config, backbone),
    )
    stock = {"attention_variant": VANILLA, "variant_layers": []}
    return ModelShape(
        backbone=backbone,
        vocabulary=whole(config, "vocab_size"),
        hidden=hidden,
        intermediate=whole(config, "intermediate_size"),
        window=whole(config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", backbone == "gpt_neox")),
        mlp_bias=bool(config.get("mlp_bias", False)) if backbone == "llama" else backbone == "gpt_neox",
        attention=attention,
        variant=read_variant(config if kind != backbone else stock, attention),
    )


def shape_facts(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A model's backbone, sizes and attention as a run's manifest keeps them: in JSON, under config.json's own keys.

    Two models of equal facts are the same but for their weights, their window and what bears on training or rotation
    only (`rope_theta`, norms' epsilon). None where the config is of another architecture.
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
    """How many numbers the model has."""
    layers, hidden = shape.attention.layers, shape.hidden
    # Llama and Qwen2 have two norms of a weight each and one behind the last layer; GPT-NeoX's have biases too
    norm = 2 * hidden if shape.backbone == "gpt_neox" else hidden
    layer = _matrices(shape) + _biases(shape) + 2 * norm
    rest = layers * layer + norm
    settings = shape.variant.settings
    if isinstance(settings, Differential):
        size = settings.size(shape.attention.head_size)
        # Four vectors that make λ, and the norm's weight over a pair
        rest += len(shape.variant.layers) * (4 * size + (2 * size if settings.subln == "affine" else 0))
    return Parameters(shape.vocabulary * hidden * (1 if shape.tied else 2), rest)


def flops_per_token(shape: ModelShape, length: int) -> int:
    """Floating-point operations of a forward pass, per token of a sequence of `length` tokens.

    2 (layers × matrices of a layer + vocabulary × hidden) + 2 × layers × heads × head size × (length + 1): each
    parameter of a matrix multiplies and adds once; queries meet keys, and shares meet values, of (length + 1) / 2
    tokens on average. All four attentions cost the same so counted; what an implementation computes twice is not in it.
    """
    attention = shape.attention
    products = attention.layers * _matrices(shape) + shape.vocabulary * shape.hidden
    return 2 * products + 2 * attention.layers * attention.heads * attention.head_size * (length + 1)


def cache_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Bytes that a token's keys and values take: 2 × layers × key-value heads × head size × bytes of the dtype."""
    attention = shape.attention
    return 2 * attention.layers * attention.kv_heads * attention.head_size * BYTES[dtype]


def _matrices(shape: ModelShape) -> int:
    """Numbers in the matrices of one layer: queries, keys, values, output; the feed-forward network's."""
    attention = shape.attention
    projections = 2 * shape.hidden * attention.head_size * (attention.heads + attention.kv_heads)
    feed_forward = shape.hidden * shape.intermediate * (2 if shape.backbone == "gpt_neox" else 3)
    return projections + feed_forward


def _biases(shape: ModelShape) -> int:
    """Numbers in the biases of one layer."""
    attention = shape.attention
    inner = attention.head_size * (attention.heads + 2 * attention.kv_heads)
    count = 0
    if shape.backbone == "qwen2":
        count += inner  # not behind the output
    elif shape.attention_bias:
        count += inner + shape.hidden
    if shape.mlp_bias:
        count += shape.hidden + shape.intermediate * (1 if shape.backbone == "gpt_neox" else 2)
    return count


def _rotary_share(config: Mapping[str, Any], backbone: str) -> float:
    inner = config.get("rope_parameters") or config.get("rope_scaling") or {}
    usual = config.get("rotary_pct", _NEOX_ROTARY_SHARE) if backbone == "gpt_neox" else 1.0
    share = inner.get("partial_rotary_factor", usual) if isinstance(inner, Mapping) else usual
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor is {share!r}; expected a share from 0 to 1")
    return float(share)


def layer_ranges(layers: Sequence[int]) -> str:
    """Layers as ranges: 0, 10–19."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def layer_count(config: Mapping[str, Any]) -> int:
    """The number of layers; raises `ValueError` where it is missing, no whole number, or too large."""
    layers = whole(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers:,}; expected at most {_MOST_LAYERS:,}")
    return layers


def whole(config: Mapping[str, Any], key: str) -> int:
    """A whole number from 1 in a config; raises `ValueError` where it is missing or something else."""
    value = config.get(key)
    if value is None:
        raise ValueError(f"'{key}' is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; expected a whole number from 1")
    return value
