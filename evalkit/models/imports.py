"""Imports of torch and transformers, which take seconds.

In: nothing. Out: the imported modules, in less time: imports create many objects and hardly any cyclic garbage, which
Python would search for among all of them again and again. The search is suspended meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Suspend the search for cyclic garbage within the block."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def import_modeling() -> None:
    """Import what every model class of transformers is made of, while weights are read by another thread."""
    with quick_imports():
        import transformers.modeling_utils  # noqa: F401
