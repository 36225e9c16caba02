"""Files of claims: the paper's sentences, and how each follows from its tables.

In: `results/published/claims.yaml`, or a file of the same form. Out: `Claims`, which `claims.py` checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BeforeValidator, model_validator

from evalkit.errors import TableError
from evalkit.inputs.settings import FileSettings, Listed, Named, read_settings
from evalkit.models.shapes import ModelShape, read_shape


@dataclass(frozen=True)
class PaperClaim:
    """A paraphrased sentence of the paper, and how it follows from the tables."""

    key: str
    where: str
    """Section or caption of the paper, and the line of its source."""
    says: str
    printed: str
    """A figure or a few words, as printed."""
    figure: str = ""
    """The printed figure as a number, where `printed` is not one."""
    computed: Any = None
    """Expression whose value must equal the figure."""
    holds: tuple[Any, ...] = ()
    """Relations, in place of a figure."""
    unchecked: str = ""
    """Why the tables cannot verify it."""
    note: str = ""


class Claims(NamedTuple):
    """Content of a file of claims."""

    claims: tuple[PaperClaim, ...]
    shapes: Mapping[str, ModelShape]
    """Models in claims that evalkit does not know by name: name → shape."""


def _written(given: object) -> object:
    """Join a text into one line; a number is converted to text."""
    if isinstance(given, str) or type(given) in (int, float):
        return " ".join(str(given).split())
    return given


_Written = Annotated[str, BeforeValidator(_written)]


class _ClaimFile(FileSettings):
    """Schema of a claim."""

    where: _Written
    says: _Written
    printed: _Written
    figure: _Written = ""
    computed: Any = None
    holds: Listed[dict[str, list[Any]]] = ()
    unchecked: _Written = ""
    note: _Written = ""

    @model_validator(mode="after")
    def _follows_in_one_way(self) -> Self:
        if len(self.model_fields_set & {"computed", "holds", "unchecked"}) != 1:
            raise ValueError("give one of computed, holds and unchecked")
        return self


class _ClaimsFile(FileSettings):
    """Schema of the file."""

    models: Named[dict[str, Any]]
    claims: Named[_ClaimFile]


def read_claims(path: Path) -> Claims:
    """Read a file of claims.

    Raises:
        TableError: it cannot be read, or a claim is invalid; names the claim.
    """
    content = read_settings(path, _ClaimsFile, TableError)
    shapes = {}
    for name, config in content.models.items():
        try:
            shapes[name] = read_shape(config)
        except ValueError as error:
            raise TableError(f"{path}: 'models.{name}': {error}") from error
    return Claims(tuple(PaperClaim(key, **dict(about)) for key, about in content.claims.items()), shapes)
