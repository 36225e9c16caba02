"""Validation of plain data from files by pydantic.

In: plain data (`reading.py`, `yaml_reading.py`) and its form: a pydantic model, or a `dict` or `list` of them. Out: the
data in that form. Nothing is converted: "2" is not 2, and 1 is not true. The error for invalid data is one line that
names the key, what was found and what is expected; for an unknown key, the nearest one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

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
    try:
        return _fitting(content, form)
    except ValidationError as found:
        raise error(f"{where}: {_described(found, content, form)}") from found


def misfit(content: Any, form: type) -> str | None:
    """Return a description of what in plain data does not fit a form; None if it is valid."""
    try:
        _fitting(content, form)
    except ValidationError as found:
        return _described(found, content, form)
    return None


def restored(content: Any, form: type[Form]) -> Form | None:
    """Return a dataclass from what `dataclasses.asdict` made of it, stored as JSON; None if it is of another form."""
    with suppress(ValidationError):
        return _fitting(content, form)
    return None


def _fitting(content: Any, form: type[Form]) -> Form:
    kind: Any = form  # mypy treats a type variable's type as unhashable
    fitting: Form = _adapter(kind).validate_python(content)
    return fitting


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


_UNKNOWN_KEY = "unknown_key"
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


def _described(found: ValidationError, content: Any, form: Any) -> str:
    """Describe the first error. An unknown key is reported before a missing one, of which it may be a misspelling."""
    if found.error_count() > _MOST_ERRORS:
        return f"{found.error_count():,} of its values are of another form"
    errors = found.errors(include_url=False)
    unknown = [error for error in errors if error["type"] == _UNKNOWN_KEY]
    meant = unknown or _meant(errors, content)
    error, path = meant[0], _path(_place(meant[0], content))
    prefix = f"'{path}': " if path else ""
    if error["type"] == "missing":
        return f"it lacks '{_path((*_place(error, content), error['loc'][-1]))}'"
    if error["loc"] and error["loc"][-1] == "[key]":
        if error["type"] == "literal_error":
            return f"{prefix}{UnknownNameError('key', _cut(str(error['input'])), _literals(error))}"
        return f"{prefix}the key {_shown(error['input'])} is no text; put it in quotes"
    if error["type"] in (_UNKNOWN_KEY, "value_error"):
        return prefix + error["msg"].removeprefix("Value error, ")
    expected = " or ".join(dict.fromkeys(map(_expected, meant)))
    if not path and isinstance(form, type) and issubclass(form, BaseModel):
        expected += f" ({', '.join(form.model_fields)})"
    what = f"'{path}'" if path else "it"
    return f"{what} is {'empty' if 'too_short' in error['type'] else _shown(error['input'])}; expected {expected}"


def _meant(errors: Sequence[ErrorDetails], content: Any) -> list[ErrorDetails]:
    """Return the first error; for a union, which has an error for each member, those of the best-fitting members."""
    place = _place(errors[0], content)
    if errors[0]["loc"] == place or errors[0]["type"] == "missing":
        return [errors[0]]
    places = [_place(error, content) for error in errors]
    furthest = max(len(other) for other in places if other[: len(place)] == place)
    members = [
        error
        for error, other in zip(errors, places, strict=True)
        if other[: len(place)] == place and len(other) == furthest
    ]
    return [error for error in members if not error["type"].endswith(_OF_ANOTHER_KIND)] or members


def _place(error: ErrorDetails, content: Any) -> tuple[int | str, ...]:
    """Return the keys down to the invalid value; pydantic's own location also contains members of unions."""
    place: list[int | str] = []
    location = error["loc"][:-2] if error["loc"][-1:] == ("[key]",) else error["loc"]
    for step in location:
        with suppress(LookupError, TypeError):
            content = content[step]
            place.append(step)
    return tuple(place)


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

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: Any) -> Any:
        for key in content if isinstance(content, dict) else ():
            if key not in cls.model_fields:
                error = UnknownNameError("key", _cut(str(key)), cls.model_fields)
                raise PydanticCustomError(_UNKNOWN_KEY, "{error}", {"error": str(error)})
        return content


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
    """Read and validate a YAML file; arguments as of `reading.read_as` and `validated`."""
    return validated(read_yaml(path, error, what), form, error, f"{what} {path}".lstrip())
