"""Reading of untrusted files for the whole package: JSON here, YAML in `yaml_reading.py`.

In: a file, or bytes of a part of one. Out: plain data: mappings, lists, strings, numbers, booleans, None. Size and
nesting depth are limited, and ambiguous content is rejected: duplicate keys with two values, lone surrogates. No code
is run. Every failure becomes a one-line error of the caller's class, which names the file and the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from evalkit.errors import DataError, EvalkitError, reading_as

MOST_BYTES = 2**24
"""Size limit of files without a limit of their own below: the index of a thousand shards has a few megabytes."""
MOST_TEXT_BYTES = 2**28
"""Size limit of a text file, or of a trainer's log."""
MOST_DOCUMENT_BYTES = 2**30
"""Size limit of a file of documents or predictions."""
DEEPEST = 100
"""Maximum levels of nesting. Other code recurses over the data, so even data that parses must be shallow."""
TOO_DEEP = f"nested more than {DEEPEST} levels deep"
Reason = Callable[[str], EvalkitError]
"""An error class, or another function from a message to an error."""

HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair."""
NO_CHARACTER = "half of a surrogate pair (\\ud800 to \\udfff), which is no character"
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):
    """Parse error with its line, where known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason = reason
        self.line = line


def read_json(path: Path, error: Reason, what: str = "", most: int | None = None) -> Any:
    """Read a JSON file of at most so many bytes, by default `MOST_BYTES`; arguments as of `read_as`."""
    return read_as(path, error, what, MOST_BYTES if most is None else most, parse_json)


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes; pipes and devices, which may never end, are `Unreadable`."""
    if not (path.is_file() or path.is_dir()) and path.exists():
        raise Unreadable("is not a regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"is too large: more than {most:,} bytes")
    return data


def read_given_text(path: Path) -> tuple[bytes, str]:
    """Read the file of `--text`: its bytes, and its text without a byte order mark, which is not empty."""
    with reading_as(f"--text {path}", "a text in UTF-8", DataError):
        content = read_bytes(path.expanduser(), MOST_TEXT_BYTES)
        text = content.decode("utf-8-sig")
    if not text.strip():
        raise DataError(f"--text {path}: the file has no text; give a file with at least one sentence")
    return content, text


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8 to plain data. Raises `Unreadable`."""
    text = decoded(data)
    try:
        content = json.loads(text, object_pairs_hook=_object)
        if _ESCAPED_HALF.search(data):
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg}", error.lineno) from error
    except UnicodeEncodeError as error:
        raise Unreadable(f"a text holds {NO_CHARACTER}") from error
    except RecursionError as error:
        raise Unreadable(TOO_DEEP) from error
    except ValueError as error:  # a key with two values, or an integer of thousands of digits
        raise Unreadable(str(error)) from error
    if data.count(b"[") + data.count(b"{") > DEEPEST and _is_deep(content):
        raise Unreadable(TOO_DEEP)
    return content


def read_as(path: Path, error: Reason, what: str, most: int, parse: Callable[[bytes], Any]) -> Any:
    """Read a file of at most so many bytes and parse it.

    Args:
        path: the file.
        error: class of the error that is raised.
        what: description of the file in messages, before its path.
        most: size limit in bytes.
        parse: raises `Unreadable`, or another `ValueError`, for invalid content.
    """
    named = f"{what} {path}".lstrip()
    try:
        return parse(read_bytes(path, most))
    except Unreadable as cause:
        line = "" if cause.line is None else f", line {cause.line}"
        raise error(f"{named}{line}: {cause.reason}") from cause
    except (OSError, ValueError) as cause:  # ValueError: an invalid path
        reason = cause.strerror if isinstance(cause, OSError) else None
        raise error(f"{named} cannot be read: {reason or cause}") from cause


def decoded(data: bytes) -> str:
    """Decode UTF-8. Raises `Unreadable`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"expected UTF-8, found the byte 0x{data[error.start]:02x}", line) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. A key may occur twice with the same value, as some trainers write it, but not with two."""
    content = dict(pairs)
    if len(content) < len(pairs):
        for key, value in pairs:
            if content[key] != value:
                raise Unreadable(f"the key {key!a} occurs twice, with different values")
    return content


def _is_deep(content: Any) -> bool:
    """Whether data has more than `DEEPEST` levels of lists and mappings."""
    level = [content]
    for _ in range(DEEPEST):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list)))
        level = list(chain.from_iterable(parts))
    return any(isinstance(part, (dict, list)) for part in level)
