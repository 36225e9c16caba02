"""Fixtures for tests of examples/pretrain, whose modules are imported as `recipe`."""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from tests.pretrain.settings_files import EXAMPLE, write_models
from tests.tiny import TRAINING_TEXT, tiny_tokenizer

sys.path.insert(0, str(EXAMPLE))

PRELOADED = ["recipe.running", "transformers.trainer", "transformers.models.llama.modeling_llama",
             "transformers.conversion_mapping", "transformers.core_model_loading"]  # fmt: skip


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, models and a tokenizer; and in `data`, packed text. Do not modify."""
    folder = tmp_path_factory.mktemp("pretrain")
    texts = [" ".join(TRAINING_TEXT[number % 7 :]) for number in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "held_out.txt").write_text(" ".join(TRAINING_TEXT) * 3)
    write_models(folder)
    tiny_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Starts processes with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
