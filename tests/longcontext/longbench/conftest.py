"""Every test here has an empty cache and no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.fixtures import unpacked
from tests.tiny import tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Public predictions of a real model on eight tasks of LongBench-E, and the official code's scores of them."""
    return unpacked("predictions", tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="session")
def real_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `--data-dir` with a real row of each of nine tasks."""
    return unpacked("longbench", tmp_path_factory.mktemp("rows"))
