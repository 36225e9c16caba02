"""Transformers' own greedy tokens, whatever the batch, the chunks and copied prefixes; batches that fit memory."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.errors import CheckpointError, ScoringError
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Capacity, Prompt, Stops, capacity_of, measured_speed
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from tests.devices import CUDA, DEVICES, cuda_memory_of, most_cuda_memory
from tests.generation.made import NEW, by_transformers, prompts, tokens
from tests.marks import fast
from tests.models.variants.building import FAMILIES, VANILLA, VARIANTS, VOCABULARY, model_of

LENGTHS = (7, 40, 1, 23, 39, 24)
ATTENTIONS = {"vanilla": VANILLA} | VARIANTS
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
SLIDING = {"sliding_window": 9}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "falcon": {"alibi": True},
    "phi": {},
    "phi3": SLIDING,
    "gemma2": SLIDING | {"head_dim": 16},
    "gemma3_text": SLIDING | {"head_dim": 16},
    "qwen2": SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "mixtral": SLIDING | {"num_local_experts": 2},
    "mistral": SLIDING,
    "olmo2": {},
    "cohere2": SLIDING,
    "stablelm": {},
    "diffllama": {},
    "llama4_text": {"num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 96},
    "afmoe": SLIDING | {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 16},
    "doge": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "modernbert-decoder": {"cls_token_id": 0, "sep_token_id": 0},  # its logits are more than an output head
}
WITHOUT_OUR_CACHE: dict[str, dict[str, Any]] = {
    "rwkv": {"attention_hidden_size": 64},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 9},
}


def architecture(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | settings))).eval()


def ids_of(generations: Any) -> list[list[int]]:
    return [generation.tokens for generation in generations]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("built", fast([("llama", "integral"), ("gpt_neox", "vanilla")], product(FAMILIES, ATTENTIONS)))
def test_a_batch_gives_what_transformers_gives(built: tuple[str, str], device: str) -> None:
    """Prompts of any length; twenty common tokens are two chunks of eight and four recomputed tokens."""
    model = model_of(built[0], ATTENTIONS[built[1]]).to(device)
    many = tokens(*LENGTHS)
    expected = [by_transformers(model, ids) for ids in many]
    for chunk in (17, 512):
        generations = Generator(model, chunk).generate(prompts(many))
        assert ids_of(generations) == expected
        assert {(row.ended, row.reused) for row in generations} == {("length", 0)}
    many = tokens(37, 21, 60, 22, beginning=20)
    generations = Generator(model, chunk=8).generate(prompts(many))
    assert ids_of(generations) == [by_transformers(model, ids) for ids in many]
    assert [row.reused for row in generations] == [0, 16, 16, 16]


@pytest.mark.parametrize("kind", fast(["gpt2", "bloom", "gemma2", "mixtral", "modernbert-decoder"], KINDS))
def test_other_architectures(kind: str) -> None:
    model = architecture(kind, **KINDS[kind])
    many = tokens(*LENGTHS) + tokens(37, 41, beginning=20)
    generations = Generator(model, chunk=8).generate(prompts(many))
    assert ids_of(generations) == [by_transformers(model, ids) for ids in many]
    assert generations[-1].reused == 16


def test_frequencies_that_change_with_the_length() -> None:
    """Phi-3's `generate` computes all keys anew where the text passes the trained window, with a prompt of any length.

    The prompts end well within that window (12), within reach of its end, and beyond.
    """
    window, channels = 32, 8
    factors = {"short_factor": [1.0] * channels, "long_factor": [1.5 + 0.5 * channel for channel in range(channels)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": window} | factors
    rope |= {"factor": 8.0, "short_mscale": 1.1, "long_mscale": 1.3}
    more = {"original_max_position_embeddings": window, "sliding_window": None}
    model = architecture("phi3", **more, rope_parameters=rope, rope_scaling=rope)
    many, generator = tokens(12, 31, 32, 60) + tokens(31, 40, beginning=20), Generator(model, chunk=8)
    assert ids_of(generator.generate(prompts(many))) == [by_transformers(model, ids) for ids in many]
    [ids] = tokens(20)
    for most in (11, 12, 13):  # a text that ends at the trained window
        assert generator.generate(prompts([ids], most))[0].tokens == by_transformers(model, ids, 20)[:most]


def test_extended_contexts() -> None:
    """YaRN; and frequencies of a dynamic method, which in chunks or after a longer prompt would be another prompt's."""
    many = tokens(40, 21, 49, 7, beginning=5)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0}
    model = model_of("llama", VARIANTS["integral"], max_position_embeddings=64, rope_parameters=rope)
    assert ids_of(Generator(model, chunk=8).generate(prompts(many))) == [by_transformers(model, ids) for ids in many]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}
    models = [model_of("llama", VANILLA, max_position_embeddings=16, rope_parameters=rope) for _ in range(5)]
    generator, expected = Generator(models.pop(), chunk=8), list(map(by_transformers, models, many))
    for _ in range(2):
        assert ids_of(generator.generate(prompts(many))) == expected


@pytest.mark.parametrize("kind", fast(["rwkv"], WITHOUT_OUR_CACHE))
def test_a_model_without_a_cache_of_keys_and_values(kind: str) -> None:
    """Transformers generates prompt by prompt, with the same stops; its generation config is ignored and restored."""
    model = architecture(kind, **WITHOUT_OUR_CACHE[kind])
    many = tokens(7, 40, 23)
    expected = [by_transformers(model, ids) for ids in many]
    generator = Generator(model, chunk=8)
    assert generator.without_cache.startswith(type(model).__name__)
    assert generator.token_bytes == 0
    config = model.generation_config
    config.repetition_penalty = 5.0
    assert ids_of(generator.generate(prompts(many))) == expected
    assert model.generation_config is config
    ends = frozenset([expected[0][2], expected[1][0]])
    generations = generator.generate(prompts(many, ends=ends, barred_first=ends))
    config.repetition_penalty = 1.0
    assert ids_of(generations) == [by_transformers(model, ids, ends=sorted(ends), barred=True) for ids in many]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "built",
    fast(
        [("llama", "vanilla", 16), ("gpt_neox", "integral", 3)],
        [
            *product(FAMILIES, ATTENTIONS, [3]),
            ("llama", "vanilla", 16),
            ("llama", "integral", 16),
            ("gpt_neox", "vanilla", 16),
        ],
    ),
)
def test_rounding_is_no_fault_of_the_cache(built: tuple[str, str, int], dtype: torch.dtype) -> None:
    """An ordinary model passes in every dtype. One whose positions after a cached prefix are off by one does not."""
    model = model_of(built[0], ATTENTIONS[built[1]], num_hidden_layers=built[2]).to(dtype)
    assert Generator(model).without_cache == ""
    forward = model.forward

    def off_by_one(**inputs: Any) -> Any:
        used = inputs["past_key_values"].get_seq_length() if "past_key_values" in inputs else 0
        if used:
            inputs["position_ids"] = torch.arange(used, used + inputs["input_ids"].shape[1])[None] + 1
        return forward(**inputs)

    model.forward = off_by_one
    assert "different logits" in Generator(model).without_cache


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_demo_checkpoint_runs_on_the_cache_in_every_dtype(demo: Path, dtype: str) -> None:
    """Its logits in bfloat16 differ by up to half of their deviation at some positions, for rounding alone."""
    assert Generator(load(locate(str(demo)), device="cpu", dtype=dtype).model).without_cache == ""


def test_logits_that_are_no_numbers() -> None:
    model = model_of("llama", VANILLA)
    generator = Generator(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 5] = torch.inf
    with pytest.raises(ScoringError, match="logits"):
        generator.generate(prompts(tokens(9)))
    with pytest.raises(CheckpointError, match="EvalkitLlamaForCausalLM"):
        Generator(model)


@pytest.mark.parametrize("barred", [False, True])
def test_end_tokens(barred: bool) -> None:
    """Each row ends at its own end token, which is kept; a suppressed one cannot be first."""
    model = model_of("gpt_neox", VANILLA)
    many = tokens(*range(3, 43, 3), seed=2)
    free = [by_transformers(model, ids) for ids in many]
    # The most frequent tokens, so that rows leave the batch at different times, some together
    counts = np.bincount(np.concatenate(free), minlength=VOCABULARY)
    ends = frozenset([int(np.argmax(counts)), free[3][0], free[7][4]])
    barred_first = ends if barred else frozenset()
    generations = Generator(model, chunk=16).generate(prompts(many, ends=ends, barred_first=barred_first))
    assert ids_of(generations) == [by_transformers(model, ids, ends=sorted(ends), barred=barred) for ids in many]
    assert {len(row.tokens) for row in generations} >= {2 if barred else 1, NEW}
    assert all((row.ended == "end") == (row.tokens[-1] in ends) for row in generations)


_SMALL = model_of("llama", VANILLA)


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=2, max_size=5), st.integers(0, 99))
def test_rows_that_leave_in_any_order(rows: list[tuple[int, int]], seed: int) -> None:
    """Each row has its own number of new tokens; rows that leave do not affect the others."""
    many = tokens(*(length for length, _ in rows), seed=seed)
    batch = [Prompt(number, ids, most) for number, (ids, (_, most)) in enumerate(zip(many, rows, strict=True))]
    generator = Generator(_SMALL, chunk=8)
    together = generator.generate(batch)
    assert ids_of(together) == [generator.generate([prompt])[0].tokens for prompt in batch]
    assert [len(row.tokens) for row in together] == [most for _, most in rows]


def test_the_pattern_is_searched_after_every_token() -> None:
    many = tokens(9, 30, 12)
    # "5 7 9" is the text of tokens 5, 7 and 9
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    batch = prompts(many)
    batch[1] = replace(batch[1], stops=Stops(pattern=r"^\d+ \d+ \d+$"))
    generator = Generator(_SMALL, tokenizer=tokenizer)
    generations, full = generator.generate(batch), [by_transformers(_SMALL, ids) for ids in many]
    assert ids_of(generations) == [full[0], full[1][:3], full[2]]
    assert [row.ended for row in generations] == ["length", "enough", "length"]
    shortened = [replace(batch[1], stops=replace(batch[1].stops, unsearched_tail=2))]
    assert ids_of(generator.generate(shortened)) == [full[1][:5]]


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_batches_are_split_when_memory_runs_out(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    most, raised, generate = 2, error("out of memory: cannot alloc"), Generator._generate

    def narrow(generator: Generator, batch: Any) -> Any:
        if len(batch) > most:
            raise raised
        return generate(generator, batch)

    generator, many, said = Generator(_SMALL, chunk=8), tokens(5, 12, 9, 30, 2), list[str]()
    monkeypatch.setattr(Generator, "_generate", narrow)
    assert ids_of(generator.generate(prompts(many), said.append)) == [by_transformers(_SMALL, ids) for ids in many]
    assert [re.findall(r"\d+", line) for line in said] == [["5", "2"], ["3", "1"]]
    most = 0
    with pytest.raises(ScoringError, match="12 tokens"):
        generator.generate(prompts(tokens(12)))
    raised = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        generator.generate(prompts(tokens(12, 3)))


@pytest.mark.parametrize("device", [CUDA])
def test_a_batch_beyond_a_gpus_memory_is_continued_alike(device: str) -> None:
    """With so many tokens that their keys and values are most of what is allocated."""
    model = model_of("llama", VANILLA, max_position_embeddings=4096).to(device)
    batch, generator, said = prompts(tokens(*range(1500, 2140, 10))), Generator(model), list[str]()
    expected = generator.generate(batch)
    with most_cuda_memory(int(0.7 * cuda_memory_of(lambda: generator.generate(batch)))):
        generations = generator.generate(batch, said.append)
    assert said[0].startswith(f"out of memory on {len(batch)} prompts")
    assert ids_of(generations) == ids_of(expected)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_tokens_have_about_the_largest_logit(device: str) -> None:
    """The model's own pass over the whole text rounds otherwise; another context's token is far below its largest."""
    model = model_of("llama", VARIANTS["integral"], dtype=torch.bfloat16).to(device)
    many = tokens(7, 40, 90, 41, 1, 65, beginning=1)
    for ids, row in zip(many, Generator(model, chunk=16).generate(prompts(many)), strict=True):
        text = torch.tensor([[*ids, *row.tokens]], device=device)
        with torch.inference_mode():
            logits = model(input_ids=text).logits[0, len(ids) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(row.tokens, device=device)[:, None])[:, 0]
        assert ((logits.amax(-1) - chosen) / (logits.amax(-1) - logits.mean(-1))).max() <= 0.05


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
BYTES = 2 * 3 * 4 * 16 * 4
"""Of a token: keys and values, three layers, four heads of 16, float32."""


@given(st.lists(st.tuples(TOKENS, st.integers(1, 9)), max_size=25), st.integers(1, 120), st.integers(1, 6),
       st.integers(1, 8))  # fmt: skip
def test_batches(rows: list[tuple[list[int], int]], budget: int, chunk: int, most_rows: int) -> None:
    """They fit; prompts with a common prefix of at least a chunk are contiguous; the longest families come first."""
    many = [Prompt(number, np.array(ids, np.int64), most) for number, (ids, most) in enumerate(rows)]
    batches = Capacity(budget, most_rows, chunk, 0).batches(many)
    order = [prompt for batch in batches for prompt in batch]
    assert sorted(prompt.index for prompt in order) == list(range(len(many)))
    for batch in batches:
        columns = max(len(prompt.tokens) for prompt in batch) + max(prompt.max_new_tokens for prompt in batch)
        assert len(batch) == 1 or (columns * len(batch) <= budget and len(batch) <= most_rows)
    beginnings = [tuple(prompt.tokens[:chunk]) if len(prompt.tokens) > chunk else prompt.index for prompt in order]
    families = [list(members) for _, members in groupby(zip(beginnings, order, strict=True), lambda pair: pair[0])]
    assert len({family[0][0] for family in families}) == len(families)
    lengths = [max(len(prompt.tokens) for _, prompt in family) for family in families]
    assert lengths == sorted(lengths, reverse=True)


def test_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the memory beside the weights, whatever other programs use; twice the tokens take longer."""
    model = _SMALL
    assert Generator(model_of("llama", VANILLA, dtype=torch.bfloat16)).token_bytes == BYTES / 2
    total = 4000 * BYTES + 1 + sum(weight.nbytes for weight in model.parameters())
    memory = psutil.virtual_memory()._replace(total=total, available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    generator = Generator(model)
    room, small = (capacity_of(generator, budget, 2048) for budget in (None, 77))
    assert capacity_of(generator, None, 2048, most_texts=3).most_rows == 3
    assert (room.token_bytes, room.tokens, room.most_rows, small.tokens) == (BYTES, 1000, 16, 77)
    speed = measured_speed(model, generator, 2048)
    seconds = speed.seconds(Prompt(0, tokens(60)[0], 5), room)
    assert 0 < 2 * seconds < min(10, speed.seconds(Prompt(0, tokens(120)[0], 10), room))


@pytest.mark.parametrize("tied", [False, True])
def test_work_is_that_of_weights_and_pairs(tied: bool) -> None:
    """A prompt's operations and the bytes read for its new tokens, here at one of each per second."""
    model = model_of("llama", VANILLA, tie_word_embeddings=tied)
    weights, embedding = sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()
    generator = Generator(model)
    speed = replace(measured_speed(model, generator, 2048), operations_a_second=1.0, bytes_a_second=1.0)
    operations = 2 * (weights - embedding) * 90 + 4 * 3 * model.config.hidden_size * 90**2 / 2
    read = 4 * (weights - (0 if tied else embedding)) / 2 + 100 * BYTES  # two rows of 100 tokens in 250
    seconds = speed.seconds(Prompt(0, tokens(90)[0], 10), capacity_of(generator, 250, 2048))
    assert seconds == operations + 10 * read
