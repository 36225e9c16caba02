"""Forms of manifest.json and of the keys that every benchmark's results.json has, and the digests of files.

A file's digest shows that its content is what was written, and binds it to its run. The forms check, once, what
determines a number or a mark in a table; a file that is otherwise of another form ends as an error of its reader.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from evalkit.inputs.validated import Stored


class StoredTask(Stored):
    """A task in results.json; benchmarks add keys."""

    task: str


class StoredAverage(Stored):
    """A mean over tasks."""

    name: str
    accuracy: float
    stderr: float | None


class StoredResults(Stored):
    """Keys of every results.json; a benchmark defines its further ones (`Benchmark.results_form`)."""

    tasks: list[StoredTask]
    averages: list[StoredAverage]


class _Specification(Stored):
    suite: str
    dtype: str
    limit: int | None
    checkpoint: dict[str, Any]
    documents: dict[str, Any] = Field(default_factory=dict)
    num_fewshot: int | None = None
    context_extension: dict[str, Any] | None = None


class _Source(Stored):
    """Source of documents or of few-shot examples."""

    source: str
    official: bool | None
    count: int


class _Device(Stored):
    """Device of some batches of a run (`batch_devices.py`)."""

    device: str
    hardware: str
    kernel: str
    host: str
    threads: int
    batches: dict[str, str]


def _check_date(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class StoredManifest(Stored):
    """Required keys of manifest.json."""

    id: str
    kind: str
    specification: _Specification
    rule: str
    groups: dict[str, list[str]]
    group_sizes: dict[str, int]
    documents: dict[str, _Source]
    examples: dict[str, _Source] = Field(default_factory=dict)
    template: str | dict[str, Any]
    created: Annotated[str, AfterValidator(_check_date)]
    model: str
    path: str | None = None
    revision: str | None
    versions: dict[str, str]
    loaded: dict[str, Any] = Field(default_factory=dict)
    devices: list[_Device] = Field(default_factory=list)
    imported: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _groups_have_sizes(self) -> Self:
        if self.groups.keys() != self.group_sizes.keys():
            raise ValueError("'groups' and 'group_sizes' have different keys")
        return self


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


def unsealed(stored: Any) -> dict[str, Any]:
    """Return the content of a sealed file without its digest; `ValueError` if that is missing or does not match."""
    if not isinstance(stored, dict):
        raise ValueError("it is not a JSON object")
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
