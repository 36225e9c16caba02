"""A small run of every benchmark: evalkit's own, and two of another package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.registry import GROUP, benchmark, kinds

Planner = Callable[[Path, Path], Any]
"""(checkpoint, folder of runs) → a plan."""


def install_plugin(folder: Path) -> Path:
    """Write the package's metadata with an entry point, as installed by pip."""
    about = folder / "evalkit_copying-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evalkit-copying\nVersion: 1.0\n", encoding="utf-8")
    named = "copying = tests.plugin.copying:Copying\nnorms = tests.plugin.norms:Norms\n"
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{named}", encoding="utf-8")
    return folder


@pytest.fixture(scope="session", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder added to the path."""
    folder = install_plugin(tmp_path_factory.mktemp("installed"))
    sys.path.insert(0, str(folder))
    benchmark.cache_clear()
    assert {"copying", "norms"} <= {*kinds()}
    yield folder
    sys.path.remove(str(folder))
    benchmark.cache_clear()
