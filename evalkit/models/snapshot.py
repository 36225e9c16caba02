"""Consistent snapshot of a checkpoint: the loaded bytes are the hashed bytes, even if files change meanwhile.

In: a `Checkpoint`. Out: the same checkpoint with copies of its small files in a temporary folder, its weights in
memory, and the `Fingerprint` of exactly these. Only hashed files are copied, so transformers finds no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from evalkit.errors import CheckpointError
from evalkit.models.files import GENERATION_CONFIG, copy_files
from evalkit.models.fingerprint import Fingerprint, State, combine, hash_file, state_of
from evalkit.models.locate import Checkpoint
from evalkit.paths import temporary_folder

if TYPE_CHECKING:
    import torch

    from evalkit.models.weights import Weights


class ChangeDetector:
    """Detector of changes to files since its creation. Raises `CheckpointError` if a file is missing."""

    def __init__(self, given: str, files: Iterable[Path]) -> None:
        self._given = given
        self._states = {path: self._state(path) for path in files}

    def check(self) -> None:
        """Raise `CheckpointError` with the file's name if a file has changed."""
        for path, before in self._states.items():
            if self._state(path) != before:
                raise CheckpointError(
                    f"{self._given}: {path.name} changed while it was read; run the command again once it is complete"
                )

    def _state(self, path: Path) -> State:
        try:
            return state_of(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True)
class LoadedFiles:
    """The files of a checkpoint, read into memory."""

    checkpoint: Checkpoint
    """The checkpoint with temporary folders instead of its own; they contain no weights."""
    tensors: dict[str, torch.Tensor]
    fingerprint: Fingerprint
    """Of exactly these files and weights."""
    rounded: Mapping[str, torch.dtype]
    """Stored dtype of each weight that was rounded to another as it was read, by name."""
    read_again: Callable[[], dict[str, torch.Tensor]] | None
    """Return all weights as stored, from unchanged files; None if none is rounded."""


class Snapshot:
    """Copies of a checkpoint's small files in an empty `folder`; created by `snapshot`."""

    def __init__(self, checkpoint: Checkpoint, weights: Sequence[Path], folder: Path) -> None:
        source, elsewhere = checkpoint.folder, checkpoint.tokenizer
        generation = [path for path in (source / GENERATION_CONFIG,) if path.is_file()]
        own, tokenizer = [source / "config.json", *generation, *checkpoint.trusted_code()], checkpoint.tokenizer_files()
        self._weights = weights
        self._changes = ChangeDetector(checkpoint.given, (*own, *tokenizer, *weights))
        copies = folder / "checkpoint", folder / ("checkpoint" if elsewhere is None else "tokenizer")
        self._folders = tuple(zip(copies, (source, elsewhere or source), strict=True))
        try:
            for files, (copy, original) in zip((own, tokenizer), self._folders, strict=True):
                copy_files(files, original, copy)
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be copied ({error.strerror})") from error
        self.checkpoint = replace(checkpoint, folder=copies[0], tokenizer=elsewhere and copies[1])
        """See `LoadedFiles`."""
        self._reading: Future[Weights] | None = None
        self._stop = Event()

    def start(self, dtype: str | None = None) -> None:
        """Begin to read the weights in another thread, while transformers is imported; `read` waits for it.

        Pickled weights are left to `read`, since unpickling imports modules.

        Args:
            dtype: see `read_weights`.
        """
        import torch

        from evalkit.models.weights import read_weights

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
        """Read the weights. Raises `CheckpointError` if a file is damaged, or has changed since the snapshot began."""
        from evalkit.models.weights import read_weights

        weights = read_weights(self._weights) if self._reading is None else self._reading.result()
        self._changes.check()

        def read_again() -> dict[str, torch.Tensor]:
            again = read_weights(self._weights)
            if again.digests != weights.digests:
                raise CheckpointError(f"{self.checkpoint.given}: its weights changed while they were read")
            return again.tensors

        fingerprint = combine(self.checkpoint, weights.digests, hash_file)
        return LoadedFiles(
            self.checkpoint, weights.tensors, fingerprint, weights.rounded, read_again if weights.rounded else None
        )

    def with_original_paths(self, text: str) -> str:
        """Replace the paths of the copies in a message by the checkpoint's own."""
        for copy, original in self._folders:
            text = text.replace(str(copy), str(original))
        return text


@contextmanager
def snapshot(checkpoint: Checkpoint, weights: Sequence[Path] | None = None) -> Iterator[Snapshot]:
    """Copy the small files of a checkpoint folder; the copies are removed when the context ends.

    Errors raised inside the context name the checkpoint's own paths instead of the copies'.

    Args:
        checkpoint: a folder; not a GGUF file.
        weights: its weight files; None: those that transformers would read.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    with temporary_folder() as folder:
        copies = Snapshot(checkpoint, checkpoint.weights() if weights is None else weights, folder)
        try:
            yield copies
        except CheckpointError as error:
            raise CheckpointError(copies.with_original_paths(str(error))) from error
        finally:
            copies.close()
