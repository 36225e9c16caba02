"""Differential checkpoints of others as evalkit's own.

In: a checkpoint of transformers' DiffLlama, or one with the attention of the authors' code (microsoft/unilm,
Diff-Transformer, `multihead_diffattn.py`) inside a Llama of transformers' names. Out: a folder of model type
`evalkit_llama` that gives the same logits.
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
_NOT_MODELS = ("model_type", "architectures", "auto_map", "lambda_std_dev", "transformers_version", "dtype")
"""Keys of a DiffLlama config that an evalkit config has otherwise or not at all."""
_FEW = 3


def convert(
    checkpoint: Checkpoint, output: Path, *, rope: str | None = None, pairing: str | None = None, say: Say = silent
) -> None:
    """Write a differential checkpoint as evalkit's own.

    Args:
        checkpoint: DiffLlama's, or one with the authors' attention; see `authors.read_authors`.
        output: the folder, which must not exist or be empty.
        rope: how the authors' heads rotate: "interleaved" (None too), or "rotate_half" as transformers has it.
        pairing: which of the authors' heads are a pair: "adjacent" (None too) or "halves".
        say: told what the user should know.

    Raises:
        UsageError: `output` is taken, or a setting is given that the layout decides itself.
        CheckpointError: neither layout, weights that do not fit, or `output` cannot be written.
    """
    if checkpoint.gguf is not None:
        raise CheckpointError(f"{checkpoint.given}: a GGUF file; give a folder with config.json and safetensors")
    with doing(f"converting {checkpoint.given}", slow=imports("torch")), snapshot(checkpoint) as held:
        _convert(held, output, rope, pairing)
    if not tokenizer_files(checkpoint.folder):
        say(f"{checkpoint.given} holds no tokenizer: put its files into {output}, or pass --tokenizer to evalkit run")


def _convert(held: Snapshot, output: Path, rope: str | None, pairing: str | None) -> None:
    checkpoint = held.checkpoint
    config = checkpoint.config()
    kind = str(config.get("model_type"))
    if kind.startswith("evalkit_"):
        raise CheckpointError(f"{checkpoint.given}: model type '{kind}' is evalkit's own already")
    own = kind == "diffllama"
    if own and (rope or pairing):
        raise UsageError("--rope and --pairing are for the authors' layout; DiffLlama's are known")
    weights = _tensors(held)
    check_sizes(checkpoint.given, config, len(weights))
    if own:
        keys = _of_diffllama(config)
    else:
        keys = read_authors(checkpoint, config, weights, rope or ROPES[0], pairing or PAIRINGS[0])
    model_config = _fitting(checkpoint, keys, weights)
    with new_folder(output) as folder:
        _write(checkpoint, folder, model_config, weights)


def _of_diffllama(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of an evalkit config for a DiffLlama one; the weights need no change."""
    from transformers import AutoConfig

    # By transformers, so that what the file leaves out is DiffLlama's default and not Llama's
    whole = AutoConfig.for_model(**config).to_dict()
    return {key: value for key, value in whole.items() if key not in _NOT_MODELS} | {
        "attention_variant": DIFFERENTIAL,
        "variant_layers": list(range(whole["num_hidden_layers"])),
        "diff_heads": "halve",
        "diff_pairing": "halves",
        "diff_subln": "plain",
        "diff_subln_eps": whole["rms_norm_eps"],
        "lambda_index": "absolute",
    }


def _tensors(held: Snapshot) -> Weights:
    """All weights, in memory; without the angles of rotary embeddings that old checkpoints store."""
    return {name: weight for name, weight in held.read().tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _fitting(checkpoint: Checkpoint, keys: dict[str, Any], weights: Weights) -> Any:
    """The config of the model that the weights fill exactly; a tied head's second copy is taken out of them."""
    import torch

    from evalkit.models.registration import register_models

    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM

        register_models()
        try:
            config = AutoConfig.for_model(_KIND, **keys)
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # transformers raises what its parts raise; the config is the cause
            raise CheckpointError(f"{checkpoint.given}: config.json: {first_line(error)}") from error
    if config.tie_word_embeddings and "lm_head.weight" in weights:
        head = weights.pop("lm_head.weight")
        if not torch.equal(head, weights.get("model.embed_tokens.weight", head)):
            raise CheckpointError(
                f"{checkpoint.given}: lm_head.weight is not model.embed_tokens.weight, though config.json says "
                "tie_word_embeddings; set it to false"
            )
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for what, names in (
        ("lacks", [name for name in expected if name not in found]),
        ("holds what the model has no place for:", [name for name in found if name not in expected]),
        ("has weights of other shapes than config.json implies:",
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
