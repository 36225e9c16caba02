"""Copies of small checkpoints for machines that share no file system with the driver.

In: a checkpoint on the driver's machine. Out: its files as bytes, which the cluster carries to the workers, and on
a worker the same checkpoint in a temporary folder. Its fingerprint is checked when it is loaded, as any other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.errors import CheckpointError
from evalkit.models.files import GENERATION_CONFIG, weight_indexes
from evalkit.models.locate import Checkpoint
from evalkit.models.spec import ModelSpec
from evalkit.paths import temporary_folder

LARGEST = 4 << 30
"""Most bytes of a checkpoint that is shipped: every node holds a copy in memory."""


@dataclass(frozen=True)
class ShippedCheckpoint:
    """Files of a checkpoint."""

    name: str
    """Name of its folder, or of its .gguf file."""
    files: dict[str, bytes]
    """Path in the folder → content."""
    tokenizer: dict[str, bytes]
    """The same for a tokenizer in another folder."""


def packed(checkpoint: Checkpoint) -> ShippedCheckpoint:
    """Read the files of a checkpoint.

    Raises:
        CheckpointError: a file cannot be read, or the checkpoint is too large.
    """
    own = checkpoint.folder / "config.json", checkpoint.folder / GENERATION_CONFIG, *weight_indexes(checkpoint.folder)
    paths = [*checkpoint.weights(), *checkpoint.trusted_code()]
    if checkpoint.gguf is None:
        paths += [path for path in own if path.is_file()]
    others = [] if checkpoint.tokenizer is None else list(checkpoint.tokenizer_files())
    if checkpoint.tokenizer is None:
        paths += checkpoint.tokenizer_files()
    size = sum(path.stat().st_size for path in {*paths, *others})
    if size > LARGEST:
        raise CheckpointError(
            f"{checkpoint.given}: has {size / 2**30:.1f} GiB, and --ship-checkpoints sends at most {LARGEST >> 30}; "
            "put it on a file system that all machines share, or on the hub"
        )
    return ShippedCheckpoint(
        checkpoint.folder.resolve().name if checkpoint.gguf is None else checkpoint.gguf.name,
        _contents(checkpoint.folder, paths),
        {} if checkpoint.tokenizer is None else _contents(checkpoint.tokenizer, others),
    )


@contextmanager
def unpacked(model: ModelSpec, shipped: ShippedCheckpoint) -> Iterator[ModelSpec]:
    """Write a shipped checkpoint to a temporary folder; yield a specification that loads it from there.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    with temporary_folder() as root:
        folder = root if shipped.name.endswith(".gguf") else root / shipped.name
        _write(folder, shipped.files)
        tokenizer = model.tokenizer
        if shipped.tokenizer:
            _write(root / "tokenizer", shipped.tokenizer)
            tokenizer = str(root / "tokenizer")
        yield replace(model, model=str(root / shipped.name), revision=None, tokenizer=tokenizer)


def _contents(folder: Path, paths: list[Path]) -> dict[str, bytes]:
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise CheckpointError(f"{path}: a shipped checkpoint cannot be written ({error.strerror})") from error
