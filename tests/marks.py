"""Marks of parametrised tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def fast(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Mark all but the chosen values of a parameter as slow."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]
