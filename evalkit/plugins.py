"""Plugins: benchmarks, metrics of answers, rules, outcomes and exports of other installed packages.

In: a group of entry points (`evalkit.benchmarks`, `evalkit.rules`, …) and a name. Out: the object.
A package is imported only when one of its objects is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from evalkit.errors import EvalkitError, UnknownNameError, UsageError, first_line

Result = TypeVar("Result")
Entry = TypeVar("Entry")


def added(group: str) -> dict[str, EntryPoint]:
    """Return name → entry point of a group. Reads the metadata of all installed packages, which is slow."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_added(group: str, name: str, what: str, own: tuple[str, ...]) -> Any:
    """Load the object of an entry point; messages name its kind `what` and evalkit's `own` objects of the kind."""
    entries = added(group)
    if name not in entries:
        raise UnknownNameError(what, name, {*own, *entries})
    return call_added(f"loading {what} '{name}' ({entries[name].value})", entries[name].load)


def load_entry(
    group: str, name: str, what: str, kind: type[Entry], own: Mapping[str, Entry], more: tuple[str, ...] = ()
) -> Entry:
    """Return one of evalkit's `own` entries, or that of an entry point, which must be a `kind` with the same name.

    Messages name the entry's kind `what`, and further known names `more`. Raises `UnknownNameError`, or `UsageError` if
    the entry is invalid.
    """
    if name in own:
        return own[name]
    loaded = load_added(group, name, what, (*more, *own))
    loaded_name = getattr(loaded, "name", None)
    if isinstance(loaded, kind) and loaded_name == name:
        return loaded
    described = f"a {what} named '{loaded_name}'" if isinstance(loaded, kind) else f"a {type(loaded).__name__}"
    must = f"it must be a {kind.__name__} with the entry point's name"
    raise UsageError(f"entry point '{name}' of {group} is {described}; {must}")


def all_entries(group: str, own: Mapping[str, Entry], find: Callable[[str], Entry]) -> tuple[list[Entry], list[str]]:
    """Return evalkit's own entries and those of other packages by name, and why others cannot be loaded."""
    entries, problems = list(own.values()), list[str]()
    for name in sorted(added(group).keys() - own.keys()):
        try:
            entries.append(find(name))
        except UsageError as error:
            problems.append(str(error))
    return entries, problems


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
