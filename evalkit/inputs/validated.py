"""Validation of plain data from files by pydantic.

In: plain data (`reading.py`, `yaml_reading.py`) and its form: a pydantic model, or a `dict` or `list` of them. Out: the
data in that form. Nothing is converted: "2" is not 2, and 1 is not true. The error for invalid data is one line that
names the key, what was found and what is expected; for an unknown key, the nearest one. Users' files: `settings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import ErrorDetails

from evalkit.errors import UnknownNameError
from evalkit.inputs.reading import Reason
from evalkit.inputs.yaml_reading import read_yaml

_LONGEST = 60
"""Maximum characters of a key or a value in a message."""
_MOST_ERRORS = 10_000
"""Maximum errors that are formatted; pydantic needs 10 microseconds for each."""


class Stored(BaseModel):
    """Base of models of files that evalkit has written: the fields at least."""

    # Built at the first use: most commands use few of the forms
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


Form = TypeVar("Form")


def validated(content: Any, form: type[Form], error: Reason, where: str) -> Form:
    """Validate plain data against its form; `where` begins the error's message."""
    kind: Any = form  # mypy treats a type variable's type as unhashable
    try:
        fitting: Form = _adapter(kind).validate_python(content)
    except ValidationError as found:
        raise error(f"{where}: {_described(found, form)}") from found
    return fitting


def misfit(content: Any, form: type) -> str | None:
    """Return a description of what in plain data does not fit a form; None if it is valid."""
    try:
        _adapter(form).validate_python(content)
    except ValidationError as found:
        return _described(found, form)
    return None


def restored(content: Any, form: type[Form]) -> Form | None:
    """Return a dataclass from what `dataclasses.asdict` made of it, stored as JSON; None if it is of another form."""
    kind: Any = form
    try:
        found: Form = _adapter(kind).validate_python(content)
    except ValidationError:
        return None
    return found


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


_UNKNOWN = ("extra_forbidden", "invalid_key")
"""pydantic's error types for an unknown key; the second is for a key that is not a string."""
_OF_ANOTHER_KIND = ("_type", "literal_error")
"""Suffixes of error types for a value of another type; other errors are about the content of a value."""
_EXPECTED = {
    "string_type": "a text",
    "string_too_short": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "list_type": "a list",
    "tuple_type": "a list",
    "path_type": "a text",
    "too_short": "a length of at least {min_length}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
"""pydantic's error type → what was expected; for other types, pydantic's own message is used."""


class _Misfit(NamedTuple):
    """One of pydantic's errors, with its location."""

    error: ErrorDetails
    place: tuple[int | str, ...]
    """Keys down to the invalid value; for a missing or unknown key, down to the mapping that lacks or has it."""
    form: Any
    """Expected form at that place."""
    union: tuple[int | str, ...] | None
    """Keys down to the enclosing union, if there is one."""


def _described(found: ValidationError, form: Any) -> str:
    """Describe the first error. An unknown key is reported before a missing one, of which it may be a misspelling."""
    if found.error_count() > _MOST_ERRORS:
        return f"{found.error_count():,} of its values are of another form"
    errors = found.errors(include_url=False)
    meant = _meant([error for error in errors if error["type"] in _UNKNOWN] or errors, form)
    error, path = meant[0].error, _path(meant[0].place)
    prefix = f"'{path}': " if path else ""
    if error["type"] == "missing":
        return f"it lacks '{_path((*meant[0].place, error['loc'][-1]))}'"
    if error["type"] in _UNKNOWN:
        return f"{prefix}{UnknownNameError('key', _cut(str(error['loc'][-1])), meant[0].form.model_fields)}"
    if error["loc"] and error["loc"][-1] == "[key]":
        if error["type"] == "literal_error":
            return f"{prefix}{UnknownNameError('key', _cut(str(error['input'])), _literals(error))}"
        return f"{prefix}the key {_shown(error['input'])} is no text; put it in quotes"
    if error["type"] == "value_error":
        return f"{prefix}{error['ctx']['error']}"
    expected = " or ".join(dict.fromkeys(_expected(one.error) for one in meant))
    if not path and isinstance(form, type) and issubclass(form, BaseModel):
        expected += f" ({', '.join(form.model_fields)})"
    what = f"'{path}'" if path else "it"
    return f"{what} is {'empty' if 'too_short' in error['type'] else _shown(error['input'])}; expected {expected}"


def _meant(errors: Sequence[ErrorDetails], form: Any) -> list[_Misfit]:
    """Return the first error; for a union, which has an error for each member, those of the best-fitting members."""
    first = _misfit_of(errors[0], form)
    if first.union is None:
        return [first]
    members = list(takewhile(lambda one: one.union == first.union, (_misfit_of(one, form) for one in errors)))
    furthest = max(len(one.place) for one in members)
    members = [one for one in members if len(one.place) == furthest]
    return [one for one in members if not one.error["type"].endswith(_OF_ANOTHER_KIND)] or members


def _misfit_of(error: ErrorDetails, form: Any) -> _Misfit:
    """Locate an error by keys alone; pydantic's own locations also contain members of unions."""
    location = error["loc"]
    if error["type"] in ("missing", *_UNKNOWN):
        location = location[:-1]
    elif location and location[-1] == "[key]":
        location = location[:-2]
    place: list[int | str] = []
    union = None
    for step in location:
        form = _bare(form)
        if get_origin(form) in (Union, UnionType):
            union = tuple(place) if union is None else union
            # A member without keys may have another name in the location: its place is the union's
            if (form := next((one for one in get_args(form) if _is_named(one, str(step))), None)) is None:
                break
            continue
        place.append(step)
        is_model = isinstance(form, type) and issubclass(form, BaseModel)
        below = [Any, *(one for one in get_args(form) if one is not Ellipsis)]
        form = form.model_fields[str(step)].annotation if is_model else below[-1]
    return _Misfit(error, tuple(place), _bare(form), union)


def _is_named(form: Any, label: str) -> bool:
    """Return whether pydantic's label of a union member, such as `list[int]` or `constrained-str`, is of this form."""
    bare = _bare(form)
    name = label.removeprefix("constrained-").partition("[")[0]
    return getattr(get_origin(bare) or bare, "__name__", "") == name


def _bare(form: Any) -> Any:
    """Strip a form of its metadata and of an optional None."""
    while get_origin(form) is Annotated:
        form = get_args(form)[0]
    if get_origin(form) in (Union, UnionType):
        others = [member for member in get_args(form) if member is not NoneType]
        return _bare(others[0]) if len(others) == 1 else form
    return form


def _expected(error: ErrorDetails) -> str:
    if error["type"] == "literal_error":
        *others, last = _literals(error)
        return f"{', '.join(others)} or {last}" if others else last
    if error["type"] in _EXPECTED:
        # Bounds of a number are floats
        return _EXPECTED[error["type"]].format_map(error.get("ctx", {})).removesuffix(".0")
    return error["msg"].removeprefix("Input should be ")


def _literals(error: ErrorDetails) -> list[str]:
    return re.findall("'(.*?)'", error["ctx"]["expected"])


def _shown(value: object) -> str:
    """Format a value for a message, with the names of YAML and JSON."""
    if isinstance(value, (dict, list)):
        return "keys and values" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _path(place: Sequence[int | str]) -> str:
    """Format keys as a path: rows[0].items.name."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{_cut(step)}" for step in place).removeprefix(".")


class FileSettings(BaseModel):
    """Base of models of users' files: the fields, and no other key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


def _as_written(value: Any, check: Callable[[Any], float]) -> Any:
    check(value)
    return value


def _by_name(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    named = {str(key) if type(key) is int else key: value for key, value in given.items()}
    if twice := [key for key in given if type(key) is int and str(key) in given]:
        raise ValueError(f"the name '{twice[0]}' occurs twice; remove one")
    return named


NonEmpty = Annotated[str, Field(min_length=1)]
"""A non-empty string."""
Number = Annotated[float, WrapValidator(_as_written)]
"""A number, an integer where it is written without a decimal point: 4 and 4.0 have different digests."""
Item = TypeVar("Item")
Named = Annotated[dict[str, Item], BeforeValidator(_by_name)]
"""Values by user-defined names. YAML reads 7 as a number, which is accepted as a name."""
Listed = Annotated[tuple[Item, ...], Strict(False)]
"""A list, stored as a tuple."""


def read_settings(path: Path, form: type[Form], error: Reason, what: str = "") -> Form:
    """Read and validate a YAML file.

    Args:
        path: the file.
        form: its model.
        error: class of the error where the file cannot be read or is invalid.
        what: description of the file in messages, before its path.
    """
    return validated(read_yaml(path, error, what), form, error, f"{what} {path}".lstrip())
