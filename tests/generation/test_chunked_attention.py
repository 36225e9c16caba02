"""A chunk's attention, compared with transformers' own under additive masks and shared heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from evalkit.generation.cache import NAME, chunked_attention
from tests.generation.test_architectures import KINDS, SIZES

CHUNK = 8


def made(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS.get(kind, {}) | settings))
    return AutoModelForCausalLM.from_config(config).eval()


@torch.inference_mode()
def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    parts = [model.base_model(part, past_key_values=cache).last_hidden_state for part in ids.split(CHUNK, dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen2", "diffllama"])
def test_the_same_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(kind)
    ids = torch.randint(2, 64, (1, 3 * CHUNK + 1))
    expected = hidden(model, ids)
    product, calls = torch.nn.functional.scaled_dot_product_attention, []

    def spy(query: torch.Tensor, key: torch.Tensor, *rest: Any, **settings: Any) -> torch.Tensor:
        mask = settings["attn_mask"]
        calls.append((query.shape[2], key.shape[1] < query.shape[1], mask is None or mask.dtype.is_floating_point))
        return product(query, key, *rest, **settings)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spy)
    with chunked_attention(model):
        torch.testing.assert_close(hidden(model, ids), expected, rtol=1e-6, atol=1e-6)
    chunks = [call[1:] for call in calls if call[0] == CHUNK][-2:]
    assert chunks == [(True, True)] * 2
    assert model.config._attn_implementation == "sdpa"


def test_a_row_of_padding_only_is_no_nan() -> None:
    model = made("llama")
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with torch.inference_mode(), chunked_attention(model):
        found = model.base_model(torch.randint(2, 64, (2, 4)), attention_mask=mask).last_hidden_state
    assert found.isfinite().all()


@pytest.mark.parametrize(("kind", "attention"), [("falcon", "sdpa"), ("llama", "eager")])
def test_others_keep_their_own(kind: str, attention: str) -> None:
    model = made(kind, attn_implementation=attention)
    with chunked_attention(model):
        assert model.config._attn_implementation == attention != NAME
