"""Whether config.json holds values of the kinds that its keys have, and sizes that its weights can have.

In: a parsed config.json; later the number of weights in the files. Out: nothing, or a `CheckpointError` that names file
and key. Only keys that evalkit reads itself are looked at, and those of which a wrong one takes hours or all memory;
transformers judges the rest when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What architectures call the number of their layers."""
WINDOW_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
"""What architectures call the number of positions that they were trained with."""
_MOST_LABELS = 10**6
"""Of a classifier's; transformers names them all, in a config of any model."""

_Kind = tuple[str, Callable[[Any], bool]]
_WHOLE: _Kind = ("a whole number", lambda value: type(value) is int)
_NUMBER: _Kind = ("a number", lambda value: type(value) in (int, float))
_FLAG: _Kind = ("true or false", lambda value: isinstance(value, bool))
_TEXT: _Kind = ("a text", lambda value: isinstance(value, str))
_OBJECT: _Kind = ("an object", lambda value: isinstance(value, dict))
_TEXTS: _Kind = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
_SHARE: _Kind = ("a number above 0, at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), _TEXT),
    **dict.fromkeys((*LAYER_KEYS, *WINDOW_KEYS, "original_max_position_embeddings", "num_labels"), _WHOLE),
    **dict.fromkeys(("is_decoder", "is_encoder_decoder", "tie_word_embeddings"), _FLAG),
    **dict.fromkeys(("auto_map", "text_config", "quantization_config", "rope_scaling", "rope_parameters"), _OBJECT),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE),
    "architectures": _TEXTS,
}
_ROPE_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("factor", "rope_theta", "original_max_position_embeddings"), _NUMBER),
    "partial_rotary_factor": _SHARE,
}


def check_kinds(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config.json with a value of another kind than its key's; null is as good as no key.

    Raises:
        CheckpointError: names the file and the key.
    """
    for text in _parts(config):
        _check(path, "", text, _KINDS)
        for name in ("rope_scaling", "rope_parameters"):
            rope = text.get(name) or {}
            for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
                _check(path, f"{name}: ", part, _ROPE_KINDS)


def check_sizes(given: str, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse a config.json with no layers, or with more than there are weights, before anything is made for each.

    Args:
        given: the checkpoint's name for messages.
        config: parsed, of the right kinds.
        tensors: named weights in the files.

    Raises:
        CheckpointError: names the key.
    """
    limits = dict.fromkeys(LAYER_KEYS, (1, tensors)) | {"num_labels": (0, _MOST_LABELS)}
    for text in _parts(config):
        for key, (least, most) in limits.items():
            value = text.get(key)
            if value is not None and not least <= value <= most:
                raise CheckpointError(
                    f"{given}: config.json has {key} {value:,}, where the files hold {tensors:,} weights in all; "
                    f"expected {least} to {most:,}"
                )


def check_code(path: Path, auto_map: Any) -> None:
    """Refuse code that a folder's file names in another repository ("owner/name--file.Class"): it is not hashed.

    Args:
        path: of the file, for messages.
        auto_map: what it says of code, if anything.

    Raises:
        CheckpointError: names the code.
    """
    places = auto_map.values() if isinstance(auto_map, dict) else auto_map or ()
    for place in places:
        if "--" in str(place):
            raise CheckpointError(
                f"{path}: takes code from another repository ({_shown(place)}); put that code's files beside it, and "
                "only file.Class into auto_map"
            )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, and that of its text part."""
    yield config
    inner = config.get("text_config")
    if isinstance(inner, dict):
        yield inner


def _check(path: Path, where: str, values: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    for key, (expected, fits) in kinds.items():
        value = values.get(key)
        if value is not None and not fits(value):
            raise CheckpointError(f"{path}: {where}{key} is {_shown(value)}; expected {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
