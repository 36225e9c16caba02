"""Arguments of commands, put together in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def arguments(common: Mapping[str, object], more: Sequence[object]) -> list[str]:
    """Options that all calls share (None: a switch), less those that a call gives itself, then the call's own."""
    given = {str(one).partition("=")[0] for one in more}
    shared = [part for name, value in common.items() if name not in given for part in (name, value)]
    return [str(part) for part in (*shared, *more) if part is not None]
