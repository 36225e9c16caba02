"""Convert differential checkpoints to evalkit's format, and export evalkit's with their code.

In: for `convert`, a checkpoint of transformers' DiffLlama, or one with the attention of the authors' code
(microsoft/unilm, Diff-Transformer, `multihead_diffattn.py`) inside a Llama with transformers' names. Out: a folder of
model type `evalkit_llama` with the same logits. `export` writes a checkpoint that loads without evalkit.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.compatibility.transformers import quiet
from evalkit.display import Say, doing, imports
from evalkit.errors import CheckpointError, UsageError, reading_as
from evalkit.models import variants
from evalkit.models.loading.files import copy_files, generation_files, tokenizer_files, weight_indexes
from evalkit.models.loading.fingerprint import Fingerprint, combine, fingerprint, hash_file
from evalkit.models.loading.locate import Checkpoint, silent
from evalkit.models.variants.settings import DIFFERENTIAL
from evalkit.models.zoo.named import new_folder
from evalkit.models.zoo.shapes import read_shape

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

_SUBLN_EPS = 1e-5
"""Epsilon of the authors' norm, which is no config key."""
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_OPTIONAL = ("num_key_value_heads", "hidden_act", "initializer_range", "rope_theta", "rope_scaling",
         "rope_parameters", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id",
         )  # fmt: skip
_DROPPED_KEYS = ("model_type", "architectures", "auto_map", "lambda_std_dev", "transformers_version", "dtype")
"""Keys of a DiffLlama config that an evalkit config sets differently or does not have."""
_MODULES = ("settings.py", "signed.py", "attention.py", "modeling.py")
"""Modules that a model needs; they import only torch, transformers and each other."""
_CLASSES = {"evalkit_llama": "EvalkitLlama", "evalkit_qwen2": "EvalkitQwen2", "evalkit_gpt_neox": "EvalkitGPTNeoX"}


def export(checkpoint: Checkpoint, output: Path) -> None:
    """Write a checkpoint with its model code to `output`, which must not exist or be empty."""
    config = checkpoint.config()
    kind = str(config.get("model_type"))
    if kind not in _CLASSES:
        raise CheckpointError(f"{checkpoint.given}: model type '{kind}' loads without evalkit and needs no export")
    folder = checkpoint.folder
    with reading_as(folder / "config.json", "a model's shape", CheckpointError):
        read_shape(config)
    files = (*checkpoint.weights(), *weight_indexes(folder), *tokenizer_files(folder), *generation_files(folder))
    name, code = _CLASSES[kind], Path(variants.__path__[0])
    # Both from one module: transformers copies each referenced module separately, and a model does not recognise the
    # settings classes of a config from another copy
    classes = {"AutoConfig": f"modeling.{name}Config", "AutoModelForCausalLM": f"modeling.{name}ForCausalLM"}
    with new_folder(output) as new, doing(f"copying {checkpoint.given}"):
        copy_files(files, folder, new)
        copy_files([code / module for module in _MODULES], code, new)
        (new / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
        _check_unchanged(checkpoint, fingerprint(replace(checkpoint, folder=new), hash_file))
        content = json.dumps(config | {"auto_map": classes}, indent=2, ensure_ascii=False)
        (new / "config.json").write_text(content + "\n", encoding="utf-8")


def convert(
    checkpoint: Checkpoint, output: Path, *, rope: str | None = None, pairing: str | None = None, say: Say = silent
) -> None:
    """Convert a differential checkpoint, a DiffLlama or one in the authors' layout, and write it to a new folder.

    Of the authors' heads, `rope` is the rotary layout: "interleaved" (also None; channels 2i and 2i + 1 rotate
    together), or "rotate_half" as in transformers (i and i + half); `pairing` is "adjacent" (also None) or "halves".
    """
    config = checkpoint.config()
    kind = str(config.get("model_type"))
    if kind in _CLASSES:
        raise CheckpointError(f"{checkpoint.given}: is already in evalkit's format (model type '{kind}')")
    if kind == "diffllama" and (rope or pairing):
        raise UsageError("--rope and --pairing apply to the authors' layout only; leave them out for a DiffLlama")
    with doing(f"converting {checkpoint.given}", slow=imports("torch")):
        from evalkit.models.loading.build import copied, read_weights

        with copied(checkpoint) as copies, new_folder(output) as folder:
            stored = read_weights(checkpoint.weights())
            # Without the rotary frequencies that old checkpoints store
            names = [name for name in stored.tensors if not name.endswith("rotary_emb.inv_freq")]
            weights = {name: stored.tensors[name] for name in names}
            if kind == "diffllama":
                keys = _config_from_diffllama(config)
            else:
                with reading_as(checkpoint.given, "a differential checkpoint", CheckpointError):
                    keys = _read_authors(checkpoint, config, weights, rope or "interleaved", pairing or "adjacent")
            model_config = _checked_config(checkpoint, keys, weights)
            _check_unchanged(checkpoint, combine(copies, stored.digests, hash_file))
            from huggingface_hub import save_torch_state_dict

            with quiet():
                model_config.save_pretrained(folder)
                save_torch_state_dict({name: weight.contiguous() for name, weight in weights.items()}, folder)
            source = copies.folder
            copy_files((*tokenizer_files(source), *generation_files(source)), source, folder)
    if not tokenizer_files(checkpoint.folder):
        say(f"{checkpoint.given} holds no tokenizer: copy its files to {output}, or pass --tokenizer to evalkit run")


def _check_unchanged(checkpoint: Checkpoint, read: Fingerprint) -> None:
    if fingerprint(checkpoint) != read:
        raise CheckpointError(
            f"{checkpoint.given}: changed while it was read; run the command again once it is complete"
        )


def _config_from_diffllama(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    # Through transformers, so that missing keys get DiffLlama's defaults, not Llama's
    full = AutoConfig.for_model(**config).to_dict()
    return {key: value for key, value in full.items() if key not in _DROPPED_KEYS} | {
        "attention_variant": DIFFERENTIAL,
        "variant_layers": list(range(full["num_hidden_layers"])),
        "diff_heads": "halve",
        "diff_pairing": "halves",
        "diff_subln": "plain",
        "diff_subln_eps": full["rms_norm_eps"],
        "lambda_index": "absolute",
    }


def _read_authors(
    checkpoint: Checkpoint, config: dict[str, Any], weights: Weights, rope: str, pairing: str
) -> dict[str, Any]:
    """Return the keys of an evalkit config; rename and reorder `weights` in place."""
    vector = r"model\.layers\.(\d+)\.self_attn\.lambda_q1"
    layers = sorted(int(match[1]) for name in weights if (match := re.fullmatch(vector, name)))
    if not layers:
        raise CheckpointError(
            f"{checkpoint.given}: neither transformers' DiffLlama (model_type diffllama) nor the authors' attention in "
            "a Llama: weight model.layers.N.self_attn.lambda_q1 not found; docs/reference/models.md lists the names"
        )
    keys = {key: config[key] for key in _REQUIRED} | {key: config[key] for key in _OPTIONAL if key in config}
    if not config.get("rope_parameters"):
        keys["rope_theta"] = config["rope_theta"]
    for name in [name for name in weights if ".self_attn.out_proj." in name]:
        weights[name.replace(".out_proj.", ".o_proj.")] = weights.pop(name)
    first = f"model.layers.{layers[0]}.self_attn"
    size = len(weights[f"{first}.lambda_q1"])
    if len(layers) == config["num_hidden_layers"]:
        # From the weights, because the authors count pairs and others count maps
        head_size = size
        heads, kv_heads = (weights[f"{first}.{part}.weight"].shape[0] // size for part in ("q_proj", "k_proj"))
    else:  # the number of heads is that of the vanilla layers
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_size = config.get("head_dim") or config["hidden_size"] // heads
    if rope == "interleaved":
        for layer in range(config["num_hidden_layers"]):
            _deinterleave(weights, layer, size if layer in layers else head_size)
    return keys | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "attention_variant": DIFFERENTIAL,
        "variant_layers": layers,
        "diff_heads": "halve" if size == head_size else "keep",
        "diff_pairing": pairing,
        # The authors' code always has a norm over a pair
        "diff_subln": "affine" if f"{first}.subln.weight" in weights else "plain",
        "diff_subln_eps": _SUBLN_EPS,
        "lambda_index": "absolute",
    }


def _deinterleave(weights: Weights, layer: int, size: int) -> None:
    """Move channels 2i of each head of `size` before channels 2i + 1, in queries and keys, so QKᵀ is unchanged."""
    for part in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
        name = f"model.layers.{layer}.self_attn.{part}"
        if name in weights and weights[name].shape[0] % size == 0:
            heads = weights[name].unflatten(0, (-1, size // 2, 2))
            weights[name] = heads.transpose(1, 2).flatten(0, 2).contiguous()


def _checked_config(checkpoint: Checkpoint, keys: dict[str, Any], weights: Weights) -> Any:
    """Build the config and check that the weights match it exactly; remove the second copy of a tied head."""
    import torch

    import evalkit.models.auto  # noqa: F401

    # transformers raises errors of any type; the checkpoint is the cause
    with reading_as(checkpoint.given, "weights that fit its config.json", CheckpointError), quiet():
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model("evalkit_llama", **keys)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        head = weights.pop("lm_head.weight", None) if config.tie_word_embeddings else None
        tied = {"lm_head.weight": weights["model.embed_tokens.weight"]} if config.tie_word_embeddings else {}
        # Every weight must be there, in its shape, and no other
        model.load_state_dict(weights | tied, assign=True)
    if head is not None and not torch.equal(head, weights["model.embed_tokens.weight"]):
        raise CheckpointError(
            f"{checkpoint.given}: lm_head.weight differs from the embedding; set tie_word_embeddings to false"
        )
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    return config
