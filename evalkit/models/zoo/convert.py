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
from evalkit.errors import CheckpointError, EvalkitError, UsageError, reading_as
from evalkit.inputs.reading import read_given_text
from evalkit.models import variants
from evalkit.models.loading.files import copy_files, generation_files, tokenizer_files, weight_indexes
from evalkit.models.loading.fingerprint import Fingerprint, combine, fingerprint, hash_file
from evalkit.models.loading.locate import Checkpoint, silent
from evalkit.models.variants.settings import DIFFERENTIAL
from evalkit.models.zoo.named import new_folder
from evalkit.models.zoo.readings import GivenReading, ScoredReading, StoredModel, score_readings
from evalkit.models.zoo.shapes import read_shape
from evalkit.paths import resource

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
    checkpoint: Checkpoint, output: Path, given: GivenReading | None = None, text: Path | None = None, say: Say = silent
) -> list[ScoredReading]:
    """Convert a checkpoint to evalkit's format, with the attention that its own code computed, in a new folder.

    That is a DiffLlama; a Llama with the attention of the differential transformer's authors; or a Llama, Qwen2 or
    GPT-NeoX whose patched code computes integral or cog attention, which adds no weights, so that `given` names it.
    Returns the perplexity of `text` under this and other readings of the weights, this first; none without a tokenizer.
    """
    config, given = checkpoint.config(), given or GivenReading()
    kind = str(config.get("model_type"))
    if kind in _CLASSES:
        raise CheckpointError(f"{checkpoint.given}: is already in evalkit's format (model type '{kind}')")
    if kind == "diffllama" and given != GivenReading():
        raise UsageError("the attention of a DiffLlama is known; leave out --variant and all that describes it")
    with doing(f"converting {checkpoint.given}", slow=imports("torch")):
        from evalkit.models.loading.build import copied, read_weights

        _, content = read_given_text(text or resource("configs", "models") / "check.txt")
        with copied(checkpoint) as copies, new_folder(output) as folder:
            stored = read_weights(checkpoint.weights())
            # Without the rotary frequencies that old checkpoints store
            names = [name for name in stored.tensors if not name.endswith("rotary_emb.inv_freq")]
            weights = {name: stored.tensors[name] for name in names}
            with reading_as(checkpoint.given, "a checkpoint with one of the paper's attentions", CheckpointError):
                if kind == "diffllama":
                    source = StoredModel("llama", weights, _config_from_diffllama(config), is_known=True)
                elif layers := _layers_with_lambda(weights):
                    source = _read_authors(config, weights, layers, given)
                else:
                    source = StoredModel(kind, weights, given.keys(checkpoint.given, kind, config))
                reading = given.reading(source)
                model_config, tensors = source.read(reading)
            _check_weights(checkpoint, model_config, tensors)
            _check_unchanged(checkpoint, combine(copies, stored.digests, hash_file))
            from huggingface_hub import save_torch_state_dict

            with quiet():
                model_config.save_pretrained(folder)
                save_torch_state_dict({name: weight.contiguous() for name, weight in tensors.items()}, folder)
            files = (*tokenizer_files(copies.folder), *generation_files(copies.folder))
            copy_files(files, copies.folder, folder)
    if not tokenizer_files(output):
        say(
            f"{checkpoint.given} holds no tokenizer: copy its files to {output}, or pass --tokenizer to evalkit run; "
            "the reading of its weights is not checked"
        )
        return []
    try:
        return score_readings(checkpoint.given, source, reading, output, content, say)
    except (EvalkitError, MemoryError) as error:  # the folder is complete
        say(f"{output}: the reading of its weights is not checked: {error}")
        return []


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


def _layers_with_lambda(weights: Weights) -> list[int]:
    vector = r"model\.layers\.(\d+)\.self_attn\.lambda_q1"
    return sorted(int(match[1]) for name in weights if (match := re.fullmatch(vector, name)))


def _read_authors(config: dict[str, Any], weights: Weights, layers: list[int], given: GivenReading) -> StoredModel:
    """Return the keys of an evalkit config, and the weights under evalkit's names."""
    chosen = given.differential_keys()
    keys = {key: config[key] for key in _REQUIRED} | {key: config[key] for key in _OPTIONAL if key in config}
    if not config.get("rope_parameters"):
        keys["rope_theta"] = config["rope_theta"]
    weights = {name.replace(".self_attn.out_proj.", ".self_attn.o_proj."): weight for name, weight in weights.items()}
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
    keys |= {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "attention_variant": DIFFERENTIAL,
        "variant_layers": layers,
        "diff_heads": "halve" if size == head_size else "keep",
        # The authors' code always has a norm over a pair
        "diff_subln": "affine" if f"{first}.subln.weight" in weights else "plain",
        "diff_subln_eps": _SUBLN_EPS,
        **chosen,
    }
    return StoredModel("llama", weights, keys, rope="interleaved")


def _check_weights(checkpoint: Checkpoint, config: Any, weights: Weights) -> None:
    """Check that the weights match a config exactly; remove the second copy of a tied head."""
    import torch

    # transformers raises errors of any type; the checkpoint is the cause
    with reading_as(checkpoint.given, "weights that fit its config.json", CheckpointError), quiet():
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        names = {id(module): name for name, module in model.named_modules()}
        output, embedding = (f"{names[id(part)]}.weight" for part in (model.get_output_embeddings(),
                                                                      model.get_input_embeddings()))  # fmt: skip
        head = weights.pop(output, None) if config.tie_word_embeddings else None
        tied = {output: weights[embedding]} if config.tie_word_embeddings else {}
        # Every weight must be there, in its shape, and no other
        model.load_state_dict(weights | tied, assign=True)
    if head is not None and not torch.equal(head, weights[embedding]):
        raise CheckpointError(
            f"{checkpoint.given}: {output} differs from the embedding; set tie_word_embeddings to false"
        )
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
