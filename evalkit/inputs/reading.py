"""Files from outside, read in one place for the whole package; JSON here, YAML in `yaml_reading.py`.

In: a file, or the bytes of a piece of one. Out: plain data: mappings, lists, texts, numbers, booleans, None. What a
file can do to its reader is bounded here (its size, its depth), and what has no single meaning is refused: a key that
stands twice, half of a surrogate pair. Nothing is run. Whatever is wrong becomes one line of the caller's class of
error, which names the file and the line.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from evalkit.errors import EvalkitError

MOST_BYTES = 2**24
"""Of a file that is not listed below: the index of a thousand shards has a few megabytes."""
MOST_TEXT_BYTES = 2**28
"""Of a text, or of what a trainer logs step by step."""
MOST_DOCUMENT_BYTES = 2**30
"""Of a file of documents or predictions."""
DEEPEST = 100
"""Levels of nesting. Python recurses over data elsewhere, so what parses must be shallow as well."""
Reason = Callable[[str], EvalkitError]
"""An error class, or what else makes an error of a line."""

HALF = re.compile("[\ud800-\udfff]")
"""Of a surrogate pair."""
NO_CHARACTER = "half of a surrogate pair (\\ud800 to \\udfff), which is no character"
_LONG = re.compile(rb"\d{309}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text of JSON, up to the end where nothing ends it."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Of brackets outside of texts: one level down, or up (-1 as a signed byte)."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):
    """What is wrong with a text, and in which line of it, where that is known."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason if line is None else f"line {line}: {reason}")
        self.reason = reason
        self.line = line


def read_json(path: Path, error: Reason, what: str = "", most: int | None = None) -> Any:
    """The content of a JSON file.

    Args:
        path: the file.
        error: made of the message where something is wrong.
        what: what messages call the file, before its path.
        most: how many bytes it may have; None: `MOST_BYTES`.
    """
    return read_as(path, error, what, MOST_BYTES if most is None else most, parse_json)


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file: a pipe may never end, and a device such as /dev/zero never does.

    Raises:
        OSError: it cannot be read.
        Unreadable: it is no regular file, or has more than `most` bytes.
    """
    if not (path.is_file() or path.is_dir()) and path.exists():
        raise Unreadable("is not a regular file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"is too large: more than {most:,} bytes")
    return data


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8 as plain data. Raises `Unreadable`."""
    text = decoded(data)
    _check_depth(data)
    try:
        content = json.loads(text, object_pairs_hook=_object, parse_int=_integer if _LONG.search(data) else None)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg}", error.lineno) from error
    except TooLarge as error:
        raise Unreadable(error.reason, text.count("\n", 0, text.find(error.digits)) + 1) from error
    if _ESCAPED_HALF.search(data):
        _check_characters(content)
    return content


def read_as(path: Path, error: Reason, what: str, most: int, parse: Callable[[bytes], Any]) -> Any:
    """What `parse` makes of a file; see `read_json`."""
    named = f"{what} {path}".lstrip()
    try:
        data = read_bytes(path, most)
    except Unreadable as trouble:
        raise error(f"{named} {trouble}") from trouble
    except (OSError, ValueError) as trouble:  # the latter: a path that no file can have
        reason = trouble.strerror if isinstance(trouble, OSError) else None
        raise error(f"{named} cannot be read: {reason or trouble}") from trouble
    try:
        return parse(data)
    except Unreadable as trouble:
        line = "" if trouble.line is None else f", line {trouble.line}"
        raise error(f"{named}{line}: {trouble.reason}") from trouble


def decoded(data: bytes) -> str:
    """UTF-8 as text. Raises `Unreadable`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"expected UTF-8, found the byte 0x{data[error.start]:02x}", line) from error


def too_deep() -> str:
    """What is said of data with too many levels."""
    return f"nested more than {DEEPEST} levels deep"


class TooLarge(Unreadable):
    """An integer that no float can hold; arithmetic with it would end in an OverflowError elsewhere."""

    def __init__(self, digits: str) -> None:
        super().__init__(f"an integer of {len(digits):,} digits, beyond the range of floating-point numbers")
        self.digits = digits


def _integer(digits: str) -> int:
    if math.isinf(float(digits)):
        raise TooLarge(digits)
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A key may stand there twice with one value, as some trainers write it, but not with two."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise Unreadable(f"the key {key!a} stands twice, with two values")
    return found


def _check_depth(data: bytes) -> None:
    """Refuse JSON that is too deep, before anything is built of it."""
    if data.count(b"[") + data.count(b"{") > DEEPEST:
        steps = array("b", _STRING.sub(b"", data).translate(_STEPS, _NO_BRACKETS))
        if max(accumulate(steps), default=0) > DEEPEST:
            raise Unreadable(too_deep())


def _check_characters(content: Any) -> None:
    """Refuse halves of surrogate pairs, which only escapes can make."""
    for key, value in _walk(content):
        if isinstance(value, str) and HALF.search(value):
            raise Unreadable(f"{key} holds {NO_CHARACTER}")


def _walk(content: Any) -> Iterator[tuple[str, Any]]:
    """(what it is under, value) of everything in plain data, keys included."""
    waiting: list[tuple[str, Any]] = [("the list" if isinstance(content, list) else "it", content)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting += [(f"'{name}'", inner) for name, item in value.items() for inner in (name, item)]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in value]
