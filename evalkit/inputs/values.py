"""Validation of single values from the command line, a file or `evaluate`: strings, paths, integers, booleans.

In: a value, and its name in messages. Out: the same value, validated; nothing is rounded, truncated or reinterpreted.
An invalid value raises a `UsageError`.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from evalkit.errors import UsageError


def text(name: str, value: object) -> str:
    """Validate a non-empty string without NUL and without bytes that are not UTF-8."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is {value!r:.60}; it must be text")
    if not value:
        raise UsageError(f"{name} is empty; leave it out, or give a value")
    if "\0" in value:
        raise UsageError(f"{name} {value}: holds a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{name} {value}: is not text in UTF-8; rename a file or folder with such a name")
    return value


def name_or_path(name: str, value: object) -> str:
    """Validate a string, or a path as a string."""
    return text(name, str(value) if isinstance(value, Path) else value)


def names(name: str, value: object) -> tuple[str, ...]:
    """Validate names: a list of them, or a comma-separated string."""
    listed = value if isinstance(value, (list, tuple)) else [one for one in text(name, value).split(",") if one.strip()]
    if not listed:
        raise UsageError(f"{name} {value}: contains no name; leave it out, or give at least one")
    return tuple(text(name, text(name, one).strip()) for one in listed)


def path(name: str, value: str | Path) -> Path:
    """Validate a path, which need not exist."""
    found = Path(name_or_path(name, value))
    try:
        found.expanduser()
    except RuntimeError:
        raise UsageError(f"{name} {value}: there is no user of that name; for a folder, write ./{value}") from None
    return found


def whole(name: str, value: Any, least: int, hint: str = "") -> int:
    """Validate an integer of at least `least`, or a string of one; `hint` names other accepted values in messages."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {value!r}; it must be a whole number{hint}") from None
    if number < least:
        raise UsageError(f"{name} is {number}; it must be at least {least}{hint}")
    return number


def switch(name: str, value: object) -> bool:
    """Validate a bool; other truthy or falsy values are rejected."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be True or False")
    return value
