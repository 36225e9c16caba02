"""What of a model's attention cannot be recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from evalkit.benchmarks.attention.attention_calls import NAME, Unrecorded, recording
from evalkit.compatibility.transformers import attention_of
from tests.models.variants.building import VANILLA, model_of


def attend(module: Any, *, tokens: int = 5, keys: int | None = None, mask: Any = None, **settings: Any) -> Any:
    states = [torch.randn(1, 2, count, 4) for count in (tokens, keys or tokens, keys or tokens)]
    return AttentionInterface()[NAME](module, *states, mask, **settings)


def module(**attributes: Any) -> Any:
    return SimpleNamespace(is_causal=True, num_key_value_groups=1, **attributes)


def test_the_call_is_that_of_the_module() -> None:
    model, ours, other = model_of("llama", VANILLA), module(), module()
    with recording(model, [ours]) as calls:
        attend(other, tokens=3)
        attend(ours, scaling=0.7)
    seen = calls.take(ours)
    assert (seen.heads, seen.tokens) == (2, 5)
    assert (seen.whole().triu(1) == 0).all()
    assert attention_of(model.config) == "sdpa"
    with pytest.raises(Unrecorded, match="outside of a recording"):
        attend(ours)


def test_a_module_that_does_not_call() -> None:
    with recording(model_of("llama", VANILLA), [ours := module()]) as calls, pytest.raises(Unrecorded):
        calls.take(ours)


def test_two_calls_are_one_map_only_where_the_module_combines_maps() -> None:
    model = model_of("llama", VANILLA)
    for ours, allowed in ((module(), False), (module(effective_map=lambda maps, dtype: maps), True)):
        with recording(model, [ours]) as calls:
            attend(ours)
            attend(ours)
        if allowed:
            assert calls.take(ours).whole().shape == (2, 5, 5)
        else:
            with pytest.raises(Unrecorded, match="attends 2 times"):
                calls.take(ours)


def test_variants_of_an_earlier_evalkit_do_not_combine_maps() -> None:
    """Remote code of a checkpoint may lack the method."""
    with recording(model_of("llama", VANILLA), [ours := module(variant="differential")]) as calls:
        attend(ours)
    with pytest.raises(Unrecorded, match="does not combine maps"):
        calls.take(ours)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_bias": torch.zeros(1, 2, 5, 5)}, "passes position_bias"),
        ({"product": lambda *_: None}, "product"),
        ({"keys": 7}, "other keys"),
        ({"mask": torch.ones(1, 5, dtype=torch.bool)}, r"mask of shape \(1, 5\)"),
    ],
)
def test_features_that_are_not_supported(given: dict[str, Any], message: str) -> None:
    with recording(model_of("llama", VANILLA), []), pytest.raises(Unrecorded, match=message):
        attend(module(), **given)
