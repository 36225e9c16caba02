"""Read weight files once into memory, so that the hashed bytes are the loaded bytes.

In: weight files. Out: tensors and the files' digests. No tensor stays mapped to a file, so overwriting, replacing or
truncating a file afterwards does not change the model.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from evalkit.errors import CheckpointError, first_line
from evalkit.models.files import damaged
from evalkit.models.fingerprint import content_sha256, state_of

_LARGE = 2**18
"""Bytes from which a tensor is rounded as it is read."""
_DIGITS = 9
"""Most digits of a number in a weight's name, such as a layer's."""
_WIDE = (torch.float64, torch.float32)

Tensors = dict[str, torch.Tensor]


class ReadingStopped(Exception):
    """Nobody needs the weights any more."""


@dataclass
class Weights:
    """All weights of a checkpoint."""

    tensors: Tensors = field(default_factory=dict)
    digests: list[tuple[str, str]] = field(default_factory=list)
    """Name and SHA-256 of each file, in order."""
    rounded: dict[str, torch.dtype] = field(default_factory=dict)
    """Stored dtype of each tensor that was rounded to another as it was read, by name."""


def read_weights(paths: Iterable[Path], stop: Event | None = None, dtype: torch.dtype | None = None) -> Weights:
    """Read and hash weight files; if two contain a tensor of the same name, the later file takes precedence.

    Args:
        paths: of the files.
        stop: another thread sets it to stop reading.
        dtype: large wider floating-point tensors of safetensors files are rounded to it, so that memory never holds all
            of them as stored; None: all tensors stay as stored.

    Raises:
        ReadingStopped: `stop` was set.
        CheckpointError: a file cannot be read, is damaged, or does not fit into memory.
    """
    weights = Weights()
    for path in paths:
        if path.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(f"{path}: expected weights in a *.safetensors or *.bin file")
        started = time.time()
        try:
            before = state_of(path)
            if path.suffix == ".safetensors":
                quick = _read_safetensors(path, weights, stop or Event(), dtype)
            else:
                quick = _read_pickled(path, weights)
            weights.digests.append((path.name, content_sha256(path, before, started, quick)))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        except (MemoryError, RuntimeError) as error:  # the latter is what torch's allocator raises
            raise CheckpointError(f"{path}: does not fit into memory ({first_line(error)})") from error
    return weights


def _read_safetensors(path: Path, weights: Weights, stop: Event, dtype: torch.dtype | None) -> str:
    """Read a file's tensors; return the xxh3 of its content: the header, then the tensors in the order of the file."""
    quick = xxhash.xxh3_128()
    try:
        # Read, not mapped: a process that has mapped a file is killed when the file is truncated
        with safe_open(path, "pt", backend="pread") as shard, path.open("rb") as file:
            length = file.read(8)
            quick.update(length + file.read(int.from_bytes(length, "little")))
            for name in shard.offset_keys():
                if stop.is_set():
                    raise ReadingStopped
                _check_name(path, name)
                tensor = shard.get_tensor(name)
                if tensor.numel():
                    quick.update(tensor.reshape(-1).view(torch.uint8).numpy())
                narrower = dtype is not None and tensor.dtype in _WIDE and tensor.itemsize > dtype.itemsize
                if narrower and tensor.nbytes >= _LARGE:
                    weights.rounded[name] = tensor.dtype
                    tensor = tensor.to(dtype)
                weights.tensors[name] = tensor
    except SafetensorError as error:
        raise damaged(path, error) from error
    return quick.hexdigest()


def _read_pickled(path: Path, weights: Weights) -> str:
    """Read a file's tensors without running code in it; return the xxh3 of its content."""
    content = path.read_bytes()
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling can raise any error
        raise CheckpointError(f"{path}: cannot be read ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}; expected tensors by name")
    for name, tensor in found.items():
        if isinstance(tensor, torch.Tensor):
            _check_name(path, str(name))
            weights.tensors[str(name)] = tensor
    return xxhash.xxh3_128(content).hexdigest()


def _check_name(path: Path, name: str) -> None:
    """Raise for a number with non-ASCII or too many digits, because transformers sorts names by their numbers."""
    if any(part.isdigit() and not (part.isascii() and len(part) <= _DIGITS) for part in name.split(".")):
        raise CheckpointError(
            f"{path}: the weight {name!r:.60} has an invalid number in its name; expected at most {_DIGITS} digits"
        )
