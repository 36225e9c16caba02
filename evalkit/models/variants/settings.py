"""Read and validate the attention settings in a checkpoint's config.

In: the flat keys of a config. Out: a `Variant`, and the `Shape` of its attention. Every detail that the papers leave
open has a key; none has a default here, so a config without one of them is rejected. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, get_args, get_type_hints

PREFIX = "evalkit_"
"""Prefix of model types whose attention differs from the backbone's."""
VANILLA, COG, DIFFERENTIAL, INTEGRAL = "vanilla", "cog", "differential", "integral"
MOST_LAYERS = 10_000
"""Limit on layers, because lists of this length, or modules, are created."""
_NEOX_ROTARY_SHARE = 0.25


@dataclass(frozen=True)
class Shape:
    """Dimensions of a backbone's attention."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_share: float = 1.0


def read_attention(config: Mapping[str, Any], backbone: str) -> Shape:
    """Read the dimensions of attention from the keys of a config; missing keys have transformers' defaults.

    Raises `ValueError` for a required key that is missing or no whole number, and for numbers that do not fit.
    """
    is_neox = backbone == "gpt_neox"
    # GPT-NeoX has neither of these two
    optional = {
        key: positive_integer(config, key)
        for key in ("head_dim", "num_key_value_heads")
        if not is_neox and config.get(key) is not None
    }
    hidden, heads = positive_integer(config, "hidden_size"), positive_integer(config, "num_attention_heads")
    kv_heads = optional.get("num_key_value_heads", heads)
    if "head_dim" not in optional and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")
    usual = config.get("rotary_pct", _NEOX_ROTARY_SHARE) if is_neox else 1.0
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", usual) if isinstance(rope, Mapping) else usual
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor is {share!r}; expected a number above 0, at most 1")
    head_size = optional.get("head_dim", hidden // heads)
    return Shape(positive_integer(config, "num_hidden_layers"), heads, kv_heads, head_size, float(share))


def positive_integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if value is None:
        raise ValueError(f"'{key}' is missing")
    if type(value) is not int or value < 1 or (key == "num_hidden_layers" and value > MOST_LAYERS):
        raise ValueError(f"{key} is {value!r}; expected a whole number from 1, of layers at most {MOST_LAYERS:,}")
    return value


# The fields are the keys that each variant requires in a config, besides `attention_variant` and `variant_layers`


@dataclass(frozen=True)
class Cog:
    """Cog attention: sign(QKᵀ) ⊙ softmax(|QKᵀ|)."""

    cog_keep_last: bool
    """Whether the model's last layer stays vanilla, as in the authors' code."""


@dataclass(frozen=True)
class Differential:
    """Differential attention: softmax(Q₁K₁ᵀ) − λ softmax(Q₂K₂ᵀ), then a norm over each pair of heads."""

    diff_heads: Literal["halve", "keep"]
    """"halve": maps as wide as the backbone's heads, half as many pairs; "keep": half as wide, a pair for each head."""
    diff_pairing: Literal["adjacent", "halves"]
    """Which maps form a pair, in the order of the projections' rows: "adjacent" (2i, 2i + 1), which under "keep" are
    the two halves of a head; "halves" (i, i + half of them)."""
    diff_subln: Literal["affine", "plain", "none"]
    """"affine": RMSNorm with a weight, × (1 − λ_init); "plain": without a weight; "none": no norm and no factor."""
    diff_subln_eps: float
    lambda_index: Literal["absolute", "relative"]
    """Depth in λ_init: "absolute" counts all layers, "relative" only the variant's; both from 0."""

    def size(self, head_size: int) -> int:
        return head_size if self.diff_heads == "halve" else head_size // 2


@dataclass(frozen=True)
class Integral:
    """Integral attention: softmax of the mean of S signals' logits."""

    num_signals: int
    signal_rope: Literal["per_signal", "full_head"]
    """"per_signal": each signal rotates as a head of its own size; "full_head": the head rotates before it is split."""
    signal_layout: Literal["contiguous", "tiled"]
    """Channels of signal s in a head of D: "contiguous" s·D/S …, "tiled" s, s + S, …"""
    signal_scale: Literal["signal", "head"]
    """Divisor of each signal's logits: the square root of the "signal" size D/S, or of the "head" size D."""
    signal_domain: Literal["logits", "probabilities"]
    """"logits": softmax of the mean; "probabilities": mean of the softmaxes."""

    def size(self, head_size: int) -> int:
        return head_size // self.num_signals

    def factor(self, head_size: int) -> float:
        return float((self.size(head_size) if self.signal_scale == "signal" else head_size) ** -0.5)

    def mean_factor(self, head_size: int) -> float:
        """Return the factor that turns a head's QKᵀ into the mean of its signals' logits."""
        signals = self.num_signals
        # A single root, so that one signal is bit-identical to vanilla attention
        return float((signals * head_size if self.signal_scale == "signal" else signals**2 * head_size) ** -0.5)


_SETTINGS: dict[str, type[Cog] | type[Differential] | type[Integral]] = {
    COG: Cog,
    DIFFERENTIAL: Differential,
    INTEGRAL: Integral,
}
KEYS = {VANILLA: (), **{name: tuple(field.name for field in fields(form)) for name, form in _SETTINGS.items()}}
ALL_KEYS = ("attention_variant", "variant_layers", *(key for keys in KEYS.values() for key in keys))
_EXPECTED = {bool: "true or false", int: "a whole number from 1", float: "a positive number"}


@dataclass(frozen=True)
class Variant:
    """An attention variant and its layers; the other layers have the backbone's attention."""

    name: str
    layers: tuple[int, ...]
    settings: Cog | Differential | Integral | None


def read_variant(config: Mapping[str, Any], shape: Shape) -> Variant:
    """Read the attention variant from the keys `ALL_KEYS` and `attention_dropout` of a config; None counts as absent.

    Raises `ValueError` if a key is missing, has no meaning for this variant, or does not fit the shape.
    """
    name = config.get("attention_variant")
    if name not in tuple(KEYS):
        raise ValueError(f"'attention_variant' is {name!r}; expected one of {', '.join(KEYS)}")
    others = {key for key in ALL_KEYS if config.get(key) is not None} - {"attention_variant", "variant_layers"}
    if unknown := sorted(others.difference(KEYS[name])):
        raise ValueError(f"'{unknown[0]}' has no meaning for {name} attention; leave it out")
    layers = _layers(config, name, shape)
    if name in (COG, DIFFERENTIAL) and config.get("attention_dropout"):
        raise ValueError(f"{name} attention has no attention_dropout; set it to 0")
    if name == VANILLA:
        return Variant(name, layers, None)
    kinds = get_type_hints(_SETTINGS[name])
    settings = _SETTINGS[name](**{key: _value(config, key, kinds[key], name) for key in KEYS[name]})
    if isinstance(settings, Cog) and settings.cog_keep_last and shape.layers - 1 in layers:
        raise ValueError(
            f"cog_keep_last is true, but variant_layers contains the last layer, {shape.layers - 1}; change one"
        )
    if isinstance(settings, Differential):
        _check_pairs(settings, shape)
    if isinstance(settings, Integral):
        signals, size = settings.num_signals, shape.head_size
        if size % signals:
            raise ValueError(
                f"{signals} signals do not divide a head of {size} channels: {size} / {signals} = {size / signals:g}"
            )
        if settings.signal_rope == "per_signal":
            _check_rotary(settings.size(size), shape, f"a signal ({size} / {signals})")
    return Variant(name, layers, settings)


def layers_of(which: str | Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the layers, from 0, for "all", "none", "top 50%" or "bottom 50%"; a list is returned unchanged.

    Raises `ValueError` for another text, and for a share that is no integer number of layers.
    """
    if isinstance(which, (list, tuple)):
        return tuple(which)
    if which in ("all", "none"):
        return tuple(range(layers)) if which == "all" else ()
    match = re.fullmatch(r"(top|bottom) (\d+) ?%", str(which))
    if not match or not 0 < int(match[2]) <= 100:
        raise ValueError(f"variant_layers '{which}': expected all, none, 'top 50%', 'bottom 50%' or a list of layers")
    share = Fraction(int(match[2]), 100) * layers
    if share.denominator != 1:
        raise ValueError(
            f"variant_layers '{which}': {match[2]} % of {layers} layers is {float(share):g}; list the layers"
        )
    return tuple(range(layers - int(share), layers)) if match[1] == "top" else tuple(range(int(share)))


def lambda_init(depth: int) -> float:
    """Compute λ_init of a differential layer at a depth from 0: 0.8 − 0.6 exp(−0.3 depth).

    Source: arXiv 2410.05258, section 2.1, whose depth counts from 1; from 0 in the authors' code.
    """
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def _check_pairs(settings: Differential, shape: Shape) -> None:
    if settings.diff_heads == "halve":
        for what, count in (("heads", shape.heads), ("key-value heads", shape.kv_heads)):
            if count % 2:
                raise ValueError(
                    f"diff_heads 'halve' pairs heads, but there are {count} {what}; use an even number, or 'keep'"
                )
    elif shape.head_size % 2:
        raise ValueError(
            f"differential attention with diff_heads 'keep' halves each head, but its size {shape.head_size} is odd"
        )
    else:
        _check_rotary(shape.head_size // 2, shape, f"half of a head of {shape.head_size}")


def _check_rotary(size: int, shape: Shape, what: str) -> None:
    # Exact arithmetic, because decimal shares such as 0.1 have no exact binary form
    rotating = Fraction(str(shape.rotary_share)) * size
    if rotating.denominator != 1 or rotating % 2 or not rotating:
        share = "" if shape.rotary_share == 1 else f", of which {shape.rotary_share:g} rotate: {float(rotating):g}"
        raise ValueError(f"{what} has {size} channels{share}; rotary embeddings need an even number from 2")


def _layers(config: Mapping[str, Any], name: str, shape: Shape) -> tuple[int, ...]:
    layers = config.get("variant_layers")
    if not isinstance(layers, (list, tuple)) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"'variant_layers' is {layers!r}; expected a list of layer numbers, from 0")
    if list(layers) != sorted(set(layers) & set(range(shape.layers))):
        raise ValueError(
            f"variant_layers is {list(layers)}; expected each layer once, in order, from 0 to {shape.layers - 1}"
        )
    if bool(layers) == (name == VANILLA):
        what = "must be empty for vanilla attention" if layers else f"is empty, so no layer has {name} attention"
        raise ValueError(f"variant_layers {what}")
    return tuple(layers)


def _value(config: Mapping[str, Any], key: str, kind: Any, name: str) -> Any:
    """Return the value of a key that an attention requires; raise if it is missing or not of its field's type."""
    value, choices = config.get(key), get_args(kind)
    expected = f"one of {', '.join(choices)}" if choices else _EXPECTED[kind]
    if value is None:
        raise ValueError(f"the config lacks '{key}', which {name} attention needs ({expected})")
    is_valid = value in choices if choices else type(value) is kind and (kind is bool or 0 < value < math.inf)
    if not is_valid:
        raise ValueError(f"{key} is {value!r}; expected {expected}")
    return value
