"""Modules of examples/replication, which is a folder of scripts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "replication"


def _module(name: str) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def write_page() -> Iterator[ModuleType]:
    """The program that writes the page."""
    yield from _module("write_page")


@pytest.fixture(scope="session")
def collect_text() -> Iterator[ModuleType]:
    """The program that collects the text."""
    yield from _module("collect_text")


@pytest.fixture(scope="session")
def summarise() -> Iterator[ModuleType]:
    """The program that writes the tables."""
    yield from _module("summarise")
