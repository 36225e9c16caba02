"""Runs in pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalkit.runs.folder import Run
from tests.comparison.made import finished_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[dev]'")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Run]:
    """Two runs of the same documents."""
    return [finished_run(tmp_path, "org/first", 0.45), finished_run(tmp_path, "org/second", 0.7, seed=5)]
