"""What is refused: models that are not causal, remote code, damaged files, weights that are not all there.

In: a `Checkpoint` and its parsed config.json, or transformers' report of what it loaded. Out: nothing, or a
`CheckpointError` that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evalkit.errors import CheckpointError
from evalkit.models.files import safetensors_header
from evalkit.models.locate import Checkpoint, Say

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


def check_weights(checkpoint: Checkpoint) -> None:
    """Refuse weights that are missing, only pickled, or cut short; a truncated file is named here."""
    for path in checkpoint.weights():
        if path.suffix == ".safetensors":
            safetensors_header(path)


def check_trust(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Refuse a model type that only the checkpoint's own code knows, unless that code is trusted."""
    if natively_known(config) or checkpoint.trust_remote_code:
        return
    kind = config.get("model_type")
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


def check_report(checkpoint: Checkpoint, report: dict[str, Any], say: Say) -> None:
    """Refuse a model that is in part random: a weight was not in the checkpoint, or had another shape."""
    if mismatched := sorted(report.get("mismatched_keys") or ()):
        shown = [f"{key} is {tuple(saved)}, not {tuple(expected)}" for key, saved, expected in mismatched]
        raise CheckpointError(
            f"{checkpoint.given}: weights do not have the shapes that config.json implies: {_few(shown)}"
        )
    if missing := sorted(report.get("missing_keys") or ()):
        raise CheckpointError(
            f"{checkpoint.given}: {len(missing)} weights are missing and would be random: {_few(missing)}"
        )
    unexpected = sorted(report.get("unexpected_keys") or ())
    if differential := [key for key in unexpected if ".lambda_" in key or ".subln." in key]:
        raise CheckpointError(
            f"{checkpoint.given}: {_few(differential)} belong to differential layers that config.json does not list; "
            "mend its variant_layers"
        )
    if unexpected:
        say(f"{checkpoint.given}: {len(unexpected)} weights that the model does not use: {_few(unexpected)}")


def natively_known(config: dict[str, Any]) -> bool:
    """Whether transformers, or an architecture registered with it, has this model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from evalkit.models.registration import register_models

    register_models()
    return config.get("model_type") in CONFIG_MAPPING


def _why_not_causal(config: dict[str, Any]) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.get("is_encoder_decoder"):
        return "is an encoder-decoder"
    named = config.get("architectures")
    if isinstance(named, list) and named and str(named[0]).endswith(_NOT_CAUSAL):
        return "is not a causal language model"
    # BERT and its kin have a causal class too, but look both ways unless this is set.
    if config.get("model_type") in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder"):
        return "attends in both directions (is_decoder is not set)"
    if config.get("use_bidirectional_attention") is True or config.get("is_causal") is False:
        return "attends in both directions"
    if not natively_known(config):
        return None  # trusted remote code: its auto_map decides
    if CONFIG_MAPPING[config["model_type"]] not in MODEL_FOR_CAUSAL_LM_MAPPING:
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
