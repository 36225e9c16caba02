"""Cog attention's blockwise product, compared with its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from evalkit.models.variants import signed
from evalkit.models.variants.signed import signed_attention, signed_map
from tests.models.variants.building import COG, causal, left_padded, model_of
from tests.models.variants.literal import largest_error, softmax

Tensor = torch.Tensor


def literal(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Row by row, head by head; a row that sees nothing is zero. `seen`: [batch, queries, keys]."""
    batch, heads, queries, _ = query.shape
    shared = heads // key.shape[1]
    rows = []
    for b in range(batch):
        for h in range(heads):
            logits = query[b, h] @ key[b, h // shared].T * scale
            rows += [
                torch.sign(logits[q]) * softmax(logits[q].abs(), seen[b, q]) @ value[b, h // shared]
                for q in range(queries)
            ]
    return torch.stack(rows).view(batch, heads, queries, -1)


def case(
    batch: int = 2, groups: int = 2, members: int = 2, queries: int = 7, keys: int = 7, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values that require gradients, in float64; values wider than keys."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((batch, groups * members, queries, 4), (batch, groups, keys, 4), (batch, groups, keys, 6))
    query, key, value = (torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes)
    return query, key, value


def rows_seen(kind: str, batch: int, queries: int, keys: int) -> Tensor:
    """Without a mask the last query stands beside the last key; else each row sees a random subset, at least one."""
    if kind == "none":
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(batch, -1, -1)
    seen = torch.rand(batch, queries, keys, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[..., 0] |= ~seen.any(-1)
    return seen


def as_mask(seen: Tensor, kind: str, dtype: torch.dtype = torch.float64) -> Tensor | None:
    if kind in ("none", "boolean"):
        return None if kind == "none" else seen[:, None]
    hidden = -torch.inf if kind == "infinite" else torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)[:, None]


def whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by the full map."""
    return signed_map(query, key, mask, scale) @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)


@settings(max_examples=50)
@given(
    shape=st.tuples(*(st.integers(1, 3) for _ in range(3))),
    lengths=st.tuples(st.integers(1, 12), st.integers(0, 9)),
    kind=st.sampled_from(["none", "boolean", "infinite", "finite"]),
    block=st.sampled_from([1, 40, 2**20]),
    seed=st.integers(0, 100),
)
def test_blocks(shape: tuple[int, int, int], lengths: tuple[int, int], kind: str, block: int, seed: int) -> None:
    """Forward and backward are those of the formula, for any mask, grouping, cache and size of block.

    float64: 1e-12 for numbers near 1, some thousand roundings; measured 3e-15.
    """
    batch, groups, members = shape
    queries, before = lengths
    seen = rows_seen(kind, batch, queries, before + queries)
    states, mask = case(batch, groups, members, queries, before + queries, seed), as_mask(seen, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signed, "_CPU_BLOCK", block)
        patch.setattr(signed, "_FEWEST", 2)
        out = signed_attention(*states, mask, 0.7)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        gradients = torch.autograd.grad((out * weights).sum(), states)
    expected = literal(*states, seen, 0.7)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole(*states, mask, 0.7), expected, rtol=0, atol=1e-12)
    for gradient, other in zip(gradients, torch.autograd.grad((expected * weights).sum(), states), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["none", "boolean", "infinite"])
def test_a_logit_of_zero_weighs_nothing(kind: str) -> None:
    """sign(0) = 0: such a key takes its share, exp(0) of the sum, and gives nothing; nor does its gradient."""
    query = torch.ones(1, 1, 3, 1, dtype=torch.float64, requires_grad=True)
    key = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64).view(1, 1, 3, 1).requires_grad_()
    value = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).view(1, 1, 3, 1)
    mask = as_mask(rows_seen("none", 1, 3, 3), kind)
    out = signed_attention(query, key, value, mask, 1.0)
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    expected = torch.stack((e**2 / e**2, e**2 / (e**2 + 1), (e**2 - 100 * e) / (e**2 + 1 + e)))
    torch.testing.assert_close(out.view(3), expected, rtol=1e-14, atol=0)
    (slope,) = torch.autograd.grad(out.sum(), key)
    assert slope[0, 0, 1] == 0 and slope[0, 0, 0] != 0 and slope[0, 0, 2] != 0
    assert signed_attention(torch.zeros_like(query), key, value, mask, 1.0).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["boolean", "infinite", "finite"])
def test_a_row_that_sees_nothing_is_zero(kind: str, dtype: torch.dtype) -> None:
    """Its gradients are numbers, none for its query; rows beside it are as if it were not there."""
    seen = rows_seen(kind, 2, 7, 7)
    blind = seen.clone()
    blind[1, :3] = False
    states = [part.detach().to(dtype).requires_grad_() for part in case()]
    query, key, value = states
    out = signed_attention(query, key, value, as_mask(blind, kind, dtype), 0.7)
    assert out.isfinite().all() and out[1, :, :3].eq(0).all()
    slopes = torch.autograd.grad(out.sum(), states)
    assert all(slope.isfinite().all() for slope in slopes) and slopes[0][1, :, :3].eq(0).all()
    other = signed_attention(query, key, value, as_mask(seen, kind, dtype), 0.7)
    assert torch.equal(out[0], other[0]) and torch.equal(out[1, :, 3:], other[1, :, 3:])


def test_bfloat16() -> None:
    """In the norm of the output: 0.6 % by the product, whose shares are float32 (measured 0.53 %; in bfloat16, 0.71 %).

    0.8 % by the map, which is rounded as it is handed out. What is left is the logits' own rounding, 2^-8 = 0.4 % each.
    """
    query, key, value = (part.detach().bfloat16() for part in case(queries=200, keys=200))
    expected = literal(query.double(), key.double(), value.double(), rows_seen("none", 2, 200, 200), 0.7)
    for function, most in ((signed_attention, 0.006), (whole, 0.008)):
        out = function(query, key, value, None, 0.7)
        assert out.dtype == torch.bfloat16 and (out.double() - expected).norm() <= most * expected.norm()


@pytest.mark.parametrize("kind", ["none", "boolean", "finite"])
@pytest.mark.parametrize("queries", [9, 1])
def test_logits_past_float16_before_they_are_scaled(kind: str, queries: int) -> None:
    """Signs of ±1 times 64, so that float16 holds every sum: logits up to 262,144, of either sign. The reference is a
    float64 copy of the same numbers."""
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, h, n, 64, generator=draw).sign() * 64 for h, n in ((4, queries), (2, 9)))
    for row in range(queries):
        key[0, :, 9 - queries + row] = query[0, ::2, row] * (-1) ** row
    assert (query.double() @ key.double().repeat_interleave(2, 1).mT).abs().max() > 4 * 65504 * 0.99
    states = [part.half().requires_grad_() for part in (query, key, torch.randn(1, 2, 9, 64, generator=draw))]
    wide = [part.detach().double().requires_grad_() for part in states]
    seen = rows_seen(kind, 1, queries, 9)
    mask = as_mask(seen, kind, torch.float16)
    expected = literal(wide[0], wide[1], wide[2], seen, 0.125)
    out = signed_attention(states[0], states[1], states[2], mask, 0.125)
    for result in (out, whole(states[0], states[1], states[2], mask, 0.125)):
        assert result.dtype == torch.float16
        assert (result.double() - expected).norm() <= 0.002 * expected.norm()
    slopes = torch.autograd.grad(out.sum(), states)
    for slope, reference in zip(slopes, torch.autograd.grad(expected.sum(), wide), strict=True):
        assert (slope.double() - reference).norm() <= 0.002 * reference.norm() + 1e-6


def test_no_tensor_is_as_large_as_the_map() -> None:
    """Of 8 heads and 1,024 tokens a map has 8 Mi numbers; a block has 1 Mi, forward and backward."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for part in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(part, torch.Tensor):
                    self.numbers = max(self.numbers, part.numel())
            return out

    query, key, value = (torch.randn(1, 8, 1024, 16, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        signed_attention(query, key, value, None, 0.25).sum().backward()  # type: ignore[no-untyped-call]
    assert largest.numbers <= signed._CPU_BLOCK < 8 * 1024**2 / 4


def test_dtypes_are_those_of_torchs_attention() -> None:
    """Of mixed inputs as after rotary embeddings, and of float64, which autocast leaves as it is."""
    for query_dtype, value_dtype in [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)]:
        query = torch.randn(1, 2, 5, 8, dtype=query_dtype, requires_grad=True)
        value = torch.randn(1, 2, 5, 8, dtype=value_dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            expected: Any = torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True)
            out = signed_attention(query, query, value, None, 8**-0.5)
        assert out.dtype == expected.dtype
        slopes = torch.autograd.grad(out.sum(), (query, value))
        assert [slope.dtype for slope in slopes] == [query_dtype, value_dtype]


def test_a_model_in_blocks_and_under_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cog attention takes flash attention's mask, which says what keys there are, but none of its kernels."""
    monkeypatch.setattr(signed, "_CPU_BLOCK", 1)
    monkeypatch.setattr(signed, "_FEWEST", 3)
    model = model_of("llama", COG | {"variant_layers": [0, 1, 2]}, dtype=torch.float64)
    for implementation in ("sdpa", "flash_attention_2"):
        model.config._attn_implementation_internal = implementation
        for scene in (causal(), left_padded()):
            assert largest_error(model, scene) <= 1e-12
