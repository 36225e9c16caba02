"""Consistent copies of a checkpoint: the loaded bytes are the hashed bytes, even if files change meanwhile.

In: a `Checkpoint`. Out: the same checkpoint with copies of its small files in a temporary folder, and its weights in
memory with the digests of exactly these. Only hashed files are copied, so transformers finds no others. No tensor stays
mapped to a file, so overwriting, replacing or truncating a file afterwards does not change the model.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from evalkit.errors import CheckpointError, reading_as
from evalkit.models.loading.files import GENERATION_CONFIG, copy_files
from evalkit.models.loading.fingerprint import file_sha256
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
    stored: Counter[torch.dtype] = field(default_factory=Counter)
    """Numbers stored in each floating-point dtype."""
    are_rounded: bool = False
    """Whether a tensor was rounded as it was read."""

    def _add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
        if tensor.is_floating_point():
            self.stored[tensor.dtype] += tensor.numel()
        is_wider = dtype is not None and tensor.dtype in _WIDE and tensor.itemsize > dtype.itemsize
        if is_wider and tensor.nbytes >= _LARGE:
            tensor, self.are_rounded = tensor.to(dtype), True
        self.tensors[name] = tensor


@contextmanager
def copied(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Copy a checkpoint's small files for the duration of the context, whose errors name the checkpoint's own paths."""
    with temporary_folder() as folder:
        copies = replace(
            checkpoint, folder=folder / "checkpoint", tokenizer=checkpoint.tokenizer and folder / "tokenizer"
        )
        try:
            small = (checkpoint.folder / "config.json", checkpoint.folder / GENERATION_CONFIG)
            copy_files((*filter(Path.is_file, small), *checkpoint.trusted_code()), checkpoint.folder, copies.folder)
            source, target = checkpoint.tokenizer or checkpoint.folder, copies.tokenizer or copies.folder
            copy_files(checkpoint.tokenizer_files(), source, target)
            yield copies
        except CheckpointError as error:
            text = str(error).replace(str(copies.folder), str(checkpoint.folder))
            if checkpoint.tokenizer is not None:
                text = text.replace(str(copies.tokenizer), str(checkpoint.tokenizer))
            raise CheckpointError(text) from error


def read_weights(files: Iterable[Path], dtype: torch.dtype | None = None) -> Weights:
    """Read and hash weight files; if two contain a tensor of the same name, the later file takes precedence.

    Large wider floating-point tensors of safetensors files are rounded to `dtype`, so that memory never holds all of
    them as stored; None: all tensors stay as stored. Raises `CheckpointError` if a file is damaged, or changes while it
    is read.
    """
    weights = Weights()
    for path in files:
        try:
            with reading_as(path, "undamaged weights", CheckpointError):
                if path.suffix == ".safetensors":
                    content = _read_safetensors(path, weights, dtype)
                else:
                    content = _read_pickled(path, weights)
        except MemoryError as error:
            raise CheckpointError(f"{path}: does not fit into memory") from error
        weights.digests.append((path.name, file_sha256(path, content)))
    return weights


def _read_safetensors(path: Path, weights: Weights, dtype: torch.dtype | None) -> str:
    """Read a file's tensors; return the xxh3 of its content: the header, then the tensors in the order of the file."""
    digest = xxhash.xxh3_128()
    # Read, not mapped: a process that has mapped a file is killed when the file is truncated
    with safe_open(path, "pt", backend="pread") as shard, path.open("rb") as file:
        length = file.read(8)
        digest.update(length + file.read(int.from_bytes(length, "little")))
        for name in shard.offset_keys():
            tensor = shard.get_tensor(name)
            if tensor.numel():
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
            weights._add(name, tensor, dtype)
    return digest.hexdigest()


def _read_pickled(path: Path, weights: Weights) -> str:
    content = path.read_bytes()
    for name, tensor in dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)).items():
        if isinstance(tensor, torch.Tensor):
            weights._add(str(name), tensor, None)
    return xxhash.xxh3_128(content).hexdigest()
