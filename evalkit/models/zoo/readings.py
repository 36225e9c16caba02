"""Readings of a checkpoint's weights: the attention that its own code computed, and how its heads rotate.

Integral and cog attention add no weights, and rotary layouts leave no trace, so a checkpoint of patched code does not
say how it is read. In: its config and weights, and what the user says. Out: a config and weights in evalkit's format,
and the perplexity of a text under this and other readings, which tells a wrong one from the right one.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from evalkit.compatibility.transformers import quiet
from evalkit.display import Say, doing
from evalkit.errors import CheckpointError, UsageError, check_known
from evalkit.models.variants.settings import (
    ALL_KEYS,
    COG,
    DIFFERENTIAL,
    INTEGRAL,
    KEYS,
    PREFIX,
    VANILLA,
    Differential,
    Integral,
    layers_of,
    read_attention,
    read_variant,
)
from evalkit.models.zoo.named import attention_settings, upto_last
from evalkit.models.zoo.shapes import layer_ranges

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

Rope = Literal["interleaved", "rotate_half"]
_ROPES: tuple[Rope, ...] = ("rotate_half", "interleaved")
_BACKBONES = ("llama", "qwen2", "gpt_neox")
_STORED = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")
"""Keys of a stock config that an evalkit config sets differently or does not have."""
_SAME = 1e-4
"""Largest difference of losses, in nats, of readings that compute the same."""
_CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    VANILLA: {},
    COG: {},
    DIFFERENTIAL: {"diff_pairing": ("adjacent", "halves"), "lambda_index": ("absolute", "relative")},
    INTEGRAL: {
        "signal_rope": ("per_signal", "full_head"),
        "signal_layout": ("contiguous", "tiled"),
        "signal_scale": ("signal", "head"),
    },
}
"""Settings that the weights do not show; every combination is a reading."""
_SIGNALS = (2, 4, 8, 16)
_LAYERS = ("all", "top 50%", "bottom 50%")
_LEAST_TOKENS, _MOST_TOKENS, _MOST_WINDOW = 100, 4096, 512
CLEAR = 3.0
"""Standard errors by which another reading must be better to be reported as clearly better; for the best of 18 equal
readings, 5 % by Bonferroni's bound are at 2.9 standard errors."""


class WeightReading(NamedTuple):
    keys: dict[str, Any]
    """Attention settings of an evalkit config."""
    rope: Rope
    """Channels that rotate together in the layers with the attention: 2i and 2i + 1, or i and i + half."""
    vanilla_rope: Rope
    """The same of the other layers."""

    def options(self, count: int) -> list[str]:
        """Return the options of `evalkit models convert` for this reading of a model of `count` layers."""
        variant = str(self.keys["attention_variant"])
        if variant == DIFFERENTIAL:
            words = ["--pairing", self.keys["diff_pairing"], "--set", f"lambda_index={self.keys['lambda_index']}"]
        else:
            words = ["--variant", variant]
        if variant in (COG, INTEGRAL):
            layers = list(self.keys["variant_layers"])
            named = [name for name in _LAYERS if _of_share(name, self.keys, count) == layers]
            words += ["--layers", named[0] if named else ",".join(map(str, layers))]
            for key, default in attention_settings(variant).items():
                value = self.keys[key]
                if value != default:
                    words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        if variant == INTEGRAL:
            words += ["--signals", str(self.keys["num_signals"])]
        return [*words, "--rope", self.rope, "--vanilla-rope", self.vanilla_rope]


def _of_share(name: str, keys: Mapping[str, Any], count: int) -> list[int]:
    """Return the layers of "all" or a half; of an odd number of layers, which has no half, none."""
    return upto_last(keys, layers_of(name, count), count) if name == "all" or count % 2 == 0 else []


@dataclass(frozen=True)
class GivenReading:
    """What the user says about a checkpoint; None: not said."""

    variant: str | None = None
    layers: str | None = None
    signals: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further attention settings."""
    rope: Rope | None = None
    vanilla_rope: Rope | None = None
    pairing: str | None = None

    def keys(self, name: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of an evalkit config for a stock one, whose weights do not show their attention."""
        if self.variant not in (COG, INTEGRAL, VANILLA) or self.pairing:
            raise UsageError(
                f"{name}: neither a DiffLlama nor the authors' differential attention in a Llama (it has no weight "
                "model.layers.N.self_attn.lambda_q1); of integral, cog and vanilla attention give --variant, whose "
                "weights show nothing, and omit --pairing"
            )
        if kind not in _BACKBONES:
            raise CheckpointError(f"{name}: has model type '{kind}'; expected {', '.join(_BACKBONES)}")
        kept = {key: value for key, value in config.items() if key not in (*_STORED, *ALL_KEYS)}
        known = [key for key in KEYS[self.variant] if key != "num_signals"]
        check_known(f"setting of {self.variant} attention", self.settings, known)
        if self.variant == VANILLA:
            if self.layers or self.signals:
                raise UsageError("vanilla attention has no layers and signals of its own; omit --layers and --signals")
            return kept | {"attention_variant": VANILLA, "variant_layers": []}
        given = dict(self.settings) | ({} if self.signals is None else {"num_signals": self.signals})
        settings = attention_settings(self.variant) | given
        if self.variant == INTEGRAL and "num_signals" not in settings:
            raise UsageError("integral attention has a number of signals in each head; give --signals")
        count = config["num_hidden_layers"]
        which = self.layers or "all"
        numbers = [int(number) for number in which.split(",")] if re.fullmatch(r"\d+(,\d+)*", which) else None
        layers = upto_last(settings, layers_of(numbers or which, count), count)
        return kept | settings | {"attention_variant": self.variant, "variant_layers": layers}

    def differential_keys(self) -> dict[str, Any]:
        """Return the keys of differential attention that the authors' weights do not show."""
        if self.variant not in (None, DIFFERENTIAL) or self.layers or self.signals:
            raise UsageError(
                "the weights have λ's vectors, so their layers are differential; omit --variant, --layers and --signals"
            )
        known = [key for key in _CHOICES[DIFFERENTIAL] if key != "diff_pairing"]
        check_known("setting that the weights do not show", self.settings, known)
        return {"diff_pairing": self.pairing or "adjacent", "lambda_index": "absolute", **self.settings}

    def reading(self, source: StoredModel) -> WeightReading:
        rope = self.rope or source.rope
        keys = {key: source.keys[key] for key in ALL_KEYS if source.keys.get(key) is not None}
        return WeightReading(keys, rope, self.vanilla_rope or rope)


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint whose weights have transformers' names."""

    backbone: str
    weights: Weights
    keys: dict[str, Any]
    """Of an evalkit config."""
    rope: Rope = "rotate_half"
    is_known: bool = False
    """Whether its format leaves nothing open."""

    def read(self, reading: WeightReading) -> tuple[Any, Weights]:
        """Return config and weights of a reading in evalkit's format. Raises `ValueError` if it is impossible."""
        from transformers import AutoConfig

        import evalkit.models.auto  # noqa: F401

        config = {key: value for key, value in self.keys.items() if key not in ALL_KEYS} | reading.keys
        shape = read_attention(config, self.backbone)
        variant, weights = read_variant(config, shape), dict(self.weights)
        settings, size = variant.settings, shape.head_size
        if isinstance(settings, Integral) and reading.rope == "interleaved":
            # A tiled or whole head is split after it has rotated, so its channels cannot be moved
            if (settings.signal_layout, settings.signal_rope) != ("contiguous", "per_signal"):
                raise ValueError("interleaved rotation applies to contiguous signals that each rotate by themselves")
            size = settings.size(size)
        elif isinstance(settings, Differential):
            size = settings.size(size)
        for layer in range(shape.layers):
            is_variant = layer in variant.layers
            if (reading.rope if is_variant else reading.vanilla_rope) == "interleaved":
                self._deinterleave(weights, layer, size if is_variant else shape.head_size)
        with quiet():
            return AutoConfig.for_model(f"{PREFIX}{self.backbone}", **config), weights

    def _deinterleave(self, weights: Weights, layer: int, size: int) -> None:
        """Move channels 2i of each head of `size` before channels 2i + 1, in queries and keys, so QKᵀ is unchanged."""
        if self.backbone == "gpt_neox":
            raise ValueError("GPT-NeoX rotates halves of its channels; --rope interleaved is for Llama and Qwen2")
        for part in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
            name = f"model.layers.{layer}.self_attn.{part}"
            if name in weights and weights[name].shape[0] % size == 0:
                heads = weights[name].unflatten(0, (-1, size // 2, 2))
                weights[name] = heads.transpose(1, 2).flatten(0, 2).contiguous()

    def others(self, reading: WeightReading) -> Iterator[WeightReading]:
        """Yield the other readings of the same weights."""
        keys, variant = reading.keys, str(reading.keys["attention_variant"])
        choices, ropes = _CHOICES[variant], list(product(_ROPES, _ROPES))
        settings = [keys | dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
        if variant == DIFFERENTIAL:
            yield from (WeightReading(chosen, *both) for chosen, both in product(settings, ropes) if not self.is_known)
            return
        if variant == INTEGRAL:
            settings += [keys | {"num_signals": signals} for signals in _SIGNALS]
        count = int(self.keys["num_hidden_layers"])
        for which in _LAYERS if variant != VANILLA else ():
            if layers := _of_share(which, keys, count):
                settings.append(keys | {"variant_layers": layers})
        settings.append({"attention_variant": VANILLA, "variant_layers": []})
        for other in {COG, INTEGRAL} - {variant}:
            layers = keys["variant_layers"] or _of_share("all", attention_settings(other), count)
            own = attention_settings(other) | {"attention_variant": other, "variant_layers": layers}
            settings += [own | {"num_signals": signals} for signals in _SIGNALS] if other == INTEGRAL else [own]
        yield from (reading._replace(keys=chosen) for chosen in settings)
        yield from (WeightReading(keys, *both) for both in ropes)


def with_attention(
    model: Any,
    *,
    variant: Literal["cog", "integral"],
    layers: str = "all",
    signals: int | None = None,
    rope: Rope = "rotate_half",
    vanilla_rope: Rope | None = None,
    **settings: Any,
) -> Any:
    """Return evalkit's model with the weights of a Llama, Qwen2 or GPT-NeoX in memory, whose code was patched.

    `layers` are "all", "top 50%", "bottom 50%" or numbers such as "0,2"; `settings` are further keys of
    docs/reference/models.md. The model can be evaluated and saved. Raises an `EvalkitError` if the weights cannot be
    read so.
    """
    config = model.config.to_dict()
    given = GivenReading(variant, layers, signals, settings, rope, vanilla_rope)
    kind = str(config["model_type"])
    source = StoredModel(kind, model.state_dict(), given.keys(type(model).__name__, kind, config))
    try:
        return _built(*source.read(given.reading(source)), str(model.dtype).removeprefix("torch."))
    except ValueError as error:
        raise CheckpointError(f"{type(model).__name__}: {error}") from error


class ScoredReading(NamedTuple):
    reading: WeightReading
    perplexity: float
    difference: float
    """Mean loss in nats per token, less that of the requested reading."""
    stderr: float
    """Standard error of the paired difference over tokens."""
    options: str
    """Options of `evalkit models convert` for the reading."""

    @property
    def is_better(self) -> bool:
        """Whether the text is clearly more likely than under the requested reading."""
        return -self.difference > CLEAR * self.stderr

    @property
    def settings(self) -> dict[str, str]:
        """Setting → its value as text."""
        keys = self.reading.keys
        about = {"attention": keys["attention_variant"], "layers": layer_ranges(keys["variant_layers"])}
        about |= {key: str(value) for key, value in keys.items() if key not in ("attention_variant", "variant_layers")}
        return about | {"rope": self.reading.rope, "vanilla_rope": self.reading.vanilla_rope}


def score_readings(
    name: str, source: StoredModel, reading: WeightReading, folder: Path, text: str, say: Say
) -> list[ScoredReading]:
    """Compute the perplexity of a text under the requested reading, which is the first, and under all others.

    Readings that compute the same count once. `folder` has the tokenizer. Of the text at most 4,096 tokens are read, in
    windows of 512. Raises an `EvalkitError` if the model or the text does not fit.
    """
    import torch

    from evalkit.models.loading.tokenizer import load_tokenizer

    embedding = next(weight for key, weight in source.weights.items() if "embed" in key)
    ids = load_tokenizer(folder, len(embedding), say=say)(text, return_tensors="pt", verbose=False).input_ids
    windows = ids[:, :_MOST_TOKENS].split(min(_MOST_WINDOW, int(source.keys["max_position_embeddings"])), dim=1)
    readings, losses, scored = [reading], list[torch.Tensor](), list[ScoredReading]()
    readings += [other for other in source.others(reading) if other != reading]
    for number, other in enumerate(readings):
        if other in readings[:number]:
            continue
        try:
            with doing(f"reading the weights of {name} in way {number + 1} of {len(readings)}"):
                model = _built(*source.read(other), "float32")
        except ValueError:  # it does not fit the shape
            continue
        with torch.no_grad():
            loss = torch.cat([_losses(model, window) for window in windows])
        if len(loss) < _LEAST_TOKENS:
            raise UsageError(f"{len(loss)} tokens of text are too few to tell readings apart; give --text")
        if any(torch.allclose(loss, known, rtol=0, atol=_SAME) for known in losses):
            continue
        losses.append(loss)
        difference = loss - losses[0]
        error = float(difference.std()) / math.sqrt(len(difference))
        options = shlex.join(other.options(int(source.keys["num_hidden_layers"])))
        scored.append(ScoredReading(other, float(loss.mean().exp()), float(difference.mean()), error, options))
    return scored


def _losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token of [1, tokens] but the first, in nats."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:], reduction="none")


def _built(config: Any, weights: Weights, dtype: str) -> Any:
    """Build evalkit's model of a config with weights, in a dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    with quiet():
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(config))
        model, report = kind.from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=getattr(torch, dtype), output_loading_info=True
        )
    for what, names in (("lacks", report["missing_keys"]), ("has no place for", report["unexpected_keys"])):
        if names:
            raise CheckpointError(f"{config.model_type} {what} weight {min(names)}")
    return model.eval()
