"""A checkpoint as it is at one moment: what is hashed is what is loaded, whatever happens to its files meanwhile.

In: a `Checkpoint`. Out: the same with copies of its small files in a folder of this process, its weights in memory, and
the `Fingerprint` of exactly these. Only files that count are copied, so transformers finds no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evalkit.errors import CheckpointError
from evalkit.models.files import GENERATION_CONFIG, copy_files
from evalkit.models.fingerprint import Fingerprint, combine
from evalkit.models.hashes import State, hash_file, state_of
from evalkit.models.locate import Checkpoint
from evalkit.models.temporary import temporary_folder

if TYPE_CHECKING:
    import torch


class Watch:
    """Finds out whether files have changed since it was made.

    Args:
        given: the checkpoint's name for messages.
        files: all that are read of it.

    Raises:
        CheckpointError: one of them is not there.
    """

    def __init__(self, given: str, files: Iterable[Path]) -> None:
        self._given = given
        self._states = {path: self._state(path) for path in files}

    def check(self) -> None:
        """Raises `CheckpointError` if a file is not what it was; names it."""
        for path, before in self._states.items():
            if self._state(path) != before:
                raise CheckpointError(
                    f"{self._given}: {path.name} changed while it was read; run the command again when it is written"
                )

    def _state(self, path: Path) -> State:
        try:
            return state_of(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class Opened:
    """A checkpoint that has been read."""

    checkpoint: Checkpoint
    """With folders of this process in place of its own; its weights are not there."""
    tensors: dict[str, torch.Tensor]
    """All weights, by name."""
    fingerprint: Fingerprint
    """Of exactly these files and weights."""


class Snapshot:
    """Use `snapshot`.

    Args:
        checkpoint: of a folder; not a GGUF file.
        weights: its files of weights.
        place: an empty folder.
    """

    def __init__(self, checkpoint: Checkpoint, weights: Sequence[Path], place: Path) -> None:
        folder, elsewhere = checkpoint.folder, checkpoint.tokenizer
        generation = [path for path in (folder / GENERATION_CONFIG,) if path.is_file()]
        own, tokenizer = [folder / "config.json", *generation, *checkpoint.trusted_code()], checkpoint.tokenizer_files()
        self._weights = weights
        self._watch = Watch(checkpoint.given, (*own, *tokenizer, *weights))
        copies = place / "checkpoint", place / ("checkpoint" if elsewhere is None else "tokenizer")
        self._folders = tuple(zip(copies, (folder, elsewhere or folder), strict=True))
        try:
            for files, (copy, folder) in zip((own, tokenizer), self._folders, strict=True):
                copy_files(files, folder, copy)
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be copied ({error.strerror})") from error
        self.checkpoint = replace(checkpoint, folder=copies[0], tokenizer=elsewhere and copies[1])
        """See `Opened`."""

    def read(self) -> Opened:
        """Read the weights.

        Raises:
            CheckpointError: a file is damaged, or any of the checkpoint's changed since the snapshot was begun.
        """
        from evalkit.models.weights import read_weights

        weights = read_weights(self._weights)
        self._watch.check()
        return Opened(self.checkpoint, weights.tensors, combine(self.checkpoint, weights.digests, hash_file))

    def with_own_names(self, text: str) -> str:
        """A message with the checkpoint's own folders in place of the copies'."""
        for copy, own in self._folders:
            text = text.replace(str(copy), str(own))
        return text


@contextmanager
def snapshot(checkpoint: Checkpoint, weights: Sequence[Path] | None = None) -> Iterator[Snapshot]:
    """Copy a checkpoint's small files; the copies last as long as the context does.

    Args:
        checkpoint: of a folder; not a GGUF file.
        weights: its files of weights; None: those that transformers would read.

    Raises:
        CheckpointError: a file is missing or cannot be read. Those that are raised inside name the checkpoint's own
            folders in place of the copies'.
    """
    with temporary_folder() as place:
        held = Snapshot(checkpoint, checkpoint.weights() if weights is None else weights, place)
        try:
            yield held
        except CheckpointError as error:
            raise CheckpointError(held.with_own_names(str(error))) from error
