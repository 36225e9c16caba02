"""Token by token, in chunks or at once: the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.marks import fast
from tests.models.variants.building import FAMILIES, VARIANTS, VOCABULARY, left_padded, model_of, random_ids

Tensor = torch.Tensor


def uncached(model: Any, ids: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """Greedy, with a whole forward pass for each token."""
    for _ in range(tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return ids


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
@torch.no_grad()
def test_generation(family: str, variant: str, implementation: str, cache: str) -> None:
    """Token for token what a greedy loop without a cache writes, batched, without and with left padding."""
    # Large weights; otherwise a random model repeats one token for any input
    model = model_of(family, VARIANTS[variant], implementation=implementation, initializer_range=0.3)
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    for paddings in ((0, 0, 0), (0, 3, 6)):
        scene = left_padded(paddings, 9)
        mask = scene.inputs["attention_mask"]
        found = model.generate(scene.ids, attention_mask=mask, cache_implementation=cache, **settings)
        assert torch.equal(found, uncached(model, scene.ids, mask, 10))
        assert len(set(found[:, 9:].flatten().tolist())) > 5
    # Alone and without padding, the last text is the same as in its batch
    assert torch.equal(uncached(model, scene.ids[2:, 6:], mask[2:, 6:], 10), found[2:, 6:])


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_prefill_in_pieces(family: str, variant: str, implementation: str, cache: Any) -> None:
    """The logits of one pass. float32: 2e-5 for logits up to 5, some forty roundings; measured 8e-6."""
    model = model_of(family, VARIANTS[variant], implementation=implementation)
    ids = random_ids(2, 24)
    whole = model(ids, use_cache=False).logits
    past = cache(config=model.config) if cache is DynamicCache else cache(config=model.config, max_cache_len=32)
    pieces = [model(piece, past_key_values=past).logits for piece in ids.split([5, 1, 11, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=2e-5)
    assert past.get_seq_length() == 24


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_no_token_sees_the_future(family: str, variant: str, implementation: str) -> None:
    """Other tokens from the eighth on: nothing before them changes, to the last bit, and all after them does."""
    model = model_of(family, VARIANTS[variant], implementation=implementation)
    ids = random_ids(2, 12)
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % VOCABULARY
    one, two = model(ids).logits, model(other).logits
    assert torch.equal(one[:, :7], two[:, :7])
    assert ((one[:, 7:] - two[:, 7:]).abs().amax(-1) > 1e-2).all()
