"""The three attentions that are not the backbone's, over queries, keys and values that are still to be rotated.

In: what a backbone's projections give. Out: [batch, tokens, heads × size], and where the implementation shows it, the
effective map [batch, heads, queries, keys]. Integral and differential attention are calls of whatever implementation
transformers has been told to use (sdpa, eager, flash, evalkit's tree); cog attention has its own, `signed.py`.

Keys are cached rotated and values as projected, as many numbers as the backbone's; heads may stand in another order,
and be twice as many of half the size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .settings import Cog, Differential, Integral, Variant, lambda_init, read_variant
from .signed import signed_attention, signed_map, split_scale

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A backbone's `apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim)`."""

LAMBDA_STD = 0.1
"""Of the normal distribution that λ's vectors begin with; arXiv 2410.05258's code."""


class VariantAttention(nn.Module):
    """Mixed into a backbone's attention module, whose projections it keeps.

    Args:
        config: of the model, with its `variant()`.
        layer_idx: from 0.
        rotary: the backbone's class of rotary embeddings.
        rotate: the backbone's function that applies them.
    """

    config: Any
    layer_idx: int
    attention_dropout: float
    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def _set_variant(self, config: Any, layer_idx: int, rotary: type[nn.Module], rotate: Rotate) -> None:
        # Not config.variant(): loaded as remote code, the config is of another copy of these modules
        self.variant: Variant = read_variant(vars(config), config.shape())
        self.head_size: int = config.shape().head_size
        self.num_key_value_groups = config.shape().heads // config.shape().kv_heads
        self._rotate = rotate
        settings = self.variant.settings
        if isinstance(settings, Differential):
            size = settings.size(self.head_size)
            depth = self.variant.layers.index(layer_idx) if settings.lambda_index == "relative" else layer_idx
            self.lambda_init = lambda_init(depth)
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                setattr(self, name, nn.Parameter(torch.zeros(size)))
            self.subln: nn.Module = nn.Identity()
            if settings.subln != "none":
                self.subln = nn.RMSNorm(2 * size, settings.subln_eps, elementwise_affine=settings.subln == "affine")
        self.rotary_emb: nn.Module | None = None
        if self._rotated_size() != self.head_size:
            self.rotary_emb = rotary(_with_head_size(config, self._rotated_size()))

    def init_lambda(self) -> None:
        """Begin with λ's vectors as the authors' code does."""
        if isinstance(self.variant.settings, Differential):
            for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
                initialization.normal_(vector, mean=0.0, std=LAMBDA_STD)

    def attend(
        self,
        states: Sequence[torch.Tensor],
        positions: tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor],
        mask: Any,
        cache: Any,
        **passed: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate, cache, attend.

        Args:
            states: queries, [batch, tokens, heads, size]; keys and values, [batch, tokens, key-value heads, size].
            positions: the backbone's cos and sin, [batch, tokens, rotating channels], and the ids, [batch, tokens].
            mask: as the attention implementation has it.
            cache: a transformers cache, or None.
            passed: on to the implementation.

        Returns:
            [batch, tokens, heads × size], and the effective map or None.
        """
        settings = self.variant.settings
        if isinstance(settings, Differential):
            states = [part.flatten(2).unflatten(2, (-1, settings.size(self.head_size))) for part in states]
        # Rotated before the heads are brought to the front, where rows lie whole in memory
        turned = (*self._rotated(states[0], states[1], positions), states[2])
        query, key, value = (part.transpose(1, 2) for part in turned)
        if isinstance(settings, Differential) and settings.pairing == "adjacent":
            query, key, value = (_firsts_then_seconds(part) for part in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if isinstance(settings, Integral):
            out, seen = self._integral(settings, query, key, value, mask, passed)
        elif isinstance(settings, Differential):
            out, seen = self._differential(settings, query, key, value, mask, passed)
        elif isinstance(settings, Cog):
            out, seen = self._cog(query, key, value, mask, passed)
        else:
            raise TypeError(f"{type(settings).__name__} is none of this module's settings")
        return out.flatten(2), seen

    def _rotated_size(self) -> int:
        """Channels of what rotates as a head of its own."""
        settings = self.variant.settings
        if isinstance(settings, Integral) and settings.rope == "per_signal":
            return settings.size(self.head_size)
        return settings.size(self.head_size) if isinstance(settings, Differential) else self.head_size

    def _integral(
        self, integral: Integral, query: Any, key: Any, value: Any, mask: Any, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[batch, heads, tokens, size] → [batch, tokens, heads, size] and the map; so the other two."""
        if integral.domain == "logits":
            return self._softmax(query, key, value, mask, integral.mean_factor(self.head_size), passed)
        # Signals become heads of their own, filled up with zeros to the values' width, which fused kernels ask for
        query, key = (self._signal_heads(part, integral) for part in (query, key))
        value = value.repeat(1, integral.signals, 1, 1)
        out, seen = self._softmax(query, key, value, mask, integral.factor(self.head_size), passed)
        mean = out.unflatten(2, (integral.signals, -1)).mean(2)
        return mean, None if seen is None else seen.unflatten(1, (integral.signals, -1)).mean(1)

    def _differential(
        self, differential: Differential, query: Any, key: Any, value: Any, mask: Any, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # A pair's values are two heads wide. One half at a time: fused kernels want them as wide as the keys
        halves = [half.repeat(1, 2, 1, 1) for half in value.chunk(2, dim=1)]
        scale = differential.size(self.head_size) ** -0.5
        found = [self._softmax(query, key, half, mask, scale, passed) for half in halves]
        plus, minus = torch.cat([out for out, _ in found], dim=-1).chunk(2, dim=2)
        weight = self._lambda(query.dtype)
        out = plus - weight * minus
        if differential.subln != "none":
            out = (1 - self.lambda_init) * self.subln(out)
        maps = found[0][1]
        if maps is not None:
            plus, minus = maps.chunk(2, dim=1)
            maps = plus - weight * minus
        return out, maps

    def _cog(
        self, query: Any, key: Any, value: Any, mask: Any, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = self.head_size**-0.5
        implementation = self.config._attn_implementation
        interface = ALL_ATTENTION_FUNCTIONS.get(implementation)
        if getattr(interface, "takes_product", False):
            out, _ = interface(self, query, key, value, mask, scaling=scale, product=signed_attention, **passed)
            return out, None
        mask = _mask_of_keys(mask, query.shape[2], key.shape[2])
        if implementation != "eager":
            if mask is None and implementation == "sdpa" and query.shape[2] > 1:
                # As torch's kernel, whose first query stands beside the first key: later ones are empty places
                key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            return signed_attention(query, key, value, mask, scale).transpose(1, 2), None
        seen = signed_map(query, key, mask, scale)
        return (seen @ value.repeat_interleave(self.num_key_value_groups, 1)).transpose(1, 2), seen

    def _softmax(
        self, query: Any, key: Any, value: Any, mask: Any, scale: float, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[batch, heads, tokens, size] → [batch, tokens, heads, size], by the implementation that is set."""
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if interface is eager_attention_forward:  # which scales when all of QKᵀ is there, in the queries' dtype
            power, scale = split_scale(scale)
            query = query * power
        dropout = self.attention_dropout if self.training else 0.0
        out, seen = interface(self, query, key, value, mask, scaling=scale, dropout=dropout, **passed)
        return out, seen

    def _rotated(self, query: Any, key: Any, positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary embeddings on [batch, tokens, heads, size], for signals within each head."""
        (cos, sin), ids = positions
        if self.rotary_emb is not None:
            cos, sin = self.rotary_emb(query, ids)
        settings = self.variant.settings
        if not (isinstance(settings, Integral) and settings.rope == "per_signal"):
            return self._rotate(query, key, cos, sin, unsqueeze_dim=2)
        # Signals stand between heads and channels: [batch, tokens, heads, signals, size]
        parts = (_signals(query, settings), _signals(key, settings), cos[:, :, None], sin[:, :, None])
        query, key = (_whole(part, settings) for part in self._rotate(*parts, unsqueeze_dim=2))
        return query, key

    def _signal_heads(self, states: Any, integral: Integral) -> Any:
        """[batch, heads, tokens, size] → [batch, signals × heads, tokens, size], zeros past a signal's own channels."""
        parts = _signals(states, integral).movedim(3, 1).flatten(1, 2)
        return nn.functional.pad(parts, (0, states.shape[-1] - parts.shape[-1]))

    def _lambda(self, dtype: torch.dtype) -> torch.Tensor:
        """λ = exp(λq1 · λk1) − exp(λq2 · λk2) + λ_init; in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        one = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dtype=wide)).to(dtype)
        two = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dtype=wide)).to(dtype)
        return one - two + self.lambda_init


def _firsts_then_seconds(states: Any) -> Any:
    """[batch, 2 × pairs, tokens, size] of adjacent pairs → the first of each pair before all second ones."""
    return states.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _signals(states: Any, integral: Integral) -> Any:
    """[…, head size] → […, signals, size]."""
    if integral.layout == "contiguous":
        return states.unflatten(-1, (integral.signals, -1))
    return states.unflatten(-1, (-1, integral.signals)).transpose(-1, -2)


def _whole(signals: Any, integral: Integral) -> Any:
    """The inverse of `_signals`."""
    return (signals if integral.layout == "contiguous" else signals.transpose(-1, -2)).flatten(-2)


def _with_head_size(config: Any, size: int) -> Any:
    """A config whose rotary embeddings are those of heads of another size."""
    other = copy.deepcopy(config)
    other.head_dim = size
    return other


def _mask_of_keys(mask: torch.Tensor | None, queries: int, keys: int) -> torch.Tensor | None:
    """A mask as `signed_attention` takes it; flash attention has [batch, keys], without causality."""
    if mask is None or mask.dim() == 4:
        return mask
    places = torch.arange(keys, device=mask.device)
    causal = places <= places[keys - queries :, None]
    return causal & mask[:, None, None, -keys:].bool()
