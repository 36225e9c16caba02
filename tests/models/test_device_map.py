"""Values of --device-map, and which device gets which layer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.errors import CheckpointError, UsageError
from evalkit.models import parts
from evalkit.models.loading.spec import model_spec
from evalkit.models.parts import Placement, automatic_placement, layers_of, tensor_bytes
from tests.models.variants.building import VANILLA, model_of


@pytest.mark.parametrize("wrong", ["balanced", "", "cuda=3", "cpu=1", "Auto"])
def test_another_value_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--device-map") as caught:
        model_spec("demo", device_map=wrong)
    assert "\n" not in str(caught.value)


def test_a_device_beside_it_is_a_contradiction() -> None:
    with pytest.raises(UsageError, match="--device cuda:1 and --device-map auto both choose the device"):
        model_spec("demo", device="cuda:1", device_map="auto")
    assert model_spec("demo", device="cuda:1", device_map="none").device == "cuda:1"


@given(st.lists(st.integers(4, 400).map(lambda share: share / 100), min_size=1, max_size=4))
def test_layers_stay_in_order_and_within_the_memory_of_each_device(shares: list[float]) -> None:
    model = model_of("llama", VANILLA)
    layer = tensor_bytes(layers_of(model)[0])
    rest = tensor_bytes(model) - 3 * layer
    memory = {f"cuda:{number}": int(share * tensor_bytes(model)) for number, share in enumerate(shares)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parts, "device_bytes", memory.__getitem__)
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


def test_auto_takes_one_device_where_it_holds_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", VANILLA)
    size = tensor_bytes(model)
    memory = {"cuda:0": 2 * size, "cuda:1": 2 * size}
    monkeypatch.setattr(parts, "device_bytes", memory.__getitem__)
    assert automatic_placement("model", model, list(memory)) is None
    memory["cuda:0"] = size
    assert automatic_placement("model", model, list(memory)) == Placement("cuda:0", ("cuda:0", "cuda:1", "cuda:1"))
    memory["cuda:1"] = size // 2
    assert automatic_placement("model", model, list(memory)) == Placement("cuda:0", ("cuda:0", "cuda:1", "cpu"))
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
