"""Values as users give them, on the command line, in a file or to `evaluate`: texts, paths, whole numbers, switches.

In: a value, and what messages call it. Out: the same value, checked; nothing is rounded, cut, or read as something
else. What does not fit raises a `UsageError`.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from evalkit.errors import UsageError


def text(name: str, value: object) -> str:
    """A text that is not empty and that every program takes: no NUL, and no bytes that are not UTF-8."""
    if not isinstance(value, str):
        raise UsageError(f"{name} is {value!r:.60}; it must be text")
    if not value:
        raise UsageError(f"{name} is empty; leave it out, or give a value")
    if "\0" in value:
        raise UsageError(f"{name} {value}: holds a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{name} {value}: is not text in UTF-8; a file or folder of such a name must be renamed")
    return value


def name_or_path(name: str, value: object) -> str:
    """A text, or a path as one."""
    return text(name, str(value) if isinstance(value, Path) else value)


def names(name: str, value: object) -> tuple[str, ...]:
    """One name or several: a list of them, or a text with commas between them."""
    listed = value if isinstance(value, (list, tuple)) else [one for one in text(name, value).split(",") if one.strip()]
    if not listed:
        raise UsageError(f"{name} {value}: names nothing; leave it out, or name some")
    return tuple(text(name, text(name, one).strip()) for one in listed)


def path(name: str, value: str | Path) -> Path:
    """A path that can be looked up, whether there is something or not."""
    found = Path(name_or_path(name, value))
    try:
        found.expanduser()
    except RuntimeError:
        raise UsageError(f"{name} {value}: there is no user of that name; a folder called so is ./{value}") from None
    return found


def whole(name: str, value: Any, least: int, hint: str = "") -> int:
    """A whole number from `least`, or a text that says one; `hint` names what else would do."""
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
    """True or False, and nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it must be True or False")
    return value
