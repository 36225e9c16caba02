"""Consistent snapshot of a checkpoint: the loaded bytes are the hashed bytes, even if files change meanwhile.

In: a `Checkpoint`. Out: the same checkpoint with copies of its small files in a temporary folder, its weights in
memory, and the `Fingerprint` of exactly these. Only hashed files are copied, so transformers finds no others. No tensor
stays mapped to a file, so overwriting, replacing or truncating a file afterwards does not change the model.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

import torch
import xxhash
from safetensors import safe_open

from evalkit.errors import CheckpointError, reading_as
from evalkit.models.loading.files import GENERATION_CONFIG, copy_files
from evalkit.models.loading.fingerprint import (
    Fingerprint,
    check_unchanged,
    combine,
    content_sha256,
    hash_file,
    state_of,
    states_of,
)
from evalkit.models.loading.locate import Checkpoint
from evalkit.paths import temporary_folder

_LARGE = 2**18
"""Bytes from which a tensor is rounded as it is read."""
_WIDE = (torch.float64, torch.float32)

Tensors = dict[str, torch.Tensor]


@dataclass
class Weights:
    """All weights of a checkpoint."""

    tensors: Tensors = field(default_factory=dict)
    digests: list[tuple[str, str]] = field(default_factory=list)
    """Name and SHA-256 of each file, in order."""
    rounded: dict[str, torch.dtype] = field(default_factory=dict)
    """Stored dtype of each tensor that was rounded to another as it was read, by name."""


@dataclass(frozen=True)
class LoadedFiles:
    """The files of a checkpoint, read into memory."""

    checkpoint: Checkpoint
    """The checkpoint with temporary folders instead of its own; they contain no weights."""
    weights: Weights
    fingerprint: Fingerprint
    """Of exactly these files and weights."""
    read_again: Callable[[], Tensors]
    """Return all weights as stored, from unchanged files."""


class Snapshot:
    """Copies of a checkpoint's small files in an empty `folder`; created by `snapshot`."""

    def __init__(self, checkpoint: Checkpoint, weights: Sequence[Path], folder: Path) -> None:
        source, elsewhere = checkpoint.folder, checkpoint.tokenizer
        generation = [path for path in (source / GENERATION_CONFIG,) if path.is_file()]
        own, tokenizer = [source / "config.json", *generation, *checkpoint.trusted_code()], checkpoint.tokenizer_files()
        self._weights = weights
        self._states = states_of((*own, *tokenizer, *weights))
        copies = folder / "checkpoint", folder / ("checkpoint" if elsewhere is None else "tokenizer")
        self.folders = tuple(zip(copies, (source, elsewhere or source), strict=True))
        try:
            for files, (copy, original) in zip((own, tokenizer), self.folders, strict=True):
                copy_files(files, original, copy)
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be copied ({error.strerror})") from error
        self.checkpoint = replace(checkpoint, folder=copies[0], tokenizer=elsewhere and copies[1])
        """See `LoadedFiles`."""
        self._reading: Future[Weights] | None = None
        self._stop = Event()

    def start(self, dtype: str | None = None) -> None:
        """Begin to read the weights in another thread, while transformers is imported; `read` waits for it.

        Pickled weights are left to `read`, since unpickling imports modules. For `dtype` see `read_weights`.
        """
        if all(path.suffix == ".safetensors" for path in self._weights):
            pool = ThreadPoolExecutor(1, "evalkit-weights")
            kind = None if dtype is None else getattr(torch, dtype)
            self._reading = pool.submit(read_weights, self._weights, self._stop, kind)
            pool.shutdown(wait=False)

    def close(self) -> None:
        """Stop the thread, if weights are still being read."""
        self._stop.set()
        if self._reading is not None:
            wait([self._reading])

    def read(self) -> LoadedFiles:
        """Read the weights. Raises `CheckpointError` if a file is damaged or has changed since the snapshot began."""
        weights = read_weights(self._weights) if self._reading is None else self._reading.result()
        check_unchanged(self.checkpoint.given, self._states)

        def read_again() -> Tensors:
            again = read_weights(self._weights)
            if again.digests != weights.digests:
                raise CheckpointError(f"{self.checkpoint.given}: its weights changed while they were read")
            return again.tensors

        fingerprint = combine(self.checkpoint, weights.digests, hash_file)
        return LoadedFiles(self.checkpoint, weights, fingerprint, read_again)


@contextmanager
def snapshot(checkpoint: Checkpoint, weights: Sequence[Path] | None = None) -> Iterator[Snapshot]:
    """Copy a checkpoint's small files for the duration of the context, whose errors name the checkpoint's own paths.

    The weight files are by default those that transformers would read.
    """
    with temporary_folder() as folder:
        copies = Snapshot(checkpoint, checkpoint.weights() if weights is None else weights, folder)
        try:
            yield copies
        except CheckpointError as error:
            text = str(error)
            for copy, original in copies.folders:
                text = text.replace(str(copy), str(original))
            raise CheckpointError(text) from error
        finally:
            copies.close()


def read_weights(paths: Iterable[Path], stop: Event | None = None, dtype: torch.dtype | None = None) -> Weights:
    """Read and hash weight files; if two contain a tensor of the same name, the later file takes precedence.

    Large wider floating-point tensors of safetensors files are rounded to `dtype`, so that memory never holds all of
    them as stored; None: all tensors stay as stored. Another thread sets `stop` to stop reading with an error.
    """
    weights = Weights()
    for path in paths:
        started = time.time()
        try:
            with reading_as(path, "undamaged weights", CheckpointError):
                before, is_safe = state_of(path), path.suffix == ".safetensors"
                quick = _read_safetensors(path, weights, stop, dtype) if is_safe else _read_pickled(path, weights)
                weights.digests.append((path.name, content_sha256(path, before, started, quick)))
        except MemoryError as error:
            raise CheckpointError(f"{path}: does not fit into memory") from error
    return weights


def _read_safetensors(path: Path, weights: Weights, stop: Event | None, dtype: torch.dtype | None) -> str:
    """Read a file's tensors; return the xxh3 of its content: the header, then the tensors in the order of the file."""
    quick = xxhash.xxh3_128()
    # Read, not mapped: a process that has mapped a file is killed when the file is truncated
    with safe_open(path, "pt", backend="pread") as shard, path.open("rb") as file:
        length = file.read(8)
        quick.update(length + file.read(int.from_bytes(length, "little")))
        for name in shard.offset_keys():
            if stop is not None and stop.is_set():
                raise CheckpointError(f"{path}: its reading was stopped")
            tensor = shard.get_tensor(name)
            if tensor.numel():
                quick.update(tensor.reshape(-1).view(torch.uint8).numpy())
            narrower = dtype is not None and tensor.dtype in _WIDE and tensor.itemsize > dtype.itemsize
            if narrower and tensor.nbytes >= _LARGE:
                weights.rounded[name] = tensor.dtype
                tensor = tensor.to(dtype)
            weights.tensors[name] = tensor
    return quick.hexdigest()


def _read_pickled(path: Path, weights: Weights) -> str:
    """Read a file's tensors without running code in it; return the xxh3 of its content."""
    content = path.read_bytes()
    found = dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    weights.tensors |= {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    return xxhash.xxh3_128(content).hexdigest()
