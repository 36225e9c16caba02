"""Integral attention, compared with a loop over its signals and with equivalent vanilla models."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.marks import fast
from tests.models.variants.building import (
    FAMILIES,
    HEAD_SIZE,
    INTEGRAL,
    SCENES,
    attention_of,
    causal,
    left_padded,
    model_of,
    plain_of,
    scene_of,
    shape_keys,
)
from tests.models.variants.literal import largest_error

EVERY_LAYER = {"variant_layers": [0, 1, 2]}
CHOICES = {
    "signal_rope": ("per_signal", "full_head"),
    "signal_layout": ("contiguous", "tiled"),
    "signal_scale": ("signal", "head"),
    "signal_domain": ("logits", "probabilities"),
}
EVERY_CHOICE = [dict(zip(CHOICES, chosen, strict=True)) for chosen in product(*CHOICES.values())]


def name_of(chosen: object) -> str | None:
    return "-".join(chosen.values()) if isinstance(chosen, dict) else None


def logits_of(model: Any, scene: Any = None) -> torch.Tensor:
    found: torch.Tensor
    with torch.no_grad():
        found = model(**(scene or causal()).given()).logits
    return found


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference as a share of the largest number."""
    assert other.isfinite().all()
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("chosen", EVERY_CHOICE, ids=name_of)
def test_every_reading_is_its_formula(chosen: dict[str, str]) -> None:
    """float64: 1e-12 of the largest output is some thousand roundings; measured 9e-16. Asked for: 1e-10."""
    model = model_of("llama", INTEGRAL | chosen | {"num_signals": 4}, dtype=torch.float64)
    assert largest_error(model, causal()) <= 1e-12
    assert largest_error(model, left_padded()) <= 1e-12


@pytest.mark.parametrize("domain", CHOICES["signal_domain"])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("family", fast(["gpt_neox"], FAMILIES))
def test_every_backbone_and_mask(family: str, scene: str, domain: str) -> None:
    """float32: 1e-6 of the largest output, about eight roundings (measured 7e-7), under both implementations."""
    attention = INTEGRAL | EVERY_LAYER | {"signal_domain": domain}
    wide = model_of(family, attention, dtype=torch.float64)
    assert largest_error(wide, scene_of(scene, torch.float64)) <= 1e-12
    for implementation in ("sdpa",) if scene == "boolean tree" else ("sdpa", "eager"):
        model = model_of(family, attention, implementation=implementation)
        assert largest_error(model, scene_of(scene, torch.float32), maps=implementation == "eager") <= 1e-6


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_signal_is_vanilla(family: str, implementation: str) -> None:
    """To the last bit, whatever else is chosen."""
    for chosen in EVERY_CHOICE:
        model = model_of(family, INTEGRAL | chosen | {"num_signals": 1}, implementation=implementation)
        plain = plain_of(family, model)
        for scene in (causal(), left_padded()):
            assert torch.equal(logits_of(model, scene), logits_of(plain, scene))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("scale", CHOICES["signal_scale"])
@pytest.mark.parametrize("layout", CHOICES["signal_layout"])
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_rotated_whole_it_is_vanilla_with_smaller_queries(
    family: str, layout: str, scale: str, implementation: str
) -> None:
    """By 1/√S where logits are divided by √(D/S), by 1/S where by √D; in some layers only.

    float32: 1e-6 of the largest logit, three layers' roundings; measured 8e-7.
    """
    chosen = {"signal_rope": "full_head", "signal_layout": layout, "signal_scale": scale, "num_signals": 8}
    model = model_of(family, INTEGRAL | chosen, implementation=implementation)
    plain = plain_of(family, model)
    assert gap(logits_of(plain), logits_of(model)) > 0.05
    for layer in (1, 2):
        for tensor in head_rows(attention_of(plain, layer), "q"):
            tensor *= 8**-0.5 if scale == "signal" else 1 / 8
    assert gap(logits_of(plain), logits_of(model)) <= 1e-6


@pytest.mark.parametrize("yarn", [False, True], ids=["", "yarn"])
@pytest.mark.parametrize("scale", CHOICES["signal_scale"])
@pytest.mark.parametrize("layout", CHOICES["signal_layout"])
@pytest.mark.parametrize(("family", "signals"), [("llama", 2), ("llama", 8), ("qwen2", 4), ("gpt_neox", 2)])
def test_rotated_by_signal_it_is_vanilla_with_other_frequencies(
    family: str, signals: int, layout: str, scale: str, yarn: bool
) -> None:
    """A plain model whose channels stand in another order, with a signal's frequencies, once for each signal.

    The order brings a signal's channels that turn together to where a whole head's do. float64 shows that it is so
    (1e-12 of the largest logit; measured 1e-15). float32, with weights as large as a new model's: 1e-6, some eight
    roundings (measured 6e-7).
    """
    chosen = {"num_signals": signals, "signal_layout": layout, "signal_scale": scale}
    changes = yarn_keys(family) if yarn else {}
    for dtype, spread, most in ((torch.float64, 0.1, 1e-12), (torch.float32, 0.02, 1e-6)):
        changes["initializer_range"] = spread
        model = model_of(family, INTEGRAL | EVERY_LAYER | chosen, dtype=dtype, **changes)
        plain = plain_of(family, model, **changes)
        order, frequencies = plain_order(family, signals, layout, attention_of(model, 0) if yarn else None)
        assert gap(logits_of(plain), logits_of(model)) > 1e-3
        for layer in range(3):
            for which in ("q", "k"):
                for tensor in head_rows(attention_of(plain, layer), which):
                    tensor.copy_(tensor[:, order])
            for tensor in head_rows(attention_of(plain, layer), "q"):
                tensor *= signals**-0.5 if scale == "signal" else 1 / signals
        plain.base_model.rotary_emb.inv_freq = frequencies
        for scene in (causal(), left_padded()):
            assert gap(logits_of(plain, scene), logits_of(model, scene)) <= most


def head_rows(attention: Any, which: str) -> list[torch.Tensor]:
    """Weights and biases of the queries or the keys as [heads, size, …]; to be changed in place."""
    if hasattr(attention, "query_key_value"):
        fused = attention.query_key_value
        part = "qk".index(which)
        return [tensor.data.unflatten(0, (-1, 3, HEAD_SIZE))[:, part] for tensor in (fused.weight, fused.bias)]
    projection = {"q": attention.q_proj, "k": attention.k_proj}[which]
    tensors = [projection.weight] + ([projection.bias] if projection.bias is not None else [])
    return [tensor.data.unflatten(0, (-1, HEAD_SIZE)) for tensor in tensors]


def plain_order(family: str, signals: int, layout: str, yarn: Any) -> tuple[list[int], torch.Tensor]:
    """Channels of a head in a plain model's order, and the frequencies of its first rotating half."""
    rope = shape_keys(family)["rope_parameters"]
    own = HEAD_SIZE // signals
    rotating = int(own * rope.get("partial_rotary_factor", 1))

    def places(channels: range) -> list[int]:
        contiguous = layout == "contiguous"
        return [s * own + c if contiguous else c * signals + s for s in range(signals) for c in channels]

    order = places(range(rotating // 2)) + places(range(rotating // 2, rotating)) + places(range(rotating, own))
    assert sorted(order) == list(range(HEAD_SIZE))
    ladder = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotating, 2, dtype=torch.float32) / rotating)
    if yarn is not None:
        assert yarn.rotary_emb.attention_scaling > 1
        ladder = yarn.rotary_emb.inv_freq
    return order, ladder.repeat(signals)


def yarn_keys(family: str) -> dict[str, Any]:
    rope = shape_keys(family)["rope_parameters"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": rope | yarn}
