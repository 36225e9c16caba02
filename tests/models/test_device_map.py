"""Values of --device-map, and which device gets which layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import CheckpointError, UsageError
from evalkit.models import placement
from evalkit.models.parts import layer_counts
from evalkit.models.placement import Placement, automatic_placement, spread, tensor_bytes
from evalkit.models.spec import model_spec
from tests.models.loading import load_folder
from tests.models.variants.building import VANILLA, model_of
from tests.tiny import tiny_checkpoint

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=20)


def test_numbers_of_layers_by_device() -> None:
    counts = layer_counts("cuda:1=2,cuda:0=1,cpu=1,disk=1")
    assert counts is not None
    assert (counts.main, counts.layers) == ("cuda:1", ("cuda:1", "cuda:1", "cuda:0", "cpu", "disk"))
    assert layer_counts("none") is None and layer_counts("auto") is None


@pytest.mark.parametrize(
    "wrong", ["balanced", "", "cuda=3", "cuda:0=0", "cuda:0=1,,cpu=1", "cuda:0=1.5", "cpu=1,cpu=2", "disk=2", "CPU=1"]
)
def test_another_value_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--device-map") as caught:
        model_spec("demo", device_map=wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device_map", ["auto", "cpu=2"])
def test_a_device_beside_it_is_a_contradiction(device_map: str) -> None:
    with pytest.raises(UsageError, match=f"--device cuda:1 and --device-map {device_map} both choose the device"):
        model_spec("demo", device="cuda:1", device_map=device_map)
    assert model_spec("demo", device="cuda:1", device_map="none").device == "cuda:1"


def test_devices_and_layers_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path / "model", layers=3)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"cuda:1: this machine has 1 cuda device\(s\)"):
        load_folder(folder, device="auto", device_map="cuda:0=1,cuda:1=2")
    with pytest.raises(UsageError, match=r"places 4 layers; .*model has 3"):
        load_folder(folder, device="auto", device_map="cpu=2,disk=2")


@given(SIZES, st.integers(0, 40), st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_layers_stay_in_order_and_within_the_memory_of_each_device(
    sizes: list[int], rest: int, memory: list[int]
) -> None:
    found = spread(sizes, rest, memory)
    placed = [device for device in found if device is not None]
    assert placed == sorted(placed) and found[: len(placed)] == placed
    used = [sum(size for size, at in zip(sizes, found, strict=True) if at == device) for device in range(len(memory))]
    reserved = rest + (max(sizes) if None in found else 0)
    assert all(own <= size for own, size in zip(used[1:], memory[1:], strict=True))
    assert not used[0] or used[0] + reserved <= memory[0]


def test_equal_devices_get_equal_shares() -> None:
    assert spread([10] * 8, 0, [1000, 1000, 1000, 1000]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert spread([10] * 6, 20, [1000, 1000]) == [0, 0, 1, 1, 1, 1]
    assert spread([10] * 6, 0, [30, 20]) == [0, 0, 1, 1, None, None]


def test_auto_takes_one_device_where_it_holds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", VANILLA)
    size = tensor_bytes(model)
    memory = {"cuda:0": 2 * size, "cuda:1": 2 * size}
    monkeypatch.setattr(placement, "device_bytes", memory.__getitem__)
    assert automatic_placement("model", model, list(memory)) == Placement("cuda:0", ("cuda:0",) * 3)
    memory["cuda:0"] = size
    assert automatic_placement("model", model, list(memory)).layers == ("cuda:0", "cuda:1", "cuda:1")
    memory["cuda:1"] = size // 2
    assert automatic_placement("model", model, list(memory)).layers == ("cuda:0", "cuda:0", "cuda:1")
    memory |= {"cuda:0": size, "cuda:1": 0}
    assert automatic_placement("model", model, list(memory)).layers == ("cuda:0", "cpu", "cpu")
    memory["cuda:0"] = size // 8
    with pytest.raises(CheckpointError, match=r"embedding and head .* do not fit into the memory of cuda:0"):
        automatic_placement("model", model, list(memory))
    assert automatic_placement("model", model, []).is_single


def test_the_line_says_what_is_where() -> None:
    found = Placement("cuda:0", ("cuda:0", "cuda:1", "cuda:1", "cpu", "disk"))
    assert (found.devices, found.is_single) == (("cuda:0", "cuda:1"), False)
    assert found.summary() == {"cuda:0": "0", "cuda:1": "1-2", "cpu": "3", "disk": "4"}
    assert found.describe() == (
        "embedding and head on cuda:0, layers 0 on cuda:0, layers 1-2 on cuda:1, layers 3 stored on cpu, layers 4 "
        "stored on the disk; stored layers are copied to cuda:0 each time they run, which is slow"
    )
    assert Placement("cpu", ("cpu", "disk")).devices == ("cpu",)
