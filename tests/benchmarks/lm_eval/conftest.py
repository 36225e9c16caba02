"""A checkpoint on which lm-eval's tasks run, and their bootstrap in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's bootstrap gives the same numbers without a pool of processes."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=128, adds_bos=True)
