"""A small run of every benchmark: evalkit's own, and two of another package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalkit.benchmarks.registry import GROUP, benchmark, kinds
from tests.packages import install


def install_plugin(folder: Path) -> Path:
    """Write the package's metadata with an entry point, as installed by pip."""
    install(folder, "evalkit-copying", {GROUP: {"copying": "tests.plugin.copying:Copying",
                                                "norms": "tests.plugin.norms:Norms"}})  # fmt: skip
    return folder


@pytest.fixture(scope="session", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = install_plugin(tmp_path_factory.mktemp("installed"))
    sys.path.insert(0, str(folder))
    benchmark.cache_clear()
    assert {"copying", "norms"} <= {*kinds()}
    yield folder
    sys.path.remove(str(folder))
    benchmark.cache_clear()
