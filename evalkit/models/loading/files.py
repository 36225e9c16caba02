"""Files of a checkpoint folder: weights, tokenizer, code and JSON; types and sizes of the values in config.json.

In: a folder. Out: paths, parsed JSON, safetensors headers, or a `CheckpointError` that names file and key. Validated
are keys of config.json with whose wrong values transformers would still load a model, and those that evalkit itself
reads or that cost hours or all memory; transformers validates the rest when the model is built. Nothing here imports
torch, so a damaged checkpoint is reported before seconds are spent on imports.
"""

from __future__ import annotations

import glob
import math
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, ValidationError, create_model
from safetensors import safe_open

from evalkit.errors import CheckpointError, reading_as, writing
from evalkit.inputs import reading
from evalkit.inputs.validated import Stored
from evalkit.inputs.values import by_number
from evalkit.models.variants.settings import MOST_LAYERS

VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tekken.json",
)  # fmt: skip
_TOKENIZER_FILES = (
    *VOCABULARY_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
CHAT_TEMPLATES = "additional_chat_templates"
_MORE_TOKENIZER_FILES = ("*.model", "tokenizer.model.*", "tokenizer.[0-9]*.json", f"{CHAT_TEMPLATES}/*.jinja")
"""Patterns of other files that transformers reads: SentencePiece models, versioned tokenizer.json files."""
TOKENIZER_PATTERNS = (*_TOKENIZER_FILES, *_MORE_TOKENIZER_FILES)
GENERATION_CONFIG = "generation_config.json"
_CODE = ("*.py", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
TRAINER_FILES = ("optimizer", "scheduler", "scaler", "training_args", "rng_state", "trainer_state")
"""Beginnings of the names of files that only a trainer reads."""
_WILDCARD = re.compile(r"[*?\[]")

FileStates: TypeAlias = tuple[tuple[str, int, int, int], ...]


def read_json(path: Path) -> dict[str, Any]:
    content = reading.read_json(path, CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def generation_settings(folder: Path) -> dict[str, Any] | None:
    path = folder / GENERATION_CONFIG
    return read_json(path) if path.is_file() else None


def generation_files(folder: Path) -> tuple[Path, ...]:
    return tuple(folder.glob(GENERATION_CONFIG))


def weight_files(folder: Path, *, allow_pickle: bool) -> tuple[Path, ...]:
    """Return the files with the weights: safetensors if there are any, else pickles if allowed.

    Shards are in the order in which transformers reads them. Raises `CheckpointError` if there are no weights, or if a
    shard in the index is missing.
    """
    for name in (_SAFE, _PICKLED) if allow_pickle else (_SAFE,):
        if (folder / name).is_file():
            return (folder / name,)
        if (index := folder / f"{name}.index.json").is_file():
            return _shards(index, Path(name).suffix)
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: holds only pickled weights, which can run code; to trust them, pass --allow-pickle"
        )
    raise CheckpointError(f"{folder}: holds no {_SAFE}; write the checkpoint with save_pretrained")


def _shards(index: Path, suffix: str) -> tuple[Path, ...]:
    with reading_as(index, "an index of weights", CheckpointError):
        names = set(read_json(index)["weight_map"].values())
    for name in names:
        # Otherwise a pickle would be read unasked, or a file outside of the folder
        if not isinstance(name, str) or "/" in name or not name.endswith(suffix):
            raise CheckpointError(f"{index}: lists {name!r:.60} as a shard; expected *{suffix} files beside it")
        if not index.with_name(name).is_file():
            raise CheckpointError(f"{index.with_name(name)}: missing, but listed in {index.name}; copy it again")
    return tuple(index.with_name(name) for name in sorted(names))


def weight_indexes(folder: Path) -> tuple[Path, ...]:
    return tuple(path for name in (_SAFE, _PICKLED) if (path := folder / f"{name}.index.json").is_file())


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Return the tokenizer files of a folder in a fixed order; empty if there is no vocabulary."""
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return ()
    named = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    return (*named, *_matching(folder, _MORE_TOKENIZER_FILES, named))


def adapter_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a `peft` adapter; transformers applies it if `peft` is installed."""
    return _matching(folder, ("adapter_config.json", "adapter_model.*"))


def code_files(folder: Path) -> tuple[Path, ...]:
    """Return a checkpoint's Python code and the files it may read, without tokenizer, config and weight files."""
    others = [*tokenizer_files(folder), folder / "config.json", folder / GENERATION_CONFIG, *weight_indexes(folder)]
    return tuple(path for path in _matching(folder, _CODE, others) if not path.name.startswith(TRAINER_FILES))


def _matching(folder: Path, patterns: Iterable[str], without: Iterable[Path] = ()) -> tuple[Path, ...]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return tuple(sorted(paths.difference(without)))


def copy_files(paths: Iterable[Path], source: Path, target: Path) -> None:
    for path in paths:
        copy = target / path.relative_to(source)
        with writing(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def safetensors_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Read the header of a safetensors file: name → (dtype, such as "BF16", and shape), in the order of the file.

    Raises `CheckpointError` if the file is shorter than its header says, for example after an interrupted copy.
    """
    with reading_as(path, "undamaged weights", CheckpointError), safe_open(path, "np") as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        return {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in slices.items()}


def why_incomplete(folder: Path, *, allow_pickle: bool) -> str:
    """Return why a checkpoint cannot be loaded, in one line; empty if its config and all its weight files are there."""
    try:
        read_json(folder / "config.json")
        for path in weight_files(folder, allow_pickle=allow_pickle):
            if path.suffix == ".safetensors":
                safetensors_header(path)
                continue
            # A file of torch is a ZIP archive, while older formats have no end mark
            with reading_as(path, "complete weights", CheckpointError), path.open("rb") as file:
                start = file.read(2)
                if not start or (start == b"PK" and not zipfile.is_zipfile(path)):
                    raise EOFError("it ends before its end; copy it again")
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def file_states(folder: Path) -> FileStates:
    """Return the states of a checkpoint's files, without those that only a trainer reads; empty if it is gone."""
    try:
        with os.scandir(folder) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:  # removed, also between two files
        return ()
    states = ((name, state.st_size, state.st_mtime_ns, state.st_ino) for name, state in files)
    return tuple(sorted(state for state in states if not state[0].startswith(TRAINER_FILES)))


def is_begun(states: FileStates) -> bool:
    return any(name == "config.json" or name.endswith((".safetensors", ".bin")) for name, *_ in states)


def is_pattern(text: str, folder: Path | None = None) -> bool:
    """Return whether a checkpoint's name is a pattern: it has wildcards, and is no path, relative to `folder`."""
    try:
        return bool(_WILDCARD.search(text)) and not (folder or Path()).joinpath(text).exists()
    except OSError:
        return False


def matching(text: str, folder: Path | None = None) -> list[str]:
    """Return the folders and GGUF files that match a pattern, in the order of the numbers in their names.

    In the pattern, `**` matches any number of folders, `~` is the user's. It and the results are relative to `folder`.
    """
    root, text = folder or Path(), str(Path(text).expanduser()) if text.startswith("~") else text
    # Path.glob accepts no absolute pattern
    paths = glob.glob(text, root_dir=root, recursive=True)  # noqa: PTH207
    return sorted((path for path in paths if path.endswith(".gguf") or (root / path).is_dir()), key=by_number)


# Values in config.json

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of config.json that may hold the number of layers."""
WINDOW_KEYS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
    "max_target_positions",
)  # fmt: skip
_MOST_LABELS = 10**6
"""Limit on the labels of a classifier; transformers generates a name for each, in the config of any model."""
_MOST_EXPERTS = 10**5
"""Limit on the experts of a layer, of which some architectures make a module each."""
_INFINITE = ("time_step_limit",)
"""Keys that may hold infinity: transformers writes it for Mamba 2."""
MOST_TOKENS = 2**24
"""Longest context: positions are computed in float32, which represents integers exactly up to this one."""
_TAG = "__float__"
"""Key of the objects that transformers writes in place of infinities and NaN."""

_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Base = Annotated[float, Field(gt=1)]
_Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
_Experts = Annotated[int, Field(ge=0, le=_MOST_EXPERTS)] | list[Any]
"""Some architectures list the experts of each kind of layer."""


def _form(name: str, types: Mapping[Any, tuple[str, ...]]) -> type[Stored]:
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
            windows = (text.get(key) or 0 for key in WINDOW_KEYS)
            longest = next((window for window in windows if window > 0), MOST_TOKENS)
            for rope in (text.get("rope_scaling") or {}, text.get("rope_parameters") or {}):
                # Some architectures have rotary parameters for each type of layer
                for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
                    _ROPE.model_validate(part)
                    _check_factors(path, part, longest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        expected = first["msg"].replace("Input should be", "expected")
        raise CheckpointError(f"{path}: {first['loc'][0]} is {first['input']!r:.60}; {expected}") from error


def _check_factors(path: Path, rope: Mapping[str, Any], window: int) -> None:
    """Raise a `CheckpointError` for factors with which attention cannot distinguish tokens by their positions.

    Positions are divided by a factor, the ratio of two windows. One above the window in tokens maps the whole window to
    less than one position of training; one far below 1 makes positions larger than `MOST_TOKENS`.
    """
    least = min(1.0, window / MOST_TOKENS)
    factors = {"factor": [rope.get("factor") or 1.0]}
    for key in ("short_factor", "long_factor"):
        factors[key] = rope.get(key) or []
    for key, values in factors.items():
        for factor in values:
            if not least <= factor <= window:
                raise CheckpointError(
                    f"{path}: {key} is {factor:g}, with which a window of {window:,} tokens has no distinct positions; "
                    f"expected {least:g} to {window:,}"
                )


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
