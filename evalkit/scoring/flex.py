"""Tree attention by FlexAttention, for GPUs.

In: a tree's ends of subtrees. Out: a `TreeAttention`, whose block mask is computed from them and not from all pairs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.compatibility.torch import compile_for_any_size
from evalkit.scoring.attention import Product, Unsupported
from evalkit.scoring.head import to_device
from evalkit.scoring.tree import Ints

_BLOCK = 128
"""Queries and keys of a block of the mask."""


class FlexLayout:
    """Tree attention by FlexAttention with a block mask, for GPUs; arguments as of `TileLayout`.

    Lengths are padded to multiples of `_BLOCK`, and the mask reads sizes from tensors only, so that batches of all
    sizes run the same compiled kernel. The mask reaches the device in one copy, which does not wait for it.
    """

    def __init__(self, ends: Ints, trunk: int, device: torch.device) -> None:
        self._nodes, self._trunk = len(ends), trunk
        # At least two blocks, since a size of one is compiled as a constant
        self._padded = max(-len(ends) % _BLOCK, 2 * _BLOCK - len(ends))
        self._gap = -trunk % _BLOCK
        first, last = query_ranges(ends, trunk, self._gap, self._padded)
        self._mask = _block_mask(first, last, len(ends) + self._padded, device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, product: Product | None
    ) -> torch.Tensor:
        """See `TreeAttention`."""
        from torch.nn.attention.flex_attention import flex_attention

        if product is not None:
            raise Unsupported("attention that is not softmax attention")
        query, key, value = _pad(query, self._padded), self._spread(key), self._spread(value)
        output = _compiled(flex_attention, query.device.type)(
            query, key, value, block_mask=self._mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        attended: torch.Tensor = output[:, :, : self._nodes].transpose(1, 2)
        return attended

    def _spread(self, states: torch.Tensor) -> torch.Tensor:
        """Pad trunk and nodes of [1, heads, trunk + nodes, size] to whole blocks each."""
        nodes = _pad(states[:, :, self._trunk :], self._padded)
        return torch.cat((_pad(states[:, :, : self._trunk], self._gap), nodes), dim=2) if self._trunk else nodes


def query_ranges(ends: Ints, trunk: int, gap: int, padded: int) -> tuple[Ints, Ints]:
    """Return which queries attend to each key: a range [first, last) of nodes, since a subtree has no gap."""
    queries = len(ends) + padded
    index = np.arange(queries, dtype=np.int32)
    first = np.concatenate((np.zeros(trunk + gap, np.int32), index))
    whole, none = np.full(trunk, queries, np.int32), np.zeros(gap, np.int32)
    return first, np.concatenate((whole, none, ends, index[len(ends) :] + 1)).astype(np.int32)


def _block_mask(first: Ints, last: Ints, queries: int, device: torch.device) -> Any:
    """Return the block mask of ranges of queries by key, each [keys]; lengths are multiples of `_BLOCK`."""
    from torch.nn.attention.flex_attention import BlockMask

    # The ranges of a block's keys begin at or before the block's own queries, so together they have no gap
    starts, stops = first.reshape(-1, _BLOCK), last.reshape(-1, _BLOCK)
    begin = np.arange(0, queries, _BLOCK)[:, None]
    used = (starts.min(1) < begin + _BLOCK) & (stops.max(1) > begin)
    full = (starts.max(1) <= begin) & (stops.min(1) >= begin + _BLOCK)
    kinds = (used & ~full, full)
    counts = [blocks.sum(1)[None, None] for blocks in kinds]
    # Blocks in use first, in ascending order
    orders = [np.argsort(~blocks, axis=1, kind="stable")[None, None] for blocks in kinds]
    first_query, last_query, number, full_number, order, full_order = _on_device(
        [first, last, *counts, *orders], device
    )

    def sees(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = (first_query[key] <= query) & (query < last_query[key])
        return inside

    return BlockMask.from_kv_blocks(
        number, order, full_number, full_order, BLOCK_SIZE=_BLOCK, mask_mod=sees, compute_q_blocks=False
    )


def _on_device(arrays: list[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device as int32, all at once.

    Each begins at a multiple of 16 bytes, as compiled kernels expect: they copy other inputs at each call.
    """
    flat = [np.pad(array.ravel().astype(np.int32), (0, -array.size % 4)) for array in arrays]
    parts = to_device(np.concatenate(flat), device).split([len(part) for part in flat])
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _pad(states: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, tokens)) if tokens else states


@cache
def _compiled(function: Any, device: str) -> Any:
    """Compile a function for CUDA; uncompiled FlexAttention materialises the whole [queries, keys] matrix."""
    return compile_for_any_size(function) if device == "cuda" else function
