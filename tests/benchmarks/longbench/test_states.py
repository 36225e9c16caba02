"""Models without a key-value cache per token: LongBench and needle tests generate with transformers, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.benchmarks.longbench.benchmark import LongBenchRequest
from evalkit.benchmarks.longbench.scores import load_generations
from evalkit.benchmarks.needle.benchmark import Needle, NeedleRequest
from evalkit.benchmarks.needle.results import load_needles
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.compatibility.transformers import quiet
from tests.benchmarks.longbench.made import evaluate_longbench, record, write
from tests.benchmarks.multiple_choice.test_evaluation import Lines
from tests.generation.made import by_transformers
from tests.models.loading import load_folder
from tests.tiny import VOCABULARY, tiny_tokenizer

SAID = "MambaForCausalLM has a recurrent state and no key-value cache: its texts are generated one by one"
WINDOW: dict[str, Any] = {"context": 1024, "context_original": 1024}
"""Its config has none."""


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_tokenizer(tmp_path_factory.mktemp("mamba"))
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = AutoConfig.for_model("mamba", **sizes, **special, initializer_range=0.2)
    torch.manual_seed(0)
    with quiet():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_longbench(mamba: Path, tmp_path: Path) -> None:
    texts = [" ".join(f"word{n}" for n in range(start, start + 80)) for start in (0, 100)]
    for task in ("trec", "hotpotqa"):
        write(tmp_path / f"{task}.jsonl", [record(task, n, context=text) for n, text in enumerate(texts)])
    common = {"output": tmp_path, "dtype": "float32", "data_dir": tmp_path, **WINDOW}
    asked = request_of(LongBenchRequest, mamba, common | {"tasks": ("trec", "hotpotqa"), "max_prompt_tokens": 400})
    lines = Lines()
    run = evaluate_longbench(asked, lines)
    table = load_generations(run)
    assert len(table) == 4
    assert (table["reused"] == 0).all()
    assert any(line.startswith(SAID) for line in lines.said)


def test_needle(mamba: Path, tmp_path: Path) -> None:
    common = {"output": tmp_path, "dtype": "float32", "lengths": (200,), "depths": (0, 50), "repeats": 1, **WINDOW}
    plan = Needle().plan(request_of(NeedleRequest, mamba, common), lambda _: None)
    lines = Lines()
    table = load_needles(run_plan(plan, lines))
    loaded = load_folder(mamba)
    encode = loaded.tokenizer
    for cell, answer in zip(plan.tasks["needle"], table["answer"], strict=True):
        ids = plan.haystack.prompt(
            cell, lambda text: encode(text).input_ids, lambda text: len(encode(text).input_ids), cue=True
        )
        expected = by_transformers(loaded.model, np.asarray(ids), 32, [1])
        assert answer == encode.decode(expected, skip_special_tokens=True)
    assert any(line.startswith(SAID) for line in lines.said)
