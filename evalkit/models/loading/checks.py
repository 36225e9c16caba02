"""Validate checkpoints: causal models only, trusted code, complete and undamaged weights, known quantisation.

In: a `Checkpoint` and its parsed config.json, or transformers' loading report. Out: nothing, or a `CheckpointError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from evalkit.compatibility import transformers as library
from evalkit.display import Say
from evalkit.errors import CheckpointError
from evalkit.models.loading.files import check_code, quantization, read_json, weight_indexes
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.variants.settings import PREFIX

if TYPE_CHECKING:
    import torch

    from evalkit.models.loading.build import BuiltModel

_PATCHED = ("llama", "qwen2", "gpt_neox")
"""Model types whose attention is patched most."""
_ATTENTION = re.compile(r"(?<![a-z])(intg|integral|cog|cogattn|diff|differential)(?![a-z])", re.IGNORECASE)
_CONDITIONAL = "ForConditionalGeneration"
_NOT_CAUSAL = (
    "ForMaskedLM", "ForPreTraining", _CONDITIONAL, "ForSequenceClassification", "ForTokenClassification",
    "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction", "EncoderModel",
)  # fmt: skip
"""Suffixes of architecture names whose head does not predict the next token from the left context alone."""
_SCALE = re.compile("scale|scb|absmax", re.IGNORECASE)
_PLAIN = ("weight", "gate_up_proj", "down_proj")
"""Last name parts that plain weights have too; the latter two belong to stacked experts."""
_FLOATING_METHODS = ("bitnet",)
"""Methods for which some checkpoints store floating-point weights and round them in each forward pass."""
_UNREADABLE_METHODS = ("gguf", "torchao")
"""Methods of GGUF files, and of checkpoints that store the types of tensors separately."""
_LAYERS = re.compile(r"(.+?\.)\d+(?:\.|$)", re.ASCII)
"""Matches the list of layers that a name begins with, as model.layers. in model.layers.3.mlp."""
_OLD_BUFFER = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|\.(inv_freq|cos_cached|sin_cached|causal_mask)$")
"""Masks and rotary angles that old versions of transformers saved in each layer; none is learned."""


def natively_known(config: Mapping[str, Any]) -> bool:
    register_type(config)
    return library.config_class(config.get("model_type")) is not None


def register_type(config: Mapping[str, Any]) -> None:
    """Register evalkit's model types with transformers if a parsed config.json has one of them."""
    if str(config.get("model_type")).startswith(PREFIX):
        import evalkit.models.auto  # noqa: F401


# Before weights are read


def warn_of_name(checkpoint: Checkpoint, config: Mapping[str, Any], say: Say) -> None:
    """Call `say` for a checkpoint whose name has an attention that its model type does not have."""
    kind, name = str(config.get("model_type")), f"{checkpoint.folder.resolve().parent.name}/{checkpoint.name}"
    if kind in _PATCHED and (attention := _ATTENTION.search(name)):
        say(
            f"{checkpoint.given}: its name has '{attention[0]}', but its config.json says {kind}, whose vanilla "
            "attention is computed; the weights of integral and cog attention look the same: evalkit models convert"
        )


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Raise a `CheckpointError` if this process has changed the library's code of a checkpoint's model type.

    Its run would have the id of a run without the change. Of a GGUF file, the types are those of all loaded models.
    """
    from evalkit.models.module_state import changed_code

    kinds = library.imported_layers(None if checkpoint.gguf is not None else checkpoint.config().get("model_type"))
    if changed := changed_code(kinds):
        raise CheckpointError(
            f"{checkpoint.given}: this process has changed code that computes it ({_few(changed)}), which the id of a "
            "checkpoint's run does not cover; load it, and give the model: evalkit.evaluate(model, tokenizer=…)"
        )


def check_supported(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    if not natively_known(config):
        if not checkpoint.trust_remote_code:
            advice = "; pass --trust-remote-code to run the checkpoint's own code if you trust its source"
            raise CheckpointError(
                f"{checkpoint.given}: config.json has model_type '{config.get('model_type')}', which transformers does "
                f"not know{advice if 'auto_map' in config else ''}"
            )
        check_code(checkpoint.folder / "config.json", config.get("auto_map"))
    check_causal(checkpoint, config)
    _check_quantization(checkpoint, config)
    # evalkit hashes the default file
    if named := config.get("transformers_weights"):
        raise CheckpointError(
            f"{checkpoint.given}: config.json has transformers_weights ({named!r:.60}); use model.safetensors"
        )


def check_causal(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raise a `CheckpointError` unless the model predicts each token from the preceding tokens only."""
    if why := _why_not_causal(config):
        architecture = _named_class(config) or f"model type '{config.get('model_type')}'"
        raise CheckpointError(f"{checkpoint.given}: {architecture} {why}; evalkit scores causal language models only")


def _why_not_causal(config: dict[str, Any]) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.get("is_encoder_decoder"):
        return "is an encoder-decoder"
    named = _named_class(config)
    # transformers loads the text part of a causal model with images or sound as the language model of its type
    causal = library.causal_language_models().get(str(config.get("model_type")))
    has_text_part = named.endswith(_CONDITIONAL) and isinstance(config.get("text_config"), dict)
    if named.endswith(_NOT_CAUSAL) and not (causal is not None and (causal == named or has_text_part)):
        return "is not a causal language model"
    # BERT-like models have a causal class too, but attend in both directions unless this is set
    is_masked = config.get("model_type") in library.masked_language_models()
    if (is_masked and not (config.get("is_decoder") or config.get("causal"))) or (
        config.get("use_bidirectional_attention") is True or config.get("is_causal") is False
    ):
        return "attends in both directions"
    if not natively_known(config):
        return None  # trusted remote code: its auto_map decides
    _register_part(config, named)
    if library.config_class(config["model_type"]) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "has no causal language model in transformers"
    return None


def _named_class(config: dict[str, Any]) -> str:
    return next(iter(config.get("architectures") or ()), "")


def _register_part(config: Mapping[str, Any], named: str) -> None:
    """Register the class that a checkpoint names for its type, if it is the language model of a larger model's type.

    transformers maps the larger model's type (mllama) to this class, but not the type in its own config
    (mllama_text_model).
    """
    import transformers

    kind = library.config_class(config["model_type"])
    if kind not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and named in library.causal_language_models().values():
        model = getattr(transformers, named)
        if model.config_class is kind:
            transformers.AutoModelForCausalLM.register(kind, model, exist_ok=True)


def _check_quantization(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    settings = quantization(config)
    if not settings:
        return
    # Keys of old bitsandbytes checkpoints
    bits = next((bits for bits in ("4bit", "8bit") if settings.get(f"load_in_{bits}") is True), None)
    method = f"bitsandbytes_{bits}" if bits else settings.get("quant_method")
    if method in _UNREADABLE_METHODS or method not in library.quantization_methods():
        raise CheckpointError(
            f"{checkpoint.given}: config.json has a quantization_config with quant_method {method!r:.60}, which "
            "evalkit does not read; dequantise the model and save the result, or remove the key from plain weights"
        )


# After weights are read


def check_stored(checkpoint: Checkpoint, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a `CheckpointError` for files that lack weights of their index, or whose quantisation is not config.json's.

    An index that lists more weights is left after a shard was replaced. transformers loads codes without their scales,
    and plain weights for quantised ones, as they are stored. Where config.json names no quantisation, `check_report`
    detects codes.
    """
    weights = checkpoint.weights() if checkpoint.gguf is None else ()
    for index in weight_indexes(checkpoint.folder):
        whole = index.with_name(index.name.removesuffix(".index.json"))
        is_used = whole not in weights and any(path.suffix == whole.suffix for path in weights)
        if is_used and (missing := sorted(read_json(index)["weight_map"].keys() - tensors.keys())):
            raise CheckpointError(
                f"{index}: lists weights that no file has, such as {missing[0]!r:.60}; copy the checkpoint again"
            )
    settings = quantization(config)
    if not settings:
        return
    codes = [name for name, tensor in tensors.items() if not tensor.is_floating_point() or tensor.element_size() == 1]
    if not codes and settings.get("quant_method") not in _FLOATING_METHODS:
        raise CheckpointError(
            f"{checkpoint.given}: config.json has a quantization_config, but no weight is stored as integers; remove it"
        )
    parts = {name: name.rpartition(".") for name in tensors}
    scaled = {module for module, _, part in parts.values() if _SCALE.search(part)}
    if bare := [name for name in codes if parts[name][2] in _PLAIN and not {name, parts[name][0]} & scaled]:
        raise CheckpointError(
            f"{checkpoint.given}: {_few(sorted(bare))} are stored as integers or in 8 bits, but lack their scales"
        )


def check_report(given: str, built: BuiltModel, say: Say) -> None:
    """Raise a `CheckpointError` if weights of the model are random, or weights of the checkpoint were not loaded.

    `say` is called for unexpected weights that belong to no layer or module of the model.
    """
    report = built.report
    if mismatched := sorted(report["mismatched_keys"]):
        shown = [f"{key} is {tuple(saved)}, not {tuple(expected)}" for key, saved, expected in mismatched]
        raise CheckpointError(f"{given}: weights do not have the shapes that config.json implies: {_few(shown)}")
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{given}: {len(missing)} weights are missing and would be random: {_few(missing)}")
    if built.codes:
        raise CheckpointError(
            f"{given}: {_few(built.codes)} are stored as integers or in 8 bits, but config.json has no "
            "quantization_config; add it, or provide dequantised weights"
        )
    if built.undetermined:
        raise CheckpointError(
            f"{given}: its files do not hold {_few(built.undetermined)}, for which its code has no value, or another "
            "one each time; save them with its weights (persistent=True)"
        )
    unexpected = sorted(report["unexpected_keys"])
    if parts := _parts(built.model, unexpected):
        raise CheckpointError(
            f"{given}: {_few(parts)} would be left out of modules of the model: the files hold weights of more layers "
            "than config.json has, or its variant_layers, its biases or its quantization_config are not theirs, or an "
            "adapter has to be merged; correct config.json"
        )
    if built.unset:
        say(f"{given}: its files do not hold {_few(built.unset)}; NaN until its code computes them")
    if unexpected:
        say(f"{given}: {len(unexpected)} weights that the model does not use: {_few(unexpected)}")


def _parts(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the unexpected weights that belong to a layer, or to a module that the model has."""
    names = model.state_dict().keys()
    layers = tuple({match[1] for match in map(_LAYERS.match, names) if match})
    modules = tuple(name.removesuffix("weight") for name in names if name.endswith(".weight"))
    base, parts = model.base_model_prefix, []
    for key in unexpected:
        bare = key.removeprefix("base_model.model.")
        # transformers adds or drops the base model's prefix, peft adds one
        possible = (bare, f"{base}.{bare}", bare.removeprefix(f"{base}."))
        prefixes = modules if _OLD_BUFFER.search(key) else modules + layers
        if any(name.startswith(prefixes) for name in possible):
            parts.append(key)
    return parts


def check_numbers(given: str, config: dict[str, Any], model: Any) -> None:
    """Raise a `CheckpointError` for non-finite weights, or an output head that differs from its tied embedding."""
    import torch

    from evalkit.compatibility.torch import shard_of

    for name, weight in model.named_parameters():
        own = shard_of(weight.detach())
        if own.is_floating_point() and own.numel() and own.element_size() > 1:
            least, largest = torch.aminmax(own)
            if not (least.isfinite() and largest.isfinite()):
                why = "" if weight.dtype == torch.float32 else ", or the dtype too narrow: try --dtype float32"
                raise CheckpointError(
                    f"{given}: {name} holds NaN or infinite values in {str(weight.dtype).removeprefix('torch.')}; "
                    f"training has diverged, or the file is damaged{why}"
                )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = config.get("tie_word_embeddings") is True and head is not None and library.ties_head(model)
    if tied and head.weight is not embedding.weight and not torch.equal(head.weight, embedding.weight):
        raise CheckpointError(
            f"{given}: its output head differs from its embedding; set tie_word_embeddings to false in config.json"
        )


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f", and {len(listed) - 3} more" if len(listed) > 3 else "")
