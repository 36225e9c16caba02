"""Digests that bind the files of a run folder to their run, so that damage and other runs' files are detected.

    manifest.json    a digest of its own content
    results.json     the same, the run's id, and the digest of every other file that is read back
    *.parquet        the run's id in the schema's metadata, which identifies a misplaced table
    journal.jsonl    the run's id in each line, covered by the line's checksum (`journal.py`)

In: content to write, or stored content. Out: content with its digest, or verified content. Digests are SHA-256: of a
JSON file's content, so that white space is ignored, and of other files' bytes. Figures and the lock file are never read
back and have no digest.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "sha256"
"""Key of a JSON file's digest of its other keys."""

RUN = "evalkit.run"
"""Key of the run's id in a table's metadata."""


def digest(content: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON file's content, independent of key order and white space."""
    return digest(json_bytes(content, sort_keys=True, separators=(",", ":")))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with its digest as the last key."""
    plain: dict[str, Any] = json.loads(json_bytes(content))
    return plain | {DIGEST: content_digest(plain)}


def unsealed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Verify the content of a sealed file and return it without the digest.

    Raises:
        ValueError: the digest is missing, or does not match the content.
    """
    content = {key: value for key, value in stored.items() if key != DIGEST}
    if DIGEST not in stored:
        raise ValueError(f"it has no '{DIGEST}' of its content: truncated, or written by an earlier version of evalkit")
    if stored[DIGEST] != content_digest(content):
        raise ValueError(f"its content does not match its '{DIGEST}'")
    return content


def json_bytes(content: Any, **options: Any) -> bytes:
    """Encode as JSON in UTF-8.

    A lone surrogate, which a path can contain and UTF-8 cannot encode, is written as its JSON escape.
    """
    return json.dumps(content, ensure_ascii=False, **options).encode("utf-8", "backslashreplace")


def describe_mismatch(name: str, content: bytes, manifest: Mapping[str, Any]) -> str:
    """Describe a file whose digest is wrong: of another run, if a table's metadata has that run's id."""
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            identity = (pq.read_schema(io.BytesIO(content)).metadata or {}).get(RUN.encode(), b"").decode()
        except (pa.ArrowException, OSError, ValueError):
            identity = ""
        if identity not in ("", manifest["id"]):
            return f"it belongs to run {identity}"
    return "its digest is not the one in results.json"
