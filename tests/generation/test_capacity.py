"""Batches contain every prompt once, within the memory; the estimate of a run's time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Capacity, MeasuredCapacity, Prompt, measure_capacity, shared_tokens
from tests.generation.made import prompts, tokens
from tests.models.variants.building import VANILLA, model_of

BYTES = 2 * 3 * 4 * 16 * 4
"""Of a token: keys and values, three layers, four heads of 16, float32."""
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def made(model: Any, budget: int | None = None) -> MeasuredCapacity:
    return measure_capacity(model, Generator(model), budget, 2048)


def prompt(index: int, ids: list[int], most: int = 4) -> Prompt:
    return Prompt(index, np.array(ids, np.int64), most)


@given(st.lists(st.tuples(TOKENS, st.integers(1, 9)), max_size=25), st.integers(1, 120), st.integers(1, 6),
       st.integers(1, 8))  # fmt: skip
def test_batches(rows: list[tuple[list[int], int]], budget: int, chunk: int, most_rows: int) -> None:
    many = [prompt(number, ids, most) for number, (ids, most) in enumerate(rows)]
    batches = Capacity(budget, most_rows, chunk, 0).batches(many)
    order = [prompt for batch in batches for prompt in batch]
    assert sorted(prompt.index for prompt in order) == list(range(len(many)))
    for batch in batches:
        columns = max(len(prompt.tokens) for prompt in batch) + max(prompt.max_new_tokens for prompt in batch)
        assert len(batch) == 1 or (columns * len(batch) <= budget and len(batch) <= most_rows)
    # Prompts with a common prefix of at least a chunk are contiguous
    beginnings = [tuple(prompt.tokens[:chunk]) if len(prompt.tokens) > chunk else None for prompt in order]
    runs = [key for place, key in enumerate(beginnings) if key and (place == 0 or beginnings[place - 1] != key)]
    assert len(runs) == len(set(runs))


def test_the_longest_families_come_first() -> None:
    many = [prompt(0, [1, 1, 1]), prompt(1, [2] * 9), prompt(2, [1, 1, 2]), prompt(3, [3] * 5)]
    assert [batch[0].index for batch in Capacity(10**6, 1, 2, 0).batches(many)] == [1, 3, 0, 2]


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_shared_tokens(first: list[int], second: list[int], chunk: int) -> None:
    shared = shared_tokens(np.array(first), np.array(second), chunk)
    assert shared % chunk == 0
    assert shared < min(len(first), len(second))  # the last token's output is needed, and is not stored
    assert first[:shared] == second[:shared]
    longer = shared + chunk
    assert longer >= min(len(first), len(second)) or first[:longer] != second[:longer]


def test_a_quarter_of_the_memory_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other programs use, so that batches are the same everywhere."""
    model = model_of("llama", VANILLA)
    assert Generator(model).token_bytes == BYTES
    assert Generator(model_of("llama", VANILLA, dtype=torch.bfloat16)).token_bytes == BYTES / 2
    total = 4000 * BYTES + 1 + sum(weight.nbytes for weight in model.parameters())
    memory = psutil.virtual_memory()._replace(total=total, available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert (made(model).tokens, made(model).most_rows, made(model, 77).tokens) == (1000, 16, 77)


@pytest.mark.parametrize("tied", [False, True])
def test_work_is_that_of_weights_and_pairs(tied: bool) -> None:
    """A prompt's operations and the bytes read for its new tokens, here at one of each per second."""
    model = model_of("llama", VANILLA, tie_word_embeddings=tied)
    weights, embedding = sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()
    room = replace(made(model, 250), operations_a_second=1.0, bytes_a_second=1.0)
    operations = 2 * (weights - embedding) * 90 + 4 * 3 * model.config.hidden_size * 90**2 / 2
    read = 4 * (weights - (0 if tied else embedding)) / 2 + 100 * BYTES  # two rows of 100 tokens in 250
    assert room.work(Prompt(0, tokens(90)[0], 10)) == operations + 10 * read


def test_the_estimate() -> None:
    """Twice the prompts and new tokens take twice as long, longer ones more; a short window is enough."""
    room = made(model_of("llama", VANILLA))
    seconds = room.work(Prompt(0, tokens(60)[0], 5))
    assert 0 < seconds < 5
    assert room.work(Prompt(0, tokens(120)[0], 10)) > 2 * seconds
    said = room.estimate(prompts(tokens(700, 20, 9), most=5))
    assert re.match(r"729 prompt tokens and up to 15 generated ones: about 1 min, and up to [\d.]+ GiB", said)
    short = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=64)).eval()
    measure_capacity(short, Generator(short), None, 32)
