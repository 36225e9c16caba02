"""What a checkpoint's numbers depend on, as hashes of content: the same files anywhere give the same digests.

In: a `Checkpoint`. Out: a `Fingerprint` of SHA-256 hex digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.models.files import read_json
from evalkit.models.hashes import FileHashes, hash_file
from evalkit.models.locate import Checkpoint

_VOLATILE = {"_name_or_path", "name_or_path", "transformers_version"}
"""Keys that say where a file was and who wrote it, not what the model computes."""


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 digests, in hexadecimal."""

    weights: str
    """Of the files that the weights are read from; of a live model of its tensors (`state.py`)."""
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
    if checkpoint.state is not None:
        return combine(checkpoint, [("state", checkpoint.state)], hash_file)
    hashes = FileHashes()
    weights = [(path.name, hashes.of(path)) for path in checkpoint.weights()]
    found = combine(checkpoint, weights, hashes.of)
    hashes.save()
    return found


def combine(checkpoint: Checkpoint, weights: Iterable[tuple[str, str]], hash_of: Callable[[Path], str]) -> Fingerprint:
    """The fingerprint of a checkpoint whose weights are hashed already.

    Args:
        checkpoint: where its other files are.
        weights: name and digest of each file of weights, in the order of `Checkpoint.weights`.
        hash_of: the digest of a file.
    """
    held = list(weights)
    if checkpoint.gguf is not None:
        whole = held[0][1]
        own = whole if checkpoint.tokenizer is None else _tokenizer_digest(checkpoint, hash_of)
        return Fingerprint(weights=whole, config=whole, tokenizer=own)
    return Fingerprint(
        weights=_digest(held),
        config=_digest(_config_parts(checkpoint, hash_of)),
        tokenizer=_tokenizer_digest(checkpoint, hash_of),
    )


def stable(value: Any) -> Any:
    """Parsed JSON without the keys that do not bear on the numbers."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in _VOLATILE}
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
    """Digest of a JSON object's content: neither the order of its keys nor volatile ones count."""
    canonical = json.dumps(stable(read_json(path)), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    """Digest of named digests; one line each, so that no two lists of parts read the same."""
    return hashlib.sha256("".join(f"{name}\t{digest}\n" for name, digest in parts).encode()).hexdigest()
