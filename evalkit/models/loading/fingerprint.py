"""Checkpoint fingerprints: content hashes of everything that determines a checkpoint's scores.

In: a `Checkpoint`. Out: a `Fingerprint` of SHA-256 hex digests. Equal files give equal digests, wherever they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from evalkit.cache import read_cached, write_cached
from evalkit.display import doing
from evalkit.errors import CheckpointError, reading_as
from evalkit.inputs.values import text_digest
from evalkit.models.loading.files import read_json
from evalkit.models.loading.locate import Checkpoint

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel


_KIND = "digests"
_CHUNK = 2**22
_SETTLED = 2.0
"""Seconds after the last change from which a new change is detectable: file times have a resolution of up to two."""
_LAST_CALL = re.compile(rb'^  "(truncation|padding)": \{\n(?:   .*\n)*  \}', re.MULTILINE)
"""Settings of a tokenizer's last call, which are saved in tokenizer.json and apply to no later call."""
_PROVENANCE = {"_name_or_path", "name_or_path", "transformers_version"}


@dataclass(frozen=True)
class Fingerprint:
    weights: str
    """Of the weight files; for a live model, of its tensors."""
    config: str
    """Of config.json without provenance keys, and of remote code if it is trusted."""
    tokenizer: str

    @property
    def combined(self) -> str:
        return _digest(asdict(self).items())


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file's content, without the cache. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_sha256(path: Path, content: str | None = None) -> str:
    """Return the SHA-256 of a file, from the cache if the file has not changed.

    `content` is the xxh3 of the bytes that were read from it: the cached digest is then that of equal bytes, whatever
    the file's times are. Raises `CheckpointError` if the file cannot be read, or has other content now.
    """
    real = path.resolve()
    known = read_cached(_KIND, str(real)) or {}
    with reading_as(path, "a file", CheckpointError), real.open("rb") as file:
        state, started = state_of(file.fileno()), time.time()
        if known.get("xxh3") == content if content else known.get("state") == state:
            return str(known["sha256"])
        digest, quick = hashlib.sha256(), xxhash.xxh3_128()
        with doing(f"hashing {path.name} ({state[0] / 1e6:,.0f} MB)"):
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                quick.update(chunk)
        if content not in (None, quick.hexdigest()):
            raise CheckpointError(f"{path}: changed while it was read; run the command again once it is complete")
        # The digest of a file that is being written is soon outdated
        settled = state_of(real) == state and started - max(state[1:3]) / 1e9 > _SETTLED
    entry = {"state": state if settled else None, "xxh3": quick.hexdigest(), "sha256": digest.hexdigest()}
    # A file for each, so that reading one entry does not depend on their number
    write_cached(_KIND, str(real), entry)
    return digest.hexdigest()


def state_of(file: Path | int) -> list[int]:
    """Return the size in bytes, modification and change time in nanoseconds, and inode of a path or an open file."""
    status = os.stat(file)  # noqa: PTH116, because a path has no such method for an open file
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def fingerprint(checkpoint: Checkpoint, hash_of: Callable[[Path], str] = file_sha256) -> Fingerprint:
    """Hash everything that determines a checkpoint's scores.

    File names are hashed relative to the folder; the folder's name is not. A GGUF file holds weights, configuration and
    tokenizer, so the digest of its content is used for all three; its name is not hashed.
    """
    if checkpoint.state is not None:
        return combine(checkpoint, checkpoint.state, hash_file)
    return combine(checkpoint, [(path.name, hash_of(path)) for path in checkpoint.weights()], hash_of)


def known_fingerprint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the parts of a checkpoint's fingerprint by name, without weights that this machine has never hashed."""
    # Of a file that was hashed before and has changed, the new content is hashed
    if all(read_cached(_KIND, str(path.resolve())) for path in checkpoint.weights()):
        return asdict(fingerprint(checkpoint))
    parts = {} if checkpoint.gguf is not None else asdict(combine(checkpoint, (), file_sha256))
    parts.pop("weights", None)
    return parts


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


def _tokenizer_digest(checkpoint: Checkpoint, hash_of: Callable[[Path], str]) -> str:
    folder = checkpoint.tokenizer or checkpoint.folder

    def digest(path: Path) -> str:
        if path.name in ("tokenizer_config.json", "config.json"):
            return _json_digest(path)
        if path.name == "tokenizer.json" and _LAST_CALL.search(content := path.read_bytes()):
            return hashlib.sha256(_LAST_CALL.sub(rb'  "\1": null', content)).hexdigest()
        return hash_of(path)

    return _digest((path.relative_to(folder).as_posix(), digest(path)) for path in checkpoint.tokenizer_files())


def _json_digest(path: Path) -> str:
    canonical = json.dumps(stable(read_json(path)), sort_keys=True, ensure_ascii=False)
    return text_digest(canonical)


def _digest(parts: Iterable[tuple[str, str]]) -> str:
    """Hash named digests, one per line, so that different lists give different digests."""
    return text_digest("".join(f"{name}\t{digest}\n" for name, digest in parts))


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in _PROVENANCE}
    return [stable(item) for item in value] if isinstance(value, list) else value


def check_identity(given: str, specification: Mapping[str, Any], loaded: LoadedModel) -> None:
    """Raise a `CheckpointError` if a model was loaded from other files than its run's id was computed from."""
    assert loaded.fingerprint is not None
    extension = loaded.extension and loaded.extension.specification()
    actual: dict[str, Any] = {**asdict(loaded.fingerprint), "dtype": loaded.dtype, "context_extension": extension}
    recorded: dict[str, Any] = specification["checkpoint"] | {
        name: specification[name] for name in ("dtype", "context_extension")
    }
    settings, name = stable(loaded.generation), "generation_config.json"
    if "end" in specification:
        actual[name], recorded[name] = (settings or {}).get("eos_token_id"), specification["end"]
    elif specification.get("generation"):
        actual[name], recorded[name] = settings, specification["generation"]["config"]
    if changed := [part for part, value in recorded.items() if actual[part] != value]:
        raise CheckpointError(
            f"{given}: changed since this run was started ({', '.join(changed)}); run the command again"
        )
