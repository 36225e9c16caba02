"""Validation of single values from the command line, a file or `evaluate`: strings, paths, integers, booleans.

In: a value, and its name in messages. Out: the same value, validated; nothing is rounded, truncated or reinterpreted.
An invalid value raises a `UsageError`.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import filter as matching_names
from pathlib import Path
from typing import Any, TypeVar

from evalkit.errors import ScoringError, UsageError


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
    return text(name, str(value) if isinstance(value, Path) else value)


def names(name: str, value: object) -> tuple[str, ...]:
    """Validate names: a list of them, or a comma-separated string."""
    if not isinstance(value, (list, tuple)):
        value = [part for part in text(name, value).split(",") if part.strip()]
    if not value:
        raise UsageError(f"{name}: contains no name; leave it out, or give at least one")
    return tuple(text(name, text(name, part).strip()) for part in value)


def with_matches(given: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return names with patterns, such as arc_*, replaced by the known names that match and are not given themselves.

    A pattern that matches no known name is kept.
    """
    listed = list(known)
    names: list[str] = []
    for name in given:
        matching = matching_names(listed, name) if is_pattern(name) else []
        names += [match for match in matching if match not in (*given, *names)] if matching else [name]
    return tuple(names)


def is_pattern(name: str) -> bool:
    """Return whether a name has wildcards."""
    return any(character in name for character in "*?[")


def path(name: str, value: str | Path) -> Path:
    validated = Path(name_or_path(name, value))
    try:
        validated.expanduser()
    except RuntimeError:
        raise UsageError(f"{name} {value}: there is no user of that name; for a folder, write ./{value}") from None
    return validated


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
        raise ScoringError(f"{label}: its text has {len(text):,} characters; the maximum is {LONGEST_TEXT:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ScoringError(f"{label}: its text holds half of a surrogate pair ({text[error.start]!a})") from error


def in_calls(items: Iterable[Item], text: Callable[[Item], str], most: int) -> Iterator[list[Item]]:
    """Group items with a text, in order, into lists of at most so many for one call of the tokenizer each."""
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


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8, in hexadecimal digits; half of a surrogate pair counts as a character."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def utf8_length(text: str) -> int:
    """Return the number of bytes of a text in UTF-8; half of a surrogate pair has three."""
    return len(text.encode("utf-8", "surrogatepass"))
