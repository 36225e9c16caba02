"""Binary blocks of a page's documents: a JSON header and number arrays, compressed, as base64.

    uint32 L          length of the header in bytes, little-endian; 4 + L is a multiple of 8
    header            UTF-8 JSON, with spaces at its end; "arrays": name → [type, offset, number of elements]
    arrays            little-endian, each from an offset that is a multiple of 8, counted from the end of the header

The page's script reads blocks when a reader opens a task, so that a page of 100,000 choices opens at once. Changes of
direction in texts are shown by their codes.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.reporting.escape import in_json

_LITTLE = {"u1": "<u1", "u2": "<u2", "i4": "<i4", "f4": "<f4", "f8": "<f8"}
"""Types, and NumPy's names of them."""
_ALIGNED = 8


@dataclass(frozen=True)
class DocumentData:
    """Documents of a page."""

    index: Mapping[str, Any]
    """Runs and tasks, JSON-compatible; "block" of a task is a place in `blocks`."""
    blocks: Sequence[str]


def encoded(header: Mapping[str, Any], arrays: Mapping[str, tuple[str, NDArray[Any]]]) -> str:
    """Return a block as base64.

    Args:
        header: JSON-compatible content.
        arrays: name → (type: u1, u2, i4, f4 or f8; values, of any shape, which must fit the type).

    Raises:
        OverflowError: an integer does not fit its type.
    """
    table: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, (kind, values) in arrays.items():
        data = _packed(name, kind, values)
        table[name] = [kind, offset, int(np.size(values))]
        data += bytes(-len(data) % _ALIGNED)
        parts.append(data)
        offset += len(data)
    text = in_json(json.dumps({**header, "arrays": table}, ensure_ascii=False, separators=(",", ":")))
    start = text.encode("utf-8", "replace")  # a lone surrogate is shown as a question mark
    start += b" " * (-(4 + len(start)) % _ALIGNED)
    content = b"".join((len(start).to_bytes(4, "little"), start, *parts))
    return base64.b64encode(gzip.compress(content, mtime=0)).decode("ascii")


def _packed(name: str, kind: str, values: NDArray[Any]) -> bytes:
    flat = np.asarray(values).ravel()
    if kind.startswith(("u", "i")) and flat.size:
        limits = np.iinfo(np.dtype(_LITTLE[kind]))
        if flat.min() < limits.min or flat.max() > limits.max:
            raise OverflowError(f"array {name}: values from {flat.min()} to {flat.max()} do not fit {kind}")
    return flat.astype(_LITTLE[kind]).tobytes()
