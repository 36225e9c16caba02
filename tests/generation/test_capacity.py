"""Memory limits of a batch, and the estimate of a run's time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import psutil
import pytest

from evalkit.generation.capacity import MeasuredCapacity, measure_capacity
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt
from tests.generation.made import prompts, tokens
from tests.models.variants.building import VANILLA, model_of

BYTES = 2 * 3 * 4 * 16 * 4
"""Of a token: keys and values, three layers, four heads of 16, float32."""


def made(model: Any, budget: int | None = None) -> MeasuredCapacity:
    return measure_capacity(model, Generator(model), budget, 2048)


def test_a_quarter_of_the_memory_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other programs use, so that batches are the same everywhere."""
    model = model_of("llama", VANILLA)
    total = psutil.virtual_memory()._replace(
        total=4000 * BYTES + 1 + sum(weight.nbytes for weight in model.parameters()), available=1 << 30
    )
    monkeypatch.setattr(psutil, "virtual_memory", lambda: total)
    room = made(model)
    assert (room.tokens, room.most_rows) == (1000, 16)
    assert made(model, 77).tokens == 77


@pytest.mark.parametrize("tied", [False, True])
def test_work_is_that_of_weights_and_pairs(tied: bool) -> None:
    """A prompt's operations and the bytes read for its new tokens, here at one of each per second."""
    model = model_of("llama", VANILLA, tie_word_embeddings=tied)
    weights, embedding = sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()
    room = replace(made(model, 250), operations_a_second=1.0, bytes_a_second=1.0)
    operations = 2 * (weights - embedding) * 90 + 4 * 3 * model.config.hidden_size * 90**2 / 2
    read = 4 * (weights - (0 if tied else embedding)) / 2 + 100 * BYTES  # two rows of 100 tokens in 250
    assert room.work(Prompt(0, tokens(90)[0], 10)) == operations + 10 * read


def test_the_estimate_is_of_the_machine() -> None:
    """Twice the prompts and new tokens take twice as long; longer ones more than that."""
    model = model_of("llama", VANILLA)
    room = made(model)
    one = room.work(Prompt(0, tokens(60)[0], 5))
    assert 0 < one < 5
    assert room.work(Prompt(0, tokens(120)[0], 10)) > 2 * one


def test_the_estimate_says_what_there_is_to_do() -> None:
    model = model_of("llama", VANILLA)
    room = made(model)
    said = room.estimate(prompts(tokens(700, 20, 9), most=5))
    found = re.fullmatch(r"(\d+) prompt tokens and up to (\d+) generated ones: about 1 min, and up to ([\d.]+) GiB "
                         r"beside the model", said)  # fmt: skip
    assert found is not None
    assert found.groups()[:2] == ("729", "15")


def test_prompts_shorter_than_a_chunk_are_not_stretched_for_it() -> None:
    """A model without rotary embeddings has no position beyond its window."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=64)).eval()
    measure_capacity(model, Generator(model), None, 32)
