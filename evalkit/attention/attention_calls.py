"""Effective attention maps in blocks of query rows, and the recorded calls that they are computed from.

In: a running model's queries and keys of some attention modules. Out: the `MapBlocks` of each: blocks [heads, rows,
keys], or the map of a single head, in float32 (float64 in a model of that dtype). The layers' outputs come from
scaled_dot_product_attention, so no map exists, and the hidden states are the model's own. Soft caps and attention
sinks, which that function lacks, are computed in blocks of rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
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


class Unrecorded(Exception):
    """A layer's attention cannot be recorded: it does not use the registry, or has a feature that is not supported."""


class MapBlocks(ABC):
    """Effective map of one layer and one sequence, of `heads` heads (of differential attention: pairs of heads).

    A block is computed from `maps` maps, which have at most `elements` elements or one row; where it ends at the key of
    its last row (`growing`), early blocks have more rows.
    """

    def __init__(self, maps: int, heads: int, tokens: int, elements: int, growing: bool) -> None:
        self.heads, self.tokens = heads, tokens
        self._maps, self._elements, self._growing = maps, elements, growing

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, block [heads, rows, keys]) in the rows' order.

        A block ends at the last key that any of its rows attends to where that is known: the weights of further keys
        are 0. Blocks may be modified.
        """
        start = 0
        while start < self.tokens:
            rows = self._elements // (self._maps * self.tokens)
            if self._growing:  # rows × (start + rows) keys of all maps are at most the maximum
                rows = int((math.sqrt(start * start + 4 * self._elements / self._maps) - start) / 2)
            stop = min(start + max(1, rows), self.tokens)
            yield start, self._block(start, stop, None)
            start = stop

    def head(self, head: int) -> torch.Tensor:
        """The whole map of one head, [tokens, tokens]."""
        rows = max(1, self._elements // (self._maps // self.heads * self.tokens))
        starts = range(0, self.tokens, rows)
        return self._joined(self._block(start, min(start + rows, self.tokens), head) for start in starts)[0]

    def whole(self) -> torch.Tensor:
        """The whole map, [heads, tokens, tokens]."""
        return self._joined(block for _, block in self.blocks())

    def _joined(self, blocks: Iterator[torch.Tensor]) -> torch.Tensor:
        start, whole = 0, torch.empty(0)
        for block in blocks:
            if start == 0:
                whole = block.new_zeros(len(block), self.tokens, self.tokens)
            whole[:, start : start + block.shape[1], : block.shape[2]] = block
            start += block.shape[1]
        return whole

    @abstractmethod
    def _block(self, start: int, stop: int, head: int | None) -> torch.Tensor:
        """Return rows, [heads, rows, keys], of all heads or of one."""


class WholeMap(MapBlocks):
    """Blocks of a map that is in memory: [heads, tokens, tokens], of any floating-point dtype."""

    def __init__(self, whole: torch.Tensor, elements: int = ELEMENTS) -> None:
        super().__init__(len(whole), len(whole), whole.shape[1], elements, growing=False)
        self._map = whole

    def _block(self, start: int, stop: int, head: int | None) -> torch.Tensor:
        heads = slice(None) if head is None else slice(head, head + 1)
        return _wide(self._map[heads, start:stop], copy=True)


@dataclass(eq=False)
class CallMap(MapBlocks):
    """Blocks computed from the arguments of one call of an attention function, for one sequence."""

    query: torch.Tensor
    """[maps, tokens, size]."""
    key: torch.Tensor
    """[key-value heads, tokens, size]."""
    scale: float
    mask: torch.Tensor | None
    """[1 or maps, tokens, tokens], boolean (True: visible) or added to the logits; None: `causal` says."""
    causal: bool
    """Whether queries attend to keys up to their own position where there is no mask."""
    softcap: float | None
    """c of the logits c · tanh(logits / c); None: no cap."""
    sinks: torch.Tensor | None
    """[maps] a further logit of each row, whose weight is dropped; None: no sinks."""
    signed: bool
    """Whether this is cog attention: the logits' signs times the softmax of their absolute values."""
    elements: int = ELEMENTS
    combine: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Combines the maps, [1, maps, queries, keys], to effective ones, [1, heads, queries, keys]; None: they are."""

    def __post_init__(self) -> None:
        maps, tokens = self.query.shape[:2]
        heads = len(self._combined(self.query.new_zeros(maps, 1, 1)))
        super().__init__(maps, heads, tokens, self.elements, growing=self.mask is None and self.causal)

    @cached_property
    def _queries(self) -> torch.Tensor:
        return _wide(self.query) * self.scale

    @cached_property
    def _keys(self) -> torch.Tensor:
        return _wide(self.key).repeat_interleave(self._maps // len(self.key), 0)

    def attend(self, value: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output, [1, heads, tokens, width], from [1, key-value heads, tokens, width]."""
        values = _wide(value[0]).repeat_interleave(self.heads // value.shape[1], 0)
        parts = [torch.bmm(block, values[:, : block.shape[2]]) for _, block in self.blocks()]
        return torch.cat(parts, dim=1)[None].to(value.dtype)

    @torch.no_grad()
    def _block(self, start: int, stop: int, head: int | None) -> torch.Tensor:
        # A head's maps in the call: one of each group of as many heads as the effective map has
        maps = slice(None) if head is None else slice(head, None, self.heads)
        mask, keys = self.mask, stop if self.mask is None and self.causal else self.tokens
        if mask is not None:
            mask = mask[:, start:stop] if len(mask) == 1 else mask[maps, start:stop]
            if mask.dtype == torch.bool and len(visible := mask.flatten(0, 1).any(0).nonzero()):
                keys = int(visible[-1]) + 1
        logits = torch.bmm(self._queries[maps, start:stop], self._keys[maps, :keys].mT)
        if not self.signed:
            return self._combined(self._softmax(logits, start, mask, maps))
        weights = self._softmax(logits.abs(), start, mask, maps)
        return self._combined(weights.mul_(logits.sign_()))

    def _softmax(self, logits: torch.Tensor, start: int, mask: torch.Tensor | None, maps: slice) -> torch.Tensor:
        """Apply cap, mask and sinks to [maps, rows, keys], in place, and normalise."""
        rows, keys = logits.shape[1:]
        least = torch.finfo(logits.dtype).min
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None and mask.dtype == torch.bool:
            logits.masked_fill_(~mask[..., :keys], least)
        elif mask is not None:
            logits.add_(mask).clamp_(min=least)
        elif self.causal:
            # Only keys within the block can be later than one of its queries
            late = torch.ones(rows, rows, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., start:].masked_fill_(late, least)
        if self.sinks is None:
            return logits.softmax(-1)
        extra = _wide(self.sinks[maps])[:, None, None].expand(-1, rows, 1)
        return torch.cat((logits, extra), dim=-1).softmax(-1)[..., :-1]

    def _combined(self, maps: torch.Tensor) -> torch.Tensor:
        return maps if self.combine is None else self.combine(maps[None])[0]


def _wide(states: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Convert half precision to float32."""
    return states.to(torch.promote_types(states.dtype, torch.float32), copy=copy)


class Recording:
    """Calls of some attention modules, until their maps are taken."""

    def __init__(self, modules: Collection[Any], elements: int) -> None:
        self.elements = elements
        self.calls: dict[int, list[CallMap]] = {id(module): [] for module in modules}

    def take(self, module: Any) -> CallMap:
        """Return the map of a module's first call, and forget all its calls.

        Differential attention calls twice with the same queries and keys, for the two halves of its values.
        """
        name = type(module).__name__
        calls, self.calls[id(module)] = self.calls[id(module)], []
        if not calls:
            raise Unrecorded(f"{name} does not use transformers' registry of attention functions")
        if hasattr(module, "effective_map"):
            return replace(calls[0], combine=partial(module.effective_map, dtype=calls[0].query.dtype))
        if hasattr(module, "variant"):  # the code of a checkpoint that an earlier evalkit wrote
            raise Unrecorded(f"{name} does not combine maps itself")
        if len(calls) > 1:
            raise Unrecorded(f"{name} attends {len(calls)} times")
        return calls[0]


_active: Recording | None = None


@contextmanager
def recording(model: Any, modules: Collection[Any], elements: int = ELEMENTS) -> Iterator[Recording]:
    """Make a model attend by the recording function inside the context; maps are in blocks of at most `elements`."""
    global _active
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    _active = Recording(modules, elements)
    try:
        with attention_named(model, NAME):
            yield _active
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
    mask, tokens = attention_mask, query.shape[2]
    unsupported = {name: settings.get(name) is not None for name in SPECIAL if name not in _SUPPORTED} | {
        "a product that is not cog attention's": product is not None and getattr(product, "__name__", "") != _SIGNED,
        "other keys than the sequence's": len(query) != 1 or tokens != key.shape[2],
        "a mask of another shape": mask is not None and mask.shape[2:] != (tokens, key.shape[2]),
    }
    if passed := [name for name, is_passed in unsupported.items() if is_passed]:
        raise Unrecorded(f"{type(module).__name__} passes {', '.join(passed)}")
    is_causal = settings.get("is_causal")
    call = CallMap(
        query=query[0],
        key=key[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=None if mask is None else mask[0],
        causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        softcap=settings.get("softcap"),
        sinks=settings.get("s_aux"),
        signed=product is not None,
        elements=_active.elements,
    )
    if id(module) in _active.calls:
        _active.calls[id(module)].append(call)
    if product is not None:
        # A missing mask means causal, for the product too
        return product(query, key, value, mask, call.scale).transpose(1, 2), None  # type: ignore[arg-type]
    if call.softcap is not None or call.sinks is not None:
        return call.attend(value).transpose(1, 2).contiguous(), None
    settings = {name: setting for name, setting in settings.items() if name not in SPECIAL}
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **settings)
    return output, None


_attention.takes_product = True  # type: ignore[attr-defined]  # read by attention modules without a softmax
