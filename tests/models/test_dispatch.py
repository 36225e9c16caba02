"""Models that are spread over devices give the numbers of one device, to the last bit, when scoring and generating.

The CPU and a disk are real. Several GPUs are simulated (`tests/simulated.py`) and, under the marker `gpu`, real.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from evalkit.errors import CheckpointError
from evalkit.generation.generator import Generator
from evalkit.models.dispatch import dispatch
from evalkit.models.parts import layers_of
from evalkit.models.placement import Placement
from evalkit.scoring.architecture import kernels_for
from evalkit.scoring.budget import memory_beside_weights, weight_bytes
from evalkit.scoring.engine import Engine
from evalkit.scoring.memory import device_bytes
from evalkit.scoring.pack import SequenceSet, plan
from tests.generation.made import prompts, tokens
from tests.generation.test_architectures import KINDS, SIZES
from tests.models.variants.building import FAMILIES, VANILLA, VARIANTS, model_of
from tests.simulated import DevicesMixed, simulate, simulated_devices

VOCABULARY = 64
ATTENTIONS = {name: VARIANTS[name] for name in ("cog", "differential", "integral")} | {"vanilla": VANILLA}
CYCLES = {
    "disk": ("cpu", "disk", "disk"),
    "two GPUs": ("cuda:1", "cuda:0", "cuda:1"),
    "GPUs, CPU and disk": ("cuda:0", "cpu", "cuda:1", "disk"),
}
"""Devices of the layers, in turn: each kind of change from one layer to the next."""


def items() -> list[SequenceSet]:
    """Questions with three choices each, after one instruction that is long enough to be a trunk."""
    dice = np.random.default_rng(0)
    instruction, made = dice.integers(1, VOCABULARY, 30), []
    for index in range(6):
        stem = np.concatenate((instruction, dice.integers(1, VOCABULARY, int(dice.integers(5, 20)))))
        choices = [np.concatenate((stem, dice.integers(1, VOCABULARY, int(dice.integers(1, 9))))) for _ in range(3)]
        masks = tuple(np.arange(len(choice)) >= len(stem) for choice in choices)
        sequences = tuple(choice.astype(np.int32) for choice in choices)
        made.append(SequenceSet(index, f"question {index}", "task", sequences, masks))
    return made


def numbers(model: Any) -> tuple[list[np.ndarray], list[list[int]], str]:
    """Return log-probabilities of each sequence, generated tokens of some prompts, and how prefixes were shared."""
    kernels = tuple(kernel for kernel in kernels_for(model) if kernel != "flex")
    engine = Engine(model, 128, lambda _: None, kernels=kernels)
    engine.check(items())
    batches = plan(items(), engine.budget)
    assert len(batches) > 1 and any(len(batch.trunk) for batch in batches)
    scored = {item.index: members for batch in batches for item, members in engine.score(batch)}
    generator = Generator(model, chunk=8)
    texts = generator.generate(prompts([*tokens(7, 23, 12), *tokens(21, 25, beginning=16)], most=6))
    how = f"{engine.kernel} {engine.shares} {engine.why_not} {generator.without_cache}"
    return [one.logprobs for index in sorted(scored) for one in scored[index]], [one.tokens for one in texts], how


def devices(layout: str) -> Any:
    return simulated_devices() if "GPU" in layout else nullcontext()


def compare(model: Any, layout: str) -> None:
    """Compare the numbers of a model on the main device with those of its copy that is spread."""
    cycle = CYCLES[layout]
    main = next((device for device in ("cuda:0", "cpu") if device in cycle))
    layers = tuple(cycle[number % len(cycle)] for number in range(len(layers_of(model))))
    assert len(layers) > 1
    other, sizes = deepcopy(model), [one.numel() for one in model.parameters()]
    with devices(layout):
        expected, texts, how = numbers(model.to(main))
        dispatch("model", other, Placement(main, layers))
        assert set(other.hf_device_map.values()) >= set(layers)
        found, found_texts, found_how = numbers(other)
        assert found_how == how
        assert found_texts == texts
        assert all(np.array_equal(one, own, equal_nan=True) for one, own in zip(found, expected, strict=True))
        assert [one.numel() for one in other.parameters()] == sizes


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, 2)


@pytest.mark.parametrize("layout", CYCLES)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_four_attentions(family: str, attention: str, layout: str) -> None:
    compare(model_of(family, ATTENTIONS[attention]), layout)


@pytest.mark.parametrize("layout", CYCLES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_architectures(kind: str, layout: str) -> None:
    torch.manual_seed(0)
    compare(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))).eval(), layout)
