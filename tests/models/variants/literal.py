"""The paper's formulas written out, one head and one signal after the other, to hold the models against.

Independent of `evalkit.models.variants`: it reads a config's flat keys and an attention module's weights, nothing
else. In float64, but for the angles of rotary embeddings, which transformers computes in float32 in every model.

Source: Kobyzev et al. (the Integral Transformer), section 2 for Cog and Diff, 3 for Intg; arXiv 2410.05258, section 2,
for what they leave out of Diff (λ, and the norm after it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.models.variants.building import Scene, attention_of

Tensor = torch.Tensor
Heads = list[Tensor]


@torch.no_grad()
def largest_error(model: Any, scene: Scene, maps: bool = False) -> float:
    """How far the attention of any variant layer is from the formulas, given that layer's own input.

    As a share of the layer's largest number. Tokens that see nothing are left out; that they are numbers is asserted.
    With `maps`, also how far the maps are, absolute.
    """
    taken: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
    hooks = [
        attention_of(model, layer).register_forward_hook(_keeping(taken, layer), with_kwargs=True)
        for layer in model.config.variant_layers
    ]
    model(**scene.given())
    for hook in hooks:
        hook.remove()
    worst = 0.0
    for layer, (hidden, output, seen_map) in taken.items():
        assert output.isfinite().all()
        for row in range(len(hidden)):
            expected, expected_map = attention(
                attention_of(model, layer), layer, hidden[row], scene.positions[row], scene.seen[row]
            )
            real = scene.real[row]
            largest = expected[real].abs().max()
            worst = max(worst, float((expected - output[row].double())[real].abs().max() / largest))
            if maps:
                assert seen_map is not None
                assert seen_map.shape[1:] == expected_map.shape
                worst = max(worst, float((expected_map - seen_map[row].double())[:, real].abs().max()))
    assert len(taken) == len(model.config.variant_layers)
    return worst


def attention(module: Any, layer: int, hidden: Tensor, positions: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, d_model] → the same, and the effective maps [heads or pairs, queries, keys]."""
    config = module.config
    variant = {"cog": _cog, "differential": _differential, "integral": _integral}[config.attention_variant]

    def turned(channels: Tensor) -> Tensor:
        return rotated(channels, positions, config.rope_parameters)

    outs, maps = variant(module, layer, *projected(module, hidden.double()), turned, seen)
    weight, bias = last_projection(module)
    return torch.cat(outs, dim=-1) @ weight.T + bias, torch.stack(maps)


def rotated(channels: Tensor, positions: Tensor, rope: dict[str, Any]) -> Tensor:
    """[tokens, size] → the same: channel c of the first half turns with c of the second, by position · θ^(−2c/size)."""
    rotating = int(channels.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    half = rotating // 2
    turned = channels.clone()
    for c in range(half):
        frequency = 1.0 / rope["rope_theta"] ** (torch.tensor(2 * c, dtype=torch.float32) / rotating)
        angle = positions.float() * frequency
        cos, sin = angle.cos().double(), angle.sin().double()
        turned[:, c] = channels[:, c] * cos - channels[:, c + half] * sin
        turned[:, c + half] = channels[:, c + half] * cos + channels[:, c] * sin
    return turned


def projected(module: Any, hidden: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values, each head by head, [tokens, size]."""
    config = module.config
    size = config.hidden_size // config.num_attention_heads
    if not hasattr(module, "query_key_value"):
        projections = (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (
            hidden @ projection.weight.double().T + (0 if projection.bias is None else projection.bias.double())
            for projection in projections
        )
        return list(q.split(size, -1)), list(k.split(size, -1)), list(v.split(size, -1))
    # GPT-NeoX: head after head, and of each its query, its key and its value
    fused = hidden @ module.query_key_value.weight.double().T + module.query_key_value.bias.double()
    pieces = list(fused.split(size, -1))
    return pieces[0::3], pieces[1::3], pieces[2::3]


def last_projection(module: Any) -> tuple[Tensor, Tensor]:
    last = module.dense if hasattr(module, "dense") else module.o_proj
    weight = last.weight.double()
    return weight, weight.new_zeros(len(weight)) if last.bias is None else last.bias.double()


def softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Of each row over the keys it sees; a row that sees none is zero."""
    shown = torch.where(seen | ~seen.any(-1, keepdim=True), logits, -torch.inf)
    powers = torch.where(seen, (shown - shown.amax(-1, keepdim=True)).exp(), 0.0)
    return torch.where(seen, powers / powers.sum(-1, keepdim=True), 0.0)


def _cog(module: Any, layer: int, q: Heads, k: Heads, v: Heads, turned: Any, seen: Tensor) -> tuple[Heads, Heads]:
    outs, maps = [], []
    for head in range(len(q)):
        shared = head // (len(q) // len(k))
        logits = turned(q[head]) @ turned(k[shared]).T / math.sqrt(q[head].shape[-1])
        maps.append(torch.sign(logits) * softmax(logits.abs(), seen))
        outs.append(maps[-1] @ v[shared])
    return outs, maps


def _integral(module: Any, layer: int, q: Heads, k: Heads, v: Heads, turned: Any, seen: Tensor) -> tuple[Heads, Heads]:
    config = module.config
    signals, size = config.num_signals, q[0].shape[-1]
    own = size // signals
    outs, maps = [], []
    for head in range(len(q)):
        shared = head // (len(q) // len(k))
        query, key = q[head], k[shared]
        if config.signal_rope == "full_head":
            query, key = turned(query), turned(key)
        logits = []
        for s in range(signals):
            channels = (
                range(s * own, (s + 1) * own) if config.signal_layout == "contiguous" else range(s, size, signals)
            )
            signal, other = query[:, list(channels)], key[:, list(channels)]
            if config.signal_rope == "per_signal":
                signal, other = turned(signal), turned(other)
            logits.append(signal @ other.T / math.sqrt(own if config.signal_scale == "signal" else size))
        if config.signal_domain == "logits":
            maps.append(softmax(sum(logits[1:], logits[0]) / signals, seen))
        else:
            each = [softmax(logit, seen) for logit in logits]
            maps.append(sum(each[1:], each[0]) / signals)
        outs.append(maps[-1] @ v[shared])
    return outs, maps


def _differential(
    module: Any, layer: int, q: Heads, k: Heads, v: Heads, turned: Any, seen: Tensor
) -> tuple[Heads, Heads]:
    config = module.config
    if config.diff_heads == "keep":
        q, k, v = ([half for head in heads for half in head.chunk(2, -1)] for heads in (q, k, v))
    depth = layer if config.lambda_index == "absolute" else list(config.variant_layers).index(layer)
    start = 0.8 - 0.6 * math.exp(-0.3 * depth)
    vectors = [getattr(module, f"lambda_{name}").double() for name in ("q1", "k1", "q2", "k2")]
    weight = math.exp(vectors[0] @ vectors[1]) - math.exp(vectors[2] @ vectors[3]) + start
    outs, maps = [], []
    for pair in range(len(q) // 2):
        shared = pair // (len(q) // len(k))
        q1, q2 = _pair(q, pair, config.diff_pairing)
        k1, k2 = _pair(k, shared, config.diff_pairing)
        root = math.sqrt(q1.shape[-1])
        first = softmax(turned(q1) @ turned(k1).T / root, seen)
        second = softmax(turned(q2) @ turned(k2).T / root, seen)
        maps.append(first - weight * second)
        out = maps[-1] @ torch.cat(_pair(v, shared, config.diff_pairing), -1)
        if config.diff_subln != "none":
            out = out / torch.sqrt((out**2).mean(-1, keepdim=True) + config.diff_subln_eps) * (1 - start)
        if config.diff_subln == "affine":
            out = out * module.subln.weight.double()
        outs.append(out)
    return outs, maps


def _pair(heads: list[Tensor], pair: int, pairing: str) -> tuple[Tensor, Tensor]:
    if pairing == "adjacent":
        return heads[2 * pair], heads[2 * pair + 1]
    return heads[pair], heads[pair + len(heads) // 2]


def _keeping(taken: dict[int, Any], layer: int) -> Callable[..., None]:
    def keep(module: Any, args: tuple[Any, ...], given: dict[str, Any], output: tuple[Any, ...]) -> None:
        hidden = args[0] if args else given["hidden_states"]
        taken[layer] = (hidden, *output[:2])

    return keep
