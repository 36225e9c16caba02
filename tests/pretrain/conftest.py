"""Fixtures for tests of examples/pretrain, whose modules are imported as `recipe`."""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import yaml

from tests.tiny import TRAINING_TEXT, tiny_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
ATTENTIONS = {"vanilla": "none", "cog": "top 50%", "differential": "top 50%", "integral": "top 50%"}
sys.path.insert(0, str(EXAMPLE))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, the replication's four models, smaller, and a tokenizer; in `data`, packed text.

    Do not modify.
    """
    folder = tmp_path_factory.mktemp("pretrain")
    texts = [" ".join(TRAINING_TEXT[number % 7 :]) for number in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "held_out.txt").write_text(" ".join(TRAINING_TEXT) * 3)
    content = yaml.safe_load((EXAMPLE.parent / "replication" / "models.yaml").read_text(encoding="utf-8"))
    content["base"] |= {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    content["models"] = {
        name: {"attention_variant": name, "variant_layers": layers} for name, layers in ATTENTIONS.items()
    }
    content["models"]["long"] = content["models"]["vanilla"] | {"max_position_embeddings": 1024}
    (folder / "models.yaml").write_text(yaml.safe_dump(content))
    tiny_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Starts processes with everything imported."""
    context = multiprocessing.get_context("forkserver")
    modules = ("trainer", "models.llama.modeling_llama", "conversion_mapping", "core_model_loading")
    context.set_forkserver_preload(["recipe.running", *(f"transformers.{name}" for name in modules)])
    return context
