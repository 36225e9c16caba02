"""Validation of single values from the command line, a file or `evaluate`: strings, paths, integers, booleans.

In: a value, and its name in messages. Out: the same value, validated; nothing is rounded, truncated or reinterpreted.
An invalid value raises a `UsageError`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from evalkit.errors import ScoringError, UnknownNameError, UsageError


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


def by_number(text: str) -> list[tuple[int, str]]:
    """Return a sort key with numeric order: checkpoint-500 before checkpoint-1000."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


LONGEST_TEXT = 2**23
"""Maximum characters of one text: two million tokens of English. LongBench's documents have some hundred thousand."""
_AT_ONCE = 2**21
"""Maximum characters in one call of the tokenizer; a longer text has a call of its own."""

Item = TypeVar("Item")


def check_text(text: str, label: str) -> None:
    """Raise a `ScoringError` that names the document if its text is too long or is not valid Unicode."""
    if len(text) > LONGEST_TEXT:
        raise ScoringError(
            f"{label}: its text has {len(text):,} characters, more than the maximum of {LONGEST_TEXT:,}; "
            "shorten it, or remove it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ScoringError(f"{label}: its text holds half of a surrogate pair ({text[error.start]!a})") from error


def in_calls(items: Iterable[Item], text: Callable[[Item], str], most: int) -> Iterator[list[Item]]:
    """Group items, in order, into lists for one call of the tokenizer each.

    Args:
        items: items with a text.
        text: returns an item's text.
        most: maximum items in one call.
    """
    call: list[Item] = []
    characters = 0
    for item in items:
        size = len(text(item))
        if call and (len(call) == most or characters + size > _AT_ONCE):
            yield call
            call, characters = [], 0
        call.append(item)
        characters += size
    if call:
        yield call


LEAST, WORD = "least", "word"
_SWITCHES = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
"""Words for booleans, as on the command line."""


def fitted(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Validate values of some fields of a dataclass, by name; None is omitted.

    Raises:
        UsageError: a value does not fit its field, which is named as on the command line.
    """
    return {name: _fitted(kind, name, value) for name, value in given.items() if value is not None}


def switched(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert words to True or False for boolean fields."""
    words = {name for name, value in given.items() if isinstance(value, str) and _hints(kind).get(name) == (bool,)}
    return {name: _SWITCHES.get(value.lower(), value) if name in words else value for name, value in given.items()}


def check_field_names(names: Collection[str], *kinds: type) -> None:
    """Raise an `UnknownNameError` for a name that is no field of the dataclasses, or is `model`."""
    known = {name for kind in kinds for name in kind.__dataclass_fields__} - {"model"}  # type: ignore[attr-defined]
    for name in names:
        if name not in known:
            raise UnknownNameError("option", name, known)


@cache
def _hints(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return field → its possible types, without None."""
    found = {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
             for name, hint in get_type_hints(kind).items()}  # fmt: skip
    return {name: tuple(hint for hint in hints if hint is not NoneType) for name, hints in found.items()}


def _fitted(kind: type, name: str, value: Any) -> Any:
    flag, metadata = f"--{name.replace('_', '-')}", kind.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    hints = _hints(kind)[name]
    hint, origin = hints[0], get_origin(hints[0])
    if hint is bool:
        return switch(flag, value)
    if hint is int:
        word = metadata.get(WORD, "")
        if word and value == word:
            return None if len(hints) == 1 else word
        return whole(flag, value, metadata.get(LEAST, 1), word and f", or {word}")
    if origin is Literal:
        if value not in get_args(hint):
            raise UnknownNameError(name, str(value), get_args(hint))
        return value
    if origin is tuple:
        each = get_args(hint)[0]
        if each is Path:
            listed = value if isinstance(value, (list, tuple)) else [value]
            return tuple(path(flag, one) for one in listed)
        return names(flag, value) if each is str else _numbers(flag, value, each)
    if hint is Path:
        return path(flag, value)
    return name_or_path(flag, value)


def _numbers(flag: str, value: Any, each: type) -> tuple[Any, ...]:
    """Validate numbers in a list, or in a comma-separated string."""
    listed = names(flag, value) if isinstance(value, str) else value
    try:
        return tuple(whole(flag, one, 0) if each is int else _number(one) for one in listed)
    except (TypeError, ValueError, UsageError):
        kind = "whole numbers" if each is int else "numbers"
        shown = ",".join(map(str, listed)) if isinstance(listed, (list, tuple)) else repr(listed)
        raise UsageError(f"{flag} {shown}: expected {kind}, separated by commas") from None


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)
