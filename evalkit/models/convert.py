"""Convert differential checkpoints to evalkit's format.

In: a checkpoint of transformers' DiffLlama, or one with the attention of the authors' code (microsoft/unilm,
Diff-Transformer, `multihead_diffattn.py`) inside a Llama with transformers' names. Out: a folder of model type
`evalkit_llama` with the same logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.activity import doing, imports
from evalkit.errors import CheckpointError, UsageError, first_line
from evalkit.models.authors import ROPES, read_authors
from evalkit.models.config_check import check_sizes
from evalkit.models.files import GENERATION_CONFIG, copy_files, tokenizer_files
from evalkit.models.folder import new_folder
from evalkit.models.locate import Checkpoint, Say, silent
from evalkit.models.quiet import quiet
from evalkit.models.snapshot import Snapshot, snapshot
from evalkit.models.variants.settings import DIFFERENTIAL

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

PAIRINGS = ("adjacent", "halves")
_KIND = "evalkit_llama"
_DROPPED_KEYS = ("model_type", "architectures", "auto_map", "lambda_std_dev", "transformers_version", "dtype")
"""Keys of a DiffLlama config that an evalkit config sets differently or does not have."""
_FEW = 3


def convert(
    checkpoint: Checkpoint, output: Path, *, rope: str | None = None, pairing: str | None = None, say: Say = silent
) -> None:
    """Convert a differential checkpoint and write it to a folder.

    Args:
        checkpoint: a DiffLlama, or one in the authors' layout; see `authors.read_authors`.
        output: the folder to write; must not exist or be empty.
        rope: rotary layout of the authors' heads: "interleaved" (also None), or "rotate_half" as in transformers.
        pairing: which of the authors' heads form a pair: "adjacent" (also None) or "halves".
        say: called with warnings.

    Raises:
        UsageError: `output` exists and is not empty, or a setting is given for DiffLlama, whose layout is fixed.
        CheckpointError: the layout is unknown, weights do not fit the config, or `output` cannot be written.
    """
    if checkpoint.gguf is not None:
        raise CheckpointError(f"{checkpoint.given}: is a GGUF file; give a folder with config.json and safetensors")
    with doing(f"converting {checkpoint.given}", slow=imports("torch")), snapshot(checkpoint) as source:
        _convert(source, output, rope, pairing)
    if not tokenizer_files(checkpoint.folder):
        say(f"{checkpoint.given} holds no tokenizer: copy its files to {output}, or pass --tokenizer to evalkit run")


def _convert(source: Snapshot, output: Path, rope: str | None, pairing: str | None) -> None:
    checkpoint = source.checkpoint
    config = checkpoint.config()
    kind = str(config.get("model_type"))
    if kind.startswith("evalkit_"):
        raise CheckpointError(f"{checkpoint.given}: is already in evalkit's format (model type '{kind}')")
    own = kind == "diffllama"
    if own and (rope or pairing):
        raise UsageError("--rope and --pairing apply to the authors' layout only; leave them out for a DiffLlama")
    weights = _tensors(source)
    check_sizes(checkpoint.given, config, len(weights))
    if own:
        keys = _config_from_diffllama(config)
    else:
        keys = read_authors(checkpoint, config, weights, rope or ROPES[0], pairing or PAIRINGS[0])
    model_config = _checked_config(checkpoint, keys, weights)
    with new_folder(output) as folder:
        _write(checkpoint, folder, model_config, weights)


def _config_from_diffllama(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of an evalkit config for a DiffLlama config; the weights need no change."""
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


def _tensors(source: Snapshot) -> Weights:
    """Read all weights, without the rotary frequencies that old checkpoints store."""
    return {name: weight for name, weight in source.read().tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _checked_config(checkpoint: Checkpoint, keys: dict[str, Any], weights: Weights) -> Any:
    """Build the config and check that the weights match it exactly; remove the second copy of a tied head."""
    import torch

    from evalkit.models.registration import register_models

    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM

        register_models()
        try:
            config = AutoConfig.for_model(_KIND, **keys)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # transformers raises errors of any type; the config is the cause
            raise CheckpointError(f"{checkpoint.given}: config.json: {first_line(error)}") from error
    if config.tie_word_embeddings and "lm_head.weight" in weights:
        head = weights.pop("lm_head.weight")
        if not torch.equal(head, weights.get("model.embed_tokens.weight", head)):
            raise CheckpointError(
                f"{checkpoint.given}: lm_head.weight differs from model.embed_tokens.weight, but config.json sets "
                "tie_word_embeddings; set it to false"
            )
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for what, names in (
        ("lacks the weights", [name for name in expected if name not in found]),
        ("has unexpected weights:", [name for name in found if name not in expected]),
        ("weights do not have the shapes that config.json implies:",
         [f"{name} {found[name]}, not {expected[name]}" for name in expected
          if found.get(name, expected[name]) != expected[name]]),
    ):  # fmt: skip
        if names:
            more = f", and {len(names) - _FEW} more" if len(names) > _FEW else ""
            raise CheckpointError(f"{checkpoint.given}: {what} {', '.join(names[:_FEW])}{more}")
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    return config


def _write(checkpoint: Checkpoint, folder: Path, config: Any, weights: Weights) -> None:
    from huggingface_hub import save_torch_state_dict

    with quiet():
        config.save_pretrained(folder)
        save_torch_state_dict({name: weight.contiguous() for name, weight in weights.items()}, folder)
    generation = checkpoint.folder / GENERATION_CONFIG
    files = (*tokenizer_files(checkpoint.folder), *([generation] if generation.is_file() else ()))
    copy_files(files, checkpoint.folder, folder)
