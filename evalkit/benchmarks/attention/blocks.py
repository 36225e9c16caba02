"""Effective maps in blocks of query rows.

In: the queries and keys of a layer, or its whole map. Out: blocks [heads, rows, keys], or the map of a single head, in
float32 (float64 in a model of that dtype).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from evalkit.benchmarks.attention.attention_calls import AttentionCall

ELEMENTS = 2**20
"""Maximum elements of a block by default: 4 MiB in float32, and about four times as much while it is computed."""

Combine = Callable[[torch.Tensor], torch.Tensor]
"""Combines the maps of a call, [1, heads of the call, queries, keys], to effective ones, [1, heads, queries, keys]."""


class MapBlocks(ABC):
    """Effective map of one layer and one sequence."""

    heads: int
    """Heads; pairs of heads of differential attention."""
    tokens: int

    @abstractmethod
    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, block [heads, rows, keys]) in the rows' order.

        A block ends at the last key that any of its rows attends to where that is known: the weights of further keys
        are 0. Blocks may be modified.
        """

    @abstractmethod
    def head(self, head: int) -> torch.Tensor:
        """Return the whole map of one head, [tokens, tokens]."""

    def whole(self) -> torch.Tensor:
        """Return the whole map, [heads, tokens, tokens]."""
        parts = [torch.nn.functional.pad(block, (0, self.tokens - block.shape[2])) for _, block in self.blocks()]
        return torch.cat(parts, dim=1)


class WholeMap(MapBlocks):
    """Blocks of a map that is in memory: [heads, tokens, tokens], of any floating-point dtype."""

    def __init__(self, whole: torch.Tensor, elements: int = ELEMENTS) -> None:
        self._map, self._elements = whole, elements
        self.heads, self.tokens = whole.shape[0], whole.shape[1]

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        rows = max(1, self._elements // (self.heads * self.tokens))
        for start in range(0, self.tokens, rows):
            yield start, _wide(self._map[:, start : start + rows], copy=True)

    def head(self, head: int) -> torch.Tensor:
        return _wide(self._map[head], copy=True)


class CallMap(MapBlocks):
    """Blocks computed from a layer's queries and keys.

    Args:
        call: of the layer's attention function.
        combine: see `Combine`; None: the maps of the call are the effective ones.
        elements: maximum elements of a block; a block has at least one row.
    """

    def __init__(self, call: AttentionCall, combine: Combine | None = None, elements: int = ELEMENTS) -> None:
        self._call, self._combine, self._elements = call, combine, elements
        calls, self.tokens = call.query.shape[:2]
        self._query = _wide(call.query) * call.scale
        self._key = _wide(call.key).repeat_interleave(calls // len(call.key), 0)
        self.heads = self._combined(self._query.new_zeros(calls, 1, 1)).shape[0]

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        start = 0
        while start < self.tokens:
            stop = min(start + self._rows(start), self.tokens)
            yield start, self._block(start, stop, None)
            start = stop

    def head(self, head: int) -> torch.Tensor:
        # A head's maps in the call: one of each group of as many heads as the effective map has
        parts = torch.arange(len(self._query), device=self._query.device)[head :: self.heads]
        rows = max(1, self._elements // (len(parts) * self.tokens))
        whole = self._query.new_zeros(self.tokens, self.tokens)
        for start in range(0, self.tokens, rows):
            block = self._block(start, min(start + rows, self.tokens), parts)[0]
            whole[start : start + len(block), : block.shape[1]] = block
        return whole

    def attend(self, value: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output, [1, heads, tokens, width], from [1, key-value heads, tokens, width]."""
        whole = _wide(value[0]).repeat_interleave(self.heads // value.shape[1], 0)
        parts = [torch.bmm(block, whole[:, : block.shape[2]]) for _, block in self.blocks()]
        return torch.cat(parts, dim=1)[None].to(value.dtype)

    def _rows(self, start: int) -> int:
        """Return the rows of the block at a row: rows × keys of all heads are at most the maximum."""
        most = self._elements / len(self._query)
        if self._call.mask is not None or not self._call.causal:
            return max(1, int(most / self.tokens))
        return max(1, int((math.sqrt(start * start + 4 * most) - start) / 2))

    @torch.no_grad()
    def _block(self, start: int, stop: int, parts: torch.Tensor | None) -> torch.Tensor:
        """Compute rows of the effective map, [heads, rows, keys], from all maps of the call or some."""
        keys = self._last_key(start, stop)
        query, key = self._query[:, start:stop], self._key[:, :keys]
        if parts is not None:
            query, key = query[parts], key[parts]
        logits = torch.bmm(query, key.mT)
        if self._call.signed:
            maps = self._softmax(logits.abs(), start, parts).mul_(logits.sign_())
        else:
            maps = self._softmax(logits, start, parts)
        return self._combined(maps)

    def _softmax(self, logits: torch.Tensor, start: int, parts: torch.Tensor | None) -> torch.Tensor:
        """Apply cap, mask and sinks to [maps, rows, keys], in place, and normalise."""
        if self._call.softcap is not None:
            logits.div_(self._call.softcap).tanh_().mul_(self._call.softcap)
        self._hide(logits, start, parts)
        if self._call.sinks is None:
            return logits.softmax(-1)
        sinks = _wide(self._call.sinks if parts is None else self._call.sinks[parts])
        extra = sinks[:, None, None].expand(-1, logits.shape[1], 1)
        return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1]

    def _hide(self, logits: torch.Tensor, start: int, parts: torch.Tensor | None) -> None:
        rows, keys = logits.shape[1:]
        least = torch.finfo(logits.dtype).min
        mask = self._call.mask
        if mask is not None:
            mask = mask if parts is None or len(mask) == 1 else mask[parts]
            mask = mask[:, start : start + rows, :keys]
            if mask.dtype == torch.bool:
                logits.masked_fill_(~mask, least)
            else:
                logits.add_(mask).clamp_(min=least)
        elif self._call.causal:
            # Only keys within the block can be later than one of its queries
            late = torch.ones(rows, rows, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., start:].masked_fill_(late, least)

    def _last_key(self, start: int, stop: int) -> int:
        """Return the number of keys of a block: the last one that is visible from any row, plus 1."""
        mask = self._call.mask
        if mask is None:
            return stop if self._call.causal else self.tokens
        if mask.dtype != torch.bool:
            return self.tokens
        visible = mask[:, start:stop].flatten(0, 1).any(0).nonzero()
        return int(visible[-1]) + 1 if len(visible) else self.tokens

    def _combined(self, maps: torch.Tensor) -> torch.Tensor:
        return maps if self._combine is None else self._combine(maps[None])[0]


def _wide(states: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Convert half precision to float32."""
    return states.to(torch.promote_types(states.dtype, torch.float32), copy=copy)
