"""Values of --device-map, and which device gets which layer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import CheckpointError, UsageError
from evalkit.models import parts
from evalkit.models.parts import Placement, automatic_placement, spread, tensor_bytes
from evalkit.models.spec import model_spec
from tests.models.variants.building import VANILLA, model_of

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@pytest.mark.parametrize("wrong", ["balanced", "", "cuda=3", "cpu=1", "Auto"])
def test_another_value_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--device-map") as caught:
        model_spec("demo", device_map=wrong)
    assert "\n" not in str(caught.value)


def test_a_device_beside_it_is_a_contradiction() -> None:
    with pytest.raises(UsageError, match="--device cuda:1 and --device-map auto both choose the device"):
        model_spec("demo", device="cuda:1", device_map="auto")
    assert model_spec("demo", device="cuda:1", device_map="none").device == "cuda:1"


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
    monkeypatch.setattr(parts, "device_bytes", memory.__getitem__)
    assert automatic_placement("model", model, list(memory)) is None
    memory["cuda:0"] = size
    assert automatic_placement("model", model, list(memory)) == Placement("cuda:0", ("cuda:0", "cuda:1", "cuda:1"))
    memory["cuda:1"] = size // 2
    assert automatic_placement("model", model, list(memory)) == Placement("cuda:0", ("cuda:0", "cuda:0", "cuda:1"))
    memory |= {"cuda:0": size, "cuda:1": 0}
    assert automatic_placement("model", model, list(memory)) == Placement("cuda:0", ("cuda:0", "cpu", "cpu"))
    memory["cuda:0"] = size // 8
    with pytest.raises(CheckpointError, match=r"embedding and head .* do not fit into the memory of cuda:0"):
        automatic_placement("model", model, list(memory))
    assert automatic_placement("model", model, []) is None


def test_the_line_says_what_is_where() -> None:
    found = Placement("cuda:0", ("cuda:0", "cuda:1", "cuda:1", "cpu"))
    assert found.devices == ("cuda:0", "cuda:1")
    assert found.summary() == {"cuda:0": "0", "cuda:1": "1-2", "cpu": "3"}
    assert found.describe() == (
        "embedding and head on cuda:0, layers 0 on cuda:0, layers 1-2 on cuda:1, layers 3 stored on cpu; stored layers "
        "are copied to cuda:0 each time they run, which is slow"
    )
