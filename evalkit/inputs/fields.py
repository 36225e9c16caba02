"""Validation of users' settings for the fields of a dataclass.

In: a dataclass, and values by name from the command line, a file or keyword arguments. Out: the values with the types
of their fields. A field's annotation gives its type; the metadata of an integer field may give its minimum (`LEAST`)
and a word that is accepted in its place (`WORD`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs import values

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
        return values.switch(flag, value)
    if hint is int:
        word = metadata.get(WORD, "")
        if word and value == word:
            return None if len(hints) == 1 else word
        return values.whole(flag, value, metadata.get(LEAST, 1), word and f", or {word}")
    if origin is Literal:
        if value not in get_args(hint):
            raise UnknownNameError(name, str(value), get_args(hint))
        return value
    if origin is tuple:
        each = get_args(hint)[0]
        if each is Path:
            listed = value if isinstance(value, (list, tuple)) else [value]
            return tuple(values.path(flag, one) for one in listed)
        return values.names(flag, value) if each is str else _numbers(flag, value, each)
    if hint is Path:
        return values.path(flag, value)
    return values.name_or_path(flag, value)


def _numbers(flag: str, value: Any, each: type) -> tuple[Any, ...]:
    """Validate numbers in a list, or in a comma-separated string."""
    listed = values.names(flag, value) if isinstance(value, str) else value
    try:
        return tuple(values.whole(flag, one, 0) if each is int else _number(one) for one in listed)
    except (TypeError, ValueError, UsageError):
        kind = "whole numbers" if each is int else "numbers"
        shown = ",".join(map(str, listed)) if isinstance(listed, (list, tuple)) else repr(listed)
        raise UsageError(f"{flag} {shown}: expected {kind}, separated by commas") from None


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)
