"""Read weight files once into memory, so that the hashed bytes are the loaded bytes.

In: weight files. Out: tensors and the files' digests. Files are not memory-mapped, so overwriting, replacing or
truncating a file afterwards does not change the model (and does not kill the process, as truncating a mapped file
does).
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import torch
import xxhash

from evalkit.errors import CheckpointError, first_line
from evalkit.models.files import parse_safetensors
from evalkit.models.fingerprint import content_sha256, state_of

_CHUNK, _LARGE = 2**22, 2**18
_DIGITS = 9
"""Most digits of a number in a weight's name, such as a layer's."""
_PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Flags for anonymous private memory; empty on systems without them."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""safetensors names of dtypes whose elements have a whole number of bytes."""
_WIDE = (torch.float64, torch.float32)


@dataclass(frozen=True)
class Weights:
    """All weights of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    digests: tuple[tuple[str, str], ...]
    """Name and SHA-256 of each file, in order."""
    rounded: dict[str, torch.dtype]
    """Stored dtype of each tensor that was rounded to another as it was read, by name."""


class ReadingStopped(Exception):
    """Nobody needs the weights any more."""


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
    tensors: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.dtype] = {}
    digests = []
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                read = _HashingReader(path, file, stop or Event(), dtype)
                found = _reader(path)(read)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except (MemoryError, RuntimeError) as error:  # the latter is what torch's allocator raises
            raise CheckpointError(f"{path}: does not fit into memory ({first_line(error)})") from error
        _check_names(path, found)
        tensors |= found
        digests.append((path.name, read.digest()))
        rounded |= read.rounded
    return Weights(tensors, tuple(digests), rounded)


def _check_names(path: Path, names: Iterable[str]) -> None:
    """Raise for numbers in names with non-ASCII or too many digits, because transformers sorts names by them."""
    for name in names:
        if any(part.isdigit() and not (part.isascii() and len(part) <= _DIGITS) for part in name.split(".")):
            raise CheckpointError(
                f"{path}: the weight {name!r:.60} has an invalid number in its name; expected at most {_DIGITS} digits"
            )


class _HashingReader:
    """A file that is read sequentially and hashed at the same time, until `stop` is set.

    Args:
        path, file: the file.
        stop, dtype: see `read_weights`.
    """

    def __init__(self, path: Path, file: BinaryIO, stop: Event, dtype: torch.dtype | None) -> None:
        self.path = path
        self.rounded: dict[str, torch.dtype] = {}
        self._dtype = dtype
        self._stop = stop
        self._started, self._before = time.time(), state_of(path)
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._quick = xxhash.xxh3_128()

    def take(self, count: int) -> bytes:
        """Read the next bytes of the file, at most all remaining ones. Raises as `tensor`."""
        found = bytearray(min(count, self.left))
        self._fill(memoryview(found))
        return bytes(found)

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Read the next bytes of the file as a new tensor.

        Raises:
            CheckpointError: the file was truncated after it was opened.
        """
        count = prod(shape) * dtype.itemsize
        content = _memory(count)
        self._fill(memoryview(content.numpy()))  # type: ignore[arg-type]
        tensor = content.view(dtype).reshape(shape)
        narrower = self._dtype is not None and dtype in _WIDE and dtype.itemsize > self._dtype.itemsize
        if not narrower or count < _LARGE:
            return tensor
        self.rounded[name] = dtype
        return tensor.to(self._dtype)

    @property
    def left(self) -> int:
        """Return the number of unread bytes."""
        return self.size - self._file.tell()

    def rest(self) -> io.BytesIO:
        """Read the remaining file. Raises as `tensor`."""
        found, piece = io.BytesIO(), memoryview(bytearray(_CHUNK))
        while self.left:
            part = piece[: min(self.left, _CHUNK)]
            self._read(part)
            found.write(part)
        found.seek(0)
        return found

    def digest(self) -> str:
        """Return the SHA-256 of all bytes read. Raises `CheckpointError` if the file has changed since."""
        return content_sha256(self.path, self._before, self._started, self._quick.hexdigest())

    def _fill(self, view: memoryview) -> None:
        # In chunks, so that the bytes to hash are still in the CPU cache
        for start in range(0, len(view), _CHUNK):
            self._read(view[start : start + _CHUNK])

    def _read(self, piece: memoryview) -> None:
        done = 0
        if self._stop.is_set():
            raise ReadingStopped
        while done < len(piece):
            count = self._file.readinto(piece[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{self.path}: was truncated while it was read; copy it again")
            done += count
        self._quick.update(piece)


def _memory(count: int) -> torch.Tensor:
    """Allocate [count] uninitialised bytes; mmap returns large blocks to the system when freed, malloc does not."""
    if count >= _LARGE:
        with contextlib.suppress(OSError):  # Linux limits a process to 65,530 mappings
            return torch.frombuffer(mmap.mmap(-1, count, **_PRIVATE), dtype=torch.uint8)
    return torch.empty(count, dtype=torch.uint8)


def _reader(path: Path) -> Callable[[_HashingReader], dict[str, torch.Tensor]]:
    """Select the reader by the file's suffix; only *.bin is unpickled."""
    readers = {".safetensors": _safetensors, ".bin": _pickled}
    if path.suffix not in readers:
        raise CheckpointError(f"{path}: expected weights in a *.safetensors or *.bin file")
    return readers[path.suffix]


def _safetensors(read: _HashingReader) -> dict[str, torch.Tensor]:
    header = parse_safetensors(read.path, read.size, read.take)
    tensors = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{read.path}: {name} is stored as {entry['dtype']}, which evalkit does not read")
        if start != end or stop - start != prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{read.path}: damaged: its header has wrong offsets for {name}; copy it again")
        tensors[name] = read.tensor(name, shape, dtype)
        end = stop
    return tensors


def _pickled(read: _HashingReader) -> dict[str, torch.Tensor]:
    content = read.rest()
    try:
        found = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling can raise any error
        raise CheckpointError(f"{read.path}: cannot be read ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{read.path}: holds a {type(found).__name__}; expected tensors by name")
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
