"""The transformers config of a checkpoint, and the settings of its config.json that are not computed.

In: a folder with config.json. Out: the config; remarks on keys that its class does not read and on what transformers
warns of; or a `CheckpointError` that names a key with which no attention can be computed. A checkpoint of patched code
often has another project's model type, and only such keys say what it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from evalkit.compatibility.transformers import collected_warnings, declared_settings, settings_read
from evalkit.errors import CheckpointError, reading_as
from evalkit.models.loading.checks import natively_known
from evalkit.models.loading.files import WINDOW_KEYS
from evalkit.models.loading.locate import Checkpoint

_WITHOUT_EFFECT = re.compile(
    # Written by libraries and trainers, or used by these only
    r"_.*|architectures|auto_map|transformers\.js_config|quantization_config|task_specific_params|tokenizer_\w+|"
    r"cache_implementation|unsloth_\w+|is_llama_config|finetuning_task|torchscript|use_bfloat16|output_past|prefix|"
    r"pruned_heads|is_decoder|add_cross_attention|tie_encoder_decoder|gradient_checkpointing|pretraining_tp|verbose|"
    r"n_special|predict_special_tokens|summary_\w+|problem_type|"
    # Of training: dropout, initialisation, losses
    r"\w*(dropout|pdrop|layerdrop)|initializer_\w+|init_(std|xavier_std|device|fn|config)|"
    r"\w*(aux|router)_loss\w*|loss_(type|reduction|ignore_index)|seq_aux|"
    # Tokens that evalkit takes from the tokenizer; sizes, which the weights have too; parts that read no text
    r"\w+_token_(id|index)s?|d_model|d_inner|n_layer|n_embd|pad_vocab_size_multiple|experts_per_token|"
    r"initial_context_length|(vision|image|video|audio)_\w+|"
    # Of published checkpoints, whose class computes what they say: routing, devices, other heads, windows, MLX's format
    r"ep_size|scoring_func|topk_method|num_nextn_predict_layers|max_window_layers|pool_size|quantization"
)
"""Keys that do not change what a language model computes from its weights."""
_AS_COMPUTED: Mapping[str, Any] = {
    "activation_function": "gelu_pytorch_tanh", "apply_residual_connection_post_layernorm": False,
    "attention_bias": False, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "full_attn_mod": 1,
    "fused_add_norm": True, "hidden_act": "gelu_pytorch_tanh", "interpolate_factor": 1, "is_causal": True,
    "lm_head_bias": False, "masked_softmax_fusion": True, "mlp_bias": False, "mlp_type": "default",
    "moe_layer_freq": 1, "norm_type": "layer_norm", "offset_alibi": 100,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rms_norm": True,
    "rope_interleaved": False, "rotary": True, "rotary_pct": 1.0, "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True, "skip_bias_add": True, "skip_bias_add_qkv": False, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_mrope": False, "use_parallel_block": True, "use_parallel_embedding": True,
}  # fmt: skip
"""Keys of published checkpoints → the value that models whose class does not read the key compute."""
_UNREAD_ROTARY = re.compile(r"Unrecognized keys in `rope_parameters` .*\{(.*)\}")
_NEEDED = (
    "rope_theta", "rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "partial_rotary_factor",
)  # fmt: skip
"""Rotary settings without which no frequency can be computed, if they are given."""
_UNIMPORTANT = re.compile("_token_id must be|we recommend|no RoPE parameters were found")
"""Warnings about tokens that evalkit checks, advice, and models without rotary positions."""
_ROTARY = ("rope_parameters", "rope_scaling")
_WINDOW = re.compile(r"(?!use_)(\w+_)?window(_size|_len)?|local_attention|attention_chunk_size")
"""Keys of the number of preceding tokens that a layer sees."""
_SLIDING = "sliding_attention"
_LIMITED = re.compile("sliding|chunk|window|local|compressed")
"""Types of layers that see so many tokens only."""


class OwnConfig(NamedTuple):
    config: Any
    """transformers' config."""
    remarks: tuple[str, ...]
    """Sentences on settings of config.json that are not computed."""


def own_config(folder: Path, raw: Mapping[str, Any], remote: bool) -> OwnConfig:
    """Read the transformers config in a folder, whose config.json is `raw`; `remote`: code in the folder defines it.

    Nothing is remarked or refused of a class that is defined by code in the folder. Raises a `CheckpointError` for a
    window without tokens.
    """
    from transformers import AutoConfig

    with collected_warnings() as warnings:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=remote)
    if remote:
        # Its own class reads what it needs
        return OwnConfig(config, ())
    text = config.get_text_config()
    _check_windows(folder, text)
    unread = [*_unread(config, raw), *_overruled(text, raw.get("text_config") or raw)]
    others = list[str]()
    for warning in warnings:
        if unrecognised := _UNREAD_ROTARY.match(warning):
            keys = sorted(re.findall(r"'([^']+)'", unrecognised[1]))
            unread += [_rotary_key(raw, key) for key in keys]
        elif not _UNIMPORTANT.search(warning):
            others.append(f"transformers warns of its config.json: {warning}")
    remarks = list(dict.fromkeys(others))
    if unread:
        kind = type(config)
        listed = ", ".join(dict.fromkeys(unread))
        remarks.append(
            f"config.json has settings that {kind.__name__} does not read ({listed}); if they change the model, "
            "correct config.json or give the model's code (docs/models.md)"
        )
    return OwnConfig(config, tuple(remarks))


def remarks_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the remarks on a checkpoint's config.json, without its weights; none if its own code reads it.

    Raises a `CheckpointError` as `own_config`.
    """
    if checkpoint.gguf is not None or checkpoint.kind == "live":
        return ()
    raw = checkpoint.config()
    if not natively_known(raw):
        return ()
    with reading_as(checkpoint.given, "a causal language model", CheckpointError):
        return own_config(checkpoint.folder, raw, remote=False).remarks


@contextmanager
def naming_rotary_keys(folder: Path, config: Any) -> Iterator[None]:
    """Raise a `CheckpointError` in place of an error that a rotary setting causes: null, or an unknown type."""
    try:
        yield
    except (KeyError, TypeError) as error:
        parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
        parts = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
        unknown = error.args[0] if isinstance(error, KeyError) else None
        causes = [key for part in parts for key in _NEEDED if key in part and part[key] == unknown]
        if not causes:
            raise
        shown = "null" if unknown is None else repr(unknown)
        raise CheckpointError(
            f"{folder / 'config.json'}: {causes[0]} is {shown}, which {type(config).__name__} does not accept; give "
            "the value of its training"
        ) from error


def _unread(config: Any, raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys with a value that neither a config's class nor the code of its models reads."""
    kind: Any = type(config)
    known = {*declared_settings(kind), *settings_read(kind), *WINDOW_KEYS}
    for key, value in raw.items():
        if _WITHOUT_EFFECT.fullmatch(key):
            continue
        if key in kind.sub_configs and isinstance(value, dict):
            yield from _unread(getattr(config, key), value, f"{prefix}{key}.")
        # A class removes from the other keys those that it reads, and stores the rest
        is_stored = key not in known and key in vars(config)
        is_known_value = value in (None, "", [], {}) or _AS_COMPUTED.get(key) == value
        if is_stored and not is_known_value and not _is_repeated(key, raw, known):
            yield prefix + key


def _is_repeated(key: str, raw: Mapping[str, Any], read: Collection[str]) -> bool:
    """Return whether a key that is read has the same value, and a name that is part of the key, or the key of it."""
    for other in raw.keys() & read:
        part = min(key, other, key=len)
        is_similar = "_" in part and part in max(key, other, key=len)
        if is_similar and raw[other] == raw[key] and not isinstance(raw[key], bool):
            return True
    return False


def _overruled(config: Any, raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rotary settings that are given twice, of which the config has another value."""
    used = getattr(config, "rope_parameters", None) or {}
    objects = {name: raw[name] for name in _ROTARY if raw.get(name)}
    for name, settings in objects.items():
        for key, value in settings.items():
            if len(objects) > 1 and used.get(key, value) != value:
                yield f"{name}.{key}"
    for key in ("rope_theta", "partial_rotary_factor"):
        if raw.get(key) is not None and used.get(key, raw[key]) != raw[key]:
            yield key


def _rotary_key(raw: Mapping[str, Any], key: str) -> str:
    """Return a rotary setting's key after the key of its object in config.json."""
    text = raw.get("text_config") or raw
    name = next((name for name in _ROTARY if key in str(text.get(name))), _ROTARY[0])
    return f"{name}.{key}"


def _check_windows(folder: Path, config: Any) -> None:
    """Raise a `CheckpointError` if attention of some layers sees no token at all."""
    settings = config.to_dict()
    types = settings.get("layer_types") or settings.get("attention_layers")
    if types and not any(_LIMITED.search(str(kind)) for kind in types):
        return
    declared = declared_settings(type(config))
    if _SLIDING in (types or ()) and "sliding_window" in declared and settings.get("sliding_window") is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: layer_types has {_SLIDING}, but sliding_window is null, or use_sliding_window "
            "is false; give the number of tokens that it sees"
        )
    layers = (settings.pop("per_layer_config", None) or {}).values()
    own = [(key, value) for key, value in settings.items() if key in declared]
    for key, value in [*own, *(item for layer in layers for item in layer.items())]:
        if _WINDOW.fullmatch(key) and isinstance(value, int) and value < 1:
            raise CheckpointError(
                f"{folder / 'config.json'}: {key} is {value}, which hides every token from attention; give the number "
                "of tokens that it sees, or null for all"
            )
