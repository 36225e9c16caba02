"""Users' YAML files as pydantic models: suites, templates, layouts, contexts, models, mappings of runs.

In: a file and its model. Out: an instance of the model. Unknown keys and values of another type are rejected
(`validated.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, WrapValidator

from evalkit.inputs.reading import Reason
from evalkit.inputs.validated import Form, validated
from evalkit.inputs.yaml_reading import read_yaml


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
