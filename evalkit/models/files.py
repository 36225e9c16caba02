"""The files of a checkpoint folder: which hold the weights, which the tokenizer, and whether they are whole.

In: a folder. Out: paths, parsed JSON, safetensors headers. Nothing here imports torch, so a broken
checkpoint is found before seconds are spent on imports.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError
from evalkit.inputs import reading

VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
"""Any one of these makes a tokenizer."""

TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that decide how text becomes token ids."""

CHAT_TEMPLATES = "additional_chat_templates"
"""The folder of those that have a name."""
_MORE_OF_TOKENIZERS = ("*.model", "tokenizer.model.*", "tokenizer.[0-9]*.json", f"{CHAT_TEMPLATES}/*.jinja")
"""What transformers reads beside these where it is there: other SentencePiece models, tokenizer.json of a version."""
TOKENIZER_PATTERNS = (*TOKENIZER_FILES, *_MORE_OF_TOKENIZERS)

GENERATION_CONFIG = "generation_config.json"
_CODE = ("*.py", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""What a checkpoint's own Python code may read of its folder."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")

_LEFT_BY_TRAINERS = ("optimizer", "scheduler", "scaler", "training_args", "rng_state", "trainer_state")
_HEADER_LIMIT = 100_000_000
"""The format's own bound on the header, in bytes; a larger length means that the file is something else."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `CheckpointError` names a file that is missing or is not one."""
    content = reading.read_json(path, CheckpointError)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def weight_files(folder: Path, *, allow_pickle: bool) -> tuple[Path, ...]:
    """The files that the weights are read from: safetensors where there are any, else pickles if allowed.

    Raises:
        CheckpointError: no weights, only pickled ones that are not allowed, or a shard that the index
            names and the folder lacks.
    """
    safe, pickles = _WEIGHTS
    if found := _named_weights(folder, safe):
        return found
    pickled = _named_weights(folder, pickles) if allow_pickle else ()
    if pickled:
        return pickled
    raise CheckpointError(f"{folder}: {_why_no_weights(folder)}")


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The tokenizer's files in this folder, in a fixed order; empty if there is no vocabulary."""
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return ()
    named = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return (*named, *_matching(folder, _MORE_OF_TOKENIZERS, named))


def adapter_files(folder: Path) -> tuple[Path, ...]:
    """What an adapter (of the `peft` package) consists of; transformers applies one where that is installed."""
    return _matching(folder, ("adapter_config.json", "adapter_model.*"), ())


def code_files(folder: Path) -> tuple[Path, ...]:
    """A checkpoint's own Python code and what it may read, as far as it is none of the files that others count."""
    counted = [*tokenizer_files(folder), folder / "config.json", folder / GENERATION_CONFIG]
    counted += [folder / f"{name}.index.json" for name in _WEIGHTS]
    found = _matching(folder, _CODE, counted)
    return tuple(path for path in found if not path.name.startswith(_LEFT_BY_TRAINERS))


def copy_files(paths: Iterable[Path], source: Path, target: Path) -> None:
    """Copy files of a folder to the same places in another."""
    for path in paths:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def generation_settings(folder: Path) -> dict[str, Any] | None:
    """The parsed generation_config.json of a checkpoint's folder; None where there is none."""
    path = folder / GENERATION_CONFIG
    return read_json(path) if path.is_file() else None


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Name → {dtype, shape, data_offsets} of every tensor in a safetensors file, without its data.

    Raises:
        CheckpointError: see `parse_safetensors`.
    """
    try:
        with path.open("rb") as file:
            return parse_safetensors(path, os.fstat(file.fileno()).st_size, file.read)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def parse_safetensors(path: Path, size: int, read: Callable[[int], bytes]) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file, as `safetensors_header` gives it.

    Args:
        path: of the file, for messages.
        size: of the file, in bytes.
        read: reads so many bytes; what it reads next after this are the tensors.

    Raises:
        CheckpointError: the header does not parse, or the file is shorter or longer than it says,
            which is how an interrupted copy looks.
    """
    try:
        (length,) = struct.unpack("<Q", read(8))
        if length > min(size, _HEADER_LIMIT):
            raise ValueError("its header is longer than the file")
        header = reading.parse_json(read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start_and_end = tensor["data_offsets"]
            known = isinstance(tensor["dtype"], str) and _are_sizes(tensor["shape"]) and _are_sizes(start_and_end)
            if not known or len(start_and_end) != 2:
                raise ValueError(f"its header misdescribes {name}")
        described = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or damaged ({error})") from error
    if size != described:
        raise CheckpointError(f"{path}: damaged: {size:,} bytes, but its header describes {described:,}; copy it again")
    return header  # type: ignore[no-any-return]


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _matching(folder: Path, patterns: Iterable[str], counted: Iterable[Path]) -> tuple[Path, ...]:
    """Files by name patterns, in the order of their names, without those that are counted already."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return tuple(sorted(found.difference(counted)))


def _named_weights(folder: Path, name: str) -> tuple[Path, ...]:
    """The one file of this name, or the shards of its index; in the order in which transformers looks."""
    if (folder / name).is_file():
        return (folder / name,)
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return ()
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    names = list(weight_map.values())
    suffix = Path(name).suffix
    for shard in names:
        if not isinstance(shard, str) or "/" in shard or not shard.endswith(suffix):
            raise CheckpointError(f"{index}: names {shard!r:.60} as a shard; expected *{suffix} files beside it")
    shards = tuple(folder / shard for shard in sorted(set(names)))
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{shard}: missing, though {index.name} names it; copy it again")
    return shards


def _why_no_weights(folder: Path) -> str:
    """What a folder without usable weights holds instead, and what to do about it."""
    if any(folder.glob("pytorch_model*.bin")):
        return (
            "holds only pickled weights, and unpickling can run code; pass --allow-pickle if you trust "
            "where they come from"
        )
    others = sorted(
        path.name
        for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
        for path in folder.glob(pattern)
        if not path.name.startswith(_LEFT_BY_TRAINERS)
    )
    found = f" (found {', '.join(others[:3])})" if others else ""
    return f"holds no model.safetensors{found}; write the checkpoint with save_pretrained"
