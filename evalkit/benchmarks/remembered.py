"""Values that several runs of one process share, such as documents and their tokens.

In: `with remembering():` around the runs, and `remembered(key, make)` where a value is made. Out: the value, made once
for each key. Outside the block every value is made anew, so that a long-lived process keeps nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Value = TypeVar("Value")


class _Memory:
    """Values by kind and key, the ones used last at the end."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.values: dict[str, OrderedDict[Hashable, Any]] = {}
        self.making: dict[Hashable, Any] = {}
        """Kind and key → the lock of the thread that makes the value."""


_memory = _Memory()


@contextmanager
def remembering() -> Iterator[None]:
    """Keep the values that are made within the block until its end."""
    with _memory.lock:
        _memory.depth += 1
    try:
        yield
    finally:
        with _memory.lock:
            _memory.depth -= 1
            if not _memory.depth:
                _memory.values.clear()
                _memory.making.clear()


def remembered(kind: str, key: Hashable, make: Callable[[], Value], most: int = 4) -> Value:
    """Return the value of a key, made at its first use within `remembering`.

    Args:
        kind: kind of the value.
        key: everything that the value depends on.
        make: makes the value, which nobody may change.
        most: number of values of this kind that are kept.
    """
    if not _memory.depth:
        return make()
    with _memory.lock:
        values = _memory.values.setdefault(kind, OrderedDict())
        making = _memory.making.setdefault((kind, key), threading.RLock())
    # Other values can be made and read meanwhile
    with making:
        with _memory.lock:
            if key in values:
                values.move_to_end(key)
                found: Value = values[key]
                return found
        found = make()
        with _memory.lock:
            values[key] = found
            while len(values) > most:
                values.popitem(last=False)
        return found
