"""Replacement of other libraries' attributes for the duration of a block.

In: an object or a module, and for each attribute a function of its present value. A name that a release has removed
raises an `AttributeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **replacements: Callable[[Any], Any]) -> Iterator[None]:
    """Replace attributes of a library's object within the block, each by the result of a function of it."""
    originals = {name: getattr(owner, name) for name in replacements}
    inherited = replacements.keys() - vars(owner).keys()
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement(originals[name]))
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
        for name in inherited:
            delattr(owner, name)
