"""Validate value types and sizes in config.json.

In: a parsed config.json; later the number of weights in the files. Out: nothing, or a `CheckpointError` that names file
and key. Only keys with whose wrong values transformers would still load a model, and those that evalkit itself reads or
that cost hours or all memory; transformers validates the rest when the model is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the number of layers in different architectures."""
WINDOW_KEYS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
    "max_target_positions",
)  # fmt: skip
"""Names of the context window in different architectures."""
_MOST_LABELS = 10**6
"""Limit on the labels of a classifier; transformers generates a name for each, in the config of any model."""
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST_EXPERTS = 10**5
"""Limit on the experts of a layer, of which some architectures make a module each."""
_INFINITE = ("time_step_limit",)
"""Keys that may hold infinity: transformers writes it for Mamba 2."""
_TAG = "__float__"
"""Key of the objects that transformers writes in place of infinities and NaN."""


def _is_number(value: Any, above: float = -math.inf, most: float = math.inf) -> bool:
    return type(value) in (int, float) and above < value <= most


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


_ValueType = tuple[str, Callable[[Any], bool]]
_WHOLE: _ValueType = ("a whole number", lambda value: type(value) is int)
_NUMBER: _ValueType = ("a number", _is_number)
_POSITIVE: _ValueType = ("a number above 0", lambda value: _is_number(value, 0))
_BASE: _ValueType = ("a number above 1", lambda value: _is_number(value, 1))
_SHARE: _ValueType = ("a number above 0, at most 1", lambda value: _is_number(value, 0, 1))
_FLAG: _ValueType = ("true or false", lambda value: isinstance(value, bool))
_TEXT: _ValueType = ("a string", lambda value: isinstance(value, str))
_OBJECT: _ValueType = ("an object", lambda value: isinstance(value, dict))
_TEXTS: _ValueType = ("a list of strings", lambda value: _is_list(value, lambda item: isinstance(item, str)))
_POSITIVES: _ValueType = ("a list of numbers above 0", lambda value: _is_list(value, lambda item: _is_number(item, 0)))

_TYPES: Mapping[str, _ValueType] = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), _TEXT),
    **dict.fromkeys((*LAYER_KEYS, *WINDOW_KEYS, "original_max_position_embeddings", "num_labels"), _WHOLE),
    **dict.fromkeys(("is_decoder", "is_encoder_decoder", "tie_word_embeddings"), _FLAG),
    **dict.fromkeys(("auto_map", "text_config", "quantization_config", "rope_scaling", "rope_parameters"), _OBJECT),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), _BASE),
    "architectures": _TEXTS,
}
_ROPE_TYPES: Mapping[str, _ValueType] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("factor", "original_max_position_embeddings", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("short_factor", "long_factor"), _POSITIVES),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NUMBER),
    "rope_theta": _BASE,
    "partial_rotary_factor": _SHARE,
}


def check_types(path: Path, config: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` if a value in config.json has the wrong type; null counts as absent."""
    if (key := _not_finite("", config)) is not None:
        raise CheckpointError(f"{path}: {key} is infinite or not a number; expected a finite number")
    for text in _parts(config):
        _check(path, "", text, _TYPES)
        for name in ("rope_scaling", "rope_parameters"):
            rope = text.get(name) or {}
            for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
                _check(path, f"{name}: ", part, _ROPE_TYPES)


def check_sizes(given: str, config: Mapping[str, Any], tensors: int) -> None:
    """Raise a `CheckpointError` if config.json has no layers, or more than the number of weights in the files.

    Memory would be allocated for each. The value types must be validated before.
    """
    limits = dict.fromkeys(LAYER_KEYS, (1, tensors)) | {"num_labels": (0, _MOST_LABELS)}
    limits |= dict.fromkeys(_EXPERT_KEYS, (0, _MOST_EXPERTS))
    for text in _parts(config):
        for key, (least, most) in limits.items():
            value = text.get(key)
            if isinstance(value, int) and not least <= value <= most:
                raise CheckpointError(
                    f"{given}: config.json has {key} {value:,}, but the files hold {tensors:,} weights in total; "
                    f"expected {least} to {most:,}"
                )


def check_code(path: Path, auto_map: Any) -> None:
    """Raise a `CheckpointError` if a file's auto_map refers to code in another repository, which is not hashed."""
    references = auto_map.values() if isinstance(auto_map, dict) else auto_map or ()
    for reference in references:
        if "--" in str(reference):
            raise CheckpointError(
                f"{path}: refers to code in another repository ({reference!r:.60}); copy that code to this folder, "
                "and use file.Class in auto_map"
            )


def _not_finite(key: str, value: Any) -> str | None:
    """Return the key of an infinite number or NaN in parsed JSON, with which a model may still give finite scores."""
    if isinstance(value, float):
        return None if math.isfinite(value) else key
    if isinstance(value, dict) and _TAG in value:
        return key
    members: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        members = ((key, item) for item in value)
    keys = (_not_finite(str(name), item) for name, item in members if name not in _INFINITE)
    return next((found for found in keys if found is not None), None)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the config, and the config of its text part."""
    yield config
    inner = config.get("text_config")
    if isinstance(inner, dict):
        yield inner


def _check(path: Path, where: str, values: Mapping[str, Any], types: Mapping[str, _ValueType]) -> None:
    for key, (expected, fits) in types.items():
        value = values.get(key)
        if value is not None and not fits(value):
            raise CheckpointError(f"{path}: {where}{key} is {value!r:.60}; expected {expected}")
