"""Plugins: benchmarks, metrics of answers, rules and exports of other installed packages.

In: a group of entry points (`evalkit.benchmarks`, `evalkit.answer_metrics`, `evalkit.rules` or `evalkit.exports`) and a
name. Out: the object.
A package is imported only when one of its objects is used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from evalkit.errors import EvalkitError, UnknownNameError, UsageError, first_line

Result = TypeVar("Result")


def added(group: str) -> dict[str, EntryPoint]:
    """Return name → entry point of a group. Reads the metadata of all installed packages, which is slow."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_added(group: str, name: str, what: str, own: tuple[str, ...]) -> Any:
    """Load the object of an entry point; messages name its kind `what` and evalkit's `own` objects of the kind."""
    entries = added(group)
    if name not in entries:
        raise UnknownNameError(what, name, {*own, *entries})
    return call_added(f"loading {what} '{name}' ({entries[name].value})", entries[name].load)


def call_added(what: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of another package; any error becomes an `EvalkitError` that names `what`, as "rule shortest"."""
    try:
        return function(*arguments)
    except EvalkitError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} failed ({type(error).__name__}: {first_line(error)}); fix or remove the package that adds it"
        ) from error
