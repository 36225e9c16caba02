"""Validation of plain data from files by pydantic.

In: plain data (`reading.py`) and its form: a pydantic model, or a `dict` or `list` of them. Out: the data in that form.
Nothing is converted: "2" is not 2, and 1 is not true. The error for invalid data is one line with the key, its value
and pydantic's reason; for an unknown key, the nearest one.
"""

from __future__ import annotations

import reprlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from evalkit.errors import UnknownNameError
from evalkit.inputs.reading import Reason, read_yaml

_LONGEST = 60  # characters of a key or a value in a message


class Stored(BaseModel):
    """Base of models of files that evalkit has written: the fields at least."""

    # Built at the first use: most commands use few of the forms
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


Form = TypeVar("Form")


def validated(content: Any, form: type[Form], error: Reason, where: str) -> Form:
    """Validate plain data against its form; `where` begins the error's message."""
    hashable: Any = form  # mypy treats a type variable's type as unhashable
    try:
        fitting: Form = _adapter(hashable).validate_python(content)
    except ValidationError as invalid:
        raise error(f"{where}: {_described(invalid, content)}") from invalid
    return fitting


def restored(content: Any, form: type[Form]) -> Form | None:
    """Return a dataclass from what `dataclasses.asdict` made of it, stored as JSON; None if it is of another form."""
    with suppress(ValueError):
        return validated(content, form, ValueError, "")
    return None


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


_UNKNOWN_KEY = "unknown_key"


def _described(invalid: ValidationError, content: Any) -> str:
    """Describe an unknown key, or the deepest error: the best-fitting member of a union fails there.

    An unknown key is reported before a missing one, of which it may be a misspelling.
    """
    described = []
    for error in invalid.errors(include_url=False):
        location, part = list[int | str](), content
        for step in error["loc"]:  # which also has members of unions
            with suppress(LookupError, TypeError):
                part = part[step]
                location.append(step)
        described.append((error, location))
    error, location = max(described, key=lambda item: (item[0]["type"] == _UNKNOWN_KEY, len(item[1])))
    kind, message, value = error["type"], error["msg"].removeprefix("Value error, "), error["input"]
    if kind == "missing":
        location = [*location, error["loc"][-1]]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{_cut(step)}" for step in location).removeprefix(".")
    if kind == "missing":
        return f"it lacks '{path}'"
    if kind in (_UNKNOWN_KEY, "value_error"):
        return f"'{path}': {message}" if path else message
    named = f"'{path}'" if path else "it"
    return f"{named} is {_cut(reprlib.repr(value))}: {message}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


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


def _by_name(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    named = {str(key) if type(key) is int else key: value for key, value in given.items()}
    if twice := [key for key in given if type(key) is int and str(key) in given]:
        raise ValueError(f"the name '{twice[0]}' occurs twice; remove one")
    return named


NonEmpty = Annotated[str, Field(min_length=1)]
Number = int | float
"""A number, an integer where it is written without a decimal point: 4 and 4.0 have different digests."""
Item = TypeVar("Item")
Named = Annotated[dict[str, Item], BeforeValidator(_by_name)]
"""Values by user-defined names. YAML reads 7 as a number, which is accepted as a name."""
Listed = Annotated[tuple[Item, ...], Field(strict=False)]
"""A list, stored as a tuple."""


def read_settings(path: Path, form: type[Form], error: Reason, what: str = "") -> Form:
    """Read and validate a YAML file; arguments as of `reading.read_as` and `validated`."""
    return validated(read_yaml(path, error, what), form, error, f"{what} {path}".lstrip())
