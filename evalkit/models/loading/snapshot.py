"""Consistent snapshot of a checkpoint: the loaded bytes are the hashed bytes, even if files change meanwhile.

In: a `Checkpoint`. Out: the same checkpoint with copies of its small files in a temporary folder, its weights in
memory, and the `Fingerprint` of exactly these. Only hashed files are copied, so transformers finds no others. No tensor
stays mapped to a file, so overwriting, replacing or truncating a file afterwards does not change the model.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Event

import torch
import xxhash
from safetensors import safe_open

from evalkit.errors import CheckpointError, reading_as
from evalkit.models.loading.files import GENERATION_CONFIG, copy_files, quantization
from evalkit.models.loading.fingerprint import Fingerprint, combine, file_sha256, hash_file
from evalkit.models.loading.locate import Checkpoint
from evalkit.paths import temporary_folder

_LARGE = 2**18
"""Bytes from which a tensor is rounded as it is read."""
_WIDE = (torch.float64, torch.float32)


@dataclass
class Weights:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: list[tuple[str, str]] = field(default_factory=list)
    """Name and SHA-256 of each file, in order."""
    rounded: dict[str, torch.dtype] = field(default_factory=dict)
    """Stored dtype of each tensor that was rounded to another as it was read, by name."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint, read into a temporary folder and into memory; created by `snapshot`."""

    checkpoint: Checkpoint
    """The checkpoint with temporary folders instead of its own; they contain no weights."""
    _files: tuple[Path, ...]
    _reading: Future[Weights]

    @cached_property
    def weights(self) -> Weights:
        """Wait for the weights. Raises `CheckpointError` if a file is damaged, or changes while it is read."""
        return self._reading.result()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return combine(self.checkpoint, self.weights.digests, hash_file)

    def unrounded(self) -> dict[str, torch.Tensor]:
        """Read all weights again, as stored. Raises `CheckpointError` if they have changed."""
        again = read_weights(self._files)
        if again.digests != self.weights.digests:
            raise CheckpointError(f"{self.checkpoint.given}: its weights changed while they were read")
        return again.tensors


@contextmanager
def snapshot(checkpoint: Checkpoint, dtype: str | None = None) -> Iterator[Snapshot]:
    """Copy a checkpoint's small files for the duration of the context, whose errors name the checkpoint's own paths.

    Its weights are read by another thread, while transformers is imported. For `dtype` see `read_weights`.
    """
    files, stop = checkpoint.weights(), Event()
    with temporary_folder() as folder, ThreadPoolExecutor(1, "evalkit-weights") as pool:
        copies = replace(
            checkpoint, folder=folder / "checkpoint", tokenizer=checkpoint.tokenizer and folder / "tokenizer"
        )
        try:
            generation = [path for path in (checkpoint.folder / GENERATION_CONFIG,) if path.is_file()]
            small = (checkpoint.folder / "config.json", *generation, *checkpoint.trusted_code())
            source, target = checkpoint.tokenizer or checkpoint.folder, copies.tokenizer or copies.folder
            try:
                copy_files(small, checkpoint.folder, copies.folder)
                copy_files(checkpoint.tokenizer_files(), source, target)
            except OSError as error:
                raise CheckpointError(f"{error.filename}: cannot be copied ({error.strerror})") from error
            # The scales of quantised weights stay as stored
            rounded = None if dtype is None or quantization(copies.config()) else getattr(torch, dtype)
            yield Snapshot(copies, files, pool.submit(read_weights, files, rounded, stop))
        except CheckpointError as error:
            text = str(error).replace(str(copies.folder), str(checkpoint.folder))
            if checkpoint.tokenizer is not None:
                text = text.replace(str(copies.tokenizer), str(checkpoint.tokenizer))
            raise CheckpointError(text) from error
        finally:
            stop.set()


def read_weights(files: Iterable[Path], dtype: torch.dtype | None = None, stop: Event | None = None) -> Weights:
    """Read and hash weight files; if two contain a tensor of the same name, the later file takes precedence.

    Large wider floating-point tensors of safetensors files are rounded to `dtype`, so that memory never holds all of
    them as stored; None: all tensors stay as stored. Another thread sets `stop` to stop reading with an error.
    """
    weights = Weights()
    for path in files:
        try:
            with reading_as(path, "undamaged weights", CheckpointError):
                if path.suffix == ".safetensors":
                    content = _read_safetensors(path, weights, dtype, stop or Event())
                else:
                    content = _read_pickled(path, weights)
        except MemoryError as error:
            raise CheckpointError(f"{path}: does not fit into memory") from error
        weights.digests.append((path.name, file_sha256(path, content)))
    return weights


def _read_safetensors(path: Path, weights: Weights, dtype: torch.dtype | None, stop: Event) -> str:
    """Read a file's tensors; return the xxh3 of its content: the header, then the tensors in the order of the file."""
    digest = xxhash.xxh3_128()
    # Read, not mapped: a process that has mapped a file is killed when the file is truncated
    with safe_open(path, "pt", backend="pread") as shard, path.open("rb") as file:
        length = file.read(8)
        digest.update(length + file.read(int.from_bytes(length, "little")))
        for name in shard.offset_keys():
            if stop.is_set():
                raise CheckpointError(f"{path}: its reading was stopped")
            tensor = shard.get_tensor(name)
            if tensor.numel():
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
            is_wider = dtype is not None and tensor.dtype in _WIDE and tensor.itemsize > dtype.itemsize
            if is_wider and tensor.nbytes >= _LARGE:
                weights.rounded[name] = tensor.dtype
                tensor = tensor.to(dtype)
            weights.tensors[name] = tensor
    return digest.hexdigest()


def _read_pickled(path: Path, weights: Weights) -> str:
    content = path.read_bytes()
    stored = dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    weights.tensors |= {str(name): tensor for name, tensor in stored.items() if isinstance(tensor, torch.Tensor)}
    return xxhash.xxh3_128(content).hexdigest()
