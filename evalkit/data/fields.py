"""Checks of single fields of one source record.

In: a record as read from JSON, Parquet or Arrow. Out: the checked value. A value that cannot be evaluated
raises a `DataError` that names the field, what was expected and what was found; whoever reads the file adds
where the record stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evalkit.errors import DataError
from evalkit.inputs.texts import LONGEST_TEXT

Record = dict[str, Any]


def wrong(field: str, expected: str, found: object) -> DataError:
    """The error for a field's value, with the value shortened to fit one line."""
    shown = ascii(found)
    return DataError(f"field '{field}': expected {expected}, found {shown if len(shown) <= 60 else shown[:57] + '...'}")


def value(record: Record, field: str, expected: str) -> Any:
    """A field that must be there, of whatever type."""
    if field not in record:
        raise DataError(f"field '{field}': expected {expected}, but the field is missing")
    return record[field]


def text(record: Record, field: str, *, may_be_empty: bool = False) -> str:
    """A string that a tokenizer can take; by default one with something in it."""
    expected = "a string" if may_be_empty else "a non-empty string"
    return _text(value(record, field, expected), field, expected, may_be_empty)


def texts(record: Record, field: str, least: int, most: int) -> list[str]:
    """A list of `least` to `most` non-empty strings."""
    expected = f"a list of {least if least == most else f'{least} to {most}'} non-empty strings"
    found = value(record, field, expected)
    if not isinstance(found, list) or not least <= len(found) <= most:
        raise wrong(field, expected, found)
    return [_text(item, field, expected, may_be_empty=False) for item in found]


def index(record: Record, field: str, size: int) -> int:
    """A gold label that is an index: an integer from 0 to `size - 1`."""
    expected = f"an integer from 0 to {size - 1}"
    found = value(record, field, expected)
    # JSON's true is a Python int as well, and would pass for 1.
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < size:
        raise wrong(field, expected, found)
    return found


def one_of(record: Record, field: str, allowed: Sequence[str]) -> str:
    """A string from a closed list."""
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
    # A lone surrogate is legal in JSON, but no tokenizer takes it and it cannot be written as UTF-8.
    if not found.isascii() and any("\ud800" <= char <= "\udfff" for char in found):
        raise wrong(field, "valid Unicode", found)
    return found
