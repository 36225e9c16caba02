"""Models that are spread over devices give the numbers of one device, to the last bit, when scoring and generating.

GPUs are simulated (`tests/simulated.py`) and, under the marker `gpu`, real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import evalkit
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import run_plan
from evalkit.errors import CheckpointError, UsageError
from evalkit.generation.generator import Generator
from evalkit.models import parts
from evalkit.models.memory import device_bytes
from evalkit.models.parts import Placement, dispatch, layers_of, tensor_bytes
from evalkit.runs.batch_devices import place_of
from evalkit.runs.folder import Run
from evalkit.scoring.architecture import kernels_for, memory_beside_weights
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import batches_of
from evalkit.scoring.sequences import Sequences, SequenceSet
from tests.benchmarks.test_every_benchmark import Silent, asked, tables
from tests.documents import made_up
from tests.generation.made import prompts, tokens
from tests.generation.test_generator import KINDS, SIZES
from tests.marks import fast
from tests.models.loading import load_folder
from tests.models.variants.building import FAMILIES, VANILLA, VARIANTS, model_of
from tests.simulated import MEMORY, DevicesMixed, simulate, simulated_devices
from tests.tiny import tiny_checkpoint

VOCABULARY = 64
ATTENTIONS = {name: VARIANTS[name] for name in ("cog", "differential", "integral")} | {"vanilla": VANILLA}
CYCLES = {
    "two GPUs": ("cuda:1", "cuda:0", "cuda:1"),
    "GPUs and CPU": ("cuda:0", "cpu", "cuda:1"),
}
"""Devices of the layers, in turn: each kind of change from one layer to the next."""


def items() -> Sequences:
    """Questions with three choices each, after one instruction that is long enough to be a trunk."""
    dice = np.random.default_rng(0)
    instruction, made = dice.integers(1, VOCABULARY, 30), []
    for index in range(6):
        stem = np.concatenate((instruction, dice.integers(1, VOCABULARY, int(dice.integers(5, 20)))))
        choices = [np.concatenate((stem, dice.integers(1, VOCABULARY, int(dice.integers(1, 9))))) for _ in range(3)]
        masks = tuple(np.arange(len(choice)) >= len(stem) for choice in choices)
        sequences = tuple(choice.astype(np.int32) for choice in choices)
        made.append(SequenceSet(f"question {index}", "task", sequences, masks))
    return Sequences.of(made)


def numbers(model: Any) -> tuple[list[np.ndarray], list[list[int]], str]:
    """Return log-probabilities of each sequence, generated tokens of some prompts, and how prefixes were shared."""
    kernels = tuple(kernel for kernel in kernels_for(model) if kernel != "flex")
    engine = Engine(model, 128, lambda _: None, kernels=kernels)
    engine.check(items())
    batches = batches_of(items(), engine.budget)
    assert len(batches) > 1 and any(len(batch.trunk) for batch in batches)
    scored = {item: members for batch in batches for item, members in engine.score(batch)}
    generator = Generator(model, chunk=8)
    texts = generator.generate(prompts([*tokens(7, 23, 12), *tokens(21, 25, beginning=16)], most=6))
    how = f"{engine.kernel} {engine.shares} {engine.why_not} {generator.without_cache}"
    return [one.logprobs for index in sorted(scored) for one in scored[index]], [one.tokens for one in texts], how


@contextmanager
def devices() -> Iterator[None]:
    """Simulate two GPUs."""
    with pytest.MonkeyPatch.context() as patched, simulated_devices():
        simulate(patched, 2)
        yield


def compare(model: Any, layout: str) -> None:
    """Compare the numbers of a model on the main device with those of its copy that is spread."""
    cycle = CYCLES[layout]
    layers = tuple(cycle[number % len(cycle)] for number in range(len(layers_of(model))))
    assert len(layers) > 1
    other, sizes = deepcopy(model), [one.numel() for one in model.parameters()]
    with devices():
        expected, texts, how = numbers(model.to("cuda:0"))
        dispatch("model", other, Placement("cuda:0", layers))
        assert set(other.hf_device_map.values()) >= set(layers)
        found, found_texts, found_how = numbers(other)
        assert found_how == how
        assert found_texts == texts
        assert all(np.array_equal(one, own, equal_nan=True) for one, own in zip(found, expected, strict=True))
        assert [one.numel() for one in other.parameters()] == sizes


@pytest.mark.parametrize("layout", fast(["GPUs and CPU"], CYCLES))
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_the_four_attentions(family: str, attention: str, layout: str) -> None:
    compare(model_of(family, ATTENTIONS[attention]), layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CYCLES)
def test_two_attentions_in_each_layout(layout: str) -> None:
    compare(model_of("gpt_neox", ATTENTIONS["differential"]), layout)
    compare(model_of("qwen2", VANILLA), layout)


@pytest.mark.parametrize("layout", fast(["GPUs and CPU"], CYCLES))
@pytest.mark.parametrize("kind", fast(["bloom"], KINDS))
def test_other_architectures(kind: str, layout: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    # The kernel of experts asks for a real GPU where weights are on one
    compare(AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval(), layout)


def test_bfloat16_weights_are_compared_in_float32_from_the_cpu() -> None:
    compare(model_of("llama", VANILLA).to(torch.bfloat16), "GPUs and CPU")


def test_the_simulation_detects_tensors_of_two_devices() -> None:
    with simulated_devices():
        head = torch.nn.Linear(4, 4).to("cuda:0")
        assert head(torch.ones(2, 4, device="cuda:0")).device == torch.device("cuda:0")
        with pytest.raises(DevicesMixed, match="linear"):
            head(torch.ones(2, 4, device="cuda:1"))
        with pytest.raises(DevicesMixed, match="linear"):
            head(torch.ones(2, 4))


def test_memory_beside_the_weights_is_that_of_each_device() -> None:
    model = model_of("llama", VANILLA)
    layer = sum(weight.nbytes for weight in layers_of(model)[0].parameters())
    rest = sum(weight.nbytes for weight in model.parameters()) - 3 * layer
    assert memory_beside_weights(model) == {torch.device("cpu"): device_bytes("cpu") - rest - 3 * layer}
    with devices():
        dispatch("model", model, Placement("cuda:0", ("cuda:0", "cuda:1", "cpu")))
        found = {str(device): own for device, own in memory_beside_weights(model).items()}
        # The stored layer runs on the first device
        assert found == {"cuda:0": MEMORY - rest - 2 * layer, "cuda:1": MEMORY - layer}
        generator = Generator(model)
        assert [str(device) for device in generator.token_bytes_on] == ["cuda:0", "cuda:1"]
        assert sum(generator.token_bytes_on.values()) == generator.token_bytes


def test_the_address_of_a_shared_weight_is_not_given_to_another_weight() -> None:
    """By it accelerate would take a stored weight for the shared one."""
    model = model_of("llama", VANILLA, tie_word_embeddings=True)
    weight = model.get_input_embeddings().weight
    assert weight is model.lm_head.weight
    address, shape = weight.data_ptr(), weight.shape
    del weight
    with devices():
        dispatch("model", model, Placement("cuda:0", ("cuda:0", "cpu", "cpu")))
    assert address not in {one.data_ptr() for one in [torch.empty(shape) for _ in range(1000)]}


def test_a_weight_of_two_devices_is_refused() -> None:
    model = model_of("llama", VANILLA)
    first, _, last = layers_of(model)
    last.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj.weight and .*layers.2.* are one weight"):
        dispatch("model", model, Placement("cuda:0", ("cuda:0", "cuda:0", "cpu")))


def test_a_model_that_accelerate_spreads_is_refused_in_memory(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    loaded = load_folder(folder)
    loaded.model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(
        CheckpointError, match=r"is spread over cpu, disk by accelerate; evaluate its checkpoint folder"
    ):
        evalkit.evaluate(loaded.model, tokenizer=loaded.tokenizer)
    with pytest.raises(UsageError, match="device_map: does not apply to a model in memory"):
        evalkit.evaluate(load_folder(folder).model, tokenizer=loaded.tokenizer, device_map="auto")
    with pytest.raises(UsageError, match="already loaded; leave out device_map"):
        Harness(loaded, device_map="auto")


@pytest.mark.parametrize("kind", fast(["multiple_choice"], ["multiple_choice", "lm_eval", "needle"]))
def test_a_run_has_the_same_rows_and_says_what_was_where(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path / "model", window=1024, layers=4)
    made_up(tmp_path / "documents", count=6)

    def run(device_map: str) -> Run:
        options = asked(kind, tmp_path, tmp_path / device_map) | {"device": "auto", "device_map": device_map}
        return run_plan(planned(tmp_path / "model", options, Silent().say), Silent())

    with devices():
        ordinary = run("none")
    size = tensor_bytes(load_folder(tmp_path / "model").model)
    monkeypatch.setattr(parts, "device_bytes", lambda _: size)
    with devices():
        spread = run("auto")
    assert spread.folder.name == ordinary.folder.name
    assert tables(spread).keys() == tables(ordinary).keys()
    for name, table in tables(ordinary).items():
        pd.testing.assert_frame_equal(tables(spread)[name], table, check_exact=True)
    assert spread.manifest["loaded"]["device_map"] == {"cuda:0": "0", "cuda:1": "1-3"}
    assert "device_map" not in ordinary.manifest["loaded"]


def test_several_devices_are_one_kind_where_their_hardware_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, 2)
    assert place_of("cuda:0+cuda:1", "tiles").kind == ("cuda", "Simulated")
    assert place_of("cuda:0", "flex").kind == ("cuda", "Simulated")


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize(
    "layers", [("cuda:0", "cuda:1", "cuda:1"), ("cuda:1", "cuda:0", "cpu"), ("cpu", "cuda:1", "cpu")]
)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_real_gpus_give_the_numbers_of_one(family: str, attention: str, layers: tuple[str, ...]) -> None:
    model = model_of(family, ATTENTIONS[attention])
    other = deepcopy(model)
    expected, texts, _ = numbers(model.to("cuda:0"))
    dispatch("model", other, Placement("cuda:0", layers))
    found, found_texts, _ = numbers(other)
    assert found_texts == texts
    for one, own in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, own, rtol=1e-4)


@pytest.mark.gpu
@needs_two
def test_auto_spreads_a_model_over_two_real_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path / "model", layers=4)
    size = tensor_bytes(load_folder(folder).model)
    monkeypatch.setattr(parts, "device_bytes", lambda _: size)
    loaded = load_folder(folder, device="auto", spread_over_gpus=True)
    assert loaded.device == "cuda:0+cuda:1"
    assert {one.device.index for one in loaded.model.parameters()} == {0, 1}
