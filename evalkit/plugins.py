"""Plugins: benchmarks, rules, outcomes and exports of other installed packages.

In: a group of entry points (`evalkit.benchmarks`, `evalkit.rules`, …) and a name. Out: the object.
A package is imported only when one of its objects is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from evalkit.errors import EvalkitError, UnknownNameError, UsageError, first_line

Result = TypeVar("Result")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Entry = TypeVar("Entry", bound=_Named)


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

    Messages name the entries `what`, and as known names `more` too. Raises `UnknownNameError`, or `UsageError` if the
    entry is invalid.
    """
    if name in own:
        return own[name]
    entry = load_added(group, name, what, (*more, *own))
    loaded = f"a {what} named '{entry.name}'" if isinstance(entry, kind) else f"a {type(entry).__name__}"
    if not isinstance(entry, kind) or entry.name != name:
        must = f"it must be a {kind.__name__} with the entry point's name"
        raise UsageError(f"entry point '{name}' of {group} is {loaded}; {must}")
    return entry


def all_entries(group: str, own: Mapping[str, Entry], find: Callable[[str], Entry]) -> Iterator[Entry]:
    """Yield evalkit's own entries, then those of other packages that can be loaded, sorted by name."""
    yield from own.values()
    for name in sorted(added(group).keys() - own.keys()):
        with suppress(UsageError):
            yield find(name)


def invalid_entries(group: str, own: Mapping[str, Entry], find: Callable[[str], Entry]) -> Iterator[str]:
    """Yield the reason for each entry of another package that cannot be loaded."""
    for name in sorted(added(group).keys() - own.keys()):
        try:
            find(name)
        except UsageError as error:
            yield str(error)


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
