"""What users write in YAML files, as pydantic models: suites, templates, layouts, contexts, models, mappings of runs.

In: a file and its model. Out: the model's instance. Keys that it does not have are refused, and so are values of
another kind (`validated.py`).
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
    """Base of what a user's file may hold: the fields, and no other key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


def _as_written(value: Any, check: Callable[[Any], float]) -> Any:
    check(value)
    return value


def _by_name(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    named = {str(key) if type(key) is int else key: value for key, value in given.items()}
    if twice := [key for key in given if type(key) is int and str(key) in given]:
        raise ValueError(f"the name '{twice[0]}' stands twice; leave one out")
    return named


NonEmpty = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""
Number = Annotated[float, WrapValidator(_as_written)]
"""A number, whole where it is written without a point: 4 and 4.0 have other digests."""
Item = TypeVar("Item")
Named = Annotated[dict[str, Item], BeforeValidator(_by_name)]
"""Values by names of the user's choice. YAML reads 7 as a number, which is a name too."""
Listed = Annotated[tuple[Item, ...], Strict(False)]
"""A list, kept as a tuple."""


def read_settings(path: Path, form: type[Form], error: Reason, what: str = "") -> Form:
    """The content of a YAML file.

    Args:
        path: the file.
        form: what it must hold.
        error: made of the message where the file cannot be read or does not fit.
        what: what messages call the file, before its path.
    """
    return validated(read_yaml(path, error, what), form, error, f"{what} {path}".lstrip())
