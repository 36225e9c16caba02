"""Cog attention, computed in blocks of queries: sign(QKᵀ) ⊙ softmax(|QKᵀ|).

In: queries, keys, values and a mask. Out: the attention output, or the full map. No fused kernel supports it, and
memory for the full map is quadratic in the length. Here only one block of the map exists at a time, forward and
backward, small enough for the processor's cache; causal blocks end at their last query.

Source: arXiv 2411.07176, equation 3; the mask applies after the absolute value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

_CPU_BLOCK = 2**20
"""Elements of a block of the map on a CPU; 4 MiB in float32."""
_GPU_BLOCK = 2**26
_FEWEST = 16
"""Minimum queries per block; smaller matrix products are slow."""


def signed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Compute cog attention for all heads: [batch, heads, queries, width], under autocast in its dtype.

    Of queries [batch, heads, queries, size], keys [batch, key-value heads, keys, size], each shared by heads /
    key-value heads query heads, and values [batch, key-value heads, keys, width]. The mask, [batch or 1, 1, queries,
    keys], is boolean (True: visible) or added to the absolute logits; None: causal, with the last query aligned to the
    last key. The logits are multiplied by `scale`.
    """
    query, key, value = _autocast(query, key, value)
    batch, heads = query.shape[:2]
    groups = key.shape[1]
    if mask is not None and mask.shape[0] == 1:
        mask = mask.expand(batch, -1, -1, -1)
    # [batch × key-value heads, heads of a group, …]: the queries of a group share the same keys
    grouped = query.unflatten(1, (groups, heads // groups)).flatten(0, 1)
    rows = mask[:, 0].repeat_interleave(groups, 0) if mask is not None else None
    out: torch.Tensor = _Signed.apply(  # type: ignore[no-untyped-call]
        grouped, key.flatten(0, 1), value.flatten(0, 1), rows, scale
    )
    attended: torch.Tensor = out.unflatten(0, (batch, groups)).flatten(1, 2)
    return attended


def signed_map(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Compute the full map, [batch, heads, queries, keys], for inspection. Arguments as for `signed_attention`."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    power, rest = split_scale(scale)
    logits = _wide(query * power @ key.mT) * rest
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(key.shape[2] - query.shape[2])
    size, hidden = _hide(logits.abs(), mask)
    return (size.softmax(-1).masked_fill(hidden, 0.0) * logits.sign()).to(query.dtype)


def split_scale(scale: float) -> tuple[float, float]:
    """Split the scale of the logits into a power of two for the queries, which is exact, and a factor from 1 to 2.

    In float16, unscaled QKᵀ may exceed the largest number, 65,504.
    """
    _, exponent = math.frexp(scale)
    power = 2.0 ** (exponent - 1)
    return power, scale / power


class _Signed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        for rows, keys in _blocks(query, key, mask):
            share, sign = _block_map(query, key, mask, scale, rows, keys)
            product = torch.bmm(share.mul_(sign).to(value.dtype), value[:, keys])
            out[:, :, rows] = product.unflatten(1, (query.shape[1], -1))
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, out = ctx.saved_tensors
        grad = grads[0]
        to_query = torch.empty_like(query)
        # Accumulated over blocks, so in float32 or wider
        wide = torch.promote_types(query.dtype, torch.float32)
        to_key, to_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for rows, keys in _blocks(query, key, mask):
            share, sign = _block_map(query, key, mask, ctx.scale, rows, keys)
            from_out = grad[:, :, rows].flatten(1, 2)
            to_value[:, keys] += torch.bmm((share * sign).to(value.dtype).mT, from_out)
            # With p = softmax(|s|) and A = sign(s) p: ds = p (dA − sign(s) Σ A dA), where Σ A dA = out · d(out)
            inner = (_wide(from_out) * _wide(out[:, :, rows].flatten(1, 2))).sum(-1, keepdim=True)
            to_logits = _wide(torch.bmm(from_out, value[:, keys].mT)).sub_(sign * inner).mul_(share).mul_(sign.abs())
            to_logits = (to_logits * ctx.scale).to(query.dtype)
            to_query[:, :, rows] = torch.bmm(to_logits, key[:, keys]).unflatten(1, (query.shape[1], -1))
            to_key[:, keys] += torch.bmm(to_logits.mT, query[:, :, rows].flatten(1, 2))
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None, None


def _autocast(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert to autocast's dtype where it is enabled, as torch's attention does: all but float64.

    Rotated queries and keys are in float32 there, values are not; forward and backward need one dtype.
    """
    device = states[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return states
    dtype = torch.get_autocast_dtype(device)
    return tuple(part if part.dtype == torch.float64 else part.to(dtype) for part in states)


def _blocks(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries, with the keys that any of them may attend to."""
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
    """Compute softmax weights and signs of a block, [groups, members × rows, keys], in float32 or wider."""
    members = query.shape[1]
    power, rest = split_scale(scale)
    logits = _wide(torch.bmm((query[:, :, rows] * power).flatten(1, 2), key[:, keys].mT)).mul_(rest)
    size = logits.abs()
    by_row = size.unflatten(1, (members, -1))
    if mask is not None:
        shown, hidden = _hide(by_row, mask[:, None, rows, keys])
        return shown.softmax(-1).masked_fill_(hidden, 0.0).flatten(1, 2), logits.sign_()
    # Only keys within the block can be later than one of its queries
    queries = rows.stop - rows.start
    last = min(queries, by_row.shape[-1])
    late = torch.ones(queries, last, dtype=torch.bool, device=size.device).triu(last - queries + 1)
    by_row[..., by_row.shape[-1] - last :].masked_fill_(late, torch.finfo(size.dtype).min)
    return size.softmax(-1), logits.sign_()


def _hide(size: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a mask to absolute logits; return them and the hidden positions.

    The lowest value is finite, so that a fully masked row is not NaN; hidden weights are set to 0 afterwards.
    """
    least = torch.finfo(size.dtype).min
    if mask.dtype == torch.bool:
        return size.masked_fill(~mask, least), ~mask
    # Additive masks of all dtypes use values far below half of float16's lowest
    return (size + mask.to(size.dtype)).clamp_(min=least), mask < -30000


def _wide(states: torch.Tensor) -> torch.Tensor:
    return states.float() if states.dtype in (torch.bfloat16, torch.float16) else states
