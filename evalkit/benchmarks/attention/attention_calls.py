"""Recorded calls of a model's attention functions, and their effective maps in blocks of query rows.

In: a running model's queries and keys of some attention modules. Out: an `AttentionCall` for each, and from it the map:
blocks [heads, rows, keys], or the map of a single head, in float32 (float64 in a model of that dtype). The layers'
outputs come from scaled_dot_product_attention, so no map exists, and the hidden states are the model's own. Soft caps
and attention sinks, which that function lacks, are computed in blocks of rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from evalkit.scoring.attention import SPECIAL, Product, attention_named

NAME = "evalkit_maps"
"""Name of this attention in transformers' registry of attention functions."""
_SUPPORTED = ("softcap", "s_aux")
"""Special arguments of transformers' attention functions that this one supports."""
_SIGNED = "signed_attention"
"""Name of cog attention's product, which may be of another copy of its module."""
ELEMENTS = 2**20
"""Maximum elements of a block by default: 4 MiB in float32, and about four times as much while it is computed."""

Combine = Callable[[torch.Tensor], torch.Tensor]
"""Combines the maps of a call, [1, heads of the call, queries, keys], to effective ones, [1, heads, queries, keys]."""


class Unrecorded(Exception):
    """A layer's attention cannot be recorded: it does not use the registry, or has a feature that is not supported."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call of an attention function, for one sequence."""

    query: torch.Tensor
    """[heads, tokens, size]."""
    key: torch.Tensor
    """[key-value heads, tokens, size]."""
    scale: float
    """Factor of the logits."""
    mask: torch.Tensor | None
    """[1 or heads, tokens, tokens], boolean (True: visible) or added to the logits; None: `causal` says."""
    causal: bool
    """Whether queries attend to keys up to their own position where there is no mask."""
    softcap: float | None
    """c of the logits c · tanh(logits / c); None: no cap."""
    sinks: torch.Tensor | None
    """[heads] a further logit of each row, whose weight is dropped; None: no sinks."""
    signed: bool
    """Whether this is cog attention: the logits' signs times the softmax of their absolute values."""


class Recording:
    """Calls of some attention modules, until they are taken.

    `attend` computes [1, heads, tokens, width] from a call with a soft cap or sinks, and values [1, key-value heads,
    tokens, width].
    """

    def __init__(self, modules: Collection[Any], attend: Callable[[AttentionCall, torch.Tensor], torch.Tensor]) -> None:
        self.attend = attend
        self._calls: dict[int, list[AttentionCall]] = {id(module): [] for module in modules}

    def add(self, module: Any, call: AttentionCall) -> None:
        """Keep a call if its module is recorded."""
        if id(module) in self._calls:
            self._calls[id(module)].append(call)

    def take(self, module: Any) -> AttentionCall:
        """Return the first call of a module and forget all of them.

        Differential attention calls twice with the same queries and keys, for the two halves of its values.

        Raises:
            Unrecorded: the module made no call, several calls, or is a variant of an earlier evalkit.
        """
        calls, self._calls[id(module)] = self._calls[id(module)], []
        if not calls:
            raise Unrecorded(f"{type(module).__name__} does not use transformers' registry of attention functions")
        combines = hasattr(module, "effective_map")
        if hasattr(module, "variant") and not combines:
            raise Unrecorded(f"{type(module).__name__} does not combine maps itself")
        if len(calls) > 1 and not combines:
            raise Unrecorded(f"{type(module).__name__} attends {len(calls)} times")
        return calls[0]


_active: Recording | None = None


@contextmanager
def recording(model: Any, active: Recording) -> Iterator[None]:
    """Make a model attend by the recording function inside the context."""
    global _active
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    _active = active
    try:
        with attention_named(model, NAME):
            yield
    finally:
        _active = None


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
    """Attend and record; transformers' signature, [1, heads, tokens, size] → [1, tokens, heads, size]."""
    if _active is None:
        raise Unrecorded("attention outside of a recording")
    call = _call_of(module, query, key, attention_mask, scaling, product, settings)
    _active.add(module, call)
    if product is not None:
        # A missing mask means causal, for the product too
        return product(query, key, value, attention_mask, call.scale).transpose(1, 2), None  # type: ignore[arg-type]
    if call.softcap is not None or call.sinks is not None:
        return _active.attend(call, value).transpose(1, 2).contiguous(), None
    settings = {name: given for name, given in settings.items() if name not in SPECIAL}
    attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **settings
    )
    return attended


def _call_of(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    product: Product | None,
    settings: dict[str, Any],
) -> AttentionCall:
    name = type(module).__name__
    for special in SPECIAL:
        if special not in _SUPPORTED and settings.get(special) is not None:
            raise Unrecorded(f"{name} passes {special}")
    if product is not None and getattr(product, "__name__", "") != _SIGNED:
        raise Unrecorded(f"{name} passes a product that is not cog attention's")
    if len(query) != 1 or query.shape[2] != key.shape[2]:
        raise Unrecorded(f"{name} attends to other keys than the sequence's")
    if mask is not None and (mask.dim() != 4 or mask.shape[2:] != (query.shape[2], key.shape[2])):
        raise Unrecorded(f"{name} passes a mask of shape {tuple(mask.shape)}")
    given = settings.get("is_causal")
    return AttentionCall(
        query=query[0],
        key=key[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=None if mask is None else mask[0],
        causal=bool(getattr(module, "is_causal", True) if given is None else given),
        softcap=settings.get("softcap"),
        sinks=settings.get("s_aux"),
        signed=product is not None,
    )


_attention.takes_product = True  # type: ignore[attr-defined]  # read by attention modules without a softmax


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
