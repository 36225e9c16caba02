"""Command-line arguments for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def arguments(common: Mapping[str, object], more: Sequence[object]) -> list[str]:
    """Return common options (None: a flag) that the call does not override, then the call's own."""
    given = {str(one).partition("=")[0] for one in more}
    shared = [part for name, value in common.items() if name not in given for part in (name, value)]
    return [str(part) for part in (*shared, *more) if part is not None]
