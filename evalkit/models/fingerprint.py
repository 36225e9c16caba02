"""What a checkpoint's numbers depend on, as hashes of content: the same files anywhere give the same digests.

In: a `Checkpoint`. Out: a `Fingerprint` of SHA-256 hex digests. Hashing gigabytes takes seconds, so the
digest of each file is remembered in the cache folder for as long as the file stays as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import CheckpointError
from evalkit.models.files import read_json, tokenizer_files
from evalkit.models.locate import Checkpoint
from evalkit.resources import cache_dir

_VOLATILE = {"_name_or_path", "name_or_path", "transformers_version"}
"""Keys that say where a file was and who wrote it, not what the model computes."""


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 digests, in hexadecimal."""

    weights: str
    """Of the files that the weights are read from."""
    config: str
    """Of config.json, less what does not bear on the numbers, and of remote code if that is trusted."""
    tokenizer: str
    """Of the tokenizer's files."""

    @property
    def combined(self) -> str:
        """One digest of all three."""
        return _digest((("weights", self.weights), ("config", self.config), ("tokenizer", self.tokenizer)))


def fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """Hash what determines a checkpoint's numbers.

    File names count relative to the folder, never the folder's own. A GGUF file holds weights,
    configuration and tokenizer at once, so its digest stands for all three, whatever it is called.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    hashes = _FileHashes()
    if checkpoint.gguf is not None:
        weights = config = hashes.of(checkpoint.gguf)
    else:
        weights = _digest((path.name, hashes.of(path)) for path in checkpoint.weights())
        config = _config_digest(checkpoint, hashes)
    tokenizer = _tokenizer_digest(checkpoint, hashes) or config
    hashes.save()
    return Fingerprint(weights=weights, config=config, tokenizer=tokenizer)


def file_sha256(path: Path) -> str:
    """SHA-256 of one file's content, remembered for as long as the file stays as it is."""
    hashes = _FileHashes()
    digest = hashes.of(path)
    hashes.save()
    return digest


class _FileHashes:
    """Digests of files, looked up by path, size and times before the file is read.

    Best effort: a cache that is damaged or cannot be written only costs time. The change time is
    compared too, because a copy that keeps modification times (rsync, `cp -p`) can put another
    checkpoint of the same size and time in the same place.
    """

    def __init__(self) -> None:
        self._file = cache_dir() / "fingerprints.json"
        self._new: dict[str, Any] = {}
        self._known = self._read()

    def of(self, path: Path) -> str:
        """The digest of one file. Raises `CheckpointError` if it cannot be read."""
        real = path.resolve()
        try:
            before = _state(real)
            known = self._known.get(str(real))
            if isinstance(known, dict) and known.get("state") == before and _is_digest(known.get("sha256")):
                return str(known["sha256"])
            with real.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _state(real) == before:  # else it is being written to: true of now, not of later
                self._new[str(real)] = {"state": before, "sha256": digest}
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        return digest

    def save(self) -> None:
        """Add what was hashed to the file, which another process may have rewritten meanwhile."""
        if not self._new:
            return
        content = json.dumps(self._read() | self._new, indent=1)
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._file.parent, prefix=".fingerprints-")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(content)
                Path(name).replace(self._file)
            except OSError:
                Path(name).unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, CheckpointError):
            return read_json(self._file)
        return {}


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64


def _config_digest(checkpoint: Checkpoint, hashes: _FileHashes) -> str:
    parts = [("config.json", _json_digest(checkpoint.folder / "config.json"))]
    if checkpoint.trust_remote_code:
        parts += [(path.name, hashes.of(path)) for path in sorted(checkpoint.folder.glob("*.py"))]
    return _digest(parts)


def _tokenizer_digest(checkpoint: Checkpoint, hashes: _FileHashes) -> str | None:
    """None for the tokenizer inside a GGUF file."""
    if checkpoint.gguf is not None and checkpoint.tokenizer is None:
        return None
    files = tokenizer_files(checkpoint.tokenizer or checkpoint.folder)
    return _digest(
        (path.name, _json_digest(path) if path.name == "tokenizer_config.json" else hashes.of(path)) for path in files
    )


def _json_digest(path: Path) -> str:
    """Digest of a JSON object's content: neither the order of its keys nor volatile ones count."""
    canonical = json.dumps(_stable(read_json(path)), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, list) else value


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    """Digest of named digests; one line each, so that no two lists of parts read the same."""
    return hashlib.sha256("".join(f"{name}\t{digest}\n" for name, digest in parts).encode()).hexdigest()
