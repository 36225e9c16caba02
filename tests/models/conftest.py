"""Every test here has a cache folder of its own, so that none depends on what another left behind."""

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
    """A checkpoint of this test's own, to be damaged."""
    shutil.copytree(saved, tmp_path / "small")
    return tmp_path / "small"
