"""The files of a checkpoint folder: which hold the weights, which the tokenizer, and whether they are whole.

In: a folder. Out: paths, parsed JSON, safetensors headers. Nothing here imports torch, so a broken
checkpoint is found before seconds are spent on imports.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from evalkit import reading
from evalkit.errors import CheckpointError

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
"""All files that decide how text becomes token ids."""

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
    if found := _named_weights(folder, "model.safetensors"):
        return found
    pickled = _named_weights(folder, "pytorch_model.bin") if allow_pickle else ()
    if pickled:
        return pickled
    raise CheckpointError(f"{folder}: {_why_no_weights(folder)}")


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The tokenizer's files in this folder, in a fixed order; empty if there is no vocabulary."""
    if not any((folder / name).is_file() for name in VOCABULARY_FILES):
        return ()
    return tuple(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Name → {dtype, shape, data_offsets} of every tensor in a safetensors file, without its data.

    Raises:
        CheckpointError: the header does not parse, or the file is shorter or longer than it says,
            which is how an interrupted copy looks.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _HEADER_LIMIT):
                raise ValueError("its header is longer than the file")
            header = reading.parse_json(file.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: not a safetensors file, or damaged ({error})") from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path}: damaged: {size:,} bytes, but its header describes {8 + length + end:,}; copy it again"
        )
    return header  # type: ignore[no-any-return]


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
    shards = tuple(folder / shard for shard in sorted({str(shard) for shard in weight_map.values()}))
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
