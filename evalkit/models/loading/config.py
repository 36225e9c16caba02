"""Validate value types and sizes in config.json.

In: a parsed config.json. Out: nothing, or a `CheckpointError` that names file and key. Only keys with whose wrong
values transformers would still load a model, and those that evalkit itself reads or that cost hours or all memory;
transformers validates the rest when the model is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model

from evalkit.errors import CheckpointError
from evalkit.inputs.validated import Stored

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the number of layers in different architectures."""
WINDOW_KEYS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
    "max_target_positions",
)  # fmt: skip
"""Names of the context window in different architectures."""
MOST_LAYERS = 10_000
"""Limit on layers, because lists of this length, or modules, are created."""
_MOST_LABELS = 10**6
"""Limit on the labels of a classifier; transformers generates a name for each, in the config of any model."""
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST_EXPERTS = 10**5
"""Limit on the experts of a layer, of which some architectures make a module each."""
_INFINITE = ("time_step_limit",)
"""Keys that may hold infinity: transformers writes it for Mamba 2."""
_TAG = "__float__"
"""Key of the objects that transformers writes in place of infinities and NaN."""

_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Base = Annotated[float, Field(gt=1)]
_TYPES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (str, ("model_type", "dtype", "torch_dtype")),
    (Annotated[int, Field(ge=1, le=MOST_LAYERS)], LAYER_KEYS),
    (int, (*WINDOW_KEYS, "original_max_position_embeddings")),
    (Annotated[int, Field(ge=0, le=_MOST_LABELS)], ("num_labels",)),
    # Some architectures list the experts of each kind of layer
    (Annotated[int, Field(ge=0, le=_MOST_EXPERTS)] | list[Any], _EXPERT_KEYS),
    (bool, ("is_decoder", "is_encoder_decoder", "tie_word_embeddings")),
    (dict[str, Any], ("auto_map", "text_config", "quantization_config", "rope_scaling", "rope_parameters")),
    (_Share, ("partial_rotary_factor", "rotary_pct")),
    (_Base, ("rope_theta", "rotary_emb_base", "rope_local_base_freq")),
    (list[str], ("architectures",)),
)
_ROPE_TYPES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (str, ("rope_type", "type")),
    (_Positive, ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")),
    (_Positive, ("low_freq_factor", "high_freq_factor")),
    (list[_Positive], ("short_factor", "long_factor")),
    (float, ("mscale", "mscale_all_dim")),
    (_Base, ("rope_theta",)),
    (_Share, ("partial_rotary_factor",)),
)


def _model(name: str, types: tuple[tuple[Any, tuple[str, ...]], ...]) -> type[Stored]:
    fields: dict[str, Any] = {key: (kind | None, None) for kind, keys in types for key in keys}
    return create_model(name, __base__=Stored, **fields)


_CONFIG, _ROPE = _model("Config", _TYPES), _model("Rope", _ROPE_TYPES)


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
