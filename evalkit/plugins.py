"""What other installed packages add to evalkit: benchmarks, rules and exports.

A package names each by an entry point of the group `evalkit.benchmarks`, `evalkit.rules` or `evalkit.exports`. Nothing
of the package is imported before what it adds is used.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from evalkit.errors import UnknownNameError, UsageError, first_line


def added(group: str) -> dict[str, EntryPoint]:
    """Name → entry point of a group. Reads the metadata of all installed packages, which takes a while."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_added(group: str, name: str, what: str, own: tuple[str, ...]) -> Any:
    """The object that an entry point names.

    Args:
        group: of entry points.
        name: of the entry point.
        what: it is, for messages: "rule".
        own: names of evalkit's own, which a message lists too.

    Raises:
        UnknownNameError: no package adds one of that name.
        UsageError: the package cannot be imported.
    """
    found = added(group)
    if name not in found:
        raise UnknownNameError(what, name, {*own, *found})
    try:
        return found[name].load()
    except Exception as error:  # another package's code
        raise UsageError(
            f"{what} '{name}' ({found[name].value}) cannot be loaded ({type(error).__name__}: {first_line(error)}); "
            "repair or remove the package that brings it"
        ) from error
