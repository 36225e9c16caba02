"""The check of maps in blocks passes for every attention, and finds small errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evalkit.benchmarks.attention import attention_calls
from evalkit.benchmarks.attention.attention_calls import CallMap
from evalkit.benchmarks.attention.map_blocks import MapReader
from tests.analysis.architectures import model_named
from tests.analysis.test_map_blocks import TOKENS, fail, maps_of, recorded
from tests.models.variants.building import VANILLA, VARIANTS, model_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["vanilla", *VARIANTS])
def test_the_check_passes(variant: str, dtype: torch.dtype) -> None:
    """The reader fails the test if the check says anything."""
    MapReader(model_of("llama", VARIANTS.get(variant, VANILLA), dtype=dtype), fail).check(TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_finds_a_wrong_scale(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def wrong(scale: float, **arguments: Any) -> CallMap:
        return CallMap(scale=scale * 1.001, **arguments)

    model = model_of("llama", VANILLA, dtype=dtype, initializer_range=0.15)
    monkeypatch.setattr(attention_calls, "CallMap", wrong)
    lines: list[str] = []
    reader = MapReader(model, lines.append)
    reader.check(TOKENS)
    assert len(lines) == 1
    assert "differs by" in lines[0]
    found = maps_of(reader)
    assert all(torch.equal(found[layer], seen.float()) for layer, seen in enumerate(recorded(model)))
    reader.check(TOKENS)
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "gpt2", "bamba"])
def test_the_check_passes_for_other_architectures(name: str) -> None:
    MapReader(model_named(name), fail).check(TOKENS)


def test_an_error_of_one_layer_is_not_one_of_later_layers() -> None:
    """Each layer is compared with the inputs that it has under eager attention."""
    model = model_of("llama", VANILLA)
    model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda _, __, out: out * (1.5 if model.config._attn_implementation == "eager" else 1.0)
    )
    lines: list[str] = []
    MapReader(model, lines.append).check(TOKENS)
    assert lines == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_passes_for_the_demo_checkpoint(demo: Any, dtype: str) -> None:
    from evalkit.models.loading.load import load
    from evalkit.models.loading.locate import locate

    MapReader(load(locate(str(demo)), device="cpu", dtype=dtype).model, fail).check(torch.arange(5, 69).numpy())
