"""Every test here has an empty cache of its own and no hub."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def longbench_data(shared_data: Path) -> Path:
    return shared_data / "longbench"


@pytest.fixture(scope="session")
def golden(longbench_data: Path) -> Path:
    """Public predictions of a real model on LongBench-E, and the official code's scores of them."""
    return longbench_data / "golden_e"
