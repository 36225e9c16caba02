"""Checkpoints with differential attention in the layout of its authors' code, inside a Llama.

In: config.json and weights. Out: the keys of an evalkit config; the weights under evalkit's names, with channels in
transformers' rotary order.

Source: microsoft/unilm, Diff-Transformer/multihead_diffattn.py. That code does not name the surrounding layers; this
module expects transformers' names for Llama.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from evalkit.errors import CheckpointError
from evalkit.models.locate import Checkpoint
from evalkit.models.variants.settings import DIFFERENTIAL

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

ROPES = ("interleaved", "rotate_half")
SUBLN_EPS = 1e-5
"""Epsilon of the authors' norm, which is no config key."""
LAYOUT = (
    "model.embed_tokens.weight; for each layer model.layers.N.self_attn.{q_proj,k_proj,v_proj,out_proj}.weight, "
    ".{lambda_q1,lambda_k1,lambda_q2,lambda_k2} and optionally .subln.weight, model.layers.N.mlp.{gate_proj,up_proj,"
    "down_proj}.weight, .{input_layernorm,post_attention_layernorm}.weight; model.norm.weight; lm_head.weight"
)
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_COPIED = (*_REQUIRED, "num_key_value_heads", "hidden_act", "initializer_range", "rope_theta", "rope_scaling",
         "rope_parameters", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
         )  # fmt: skip
"""Keys of config.json with the same meaning in an evalkit config."""


def read_authors(
    checkpoint: Checkpoint, config: dict[str, Any], weights: Weights, rope: str, pairing: str
) -> dict[str, Any]:
    """Return the keys of an evalkit config; rename and reorder `weights` in place.

    If every layer is differential, the number of heads is derived from the weights, because the authors count pairs
    and others count maps. If only some layers are, `num_attention_heads` is that of the vanilla layers.

    Args:
        checkpoint: its name appears in errors.
        config: the parsed config.json, with Llama's keys.
        weights: tensors by name.
        rope: "interleaved" (channels 2i and 2i + 1 rotate together) or "rotate_half" (i and i + half).
        pairing: "adjacent" or "halves".

    Raises:
        CheckpointError: the layout is another one, or the config lacks a required key.
    """
    layers = sorted(
        int(found[1])
        for name in weights
        if (found := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.lambda_q1", name))
    )
    if not layers:
        raise CheckpointError(
            f"{checkpoint.given}: neither transformers' DiffLlama (model_type diffllama) nor the authors' attention in "
            f"a Llama: weight model.layers.N.self_attn.lambda_q1 not found. Expected: {LAYOUT}"
        )
    for key in (*_REQUIRED, "rope_theta"):
        if key not in config and not (key == "rope_theta" and config.get("rope_parameters")):
            raise CheckpointError(f"{checkpoint.folder / 'config.json'}: lacks '{key}'")
    for name in [name for name in weights if ".self_attn.out_proj." in name]:
        weights[name.replace(".out_proj.", ".o_proj.")] = weights.pop(name)
    keys = {key: config[key] for key in _COPIED if key in config}
    size = _size(checkpoint, weights, layers)
    keys |= _heads(checkpoint, config, weights, layers, size)
    if rope == "interleaved":
        for layer in range(config["num_hidden_layers"]):
            _deinterleave(weights, layer, size if layer in layers else keys["head_dim"])
    return keys | {
        "attention_variant": DIFFERENTIAL,
        "variant_layers": layers,
        "diff_heads": "halve" if size == keys["head_dim"] else "keep",
        "diff_pairing": pairing,
        "diff_subln": _subln(checkpoint, weights, layers),
        "diff_subln_eps": SUBLN_EPS,
        "lambda_index": "absolute",
    }


def _size(checkpoint: Checkpoint, weights: Weights, layers: list[int]) -> int:
    """Channels of each map of a pair, equal to the length of λ's vectors."""
    sizes = {len(weights[f"model.layers.{layer}.self_attn.lambda_q1"]) for layer in layers}
    if len(sizes) > 1:
        raise CheckpointError(
            f"{checkpoint.given}: lambda_q1 has different sizes across layers: {sorted(sizes)} channels"
        )
    return sizes.pop()


def _heads(
    checkpoint: Checkpoint, config: dict[str, Any], weights: Weights, layers: list[int], size: int
) -> dict[str, int]:
    """Return `num_attention_heads`, `num_key_value_heads` and `head_dim`."""
    if len(layers) == config["num_hidden_layers"]:
        rows = []
        for part in ("q_proj", "k_proj"):
            name = f"model.layers.{layers[0]}.self_attn.{part}.weight"
            if name not in weights:
                raise CheckpointError(f"{checkpoint.given}: lacks {name}. Expected: {LAYOUT}")
            rows.append(weights[name].shape[0])
        if rows[0] % size or rows[1] % size:
            raise CheckpointError(
                f"{checkpoint.given}: q_proj and k_proj have {rows[0]} and {rows[1]} rows, not divisible by the head "
                f"size {size} (channels of lambda_q1)"
            )
        return {"num_attention_heads": rows[0] // size, "num_key_value_heads": rows[1] // size, "head_dim": size}
    heads = config["num_attention_heads"]
    own = config.get("head_dim") or config["hidden_size"] // heads
    if own not in (size, 2 * size):
        raise CheckpointError(
            f"{checkpoint.given}: the vanilla layers' heads have {own} channels and lambda_q1 has {size}; expected the "
            "same, or half; num_attention_heads must count the heads of the vanilla layers"
        )
    return {"num_key_value_heads": config.get("num_key_value_heads") or heads, "head_dim": own}


def _subln(checkpoint: Checkpoint, weights: Weights, layers: list[int]) -> str:
    """Return "affine" if the norm over a pair has a weight, else "plain"; the authors' code always has a norm."""
    affine = [layer for layer in layers if f"model.layers.{layer}.self_attn.subln.weight" in weights]
    if affine and affine != layers:
        raise CheckpointError(
            f"{checkpoint.given}: only {len(affine)} of {len(layers)} differential layers have subln.weight"
        )
    return "affine" if affine else "plain"


def _deinterleave(weights: Weights, layer: int, size: int) -> None:
    """Move channels 2i of each head of `size` before channels 2i + 1, in queries and keys, so QKᵀ is unchanged."""
    for part in ("q_proj", "k_proj"):
        for kind in ("weight", "bias"):
            name = f"model.layers.{layer}.self_attn.{part}.{kind}"
            if name in weights and weights[name].shape[0] % size == 0:
                heads = weights[name].unflatten(0, (-1, size // 2, 2))
                weights[name] = heads.transpose(1, 2).flatten(0, 2).contiguous()
