"""The form that plain data must have: which keys, and what under each.

    {"task": str, "n": int, "stderr": (float, None)}    these keys at least
    [str]                                               a list of texts
    Each(int)                                           keys of any name, a whole number under each
    Optional(str)                                       under a key: may be absent
    (float, None)                                       any of these
    object                                              anything

A whole number is a number too; true and false are neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "keys and values",
    list: "a list",
    type(None): "null",
}


@dataclass(frozen=True)
class Each:
    """Keys of any name."""

    form: Any


@dataclass(frozen=True)
class Optional:
    """What may be absent."""

    form: Any


def misfit(value: Any, form: Any) -> str | None:
    """Where data has another form than it must have, in words; None where it has not."""
    return next(_misfits(value, form, ""), None)


def _misfits(value: Any, form: Any, place: str) -> Iterator[str]:
    if isinstance(form, tuple):
        if all(misfit(value, one) for one in form):
            yield _other(value, " or ".join(map(_name, form)), place)
    elif isinstance(form, (dict, Each)):
        if not isinstance(value, dict):
            yield _other(value, _NAMES[dict], place)
            return
        inner = dict.fromkeys(value, form.form) if isinstance(form, Each) else form
        for key, one in inner.items():
            if key in value:
                yield from _misfits(value[key], one.form if isinstance(one, Optional) else one, _below(place, key))
            elif not isinstance(one, Optional):
                yield f"it lacks '{_below(place, key)}'"
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield _other(value, _NAMES[list], place)
            return
        for number, one in enumerate(value):
            yield from _misfits(one, form[0], _below(place, str(number)))
    elif not _is(value, form):
        yield _other(value, _name(form), place)


def _is(value: Any, form: Any) -> bool:
    if form is object or form is None:
        return form is object or value is None
    allowed = (int, float) if form is float else (form,)
    return isinstance(value, allowed) and (form is bool or not isinstance(value, bool))


def _name(form: Any) -> str:
    if isinstance(form, (dict, Each)):
        return _NAMES[dict]
    return _NAMES[list if isinstance(form, list) else type(None) if form is None else form]


def _other(value: Any, expected: str, place: str) -> str:
    where = f"'{place}'" if place else "it"
    return f"{where} is {_NAMES.get(type(value), type(value).__name__)}; expected {expected}"


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
