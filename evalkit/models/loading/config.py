"""Validate value types and sizes in config.json.

In: a parsed config.json. Out: nothing, or a `CheckpointError` that names file and key. Only keys with whose wrong
values transformers would still load a model, and those that evalkit itself reads or that cost hours or all memory;
transformers validates the rest when the model is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model

from evalkit.errors import CheckpointError
from evalkit.inputs.validated import Stored

WINDOW_KEYS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
    "max_target_positions",
)  # fmt: skip
"""Names of the context window in different architectures."""
MOST_LAYERS = 10_000
"""Limit on layers, because lists of this length, or modules, are created."""
_MOST_LABELS = 10**6
"""Limit on the labels of a classifier; transformers generates a name for each, in the config of any model."""
_MOST_EXPERTS = 10**5
"""Limit on the experts of a layer, of which some architectures make a module each."""
_INFINITE = ("time_step_limit",)
"""Keys that may hold infinity: transformers writes it for Mamba 2."""
_TAG = "__float__"
"""Key of the objects that transformers writes in place of infinities and NaN."""

_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Base = Annotated[float, Field(gt=1)]
_Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
# Some architectures list the experts of each kind of layer
_Experts = Annotated[int, Field(ge=0, le=_MOST_EXPERTS)] | list[Any]


def _form(name: str, types: Mapping[Any, tuple[str, ...]]) -> type[Stored]:
    """Return a model of optional keys, by type."""
    fields: dict[str, Any] = {key: (kind | None, None) for kind, keys in types.items() for key in keys}
    return create_model(name, __base__=Stored, **fields)


_CONFIG = _form("Config", {
    str: ("model_type", "dtype", "torch_dtype"),
    list[str]: ("architectures",),
    bool: ("is_decoder", "is_encoder_decoder", "tie_word_embeddings"),
    dict[str, Any]: ("auto_map", "text_config", "quantization_config", "rope_scaling", "rope_parameters"),
    int: (*WINDOW_KEYS, "original_max_position_embeddings"),
    _Layers: ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    Annotated[int, Field(ge=0, le=_MOST_LABELS)]: ("num_labels",),
    _Experts: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    _Share: ("partial_rotary_factor", "rotary_pct"),
    _Base: ("rope_theta", "rotary_emb_base", "rope_local_base_freq"),
})  # fmt: skip
_ROPE = _form("Rope", {
    str: ("rope_type", "type"),
    _Positive: ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                "low_freq_factor", "high_freq_factor"),
    list[_Positive]: ("short_factor", "long_factor"),
    float: ("mscale", "mscale_all_dim"),
    _Base: ("rope_theta",),
    _Share: ("partial_rotary_factor",),
})  # fmt: skip


def check_types(path: Path, config: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` if a value in config.json has the wrong type or size; null counts as absent."""
    if (key := _not_finite("", config)) is not None:
        raise CheckpointError(f"{path}: {key} is infinite or not a number; expected a finite number")
    try:
        _CONFIG.model_validate(config)
        for text in (config, config.get("text_config") or {}):
            _CONFIG.model_validate(text)
            for rope in (text.get("rope_scaling") or {}, text.get("rope_parameters") or {}):
                # Some architectures have rotary parameters for each type of layer
                for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
                    _ROPE.model_validate(part)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        expected = first["msg"].replace("Input should be", "expected")
        raise CheckpointError(f"{path}: {first['loc'][0]} is {first['input']!r:.60}; {expected}") from error


def _not_finite(key: str, value: Any) -> str | None:
    """Return the key of an infinite number or NaN in parsed JSON, with which a model may still give finite scores."""
    if isinstance(value, float):
        return None if math.isfinite(value) else key
    if isinstance(value, dict):
        if _TAG in value:
            return key
        keys = (_not_finite(name, item) for name, item in value.items() if name not in _INFINITE)
    else:
        keys = (_not_finite(key, item) for item in (value if isinstance(value, list) else ()))
    return next((name for name in keys if name is not None), None)


def quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization_config, also that of the text part of a multi-part model; empty if there is none."""
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}


def check_code(path: Path, auto_map: Any) -> None:
    """Raise a `CheckpointError` if a file's auto_map refers to code in another repository, which is not hashed."""
    references = auto_map.values() if isinstance(auto_map, dict) else auto_map or ()
    for reference in references:
        if "--" in str(reference):
            raise CheckpointError(
                f"{path}: refers to code in another repository ({reference!r:.60}); copy that code to this folder, "
                "and use file.Class in auto_map"
            )
