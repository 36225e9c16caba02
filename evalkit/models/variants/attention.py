"""Cog, differential and integral attention over queries, keys and values before rotation.

In: the outputs of a backbone's projections. Out: [batch, tokens, heads × size], and if the implementation returns it,
the effective map [batch, heads, queries, keys]. Integral and differential attention call the implementation that is set
in transformers (sdpa, eager, flash, evalkit's tree); cog attention has its own, `signed.py`.

The cache stores rotated keys and unchanged values, with as many numbers as the backbone's; heads may be in another
order, or twice as many of half the size.
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

LAMBDA_STD = 0.1
"""Standard deviation of the initial λ vectors; code of arXiv 2410.05258."""


class VariantAttention(nn.Module):
    """Mixin for a backbone's attention module, which provides the projections."""

    rotary_class: type[nn.Module]
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """The backbone's `apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim)`."""
    config: Any
    layer_idx: int
    attention_dropout: float
    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        # Not config.variant(): as remote code, the config may come from another copy of these modules
        self.variant: Variant = read_variant(vars(config), config.shape())
        self.head_size: int = config.shape().head_size
        self.num_key_value_groups = config.shape().heads // config.shape().kv_heads
        settings = self.variant.settings
        if isinstance(settings, Differential):
            size = settings.size(self.head_size)
            depth = self.variant.layers.index(layer_idx) if settings.lambda_index == "relative" else layer_idx
            self.lambda_init = lambda_init(depth)
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                setattr(self, name, nn.Parameter(torch.zeros(size)))
            self.subln: nn.Module = nn.Identity()
            if settings.diff_subln != "none":
                self.subln = nn.RMSNorm(
                    2 * size, settings.diff_subln_eps, elementwise_affine=settings.diff_subln == "affine"
                )
        self.rotary_emb: nn.Module | None = None
        if self._rotated_size() != self.head_size:
            own = copy.deepcopy(config)
            own.head_dim = self._rotated_size()
            self.rotary_emb = self.rotary_class(own)

    def init_lambda(self) -> None:
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
        """Rotate, update the cache, and attend: [batch, tokens, heads × size], and the effective map or None.

        `states` are queries, [batch, tokens, heads, size], and keys and values, [batch, tokens, key-value heads, size];
        `positions` the backbone's cos and sin, [batch, tokens, rotating channels], and the ids, [batch, tokens]. The
        mask and what else is `passed` are in the form of the attention implementation.
        """
        settings = self.variant.settings
        if isinstance(settings, Differential):
            states = [part.flatten(2).unflatten(2, (-1, settings.size(self.head_size))) for part in states]
        # Rotated before the transposition, where rows are contiguous in memory
        rotated = (*self._rotated(states[0], states[1], positions), states[2])
        query, key, value = (part.transpose(1, 2) for part in rotated)
        if isinstance(settings, Differential) and settings.diff_pairing == "adjacent":
            # The first of each pair, then the second of each: [batch, 2 × pairs, tokens, size]
            pairs = (part.unflatten(1, (-1, 2)) for part in (query, key, value))
            query, key, value = (part.transpose(1, 2).flatten(1, 2) for part in pairs)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if isinstance(settings, Integral):
            out, seen = self._integral(settings, query, key, value, mask, passed)
        elif isinstance(settings, Differential):
            out, seen = self._differential(settings, query, key, value, mask, passed)
        elif isinstance(settings, Cog):
            out, seen = self._cog(query, key, value, mask, passed)
        else:
            raise TypeError(f"{type(settings).__name__} is not a settings class of this module")
        return out.flatten(2), seen

    def effective_map(self, maps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Combine the maps of one call of the implementation into weights of the values, [batch, heads or pairs, …].

        The maps, [batch, heads of the call, queries, keys], are all first maps of the pairs, then all second ones
        (differential); all heads of the first signal, then of the next (integral, probabilities); signed (cog). `dtype`
        is that of the queries, in which λ is computed.
        """
        settings = self.variant.settings
        if isinstance(settings, Differential):
            plus, minus = maps.chunk(2, dim=1)
            return plus - self._lambda(dtype) * minus
        if isinstance(settings, Integral) and settings.signal_domain == "probabilities":
            maps = maps.unflatten(1, (settings.num_signals, -1)).mean(1)
        return maps

    def _rotated_size(self) -> int:
        settings = self.variant.settings
        if isinstance(settings, Integral) and settings.signal_rope == "per_signal":
            return settings.size(self.head_size)
        return settings.size(self.head_size) if isinstance(settings, Differential) else self.head_size

    def _integral(
        self, integral: Integral, query: Any, key: Any, value: Any, mask: Any, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if integral.signal_domain == "logits":
            return self._softmax(query, key, value, mask, integral.mean_factor(self.head_size), passed)
        # Each signal becomes a head, zero-padded to the width of the values, which fused kernels require
        padding = self.head_size - integral.size(self.head_size)
        signals = (_split_signals(part, integral).movedim(3, 1).flatten(1, 2) for part in (query, key))
        query, key = (nn.functional.pad(part, (0, padding)) for part in signals)
        value = value.repeat(1, integral.num_signals, 1, 1)
        out, seen = self._softmax(query, key, value, mask, integral.factor(self.head_size), passed)
        mean = out.unflatten(2, (integral.num_signals, -1)).mean(2)
        return mean, None if seen is None else self.effective_map(seen, query.dtype)

    def _differential(
        self, differential: Differential, query: Any, key: Any, value: Any, mask: Any, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # A pair's values are two heads wide; split, because fused kernels require the width of the keys
        halves = [half.repeat(1, 2, 1, 1) for half in value.chunk(2, dim=1)]
        scale = differential.size(self.head_size) ** -0.5
        results = [self._softmax(query, key, half, mask, scale, passed) for half in halves]
        plus, minus = torch.cat([out for out, _ in results], dim=-1).chunk(2, dim=2)
        weight = self._lambda(query.dtype)
        out = plus - weight * minus
        if differential.diff_subln != "none":
            # Under autocast the products are in its dtype, and the norm in that of its weights
            out = (1 - self.lambda_init) * self.subln(out.to(self.lambda_q1.dtype))
        seen = results[0][1]
        return out, None if seen is None else self.effective_map(seen, query.dtype)

    def _cog(
        self, query: Any, key: Any, value: Any, mask: Any, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = self.head_size**-0.5
        implementation = self.config._attn_implementation
        interface = ALL_ATTENTION_FUNCTIONS.get(implementation)
        if getattr(interface, "takes_product", False):
            out, _ = interface(self, query, key, value, mask, scaling=scale, product=signed_attention, **passed)
            return out, None
        mask = _four_dimensional_mask(mask, query.shape[2], key.shape[2])
        if implementation != "eager":
            if mask is None and implementation == "sdpa" and query.shape[2] > 1:
                # As in torch's kernel, the first query aligns with the first key; later cache slots are empty
                key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            return signed_attention(query, key, value, mask, scale).transpose(1, 2), None
        seen = signed_map(query, key, mask, scale)
        return (seen @ value.repeat_interleave(self.num_key_value_groups, 1)).transpose(1, 2), seen

    def _softmax(
        self, query: Any, key: Any, value: Any, mask: Any, scale: float, passed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the implementation that is set: [batch, heads, tokens, size] → [batch, tokens, heads, size]."""
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if interface is eager_attention_forward:  # which scales QKᵀ only afterwards, in the queries' dtype
            power, scale = split_scale(scale)
            query = query * power
        dropout = self.attention_dropout if self.training else 0.0
        out, seen = interface(self, query, key, value, mask, scaling=scale, dropout=dropout, **passed)
        return out, seen

    def _rotated(self, query: Any, key: Any, positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply rotary embeddings to [batch, tokens, heads, size], per signal if so configured."""
        (cos, sin), ids = positions
        if self.rotary_emb is not None:
            cos, sin = self.rotary_emb(query, ids)
        settings = self.variant.settings
        if not (isinstance(settings, Integral) and settings.signal_rope == "per_signal"):
            return self.rotate(query, key, cos, sin, unsqueeze_dim=2)
        # Shape of the parts: [batch, tokens, heads, signals, size]
        parts = (_split_signals(query, settings), _split_signals(key, settings), cos[:, :, None], sin[:, :, None])
        is_tiled = settings.signal_layout == "tiled"
        rotated = self.rotate(*parts, unsqueeze_dim=2)
        query, key = ((part.transpose(-1, -2) if is_tiled else part).flatten(-2) for part in rotated)
        return query, key

    def _lambda(self, dtype: torch.dtype) -> torch.Tensor:
        """Compute λ = exp(λq1 · λk1) − exp(λq2 · λk2) + λ_init, in float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        first = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dtype=wide)).to(dtype)
        second = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dtype=wide)).to(dtype)
        return first - second + self.lambda_init


def _split_signals(states: Any, integral: Integral) -> Any:
    if integral.signal_layout == "contiguous":
        return states.unflatten(-1, (integral.num_signals, -1))
    return states.unflatten(-1, (-1, integral.num_signals)).transpose(-1, -2)


def _four_dimensional_mask(mask: torch.Tensor | None, queries: int, keys: int) -> torch.Tensor | None:
    """Convert a mask for `signed_attention`; flash attention's is [batch, keys] and not causal."""
    if mask is None or mask.dim() == 4:
        return mask
    positions = torch.arange(keys, device=mask.device)
    causal = positions <= positions[keys - queries :, None]
    return causal & mask[:, None, None, -keys:].bool()
