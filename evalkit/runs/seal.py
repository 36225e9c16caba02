"""What binds the files of a run folder to their run, so that damage and another run's files are noticed on reading.

    manifest.json    a digest of its own content
    results.json     the same, the run's id, and the digest of every other file that is read back
    *.parquet        the run's id in the schema's metadata, which says whose table a wrong one is
    journal.jsonl    the run's id in each line, under the line's checksum (`journal.py`)

Digests are SHA-256: of a JSON file over its content, so that white space does not count, of others over their bytes.
Pictures and the lock are never read back and have none.
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
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def content_digest(content: Mapping[str, Any]) -> str:
    """The same of what a JSON file holds, in whatever order and spacing."""
    return digest(json_bytes(content, sort_keys=True, separators=(",", ":")))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with its digest, which comes last."""
    plain: dict[str, Any] = json.loads(json_bytes(content))
    return plain | {DIGEST: content_digest(plain)}


def unsealed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a sealed file, without the digest.

    Raises:
        ValueError: it has no digest, or that of another content; says which.
    """
    content = {key: value for key, value in stored.items() if key != DIGEST}
    if DIGEST not in stored:
        raise ValueError(f"it has no '{DIGEST}' of its content: cut short, or of an earlier version of evalkit")
    if stored[DIGEST] != content_digest(content):
        raise ValueError(f"its content does not match its '{DIGEST}'")
    return content


def json_bytes(content: Any, **options: Any) -> bytes:
    """JSON in UTF-8.

    A lone surrogate, which paths can hold and UTF-8 cannot, is written as the escape that JSON has for it.
    """
    return json.dumps(content, ensure_ascii=False, **options).encode("utf-8", "backslashreplace")


def whose_file(name: str, content: bytes, manifest: Mapping[str, Any]) -> str:
    """What a file is that is not the one that was written: another run's, where a table says so itself."""
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            identity = (pq.read_schema(io.BytesIO(content)).metadata or {}).get(RUN.encode(), b"").decode()
        except (pa.ArrowException, OSError, ValueError):
            identity = ""
        if identity not in ("", manifest["id"]):
            return f"it is of run {identity}"
    return "it is not the file that results.json was written with"
