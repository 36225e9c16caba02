"""Tree attention: attention over a tree of shared prefixes, in place of a model's own attention function.

In: where each token's subtree ends. Out: a `TreeAttention` that transformers' attention modules call while `attending`
is active; their keys and values are the trunk's, followed by the tree's. Two implementations give the same numbers:

- `TileLayout`, for CPUs: the row is cut into tiles of neighbouring tokens, and each tile attends to the trunk, its
  ancestors and itself. What the tree masks for a whole tile is never computed, so a row may contain a whole batch.
- `FlexLayout` (`flex.py`), for GPUs: FlexAttention with a block mask.

Models whose attention does not use transformers' registry of attention functions use neither; they get the tree as an
attention mask (`forward.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

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
"""Maximum tokens of a tile."""
_OVERHEAD = 2**20
"""Fixed cost of a tile in units of (query, key) pairs × heads × head size: about 50 µs."""


class TreeAttention(Protocol):
    """Attention between the tokens of one batch."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, product: Product | None
    ) -> torch.Tensor:
        """Return the attention output, [1, nodes, heads, size].

        Args:
            query: [1, heads, nodes, size].
            key, value: [1, heads, trunk + nodes, size].
            scale: factor of the logits; None: 1 / sqrt(size).
            product: replaces softmax attention, where given.
        """


class Unsupported(Exception):
    """The model's attention has a feature that tree attention does not implement."""


class Tile(NamedTuple):
    """Neighbouring tokens, and the tokens that they attend to beside the trunk."""

    start: int
    end: int
    """One past its last token."""
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
        best = None
        for j in range(i - 1, -1, -1):
            size = cuts[i] - cuts[j]
            if size > _WIDEST and best is not None:
                break
            total = cost[j] + size * (trunk + int(depths[cuts[j]]) + size) + overhead
            if best is None or total < best:
                best, begin[i] = total, j
        cost[i] = best or 0
    tiles: list[Tile] = []
    i = len(cuts) - 1
    while i:
        i, end = begin[i], cuts[i]
        ancestors = np.flatnonzero(ends[: cuts[i]] > cuts[i])
        tiles.append(Tile(cuts[i], end, np.concatenate((ancestors, np.arange(cuts[i], end)))))
    return tiles[::-1]


class TileLayout:
    """Tree attention tile by tile, for CPUs.

    Args:
        ends: [nodes] one past each node's last descendant.
        depths: [nodes] number of ancestors of each node in the row.
        trunk: number of trunk tokens, which precede the tree's and to which every token attends.
        width: heads × head size of the queries.
    """

    def __init__(
        self, ends: Ints, depths: Ints, trunk: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        tiles = cut_tiles(ends, depths, trunk, _OVERHEAD // width)
        self._tiles = [(slice(tile.start, tile.end), _key_ranges(tile, trunk)) for tile in tiles]
        # Layers may be on several devices; each device gets a copy of the masks when its first layer runs
        self._masks = {device: [_tile_mask(ends, tile, trunk, dtype).to(device) for tile in tiles]}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, product: Product | None
    ) -> torch.Tensor:
        """See `TreeAttention`."""
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


def _key_ranges(tile: Tile, trunk: int) -> list[tuple[int, int]]:
    """Return a tile's keys, the trunk's included, as ranges without gaps, [start, end)."""
    keys = np.concatenate((np.arange(trunk), trunk + tile.keys))
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(keys, np.flatnonzero(np.diff(keys) > 1) + 1)]


def _tile_mask(ends: Ints, tile: Tile, trunk: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask of a tile, [1, 1, queries, trunk + keys]."""
    queries = np.arange(tile.start, tile.end)[:, None]
    hidden = (tile.keys > queries) | (queries >= ends[tile.keys])
    mask = torch.zeros(1, 1, len(queries), trunk + len(tile.keys), dtype=dtype)
    mask[0, 0, :, trunk:].masked_fill_(torch.from_numpy(hidden), torch.finfo(dtype).min)
    return mask


def _selected(states: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor:
    """Select tokens of [1, heads, tokens, size]; a single range is not copied."""
    parts = [states[:, :, start:end] for start, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


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
    """Attend within the active tree; the function that transformers calls.

    transformers passes no mask, since no mask function is registered under `NAME`.
    """
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
