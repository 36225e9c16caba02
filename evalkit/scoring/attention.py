"""Tree attention: attention over a tree of shared prefixes, in place of a model's own attention function.

In: where each token's subtree ends. Out: a layout that transformers' attention modules call while `attending` is
active; their keys and values are the trunk's, followed by the tree's. `TileLayout` (CPUs) cuts the row into tiles, each
of which attends to the trunk, its ancestors and itself; `FlexLayout` (GPUs) is FlexAttention with a block mask. Models
outside of transformers' registry of attention functions get the tree as an attention mask (`forward.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from evalkit.compatibility.torch import compiled_for
from evalkit.compatibility.transformers import attention_of, select_attention
from evalkit.scoring.tree import Ints

NAME = "evalkit_tree"
"""Name of this attention in transformers' registry of attention functions."""

SPECIAL = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of transformers' attention functions that do more than a softmax under a mask."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Attention product: query, key and value, [1, heads, tokens, size], an additive mask, [1, 1, queries, keys], and the
factor of the logits → [1, heads, queries, size]."""

_PIECE = 64
"""Tile boundaries are at multiples of this from the start of a branch, or where a branch ends."""
_WIDEST = 512
_OVERHEAD = 2**20
"""Fixed cost of a tile in units of (query, key) pairs × heads × head size: about 50 µs."""
_BLOCK = 128
"""Queries and keys of a block of FlexAttention's mask."""


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, without waiting for a GPU."""
    states = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_available():
        return states.pin_memory().to(device, non_blocking=True)
    return states.to(device)


class Unsupported(Exception):
    """The model's attention has a feature that tree attention does not implement."""


def additive_mask(hidden: torch.Tensor, trunk: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [1, 1, queries, trunk + keys] from which keys, [queries, keys], each query does not attend to."""
    mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return torch.nn.functional.pad(mask, (trunk, 0))[None, None]


class Tile(NamedTuple):
    """Neighbouring tokens, and the tokens that they attend to beside the trunk."""

    start: int
    end: int
    keys: NDArray[np.int64]
    """[keys] the ancestors of its first token, then its own tokens."""


def cut_tiles(ends: Ints, depths: Ints, trunk: int, overhead: int) -> list[Tile]:
    """Cut a row into tiles of least total cost, by dynamic programming."""
    nodes = len(ends)
    branches = np.flatnonzero(ends[:-1] <= np.arange(1, nodes)) + 1
    limits = np.concatenate(([0], branches, [nodes]))
    cuts = [cut for a, b in pairwise(limits) for cut in range(int(a), int(b), _PIECE)]
    cuts.append(nodes)
    # cost[i]: least cost of the tokens before cuts[i]
    cost, begin = [0] * len(cuts), [0] * len(cuts)
    for i in range(1, len(cuts)):
        totals: dict[int, int] = {}
        for j in range(i - 1, -1, -1):
            size = cuts[i] - cuts[j]
            if size > _WIDEST and totals:
                break
            totals[j] = cost[j] + size * (trunk + int(depths[cuts[j]]) + size) + overhead
        begin[i] = min(totals, key=totals.__getitem__)
        cost[i] = totals[begin[i]]
    tiles: list[Tile] = []
    i = len(cuts) - 1
    while i:
        i, end = begin[i], cuts[i]
        ancestors = np.flatnonzero(ends[: cuts[i]] > cuts[i])
        tiles.append(Tile(cuts[i], end, np.concatenate((ancestors, np.arange(cuts[i], end)))))
    return tiles[::-1]


class TileLayout:
    """Tree attention tile by tile, for CPUs.

    `ends` and `depths` are [nodes]: one past each node's last descendant, and the number of its ancestors in the row.
    Every token attends to the `trunk` tokens that precede the tree's. `width` is heads × head size of the queries.
    """

    def __init__(
        self, ends: Ints, depths: Ints, trunk: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tiles: list[tuple[slice, list[tuple[int, int]]]] = []
        """Of each tile its queries, and its keys as ranges [start, end) without gaps, the trunk's included."""
        masks: list[torch.Tensor] = []
        for tile in cut_tiles(ends, depths, trunk, _OVERHEAD // width):
            keys = np.concatenate((np.arange(trunk), trunk + tile.keys))
            runs = np.split(keys, np.flatnonzero(np.diff(keys) > 1) + 1)
            self._tiles.append((slice(tile.start, tile.end), [(int(run[0]), int(run[-1]) + 1) for run in runs]))
            queries = np.arange(tile.start, tile.end)[:, None]
            hidden = (tile.keys > queries) | (queries >= ends[tile.keys])
            masks.append(additive_mask(torch.from_numpy(hidden), trunk, dtype).to(device))
        # Layers may be on several devices; each device gets a copy of the masks when its first layer runs
        self._masks = {device: masks}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, product: Product | None
    ) -> torch.Tensor:
        """Return the attention output, [1, nodes, heads, size].

        `query` is [1, heads, nodes, size]; `key` and `value` are [1, heads, trunk + nodes, size]. The logits' factor
        `scale` is 1 / sqrt(size) by default; a `product` replaces softmax attention.
        """
        _, heads, tokens, size = query.shape
        output = query.new_empty(1, tokens, heads, value.shape[3])
        if query.device not in self._masks:
            self._masks[query.device] = [mask.to(query.device) for mask in next(iter(self._masks.values()))]
        for (queries, ranges), mask in zip(self._tiles, self._masks[query.device], strict=True):
            part = query[:, :, queries], _selected(key, ranges), _selected(value, ranges)
            if product is not None:
                attended = product(*part, mask, size**-0.5 if scale is None else scale)
            else:
                attended = torch.nn.functional.scaled_dot_product_attention(
                    *part, attn_mask=mask, scale=scale, enable_gqa=heads != key.shape[1]
                )
            output[:, queries] = attended.transpose(1, 2)
        return output


def _selected(states: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """Select tokens of [1, heads, tokens, size]; a single range is not copied."""
    parts = [states[:, :, start:end] for start, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class FlexLayout:
    """Tree attention by FlexAttention, for GPUs; arguments as of `TileLayout`.

    Lengths are multiples of `_BLOCK`, and the mask reads sizes from tensors only, so that batches of all sizes run the
    same compiled kernel. The mask reaches the device in one copy, which does not wait for it. States are padded, unless
    they have these lengths: queries those of `queries` tokens, keys those of the trunk's blocks before.
    """

    def __init__(self, ends: Ints, trunk: int, device: torch.device) -> None:
        self._trunk, self._before = trunk, multiple_of_block(trunk)
        # At least two blocks, since a size of one is compiled as a constant
        self.queries = queries = max(multiple_of_block(len(ends)), 2 * _BLOCK)
        # The queries that attend to each key are a range [first, last) of nodes, since a subtree has no gap
        index = np.arange(queries, dtype=np.int32)
        first = np.concatenate((np.zeros(self._before, np.int32), index))
        whole, none = np.full(trunk, queries, np.int32), np.zeros(self._before - trunk, np.int32)
        last = np.concatenate((whole, none, ends, index[len(ends) :] + 1)).astype(np.int32)
        self._mask = _block_mask(first, last, queries, device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, product: Product | None
    ) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        if product is not None:
            raise Unsupported("attention that is not softmax attention")
        # Uncompiled, it stores the whole [queries, keys] matrix
        padded, key, value = pad(query, self.queries), self._spread(key), self._spread(value)
        output = compiled_for(flex_attention, query.device.type)(
            padded, key, value, block_mask=self._mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1],
            kernel_options=_kernel_options(query),
        )  # fmt: skip
        attended: torch.Tensor = output[:, :, : query.shape[2]].transpose(1, 2)
        return attended

    def _spread(self, states: torch.Tensor) -> torch.Tensor:
        if not self._trunk or states.shape[2] == self._before + self.queries:
            return pad(states, self.queries)
        trunk, nodes = states.split((self._trunk, states.shape[2] - self._trunk), dim=2)
        return torch.cat((pad(trunk, self._before), pad(nodes, self.queries)), dim=2)


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
    # In one copy; each starts at a multiple of 16 bytes, as compiled kernels expect, which copy other inputs
    arrays = [first, last, *counts, *orders]
    flat = [np.pad(array.ravel().astype(np.int32), (0, -array.size % 4)) for array in arrays]
    parts = to_device(np.concatenate(flat), device).split([len(part) for part in flat])
    first_query, last_query, number, full_number, order, full_order = (
        part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)
    )

    def sees(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = (first_query[key] <= query) & (query < last_query[key])
        return inside

    return BlockMask.from_kv_blocks(
        number, order, full_number, full_order, BLOCK_SIZE=_BLOCK, mask_mod=sees, compute_q_blocks=False
    )


def _kernel_options(query: torch.Tensor) -> dict[str, Any]:
    # No public option says that lengths are multiples of a block, which a compiler for any size cannot know
    options: dict[str, Any] = {"IS_DIVISIBLE": True}
    if query.dtype != torch.float32 and query.shape[3] <= 64:
        # Half as many keys as by default: a token's ancestors are few
        options |= {"BLOCK_M": 128, "BLOCK_N": 64}
    return options


def multiple_of_block(tokens: int) -> int:
    """Round a number of tokens up to blocks of FlexAttention's mask."""
    return -(-tokens // _BLOCK) * _BLOCK


def pad(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Pad [1, heads, tokens, size] with zeros to a number of tokens."""
    missing = tokens - states.shape[2]
    return torch.nn.functional.pad(states, (0, 0, 0, missing)) if missing > 0 else states


TreeAttention: TypeAlias = TileLayout | FlexLayout

_active: TreeAttention | None = None


@contextmanager
def attending(model: Any, layout: TreeAttention) -> Iterator[None]:
    """Make a model attend by a tree layout inside the context."""
    global _active
    AttentionInterface.register(NAME, _attention)
    _active = layout
    try:
        with attention_named(model, NAME):
            yield
    finally:
        _active = None


@contextmanager
def attention_named(model: Any, name: str) -> Iterator[None]:
    """Select an attention function of transformers' registry for a model inside the context."""
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    before = [attention_of(config) for config in configs]
    try:
        for config in configs:
            select_attention(config, name)
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            select_attention(config, implementation)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    product: Product | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the active tree; transformers passes no mask, since no mask function is registered under `NAME`."""
    if attention_mask is not None:
        raise Unsupported("attention with a mask that the model makes itself")
    # Soft caps, attention sinks and position biases would be ignored silently
    for setting in SPECIAL:
        if settings.get(setting) is not None:
            raise Unsupported(f"attention with {setting}")
    if not getattr(module, "is_causal", True):
        raise Unsupported("attention that is not causal")
    if _active is None:
        raise Unsupported("attention outside of a tree")
    return _active.attend(query, key, value, scaling, product), None


_attention.takes_product = True  # type: ignore[attr-defined]  # read by attention modules without a softmax
