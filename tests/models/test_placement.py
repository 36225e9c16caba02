"""--device-map: which device gets which layer; spread models give the numbers of one device, to the last bit.

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
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import evalkit
from evalkit.display import Progress
from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.generation.generator import Generator
from evalkit.models import memory as placing
from evalkit.models.loading.spec import model_spec
from evalkit.models.memory import Placement, automatic_placement, device_bytes, dispatch, tensor_bytes
from evalkit.models.parts import layers_of
from evalkit.runs.folder import Run
from evalkit.scoring.architecture import kernels_for, memory_beside_weights
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import Sequences, SequenceSet, batches_of
from tests.documents import made_up
from tests.generation.made import prompts, tokens
from tests.generation.test_generator import KINDS, SIZES
from tests.marks import fast
from tests.models.loading import load_folder
from tests.models.variants.building import FAMILIES, VANILLA, VARIANTS, model_of
from tests.simulated import MEMORY, simulate, simulated_devices
from tests.tiny import tiny_checkpoint

VOCABULARY = 64
ATTENTIONS = {name: VARIANTS[name] for name in ("cog", "differential", "integral")} | {"vanilla": VANILLA}
CYCLES = {"two GPUs": ("cuda:1", "cuda:0", "cuda:1"), "GPUs and CPU": ("cuda:0", "cpu", "cuda:1")}
"""Devices of the layers, in turn: each kind of change from one layer to the next."""


def test_values_that_contradict() -> None:
    for wrong in ("balanced", ""):
        with pytest.raises(UnknownNameError, match="device_map"):
            model_spec("demo", device_map=wrong)
    with pytest.raises(UsageError, match="--device cuda:1 and --device-map auto"):
        model_spec("demo", device="cuda:1", device_map="auto")


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama", VANILLA)


@given(shares=st.lists(st.integers(4, 400).map(lambda share: share / 100), min_size=1, max_size=4))
def test_layers_stay_in_order_and_within_the_memory_of_each_device(model: Any, shares: list[float]) -> None:
    layer = tensor_bytes(layers_of(model)[0])
    rest = tensor_bytes(model) - 3 * layer
    memory = {f"cuda:{number}": int(share * tensor_bytes(model)) for number, share in enumerate(shares)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(placing, "device_bytes", memory.__getitem__)
        try:
            placement = automatic_placement("model", model, list(memory))
        except CheckpointError as error:
            assert "do not fit into the memory of cuda:0" in str(error)
            return
    if placement is None:
        assert memory["cuda:0"] > tensor_bytes(model)
        return
    order = [*memory, "cpu"]
    places = [order.index(device) for device in placement.layers]
    assert places == sorted(places)
    for device, size in memory.items():
        used = layer * placement.layers.count(device) + (rest if device == "cuda:0" else 0)
        # A stored layer runs on the first device
        reserved = layer if device == "cuda:0" and "cpu" in placement.layers else 0
        assert used + reserved <= size or not used


def test_the_line_says_what_is_where() -> None:
    placement = Placement("cuda:0", ("cuda:0", "cuda:1", "cuda:1", "cpu"))
    assert placement.devices == ("cuda:0", "cuda:1")
    assert placement.summary() == {"cuda:0": "0", "cuda:1": "1-2", "cpu": "3"}
    assert all(words in placement.describe() for words in ("layers 1-2 on cuda:1", "layers 3 stored on cpu"))


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
    texts = generator.generate(prompts([*tokens(7, 23, 12), *tokens(21, 25, beginning=16)], most=4))
    how = f"{engine.kernel} {engine.way} {engine.why} {generator.without_cache}"
    return [row.logprobs for index in sorted(scored) for row in scored[index]], [text.tokens for text in texts], how


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
    other, sizes = deepcopy(model), [weight.numel() for weight in model.parameters()]
    with devices():
        expected, texts, how = numbers(model.to("cuda:0"))
        dispatch("model", other, Placement("cuda:0", layers))
        assert set(other.hf_device_map.values()) >= set(layers)
        spread, *others = numbers(other)
        assert others == [texts, how]
        assert all(np.array_equal(row, own, equal_nan=True) for row, own in zip(spread, expected, strict=True))
        assert [weight.numel() for weight in other.parameters()] == sizes


@pytest.mark.parametrize("layout", fast(["GPUs and CPU"], CYCLES))
@pytest.mark.parametrize("attention", fast(["differential"], ATTENTIONS))
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_the_four_attentions(family: str, attention: str, layout: str) -> None:
    compare(model_of(family, ATTENTIONS[attention]), layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CYCLES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_architectures(kind: str, layout: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    # The kernel of experts asks for a real GPU where weights are on one
    compare(AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval(), layout)


def test_memory_beside_the_weights_is_that_of_each_device() -> None:
    model = model_of("llama", VANILLA)
    layer = sum(weight.nbytes for weight in layers_of(model)[0].parameters())
    rest = sum(weight.nbytes for weight in model.parameters()) - 3 * layer
    assert memory_beside_weights(model) == {torch.device("cpu"): device_bytes("cpu") - rest - 3 * layer}
    with devices():
        dispatch("model", model, Placement("cuda:0", ("cuda:0", "cuda:1", "cpu")))
        beside = {str(device): size for device, size in memory_beside_weights(model).items()}
        # The stored layer runs on the first device
        assert beside == {"cuda:0": MEMORY - rest - 2 * layer, "cuda:1": MEMORY - layer}


def test_shared_weights() -> None:
    """By its address accelerate would take a stored weight for a shared one, were that memory freed."""
    model = model_of("llama", VANILLA, tie_word_embeddings=True)
    weight = model.get_input_embeddings().weight
    address, shape = weight.data_ptr(), weight.shape
    del weight
    with devices():
        dispatch("model", model, Placement("cuda:0", ("cuda:0", "cpu", "cpu")))
    assert address not in {tensor.data_ptr() for tensor in [torch.empty(shape) for _ in range(1000)]}
    model = model_of("llama", VANILLA)
    first, _, last = layers_of(model)
    last.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(CheckpointError, match=r"layers.0 and .*layers.2 have one weight"):
        dispatch("model", model, Placement("cuda:0", ("cuda:0", "cuda:0", "cpu")))


@pytest.mark.parametrize("suite", fast(["zeroshot8"], ["zeroshot8", "needle"]))
def test_a_run_has_the_same_rows_and_says_what_was_where(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoint(tmp_path / "model", window=1024, layers=4)
    options: dict[str, Any] = {"settings": {"lengths": (300,), "depths": (50,), "repeats": 1}}
    if suite == "zeroshot8":
        made_up(tmp_path / "documents", count=2)
        options = {"tasks": "piqa", "data_dir": tmp_path / "documents", "allow_unofficial_data": True}

    def run(device_map: str) -> Run:
        output, progress = tmp_path / device_map, Progress(live=False)
        with devices():
            return evalkit.evaluate(
                model, suite=suite, device_map=device_map, output=output, progress=progress, **options
            )

    ordinary = run("none")
    size = tensor_bytes(load_folder(model).model)
    monkeypatch.setattr(placing, "device_bytes", lambda _: size)
    spread = run("auto")
    assert spread.folder.name == ordinary.folder.name
    for name in ordinary.files:
        if name.endswith("parquet"):
            mine, expected = (
                run.table(name, ()).drop(columns="seconds", errors="ignore") for run in (spread, ordinary)
            )
            pd.testing.assert_frame_equal(mine, expected, check_exact=True)
    assert spread.manifest["loaded"]["device_map"] == {"cuda:0": "0", "cuda:1": "1-3"}
    assert "device_map" not in ordinary.manifest["loaded"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("layers", [("cuda:0", "cuda:1", "cuda:1"), ("cuda:1", "cuda:0", "cpu")])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_real_gpus_give_the_numbers_of_one(attention: str, layers: tuple[str, ...]) -> None:
    model = model_of("llama", ATTENTIONS[attention])
    other = deepcopy(model)
    expected, texts, _ = numbers(model.to("cuda:0"))
    dispatch("model", other, Placement("cuda:0", layers))
    spread, spread_texts, _ = numbers(other)
    assert spread_texts == texts
    for row, own in zip(spread, expected, strict=True):
        np.testing.assert_allclose(row, own, rtol=1e-4)
