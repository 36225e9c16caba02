"""Validation of single fields of one source record.

In: a record as read from JSON, Parquet or Arrow. Out: the validated value. An invalid value raises a `DataError` that
names the field, what was expected and what was found; the caller adds the file and the record's position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evalkit.errors import DataError
from evalkit.inputs.texts import LONGEST_TEXT

Record = dict[str, Any]


def wrong(field: str, expected: str, found: object) -> DataError:
    """Return the error for an invalid field, with the value shortened to fit one line."""
    shown = ascii(found)
    return DataError(f"field '{field}': expected {expected}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")


def value(record: Record, field: str, expected: str) -> Any:
    """Return a required field of any type."""
    if field not in record:
        raise DataError(f"field '{field}': expected {expected}, but the field is missing")
    return record[field]


def text(record: Record, field: str, *, may_be_empty: bool = False) -> str:
    """Return a string field that a tokenizer accepts; by default it must not be empty or blank."""
    expected = "a string" if may_be_empty else "a non-empty string"
    return _text(value(record, field, expected), field, expected, may_be_empty)


def texts(record: Record, field: str, least: int, most: int) -> list[str]:
    """Return a field that is a list of `least` to `most` non-empty strings."""
    expected = f"a list of {least if least == most else f'{least} to {most}'} non-empty strings"
    found = value(record, field, expected)
    if not isinstance(found, list) or not least <= len(found) <= most:
        raise wrong(field, expected, found)
    return [_text(item, field, expected, may_be_empty=False) for item in found]


def index(record: Record, field: str, size: int) -> int:
    """Return a gold label that is an index: an integer from 0 to `size - 1`."""
    expected = f"an integer from 0 to {size - 1}"
    found = value(record, field, expected)
    # A bool is an int in Python; JSON's true would be accepted as 1
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < size:
        raise wrong(field, expected, found)
    return found


def one_of(record: Record, field: str, allowed: Sequence[str]) -> str:
    """Return a field that must be one of the allowed strings."""
    expected = "one of " + ", ".join(allowed) if len(allowed) <= 8 else f"one of {len(allowed)} known names"
    found = value(record, field, expected)
    if not isinstance(found, str) or found not in allowed:
        raise wrong(field, expected, found)
    return found


def _text(found: object, field: str, expected: str, may_be_empty: bool) -> str:
    if not isinstance(found, str) or not (may_be_empty or found.strip()):
        raise wrong(field, expected, found)
    if len(found) > LONGEST_TEXT:
        raise DataError(f"field '{field}': expected at most {LONGEST_TEXT:,} characters, found {len(found):,}")
    # A lone surrogate is legal in JSON, but no tokenizer accepts it and it cannot be encoded as UTF-8
    if not found.isascii() and any("\ud800" <= char <= "\udfff" for char in found):
        raise wrong(field, "valid Unicode", found)
    return found
