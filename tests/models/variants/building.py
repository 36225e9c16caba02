"""Tiny models of every backbone and attention, and batches to show them.

The same arguments give the same weights everywhere. Norm scales, biases and λ's vectors are moved off 1 and 0, so that
code which drops one of them is found out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import evalkit.models.auto  # noqa: F401
from evalkit.models.variants.modeling import CLASSES

FAMILIES = ("llama", "qwen2", "gpt_neox")
VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 64, 3, 8, 4, 16

_MODELS: dict[str, Any] = dict(zip(FAMILIES, CLASSES, strict=True))
_PLAIN: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
}

VANILLA: dict[str, Any] = {"attention_variant": "vanilla", "variant_layers": []}
COG: dict[str, Any] = {"attention_variant": "cog", "variant_layers": [1, 2], "cog_keep_last": False}
DIFFERENTIAL: dict[str, Any] = {
    "attention_variant": "differential", "variant_layers": [1, 2], "diff_heads": "halve", "diff_pairing": "adjacent",
    "diff_subln": "affine", "diff_subln_eps": 1e-5, "lambda_index": "absolute",
}  # fmt: skip
INTEGRAL: dict[str, Any] = {
    "attention_variant": "integral", "variant_layers": [1, 2], "num_signals": 2, "signal_rope": "per_signal",
    "signal_layout": "contiguous", "signal_scale": "signal", "signal_domain": "logits",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "cog": COG,
    "differential": DIFFERENTIAL,
    "differential-keep": DIFFERENTIAL | {"diff_heads": "keep", "diff_subln": "plain"},
    "integral": INTEGRAL,
    "integral-probabilities": INTEGRAL | {"signal_domain": "probabilities", "signal_layout": "tiled"},
}
"""One of each way through the code, for tests of what all have in common."""


def shape_keys(family: str, **changes: Any) -> dict[str, Any]:
    """What a config says beside its attention: grouped queries but for GPT-NeoX, of which half a head rotates."""
    heads = changes.get("num_attention_heads", HEADS)
    keys: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": heads * HEAD_SIZE, "intermediate_size": 2 * heads * HEAD_SIZE,
        "num_hidden_layers": LAYERS, "num_attention_heads": heads, "max_position_embeddings": 128,
        "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    # Not the default base, so that an ignored base fails the test
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000.0}
    if family == "gpt_neox":
        keys["rope_parameters"] = rope | {"partial_rotary_factor": 0.5}
    else:
        keys |= {"rope_parameters": rope, "num_key_value_heads": KV_HEADS}
    return keys | changes


def config_of(family: str, attention: dict[str, Any], **changes: Any) -> Any:
    return _MODELS[family].config_class(**shape_keys(family, **changes), **attention)


def model_of(
    family: str,
    attention: dict[str, Any],
    *,
    implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A model of random weights, in evaluation mode."""
    config = config_of(family, attention, **changes)
    config._attn_implementation = implementation
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = _MODELS[family](config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval().to(dtype)


def plain_of(family: str, model: Any, **changes: Any) -> Any:
    """The backbone's own model, of the shape and dtype of a variant's, with its weights where it has such."""
    config_class, model_class = _PLAIN[family]
    config = config_class(**shape_keys(family, **changes))
    config._attn_implementation = model.config._attn_implementation
    plain = model_class(config).eval().to(model.dtype)
    assert not plain.load_state_dict(model.state_dict(), strict=False).missing_keys
    return plain


def attention_of(model: Any, layer: int) -> Any:
    block = model.base_model.layers[layer]
    return block.attention if hasattr(block, "attention") else block.self_attn


def random_ids(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Scene:
    """A batch and its attention mask."""

    ids: torch.Tensor
    """[batch, tokens]."""
    positions: torch.Tensor
    """[batch, tokens]."""
    seen: torch.Tensor
    """[batch, queries, keys], boolean."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further inputs of the model that describe the layout."""

    @property
    def real(self) -> torch.Tensor:
        """[batch, tokens]: tokens that attend to anything."""
        return self.seen.any(-1)

    def given(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids, "position_ids": self.positions, **self.inputs}


def logits_of(model: Any, scene: Scene | None = None) -> Any:
    with torch.no_grad():
        return model(**(scene or causal()).given()).logits


def causal(batch: int = 2, tokens: int = 11) -> Scene:
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(batch, -1, -1)
    return Scene(random_ids(batch, tokens), torch.arange(tokens).expand(batch, -1), seen)


def left_padded(paddings: tuple[int, ...] = (0, 5), tokens: int = 11) -> Scene:
    whole = causal(len(paddings), tokens)
    mask = torch.arange(tokens)[None] >= torch.tensor(paddings)[:, None]
    seen = whole.seen & mask[:, None, :]
    return Scene(whole.ids, (mask.long().cumsum(1) - 1).clamp(min=0), seen, {"attention_mask": mask.long()})


def tree(kind: str, dtype: torch.dtype, batch: int = 2, tokens: int = 11) -> Scene:
    """Tokens that see themselves and their ancestors; positions are depths.

    The mask, [batch, 1, tokens, tokens], is "boolean" (True is seen) or "additive" (0, or the dtype's least number).
    """
    draw = torch.Generator().manual_seed(2)
    seen = torch.zeros(batch, tokens, tokens, dtype=torch.bool)
    for row in seen:
        for token in range(tokens):
            if token:
                row[token] = row[int(torch.randint(0, token, (), generator=draw))]
            row[token, token] = True
    mask = seen[:, None]
    if kind == "additive":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return Scene(random_ids(batch, tokens), seen.sum(-1) - 1, seen, {"attention_mask": mask})


SCENES = ("causal", "left padded", "boolean tree", "additive tree")


def scene_of(name: str, dtype: torch.dtype) -> Scene:
    if name == "causal":
        return causal()
    return left_padded() if name == "left padded" else tree(name.split()[0], dtype)
