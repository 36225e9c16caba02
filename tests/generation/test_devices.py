"""Greedy texts equal transformers' own on every kind of device, also when a batch does not fit in memory."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from evalkit.generation.generator import Generator
from tests.devices import CUDA, DEVICES, cuda_memory_of, most_cuda_memory
from tests.generation.made import by_transformers, prompts, tokens
from tests.generation.test_generator import ids_of
from tests.models.variants.building import FAMILIES, VANILLA, VARIANTS, model_of

ATTENTIONS = {"vanilla": VANILLA, "integral": VARIANTS["integral"]}
LENGTHS = (7, 40, 90, 41, 1, 65)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", [CUDA])  # on a CPU: test_generator.py
def test_a_batch_gives_what_transformers_gives_one_by_one(device: str, family: str, attention: str) -> None:
    model = model_of(family, ATTENTIONS[attention]).to(device)
    many = tokens(*LENGTHS, beginning=1)
    found = Generator(model, chunk=16).generate(prompts(many))
    assert ids_of(found) == [by_transformers(model, ids) for ids in many]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_tokens_have_about_the_largest_logit(device: str, attention: str) -> None:
    """The model's own pass over the whole text rounds otherwise; another context's token is far below its largest."""
    model = model_of("llama", ATTENTIONS[attention], dtype=torch.bfloat16).to(device)
    many = tokens(*LENGTHS, beginning=1)
    gaps = []
    for ids, one in zip(many, Generator(model, chunk=16).generate(prompts(many)), strict=True):
        text = torch.tensor([[*ids, *one.tokens]], device=device)
        with torch.inference_mode():
            logits = model(input_ids=text).logits[0, len(ids) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(one.tokens, device=device)[:, None])[:, 0]
        gaps.append((logits.amax(-1) - chosen) / (logits.amax(-1) - logits.mean(-1)))
    assert torch.cat(gaps).max() <= 0.05


class Narrow(Generator):
    """A generator that fails on larger batches, like a CUDA device without memory for them."""

    most = sys.maxsize

    def _generate(self, batch: Any) -> Any:
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super()._generate(batch)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_that_memory_does_not_hold_is_split_and_continued_alike(device: str) -> None:
    # On a CUDA device with so many tokens that their keys and values are most of what is allocated
    lengths = range(1500, 2140, 10) if device == "cuda" else (5, 12, 9, 30, 2, 17)
    model = model_of("llama", VANILLA, max_position_embeddings=4096).to(device)
    batch, generator, said = prompts(tokens(*lengths)), Narrow(model, chunk=512), []
    expected = generator.generate(batch)
    if device == "cpu":
        generator.most = 4
        found = generator.generate(batch, said.append)
    else:
        with most_cuda_memory(int(0.7 * cuda_memory_of(lambda: generator.generate(batch)))):
            found = generator.generate(batch, said.append)
    assert re.fullmatch(rf"out of memory on {len(batch)} prompts: going on with {len(batch) // 2}", said[0])
    assert ids_of(found) == ids_of(expected)
    for prompt, one in list(zip(batch, found, strict=True))[::5]:
        assert one.tokens == by_transformers(model, prompt.tokens)
