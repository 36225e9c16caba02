"""Checkpoint fingerprints: content hashes of everything that determines a checkpoint's scores.

In: a `Checkpoint`. Out: a `Fingerprint` of SHA-256 hex digests. Equal files give equal digests, wherever they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalkit.models.files import read_json
from evalkit.models.hashes import file_sha256, hash_file, known_sha256
from evalkit.models.locate import Checkpoint

_PROVENANCE = {"_name_or_path", "name_or_path", "transformers_version"}
"""Keys of provenance, which do not change what the model computes."""


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 digests of a checkpoint, in hexadecimal."""

    weights: str
    """Of the weight files; for a live model, of its tensors (`state.py`)."""
    config: str
    """Of config.json without provenance keys, and of remote code if it is trusted."""
    tokenizer: str
    """Of the tokenizer files."""

    @property
    def combined(self) -> str:
        """Return one digest of all three."""
        return _digest((("weights", self.weights), ("config", self.config), ("tokenizer", self.tokenizer)))


def fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """Hash everything that determines a checkpoint's scores.

    File names are hashed relative to the folder; the folder's name is not. A GGUF file holds weights, configuration and
    tokenizer, so the digest of its content is used for all three; its name is not hashed.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    if checkpoint.state is not None:
        return combine(checkpoint, [("state", checkpoint.state)], hash_file)
    weights = [(path.name, file_sha256(path)) for path in checkpoint.weights()]
    return combine(checkpoint, weights, file_sha256)


def known_fingerprint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the parts of a checkpoint's fingerprint by name, without weights that were never hashed on this machine.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    digests = [(path.name, known_sha256(path)) for path in checkpoint.weights()]
    unknown = any(digest is None for _, digest in digests)
    if unknown and checkpoint.gguf is not None:
        return {}
    found = asdict(combine(checkpoint, [(name, digest or "") for name, digest in digests], file_sha256))
    return {part: digest for part, digest in found.items() if not (unknown and part == "weights")}


def combine(checkpoint: Checkpoint, weights: Iterable[tuple[str, str]], hash_of: Callable[[Path], str]) -> Fingerprint:
    """Compute the fingerprint of a checkpoint from the digests of its weight files.

    Args:
        checkpoint: provides the other files.
        weights: name and digest of each weight file, in the order of `Checkpoint.weights`.
        hash_of: computes the digest of a file.
    """
    digests = list(weights)
    if checkpoint.gguf is not None:
        whole = digests[0][1]
        own = whole if checkpoint.tokenizer is None else _tokenizer_digest(checkpoint, hash_of)
        return Fingerprint(weights=whole, config=whole, tokenizer=own)
    return Fingerprint(
        weights=_digest(digests),
        config=_digest(_config_parts(checkpoint, hash_of)),
        tokenizer=_tokenizer_digest(checkpoint, hash_of),
    )


def stable(value: Any) -> Any:
    """Return parsed JSON without provenance keys."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in _PROVENANCE}
    return [stable(item) for item in value] if isinstance(value, list) else value


def _config_parts(checkpoint: Checkpoint, hash_of: Callable[[Path], str]) -> list[tuple[str, str]]:
    code = [(path.name, hash_of(path)) for path in checkpoint.trusted_code()]
    return [("config.json", _json_digest(checkpoint.folder / "config.json")), *code]


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
