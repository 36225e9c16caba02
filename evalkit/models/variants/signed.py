"""Cog attention: sign(QKᵀ) ⊙ softmax(|QKᵀ|), a block of queries at a time.

No fused kernel has it, and all of its map at once would grow with the square of the length. Here only a block of it
exists, forward and backward, small enough to stay in the cache; causal blocks end at their last query.

Source: arXiv 2411.07176, equation 3; the mask applies after the absolute value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

_CPU_BLOCK = 2**20
"""Scores that exist at a time on a CPU; 4 MiB in float32."""
_GPU_BLOCK = 2**26
_FEWEST = 16
"""Fewest queries at a time; narrower products are slow."""


def signed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Cog attention of every head.

    Args:
        query: [batch, heads, queries, size].
        key: [batch, key-value heads, keys, size]; each serves heads / key-value heads of the queries.
        value: [batch, key-value heads, keys, width].
        mask: [batch or 1, 1, queries, keys], boolean (True is seen) or added to the absolute logits; None: causal, the
            last query beside the last key.
        scale: of the logits.

    Returns:
        [batch, heads, queries, width].
    """
    batch, heads = query.shape[:2]
    groups = key.shape[1]
    if mask is not None and mask.shape[0] == 1:
        mask = mask.expand(batch, -1, -1, -1)
    # [batch × key-value heads, heads of a group, …]: a group's queries are rows beside the same keys
    grouped = query.unflatten(1, (groups, heads // groups)).flatten(0, 1)
    rows = mask[:, 0].repeat_interleave(groups, 0) if mask is not None else None
    out: torch.Tensor = _Signed.apply(  # type: ignore[no-untyped-call]
        grouped, key.flatten(0, 1), value.flatten(0, 1), rows, scale
    )
    found: torch.Tensor = out.unflatten(0, (batch, groups)).flatten(1, 2)
    return found


def signed_map(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """All of the map at once, [batch, heads, queries, keys]; for looking at. Arguments as `signed_attention`'s."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    power, rest = split_scale(scale)
    logits = _wide(query * power @ key.mT) * rest
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(key.shape[2] - query.shape[2])
    size, hidden = _hide(logits.abs(), mask)
    return (size.softmax(-1).masked_fill(hidden, 0.0) * logits.sign()).to(query.dtype)


def split_scale(scale: float) -> tuple[float, float]:
    """The scale of logits as a power of two for the queries, which is exact, and a rest from 1 to 2 for the logits.

    In float16, QKᵀ may be past the largest number, 65,504, before it is scaled.
    """
    _, exponent = math.frexp(scale)
    power = 2.0 ** (exponent - 1)
    return power, scale / power


class _Signed(torch.autograd.Function):
    """Of [groups, members, queries, size], [groups, keys, size] and [groups, keys, width]."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for rows, keys in _blocks(query, key, mask):
            share, sign = _block_map(query, key, mask, scale, rows, keys)
            found = torch.bmm(share.mul_(sign).to(value.dtype), value[:, keys])
            out[:, :, rows] = found.unflatten(1, (query.shape[1], -1))
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, out = ctx.saved_tensors
        grad = grads[0]
        to_query = torch.empty_like(query)
        # Sums over blocks, so in float32 at least
        wide = torch.promote_types(query.dtype, torch.float32)
        to_key, to_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for rows, keys in _blocks(query, key, mask):
            share, sign = _block_map(query, key, mask, ctx.scale, rows, keys)
            from_out = grad[:, :, rows].flatten(1, 2)
            to_value[:, keys] += torch.bmm((share * sign).to(value.dtype).mT, from_out)
            # With p = softmax(|s|) and A = sign(s) p: ds = p (dA − sign(s) Σ A dA), where Σ A dA is out · its gradient
            inner = (_wide(from_out) * _wide(out[:, :, rows].flatten(1, 2))).sum(-1, keepdim=True)
            to_logits = _wide(torch.bmm(from_out, value[:, keys].mT)).sub_(sign * inner).mul_(share).mul_(sign.abs())
            to_logits = (to_logits * ctx.scale).to(query.dtype)
            to_query[:, :, rows] = torch.bmm(to_logits, key[:, keys]).unflatten(1, (query.shape[1], -1))
            to_key[:, keys] += torch.bmm(to_logits.mT, query[:, :, rows].flatten(1, 2))
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None, None


def _blocks(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Queries that are taken together, and the keys that any of them may see."""
    groups, members, queries, _ = query.shape
    keys = key.shape[1]
    most = _CPU_BLOCK if query.device.type == "cpu" else _GPU_BLOCK
    rows = max(_FEWEST, most // max(1, groups * members * keys))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        yield slice(start, stop), slice(0, keys if mask is not None else max(0, keys - queries + stop))


def _block_map(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float, rows: slice, keys: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares and signs of a block, [groups, members × rows, keys], in float32 or wider."""
    members = query.shape[1]
    power, rest = split_scale(scale)
    logits = _wide(torch.bmm((query[:, :, rows] * power).flatten(1, 2), key[:, keys].mT)).mul_(rest)
    size = logits.abs()
    by_row = size.unflatten(1, (members, -1))
    if mask is not None:
        shown, hidden = _hide(by_row, mask[:, None, rows, keys])
        return shown.softmax(-1).masked_fill_(hidden, 0.0).flatten(1, 2), logits.sign_()
    # Only the block's own queries can be later than a key of it
    queries = rows.stop - rows.start
    last = min(queries, by_row.shape[-1])
    late = torch.ones(queries, last, dtype=torch.bool, device=size.device).triu(last - queries + 1)
    by_row[..., by_row.shape[-1] - last :].masked_fill_(late, torch.finfo(size.dtype).min)
    return size.softmax(-1), logits.sign_()


def _hide(size: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute logits with the mask on them, and where it hides.

    The least value is finite, so that a row without a key is no NaN; shares of what is hidden are set to 0 afterwards.
    """
    least = torch.finfo(size.dtype).min
    if mask.dtype == torch.bool:
        return size.masked_fill(~mask, least), ~mask
    # Masks of all dtypes reach far below half of float16's least value
    return (size + mask.to(size.dtype)).clamp_(min=least), mask < -30000


def _wide(states: torch.Tensor) -> torch.Tensor:
    return states.float() if states.dtype in (torch.bfloat16, torch.float16) else states
