"""Checkpoint fingerprints: content hashes of everything that determines a checkpoint's scores.

In: a `Checkpoint`. Out: a `Fingerprint` of SHA-256 hex digests. Equal files give equal digests, wherever they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import xxhash

from evalkit.cache import read_cached, write_cached
from evalkit.display import doing
from evalkit.errors import CheckpointError, reading_as
from evalkit.models.loading.files import read_json
from evalkit.models.loading.locate import Checkpoint

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel


State = list[int]
"""File status: size in bytes, modification and change time in ns, inode."""

_KIND = "digests"
_CHUNK = 2**22
_SETTLED = 2.0
"""Seconds after the last change from which a new change is detectable: file times have a resolution of up to two."""
_PROVENANCE = {"_name_or_path", "name_or_path", "transformers_version"}
"""Keys of provenance, which do not change what the model computes."""


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 digests of a checkpoint, in hexadecimal."""

    weights: str
    """Of the weight files; for a live model, of its tensors."""
    config: str
    """Of config.json without provenance keys, and of remote code if it is trusted."""
    tokenizer: str
    """Of the tokenizer files."""

    @property
    def combined(self) -> str:
        """Return one digest of all three."""
        return _digest(asdict(self).items())


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, from the cache if the file has not changed."""
    real = path.resolve()
    with reading_as(path, "a file", CheckpointError), real.open("rb") as file:
        before, started = _state(os.fstat(file.fileno())), time.time()
        known = _entry(real)
        if known.get("state") == before:
            return str(known["sha256"])
        with doing(f"hashing {path.name} ({before[0] / 1e6:,.0f} MB)"):
            digest, quick = _digests(file)
        _keep(real, known, before, started, quick, digest)
        return digest


def content_sha256(path: Path, before: State, started: float, quick: str) -> str:
    """Return the digest of content with the xxh3 `quick` that was read from a file; raise if the file now has another.

    The file is read again unless a cached digest matches. `before` is its status when it was opened, at the time
    `started`.
    """
    real = path.resolve()
    known = _entry(real)
    digest = str(known.get("sha256"))
    if known.get("xxh3") != quick:
        with real.open("rb") as file:
            digest, again = _digests(file)
        if again != quick:
            raise CheckpointError(f"{path}: changed while it was read; run the command again once it is complete")
    with contextlib.suppress(OSError):
        _keep(real, known, before, started, quick, digest)
    return digest


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file's content, without the cache. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_of(path: Path) -> State:
    """Return the current status of a file. Raises `OSError`."""
    return _state(path.stat())


def _digests(file: BinaryIO) -> tuple[str, str]:
    digest, quick = hashlib.sha256(), xxhash.xxh3_128()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        quick.update(chunk)
    return digest.hexdigest(), quick.hexdigest()


def _entry(real: Path) -> dict[str, Any]:
    """Return what is cached of a file: its status and digests; else an empty mapping."""
    return read_cached(_KIND, str(real)) or {}


def _keep(real: Path, known: dict[str, Any], before: State, started: float, quick: str, digest: str) -> None:
    # The digest of a file that is being written is soon outdated
    settled = state_of(real) == before and started - max(before[1:3]) / 1e9 > _SETTLED
    entry = {"state": before if settled else None, "xxh3": quick, "sha256": digest}
    if entry != known:
        # A file for each, so that reading one entry does not depend on their number
        write_cached(_KIND, str(real), entry)


def _state(status: os.stat_result) -> State:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def states_of(files: Iterable[Path]) -> dict[Path, State]:
    """Return the current status of files. Raises `CheckpointError` if a file is missing."""
    states = {}
    for path in files:
        with reading_as(path, "a file", CheckpointError):
            states[path] = state_of(path)
    return states


def check_unchanged(given: str, before: Mapping[Path, State]) -> None:
    """Raise a `CheckpointError` that names a file whose status has changed."""
    for path, state in states_of(before).items():
        if state != before[path]:
            raise CheckpointError(
                f"{given}: {path.name} changed while it was read; run the command again once it is complete"
            )


def fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """Hash everything that determines a checkpoint's scores.

    File names are hashed relative to the folder; the folder's name is not. A GGUF file holds weights, configuration and
    tokenizer, so the digest of its content is used for all three; its name is not hashed.
    """
    if checkpoint.state is not None:
        return combine(checkpoint, [("state", checkpoint.state)], hash_file)
    weights = [(path.name, file_sha256(path)) for path in checkpoint.weights()]
    return combine(checkpoint, weights, file_sha256)


def known_fingerprint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the parts of a checkpoint's fingerprint by name, without weights that this machine has never hashed."""
    # Of a file that was hashed before and has changed, the new content is hashed
    digests = [(path.name, file_sha256(path) if _entry(path.resolve()) else "") for path in checkpoint.weights()]
    unknown = not all(digest for _, digest in digests)
    if unknown and checkpoint.gguf is not None:
        return {}
    parts = asdict(combine(checkpoint, digests, file_sha256))
    return {part: digest for part, digest in parts.items() if not (unknown and part == "weights")}


def combine(checkpoint: Checkpoint, weights: Iterable[tuple[str, str]], hash_of: Callable[[Path], str]) -> Fingerprint:
    """Compute the fingerprint of a checkpoint from the names and digests of its weight files, in order."""
    digests = list(weights)
    if checkpoint.gguf is not None:
        whole = digests[0][1]
        own = whole if checkpoint.tokenizer is None else _tokenizer_digest(checkpoint, hash_of)
        return Fingerprint(weights=whole, config=whole, tokenizer=own)
    code = [(path.name, hash_of(path)) for path in checkpoint.trusted_code()]
    return Fingerprint(
        weights=_digest(digests),
        config=_digest([("config.json", _json_digest(checkpoint.folder / "config.json")), *code]),
        tokenizer=_tokenizer_digest(checkpoint, hash_of),
    )


def stable(value: Any) -> Any:
    """Return parsed JSON without provenance keys."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in _PROVENANCE}
    return [stable(item) for item in value] if isinstance(value, list) else value


def _tokenizer_digest(checkpoint: Checkpoint, hash_of: Callable[[Path], str]) -> str:
    folder = checkpoint.tokenizer or checkpoint.folder
    return _digest(
        (
            path.relative_to(folder).as_posix(),
            _json_digest(path) if path.name in ("tokenizer_config.json", "config.json") else hash_of(path),
        )
        for path in checkpoint.tokenizer_files()
    )


def _json_digest(path: Path) -> str:
    """Hash a JSON object's content, independent of key order and provenance keys."""
    canonical = json.dumps(stable(read_json(path)), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    """Hash named digests, one per line, so that different lists give different digests."""
    return hashlib.sha256("".join(f"{name}\t{digest}\n" for name, digest in parts).encode()).hexdigest()


def check_identity(given: str, specification: Mapping[str, Any], loaded: LoadedModel) -> None:
    """Raise a `CheckpointError` if a model was loaded from other files than its run's id was computed from."""
    if loaded.fingerprint is None:
        raise ValueError("a model without a fingerprint belongs to no run")
    extension = loaded.extension and loaded.extension.specification()
    found: dict[str, Any] = {**asdict(loaded.fingerprint), "dtype": loaded.dtype, "context_extension": extension}
    recorded: dict[str, Any] = specification["checkpoint"] | {
        name: specification[name] for name in ("dtype", "context_extension")
    }
    settings, name = stable(loaded.generation), "generation_config.json"
    if "end" in specification:
        found[name], recorded[name] = (settings or {}).get("eos_token_id"), specification["end"]
    elif specification.get("generation"):
        found[name], recorded[name] = settings, specification["generation"]["config"]
    if changed := [what for what, value in recorded.items() if found[what] != value]:
        raise CheckpointError(
            f"{given}: changed since this run was started ({', '.join(changed)}), so its scores would be stored under "
            "another model's id; run the command again"
        )
