"""Batches, chunks, copied prefixes and compaction do not change transformers' own greedy tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MistralConfig

from evalkit.errors import CheckpointError, ScoringError
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt, Stops
from tests.generation.made import NEW, by_transformers, prompts, tokens
from tests.models.variants.building import FAMILIES, VANILLA, VARIANTS, VOCABULARY, model_of

LENGTHS = (7, 40, 1, 23, 39, 24)
ATTENTIONS = {"vanilla": VANILLA} | VARIANTS


def ids_of(found: Any) -> list[list[int]]:
    return [one.tokens for one in found]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_what_transformers_gives_one_by_one(family: str, attention: str) -> None:
    model = model_of(family, ATTENTIONS[attention])
    many = tokens(*LENGTHS)
    found = Generator(model, chunk=16).generate(prompts(many))
    assert ids_of(found) == [by_transformers(model, ids) for ids in many]
    assert {(one.ended, one.reused) for one in found} == {("length", 0)}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_beginnings_are_computed_once(family: str, attention: str) -> None:
    """Twenty common tokens are two chunks of eight and four recomputed tokens."""
    model = model_of(family, ATTENTIONS[attention])
    many = tokens(37, 21, 60, 22, beginning=20)
    found = Generator(model, chunk=8).generate(prompts(many))
    assert ids_of(found) == [by_transformers(model, ids) for ids in many]
    assert [one.reused for one in found] == [0, 16, 16, 16]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 512])
def test_any_chunk(chunk: int, implementation: str) -> None:
    model = model_of("llama", VARIANTS["integral"], implementation=implementation)
    many = tokens(*LENGTHS, seed=1)
    assert ids_of(Generator(model, chunk).generate(prompts(many))) == [by_transformers(model, ids) for ids in many]


def test_a_sliding_window() -> None:
    """Its masks are by position too, though all keys are kept."""
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=9,
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    many = tokens(*LENGTHS, 37, beginning=1)
    assert ids_of(Generator(model, chunk=8).generate(prompts(many))) == [by_transformers(model, ids) for ids in many]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stretched_context(family: str) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0}
    model = model_of(family, VARIANTS["integral"], max_position_embeddings=64, rope_parameters=rope)
    many = tokens(40, 21, 49, 7, beginning=5)
    assert ids_of(Generator(model, chunk=8).generate(prompts(many))) == [by_transformers(model, ids) for ids in many]


def test_frequencies_that_depend_on_the_length() -> None:
    """In chunks, beside a longer prompt or after one, they would be another prompt's."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}

    def fresh() -> Any:
        return model_of("llama", VANILLA, max_position_embeddings=16, rope_parameters=rope)

    many = tokens(40, 21, 60, 33, 16, 25, 7, 19, beginning=5)
    generator = Generator(fresh(), chunk=8)
    expected = [by_transformers(fresh(), ids) for ids in many]
    for _ in range(2):
        assert ids_of(generator.generate(prompts(many))) == expected
    used = fresh()
    assert [by_transformers(used, ids) for ids in many] != expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(value: float) -> None:
    model = model_of("llama", VANILLA)
    generator = Generator(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 5] = value
    with pytest.raises(ScoringError, match=r"logits are not numbers .* try --dtype float32"):
        generator.generate(prompts(tokens(9)))
    with pytest.raises(
        CheckpointError, match=r"the logits of EvalkitLlamaForCausalLM are not numbers; .*--dtype float32"
    ):
        Generator(model)


@pytest.mark.parametrize("barred", [False, True])
def test_end_tokens(barred: bool) -> None:
    """Each row ends at its own end token, which is kept; a suppressed one cannot be first."""
    model = model_of("gpt_neox", VANILLA)
    many = tokens(*range(3, 43, 2), seed=2)
    free = [by_transformers(model, ids) for ids in many]
    # The most frequent tokens, so that rows leave the batch at different times, some together
    counts = np.bincount(np.concatenate(free), minlength=VOCABULARY)
    ends = frozenset([int(np.argmax(counts)), free[3][0], free[7][4]])
    found = Generator(model, chunk=16).generate(prompts(many, ends=ends, barred_first=ends if barred else frozenset()))
    assert ids_of(found) == [by_transformers(model, ids, ends=sorted(ends), barred=barred) for ids in many]
    assert {len(one.tokens) for one in found} >= {2 if barred else 1, NEW}
    for one in found:
        assert (one.ended == "end") == (one.tokens[-1] in ends)
        assert not (barred and one.tokens[0] in ends)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=7), st.integers(0, 99))
def test_rows_that_leave_in_any_order(rows: list[tuple[int, int]], seed: int) -> None:
    """Each row has its own number of new tokens; rows that leave do not affect the others."""
    model = _SMALL
    many = tokens(*(length for length, _ in rows), seed=seed)
    batch = [Prompt(n, ids, most) for n, (ids, (_, most)) in enumerate(zip(many, rows, strict=True))]
    together = Generator(model, chunk=8).generate(batch)
    alone = [Generator(model, chunk=8).generate([prompt])[0] for prompt in batch]
    assert ids_of(together) == ids_of(alone)
    assert [len(one.tokens) for one in together] == [most for _, most in rows]


_SMALL = model_of("llama", VANILLA)


def test_the_pattern_is_looked_for_after_every_token() -> None:
    model = model_of("qwen2", VANILLA)
    many = tokens(9, 30, 12)
    # "5 7 9" is the text of tokens 5, 7 and 9
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    batch = prompts(many)
    batch[1] = replace(batch[1], stops=Stops(pattern=r"^\d+ \d+ \d+$"))
    found = Generator(model, tokenizer=tokenizer).generate(batch)
    full = [by_transformers(model, ids) for ids in many]
    assert ids_of(found) == [full[0], full[1][:3], full[2]]
    assert [one.ended for one in found] == ["length", "enough", "length"]
    shortened = [replace(batch[1], stops=replace(batch[1].stops, unsearched_tail=2))]
    assert ids_of(Generator(model, tokenizer=tokenizer).generate(shortened)) == [full[1][:5]]


class Narrow(Generator):
    """A generator that raises out of memory on more than a few prompts."""

    def __init__(self, model: Any, most: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__(model, chunk=8)
        self._most, self._error = most, error
        self.tried: list[int] = []

    def _generate(self, batch: Any) -> Any:
        self.tried.append(len(batch))
        if len(batch) > self._most:
            raise self._error("out of memory: cannot alloc")
        return super()._generate(batch)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_batches_are_split_when_memory_runs_out(error: type[Exception]) -> None:
    many = tokens(5, 12, 9, 30, 2)
    narrow, said = Narrow(_SMALL, 2, error), []
    found = narrow.generate(prompts(many), said.append)
    assert ids_of(found) == [by_transformers(_SMALL, ids) for ids in many]
    assert narrow.tried == [5, 2, 3, 1, 2]
    assert said == [
        "out of memory on 5 prompts: going on with 2",
        "out of memory on 3 prompts: going on with 1",
    ]


def test_a_single_prompt_beyond_memory_is_reported() -> None:
    with pytest.raises(ScoringError, match="a prompt of 12 tokens is more than memory holds"):
        Narrow(_SMALL, 0).generate(prompts(tokens(12)))


def test_other_errors_are_not_swallowed() -> None:
    class Broken(Narrow):
        def _generate(self, batch: Any) -> Any:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Broken(_SMALL, 1).generate(prompts(tokens(12, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "heads"), [("llama", 4), ("gpt_neox", 8)])
def test_bytes_of_a_token(family: str, heads: int, dtype: torch.dtype) -> None:
    """Keys and values of three layers, heads of 16."""
    generator = Generator(model_of(family, VANILLA, dtype=dtype))
    assert generator.token_bytes == 2 * 3 * heads * 16 * (4 if dtype == torch.float32 else 2)
