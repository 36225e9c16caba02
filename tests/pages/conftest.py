"""Runs in pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.runs.folder import Run
from tests.pages.made import finished_run


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Run]:
    """Two runs of the same documents."""
    return [finished_run(tmp_path, "org/first", 0.45), finished_run(tmp_path, "org/second", 0.7, seed=5)]
