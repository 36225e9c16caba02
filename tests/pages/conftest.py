"""Runs in pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.runs.folder import Run, load_run
from tests.comparison.made import finished_run


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    runs = [finished_run(root, "org/first", 0.45), finished_run(root, "org/second", 0.7, seed=5)]
    return [run.folder for run in runs]


@pytest.fixture
def two_runs(folders: list[Path]) -> list[Run]:
    """Two runs of the same documents. Their folders are shared; do not modify."""
    return list(map(load_run, folders))
