"""Every test here has its own cache folder, so that tests are independent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh evalkit cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("EVALKIT_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("saved") / "small")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that may be damaged."""
    shutil.copytree(saved, tmp_path / "small")
    return tmp_path / "small"
