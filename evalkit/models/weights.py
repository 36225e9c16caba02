"""Weights, read once into memory of this process: the bytes that are hashed are the bytes that are loaded.

In: the files that hold them. Out: tensors and the files' digests. Nothing is mapped, so a file that is overwritten,
replaced or cut short afterwards changes no model (and ends no process, as a mapped file that shrinks does).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from evalkit.errors import CheckpointError, first_line
from evalkit.models.files import parse_safetensors
from evalkit.models.hashes import FileHashes, state_of

_CHUNK, _LARGE = 2**22, 2**18
_DIGITS = 9
"""Of the longest number in a weight's name, such as a layer's."""
_PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Anonymous memory of this process alone; not of a file, and not where other systems have no such choice."""
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
"""Of the format's names, those whose numbers are whole bytes."""


@dataclass(frozen=True)
class Weights:
    """All weights of a checkpoint."""

    tensors: dict[str, torch.Tensor]
    digests: tuple[tuple[str, str], ...]
    """Name and SHA-256 of each file, in order."""


def read_weights(paths: Iterable[Path]) -> Weights:
    """Read and hash files of weights; where two hold a tensor of one name, the later one counts.

    Raises:
        CheckpointError: a file cannot be read, is damaged, or does not fit into memory.
    """
    hashes = FileHashes()
    tensors: dict[str, torch.Tensor] = {}
    digests = []
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                read = _Read(path, file)
                found = _reader(path)(read)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except (MemoryError, RuntimeError) as error:  # the latter is what torch's allocator raises
            raise CheckpointError(f"{path}: does not fit into memory ({first_line(error)})") from error
        _check_numbers(path, found)
        tensors |= found
        digests.append((path.name, read.digest(hashes)))
    hashes.save()
    return Weights(tensors, tuple(digests))


def _check_numbers(path: Path, names: Iterable[str]) -> None:
    """Refuse a number in a name that is not written in a few digits: transformers sorts by them, as by layers'."""
    for name in names:
        if any(part.isdigit() and not (part.isascii() and len(part) <= _DIGITS) for part in name.split(".")):
            raise CheckpointError(f"{path}: the weight {name!r:.60} has a number in its name that no layer can have")


class _Read:
    """A file that is read from its beginning to its end, and hashed meanwhile."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._started, self._before = time.time(), state_of(path)
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._quick = xxhash.xxh3_128()
        self._parts: list[memoryview] = []

    def take(self, count: int) -> bytes:
        """The next bytes of the file, or all that are left of it. Raises as `tensor`."""
        found = bytearray(min(count, self.left))
        self._fill(memoryview(found))
        return bytes(found)

    def tensor(self, count: int) -> torch.Tensor:
        """The next bytes of the file as a tensor [count] of uint8, in memory of its own.

        Raises:
            CheckpointError: it became shorter since it was opened.
        """
        found = _memory(count)
        self._fill(memoryview(found.numpy()))  # type: ignore[arg-type]
        return found

    @property
    def left(self) -> int:
        """Bytes that are not read yet."""
        return self.size - self._file.tell()

    def rest(self) -> io.BytesIO:
        """All that is left of the file. Raises as `tensor`."""
        found, piece = io.BytesIO(), memoryview(bytearray(_CHUNK))
        while self.left:
            part = piece[: min(self.left, _CHUNK)]
            self._read(part)
            found.write(part)
        self._parts.append(found.getbuffer())
        found.seek(0)
        return found

    def digest(self, hashes: FileHashes) -> str:
        """SHA-256 of all that was read."""

        def whole() -> str:
            digest = hashlib.sha256()
            for part in self._parts:
                digest.update(part)
            return digest.hexdigest()

        return hashes.of_bytes(self.path, self._before, self._started, self._quick.hexdigest(), whole)

    def _fill(self, view: memoryview) -> None:
        # Piece by piece, so that what is hashed is still in the processor's cache
        for start in range(0, len(view), _CHUNK):
            self._read(view[start : start + _CHUNK])
        self._parts.append(view)

    def _read(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            count = self._file.readinto(piece[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{self.path}: became shorter while it was read; copy it again")
            done += count
        self._quick.update(piece)


def _memory(count: int) -> torch.Tensor:
    """Uninitialised bytes, [count]; large ones go back to the system when they go, which malloc keeps for others."""
    if count >= _LARGE:
        with contextlib.suppress(OSError):  # past 65,530 of them, on Linux
            return torch.frombuffer(mmap.mmap(-1, count, **_PRIVATE), dtype=torch.uint8)
    return torch.empty(count, dtype=torch.uint8)


def _reader(path: Path) -> Callable[[_Read], dict[str, torch.Tensor]]:
    """By the file's suffix; never a pickle for want of another."""
    readers = {".safetensors": _safetensors, ".bin": _pickled}
    if path.suffix not in readers:
        raise CheckpointError(f"{path}: expected weights in a *.safetensors or *.bin file")
    return readers[path.suffix]


def _safetensors(read: _Read) -> dict[str, torch.Tensor]:
    header = parse_safetensors(read.path, read.size, read.take)
    tensors = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{read.path}: {name} is stored as {entry['dtype']}, which evalkit does not read")
        if start != end or stop - start != prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{read.path}: damaged: its header misplaces {name}; copy it again")
        tensors[name] = read.tensor(stop - start).view(dtype).reshape(shape)
        end = stop
    return tensors


def _pickled(read: _Read) -> dict[str, torch.Tensor]:
    content = read.rest()
    try:
        found = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises whatever the bytes make it raise
        raise CheckpointError(f"{read.path}: cannot be read ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{read.path}: holds a {type(found).__name__}; expected tensors by name")
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
