"""Recurrent and hybrid models: texts of a batch are transformers' own of each prompt; faults of a cache are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.architectures import TYPES, tiny_settings, way_of
from evalkit.generation.generator import Generator
from evalkit.generation.own_caches import OwnCaches
from evalkit.generation.prompts import Capacity, Decoding, Prompt, Stops, capacity_of, estimate_line, measured_speed
from evalkit.generation.rows import Generation
from tests.devices import DEVICES
from tests.generation.made import by_transformers, prompts, tokens
from tests.marks import fast

IN_CHUNKS = [
    "mamba2", "qwen3_next", "falcon_h1", "bamba", "lfm2", "lfm3", "olmo_hybrid", "qwen3_5_text", "granitemoehybrid",
    "kimi_linear", "bailing_hybrid", "inkling_text", "deepseek_v32", "glm_moe_dsa",
]  # fmt: skip
"""Of most, several tokens behind a state give the logits of a single pass."""
WHOLE = ["mamba", "falcon_mamba", "jamba", "zamba", "nemotron_h", "zamba2", "roberta"]
"""Of these they do not, or a single token does not."""
ONE_BY_ONE = ["bart", "roformer", "git", "deepseek_v4", "minimax", "trocr", "recurrent_gemma", "rwkv"]
"""Positions that padding moves; caches with parts of their own; states in the model, or in no cache."""
FAST = ["mamba", "qwen3_next", "falcon_h1", "lfm2", "nemotron_h"]


def tiny(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of a type with random weights; windows, where it has any, are 16 tokens."""
    config_class = CONFIG_MAPPING[kind]
    config = config_class(**tiny_settings(config_class, TYPES.get(kind, {})))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(dtype)


def one_by_one(generator: Generator, batch: Sequence[Prompt]) -> list[Generation]:
    """Generate by transformers' `generate`, with the stops and the random numbers of the prompts."""
    storage, generator.storage = generator.storage, None
    try:
        return generator.generate(batch)
    finally:
        generator.storage = storage


def outcome(generations: Sequence[Generation]) -> list[tuple[list[int], str]]:
    return [(row.tokens, row.ended) for row in generations]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", fast(FAST, IN_CHUNKS + WHOLE))
def test_a_batch_gives_what_transformers_gives(kind: str, device: str) -> None:
    """Prompts of any length, shorter than a convolution and longer than a window; the last two begin alike."""
    model = tiny(kind).to(device)
    many = tokens(7, 40, 1, 23, 39, 2) + tokens(37, 41, beginning=20)
    expected = [by_transformers(model, ids) for ids in many]
    generator = Generator(model, chunk=8)
    assert way_of(generator) == ("OwnCaches" if kind in IN_CHUNKS else "OwnCaches, whole prompts")
    generations = generator.generate(prompts(many))
    assert [row.tokens for row in generations] == expected
    assert [row.reused for row in generations] == [0] * 7 + [16 if kind in IN_CHUNKS else 0]
    ends = frozenset([expected[0][2], expected[1][0], expected[3][5]])
    generations = generator.generate(prompts(many, ends=ends, barred_first=ends))
    assert [row.tokens for row in generations] == [
        by_transformers(model, ids, ends=sorted(ends), barred=True) for ids in many
    ]
    assert {row.ended for row in generations} == {"end", "length"}


@pytest.mark.parametrize("kind", fast(["bart", "rwkv"], ONE_BY_ONE))
def test_models_without_batches(kind: str) -> None:
    """Their texts are transformers' own too."""
    model, many = tiny(kind), tokens(7, 40, 23)
    generator = Generator(model, chunk=8)
    assert generator.without_cache.startswith(type(model).__name__)
    assert (generator.token_bytes, generator.row_bytes) == (0, 0)
    assert capacity_of(generator, None, 512) == Capacity(512, 1, 8, 0)
    assert [row.tokens for row in generator.generate(prompts(many))] == [by_transformers(model, ids) for ids in many]


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_sliding_windows(kind: str) -> None:
    """Caches that drop the keys and values behind a window, of prompts shorter and longer than it."""
    model, many = tiny(kind), tokens(7, 40, 1, 23, 15, 16, 17)
    generator = Generator(model)
    generator.storage = partial(OwnCaches, chunk=8)
    assert [row.tokens for row in generator.generate(prompts(many))] == [by_transformers(model, ids) for ids in many]


TOKENIZER = SimpleNamespace(
    decode=lambda ids, skip_special_tokens=False: " ".join(map(str, ids)), encode=lambda text, **_: text.split()
)
"""The text of a token is its number."""
QWEN, MAMBA = (Generator(tiny(kind), chunk=8, tokenizer=TOKENIZER) for kind in ("qwen3_next", "mamba"))


@pytest.mark.parametrize("generator", [QWEN, MAMBA], ids=["qwen3_next", "mamba"])
@settings(max_examples=6)
@given(rows=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_rows_that_leave_in_any_order(generator: Generator, rows: list[tuple[int, int]], seed: int) -> None:
    many = tokens(*(length for length, _ in rows), seed=seed)
    batch = [Prompt(number, ids, most) for number, (ids, (_, most)) in enumerate(zip(many, rows, strict=True))]
    together = generator.generate(batch)
    assert [row.tokens for row in together] == [generator.generate([prompt])[0].tokens for prompt in batch]
    assert [len(row.tokens) for row in together] == [most for _, most in rows]


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=2, max_size=5))
def test_shared_prefixes_in_any_order(rows: list[tuple[int, int]]) -> None:
    """Prompts that share zero to three chunks give the same bits alone, and reuse what an earlier one has computed."""
    start, ends = tokens(24)[0], tokens(*(length for _, length in rows), seed=1)
    many = [np.concatenate([start[: 8 * chunks], end]) for (chunks, _), end in zip(rows, ends, strict=True)]
    generations = QWEN.generate(prompts(many, 2))
    assert [row.tokens for row in generations] == [QWEN.generate(prompts([ids], 2))[0].tokens for ids in many]
    for index, row in enumerate(generations):
        earlier = [min(rows[index][0], chunks) for chunks, _ in rows[:index]]
        assert row.reused == 8 * max(earlier, default=0)


@pytest.mark.parametrize("generator", [QWEN, MAMBA], ids=["qwen3_next", "mamba"])
def test_stops_and_seeds(generator: Generator) -> None:
    """A pattern, stop strings, and sampling under settings end and choose as with transformers, prompt by prompt."""
    many = tokens(9, 30, 12, 20, 3)
    free = [row.tokens for row in generator.generate(prompts(many))]
    batch = prompts(many)
    batch[1] = replace(batch[1], stops=Stops(pattern=r"^\d+ \d+ \d+$"))
    batch[2] = replace(batch[2], stops=Stops(until=(f"{free[2][4]} {free[2][5]}",)))
    for index in (3, 4):
        sampled = Decoding({"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.3, "top_k": 20}, seed=index)
        batch[index] = replace(batch[index], decoding=sampled)
    together = generator.generate(batch)
    assert outcome(together) == outcome(one_by_one(generator, batch))
    assert together[1].tokens == free[1][:3]
    assert len(together[2].tokens) <= 6
    assert together[3].tokens != free[3]


@pytest.mark.parametrize("kind", fast(["qwen3_next", "mamba"], IN_CHUNKS + WHOLE))
def test_answers(kind: str) -> None:
    """Log-likelihoods from a stored state are those of plain passes; texts and copied chunks stay as they are."""
    model, many = tiny(kind), tokens(37, 41, 40, beginning=20) + tokens(1, 9)
    generator = Generator(model, chunk=8)
    answers = tuple(tokens(5, 1, seed=3))
    batch = [
        replace(prompt, answers=answers, shared=max(1, len(prompt.tokens) - prompt.index)) for prompt in prompts(many)
    ]
    generations = generator.generate(batch)
    assert [row.tokens for row in generations] == [by_transformers(model, ids) for ids in many]
    for row in generations:
        for answer, logprob in zip(answers, row.logprobs, strict=True):
            sequence = torch.from_numpy(np.concatenate([row.prompt.tokens[: row.prompt.shared], answer]))
            with torch.inference_mode():
                logits = model(input_ids=sequence[None], use_cache=False).logits[0].log_softmax(-1)
            of_answer = logits[row.prompt.shared - 1 : -1].gather(-1, sequence[row.prompt.shared :, None])
            assert logprob == pytest.approx(float(of_answer.sum()), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", fast(["mamba", "qwen3_next"], IN_CHUNKS + WHOLE))
def test_rounding_is_no_fault_of_a_cache(kind: str, dtype: torch.dtype) -> None:
    assert Generator(tiny(kind, dtype)).without_cache == ""


@pytest.mark.parametrize(("fault", "way"), [
    ("forgets a state", "OwnCaches, whole prompts"),
    ("mixes rows", "one by one: Qwen3NextForCausalLM gives different logits in a batch"),
    ("has no cache", "one by one: Qwen3NextForCausalLM does not run in batches (TypeError: no cache is returned)"),
])  # fmt: skip
def test_faults_of_a_cache_are_found(fault: str, way: str) -> None:
    model = tiny("qwen3_next")
    forward = model.forward

    @wraps(forward)
    def faulty(input_ids: Any, past_key_values: Any = None, **inputs: Any) -> Any:
        if fault == "forgets a state" and past_key_values is not None and input_ids.shape[1] > 1:
            for layer in past_key_values.layers:
                for states in getattr(layer, "recurrent_states", {}).values():
                    states.zero_()
        output = forward(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        if fault == "mixes rows":
            output.logits = output.logits + output.logits.mean(0) - output.logits[:1]
        if fault == "has no cache":
            output.past_key_values = None
        return output

    model.forward = faulty
    assert way_of(Generator(model)) == way


def test_memory_is_that_of_states_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba keeps a row's states only; of Falcon-H1, half of the room is for states."""
    config = tiny("mamba").config
    states = config.intermediate_size * (config.conv_kernel + config.state_size)
    assert (MAMBA.token_bytes, MAMBA.row_bytes) == (0, 4 * 4 * states)
    assert capacity_of(MAMBA, None, 512) == Capacity(512 * 16, 16, 8, 0, MAMBA.row_bytes)
    model = tiny("falcon_h1")
    known = Generator(model)
    assert known.token_bytes == 4 * 4 * 2 * 2 * 16  # float32, layers, keys and values, heads of 16
    total = 4 * (10 * known.row_bytes + 1000 * known.token_bytes) + sum(weight.nbytes for weight in model.parameters())
    memory = psutil.virtual_memory()._replace(total=total, available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    capacity = capacity_of(Generator(model), None, 512)
    most_rows = (10 * known.row_bytes + 1000 * known.token_bytes) // 2 // known.row_bytes
    assert capacity.most_rows == min(16, most_rows)
    room = capacity.most_rows * capacity.row_bytes + capacity.tokens * capacity.token_bytes
    assert 0 <= total - sum(weight.nbytes for weight in model.parameters()) - 4 * room <= 4 * known.token_bytes
    speed = replace(measured_speed(model, known, 512), operations_a_second=1.0, bytes_a_second=1.0)
    prompt = Prompt(0, tokens(60)[0], 5)
    operations = speed.linear * 60 + 4 * 4 * model.config.hidden_size * 60**2 / 2
    rows = min(capacity.most_rows, capacity.tokens // 65)
    read = speed.weights / rows + 65 * known.token_bytes + known.row_bytes
    assert speed.seconds(prompt, capacity) == pytest.approx(operations + 5 * read)
    many = replace(capacity, row_bytes=1 << 30, most_rows=3, tokens=100)
    assert "up to 3.0 GiB" in estimate_line([prompt], many, speed)


def test_batches_are_split_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    many, said, generate = tokens(5, 12, 9, 30, 2), list[str](), Generator._generate

    def narrow(generator: Generator, batch: Any) -> Any:
        if len(batch) > 2:
            raise MemoryError("out of memory")
        return generate(generator, batch)

    expected = [row.tokens for row in QWEN.generate(prompts(many))]
    monkeypatch.setattr(Generator, "_generate", narrow)
    assert [row.tokens for row in QWEN.generate(prompts(many), said.append)] == expected
    assert len(said) == 2
