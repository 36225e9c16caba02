"""What is refused: models that are not causal, remote code, damaged files, weights that are not all there.

In: a `Checkpoint` and its parsed config.json, or transformers' report of what it loaded. Out: nothing, or a
`CheckpointError` that says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from evalkit.compatibility.transformers import config_class, masked_language_models, quantization_methods
from evalkit.errors import CheckpointError
from evalkit.models.config_check import check_code
from evalkit.models.locate import Checkpoint, Say

if TYPE_CHECKING:
    import torch

    from evalkit.models.build import Built

_NOT_CAUSAL = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "EncoderModel",
)
"""Endings of architecture names whose head does not predict the next token from the left alone."""
_SCALE = re.compile("scale|scb|absmax", re.IGNORECASE)
"""In the names of what a module's codes are multiplied by, of every method."""
_PLAIN = ("weight", "gate_up_proj", "down_proj")
"""Last parts of the names of what also stands for plain weights; the latter two are of stacked experts."""
_FLOATING_METHODS = ("bitnet",)
"""Methods of which some checkpoints keep floating-point weights, rounded in each forward pass."""
_OLD_BUFFER = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|\.(inv_freq|cos_cached|sin_cached|causal_mask)$")
"""Masks and angles that old versions of transformers saved in each layer; they hold nothing that was learned."""


def check_trust(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Refuse a model type that only Python code knows, unless that is the checkpoint's own and trusted."""
    if natively_known(config):
        return
    kind = config.get("model_type")
    if checkpoint.trust_remote_code:
        check_code(checkpoint.folder / "config.json", config.get("auto_map"))
        return
    if "auto_map" in config:
        raise CheckpointError(
            f"{checkpoint.given}: model type '{kind}' is defined by the checkpoint's own Python code; pass "
            "--trust-remote-code to run it if you trust where it comes from"
        )
    raise CheckpointError(f"{checkpoint.given}: config.json has model_type '{kind}', which transformers does not know")


def check_causal(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Refuse a model that does not predict each token from those before it alone.

    Raises:
        CheckpointError: names the architecture.
    """
    if why := _why_not_causal(config):
        raise CheckpointError(
            f"{checkpoint.given}: {_architecture(config)} {why}; evalkit scores causal language models only"
        )


def check_weights_name(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Refuse weights in a file that config.json names: transformers would take it, and evalkit hashes others.

    Raises:
        CheckpointError: names the file.
    """
    if named := config.get("transformers_weights"):
        raise CheckpointError(
            f"{checkpoint.given}: config.json names its weights in transformers_weights ({named!r:.60}); call that "
            "file model.safetensors and leave the key out"
        )


def check_quantization(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Refuse quantised weights that would be read as they are stored.

    Raises:
        CheckpointError: transformers does not know the method, or keeps what belongs to the weights outside of them.
    """
    found = _quantization(config)
    if not found:
        return
    # As old bitsandbytes checkpoints have it
    short = [bits for bits in ("4bit", "8bit") if found.get(f"load_in_{bits}") is True]
    method = f"bitsandbytes_{short[0]}" if short else found.get("quant_method")
    if not isinstance(method, str) or method not in quantization_methods():
        raise CheckpointError(
            f"{checkpoint.given}: config.json has a quantization_config whose quant_method is {method!r:.60}, which "
            "transformers does not know; its weights would be taken for plain ones"
        )
    if method == "gguf":
        raise CheckpointError(
            f"{checkpoint.given}: config.json has quant_method gguf, which is for GGUF files; give the file itself, or "
            "remove quantization_config if the weights are plain"
        )
    if method == "torchao":
        raise CheckpointError(
            f"{checkpoint.given}: is quantised by torchao, whose checkpoints keep the types of their tensors beside "
            "them, which evalkit does not read; dequantise it and save the result"
        )


def check_stored(given: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a named quantisation that the weights do not have, or that they have without its scales.

    transformers takes such weights as they are stored. Where config.json names none, `check_report` finds them.

    Raises:
        CheckpointError: names the first of the weights.
    """
    found = _quantization(config)
    if not found:
        return
    codes = [name for name, tensor in tensors.items() if not tensor.is_floating_point() or tensor.element_size() == 1]
    if not codes and found.get("quant_method") not in _FLOATING_METHODS:
        raise CheckpointError(
            f"{given}: config.json has a quantization_config, and no weight is stored as integers or in 8 bits; remove "
            "it, or give the quantised weights"
        )
    parts = {name: name.rpartition(".") for name in tensors}
    scaled = {module for module, _, part in parts.values() if _SCALE.search(part)}
    if bare := [name for name in codes if parts[name][2] in _PLAIN and not {name, parts[name][0]} & scaled]:
        raise CheckpointError(
            f"{given}: {_few(sorted(bare))} are stored as integers or in 8 bits, and the files lack their scales"
        )


def check_report(given: str, built: Built, say: Say) -> None:
    """Refuse a model that is in part random or that leaves out a part of its checkpoint.

    Args:
        given: the checkpoint's name for messages.
        built: from `build_model`.
        say: called with a warning about weights that are in the files and nowhere in the model.

    Raises:
        CheckpointError: a weight was not in the files, had another shape, is of layers or of modules that the model has
            without it, or is quantised and config.json says nothing of it.
    """
    report = built.report
    if mismatched := sorted(report.get("mismatched_keys") or ()):
        shown = [f"{key} is {tuple(saved)}, not {tuple(expected)}" for key, saved, expected in mismatched]
        raise CheckpointError(f"{given}: weights do not have the shapes that config.json implies: {_few(shown)}")
    if missing := sorted(report.get("missing_keys") or ()):
        raise CheckpointError(f"{given}: {len(missing)} weights are missing and would be random: {_few(missing)}")
    if built.codes:
        raise CheckpointError(
            f"{given}: {_few(built.codes)} are stored as integers or in 8 bits, and config.json has no "
            "quantization_config, so their scales are not known"
        )
    _check_unexpected(given, sorted(report.get("unexpected_keys") or ()), built.model, say)


def check_numbers(given: str, config: dict[str, Any], model: Any) -> None:
    """Refuse a loaded model with weights that are not numbers, or with a head that should be its embedding and is not.

    Raises:
        CheckpointError: names the weight.
    """
    import torch

    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel() and weight.element_size() > 1:
            least, largest = torch.aminmax(weight.detach())
            if not (least.isfinite() and largest.isfinite()):
                why = "" if weight.dtype == torch.float32 else ", or the dtype too narrow: try --dtype float32"
                raise CheckpointError(
                    f"{given}: {name} holds NaN or infinite values in {str(weight.dtype).removeprefix('torch.')}; "
                    f"training has diverged, or the file is damaged{why}"
                )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = config.get("tie_word_embeddings") is True and head is not None
    if tied and head.weight is not embedding.weight and not torch.equal(head.weight, embedding.weight):
        raise CheckpointError(
            f"{given}: its output head is not its embedding, though config.json says tie_word_embeddings; set that to "
            "false, or remove the head from the file"
        )


def _quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config, also of the text part of a multi-part model; empty where there is none."""
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}


def _check_unexpected(given: str, unexpected: list[str], model: Any, say: Say) -> None:
    """Refuse weights without a place in the model that belong to its layers or its modules; report all others."""
    if differential := [key for key in unexpected if ".lambda_" in key or ".subln." in key]:
        raise CheckpointError(
            f"{given}: {_few(differential)} belong to differential layers that config.json does not list; "
            "correct its variant_layers"
        )
    own = model.state_dict()
    last = _last_layers(own)
    forms = {key: _forms(key, model.base_model_prefix) for key in unexpected}
    if layers := [key for key in unexpected if any(_is_further(form, last) for form in forms[key])]:
        raise CheckpointError(
            f"{given}: holds weights of layers that config.json does not count: {_few(layers)}; correct its number of "
            "layers"
        )
    if parts := [key for key in unexpected if any(_is_part(form, own, last) for form in forms[key])]:
        raise CheckpointError(
            f"{given}: {_few(parts)} would be left out of modules that the model has; config.json lacks their bias or "
            "their quantization_config or is of another architecture, or an adapter is to be merged"
        )
    if unexpected:
        say(f"{given}: {len(unexpected)} weights that the model does not use: {_few(unexpected)}")


def _forms(name: str, base: str) -> tuple[str, ...]:
    """The names that a weight can have in the model: transformers adds and removes the base model's, peft adds one."""
    bare = name.removeprefix("base_model.model.")
    return bare, f"{base}.{bare}", bare.removeprefix(f"{base}.")


def _is_further(name: str, last: Mapping[str, int]) -> bool:
    """Whether it is of a layer past the last one that the model has in the same list."""
    path, number = _layer_of(name)
    return number is not None and path in last and number > last[path]


def _is_part(name: str, own: Mapping[str, Any], last: Mapping[str, int]) -> bool:
    """Whether it belongs to one of the model's modules, or is of a layer and no buffer of an old version."""
    if any(f"{module}.weight" in own for module in _modules_around(name)):
        return True
    return any(name.startswith(f"{path}.") for path in last) and not _OLD_BUFFER.search(name)


def _modules_around(name: str) -> list[str]:
    """a.b.bias → a.b, a."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _last_layers(names: Iterable[str]) -> dict[str, int]:
    """Of each list of layers the number of the last one."""
    last: dict[str, int] = {}
    for path, number in map(_layer_of, names):
        if number is not None:
            last[path] = max(number, last.get(path, 0))
    return last


def _layer_of(name: str) -> tuple[str, int | None]:
    """model.layers.3.mlp.up_proj.weight → (model.layers, 3)."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return (name, None) if number is None else (".".join(parts[:number]), int(parts[number]))


def natively_known(config: dict[str, Any]) -> bool:
    """Whether transformers, or an architecture registered with it, has this model type."""
    from evalkit.models.registration import register_models

    register_models()
    return config_class(config.get("model_type")) is not None


def _why_not_causal(config: dict[str, Any]) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.get("is_encoder_decoder"):
        return "is an encoder-decoder"
    named = config.get("architectures")
    if isinstance(named, list) and named and str(named[0]).endswith(_NOT_CAUSAL):
        return "is not a causal language model"
    # BERT and its kin have a causal class too, but look both ways unless this is set.
    if config.get("model_type") in masked_language_models() and not config.get("is_decoder"):
        return "attends in both directions (is_decoder is not set)"
    if config.get("use_bidirectional_attention") is True or config.get("is_causal") is False:
        return "attends in both directions"
    if not natively_known(config):
        return None  # trusted remote code: its auto_map decides
    if config_class(config["model_type"]) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "has no causal language model in transformers"
    return None


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    return f"model type '{config.get('model_type')}'"


def _few(names: Iterable[str]) -> str:
    """The first three of a list, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f", and {len(listed) - 3} more" if len(listed) > 3 else "")
