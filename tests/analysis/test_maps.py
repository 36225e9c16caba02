"""Effective attention maps, layer by layer: one map at a time, and no layers beyond the requested ones."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DiffLlamaForCausalLM

from evalkit.benchmarks.attention.map_blocks import attention_map, stream_attention_maps
from evalkit.errors import CheckpointError, UsageError
from evalkit.models.variants.modeling import EvalkitLlamaConfig, EvalkitLlamaForCausalLM
from tests.analysis.architectures import model_named
from tests.tiny import tiny_checkpoint

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "cog": {"attention_variant": "cog", "cog_keep_last": True},
    "integral": {
        "attention_variant": "integral",
        "num_signals": 2,
        "signal_rope": "per_signal",
        "signal_layout": "contiguous",
        "signal_scale": "signal",
        "signal_domain": "logits",
    },
    "differential": {
        "attention_variant": "differential",
        "diff_heads": "halve",
        "diff_pairing": "adjacent",
        "diff_subln": "affine",
        "diff_subln_eps": 1e-5,
        "lambda_index": "absolute",
    },
}


def model_of(variant: str) -> Any:
    torch.manual_seed(0)
    return EvalkitLlamaForCausalLM(EvalkitLlamaConfig(**SHAPE, variant_layers=[1], **VARIANTS[variant])).eval()


IDS = torch.arange(3, 15).repeat(2, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_map_is_what_the_values_are_summed_with(variant: str) -> None:
    """Compute the layer's output from its map and its values."""
    model = model_of(variant)
    attention = model.model.layers[1].self_attn
    taken: dict[str, torch.Tensor] = {}
    attention.v_proj.register_forward_hook(lambda _, __, out: taken.update(value=out))
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: taken.update(out=inputs[0]))
    seen = attention_map(model, IDS, 1)
    pairs = 2 if variant == "differential" else 4
    assert seen.shape == (2, pairs, 12, 12)
    value = taken["value"].unflatten(-1, (pairs, -1)).transpose(1, 2)
    out = (seen @ value).transpose(1, 2)
    if variant == "differential":
        out = torch.nn.functional.rms_norm(out, (16,), eps=1e-5) * (1 - attention.lambda_init)
    # A float32 softmax and two products of a dozen terms
    assert torch.allclose(out.flatten(2), taken["out"], atol=1e-6)
    assert (seen.triu(1) == 0).all()


def test_signed_maps_have_negative_entries_and_differential_rows_sum_to_one_less_lambda() -> None:
    assert (attention_map(model_of("cog"), IDS, 1) < 0).any()
    model = model_of("differential")
    layer = model.model.layers[1].self_attn
    weight = (
        (layer.lambda_q1 * layer.lambda_k1).sum().exp() - (layer.lambda_q2 * layer.lambda_k2).sum().exp()
    ) + layer.lambda_init
    rows = attention_map(model, IDS, 1).sum(-1)
    assert torch.allclose(rows, torch.full_like(rows, float(1 - weight.detach())), atol=1e-6)


def test_layers_come_in_order_and_no_map_outlives_its_turn() -> None:
    model = model_of("integral")
    order: list[int] = []
    last: list[Any] = []

    def use(layer: int, seen: torch.Tensor) -> None:
        gc.collect()
        assert all(earlier() is None for earlier in last)
        last.append(weakref.ref(seen))
        order.append(layer)

    stream_attention_maps(model, IDS, use)
    assert order == [0, 1, 2]
    assert model.config._attn_implementation == "sdpa"


def test_layers_past_the_last_one_are_not_run() -> None:
    model = model_of("cog")
    model.model.layers[2].mlp.register_forward_hook(lambda *_: pytest.fail("layer 2 ran"))
    assert attention_map(model, IDS, 1).shape == (2, 4, 12, 12)


def test_stock_models_give_maps_too_as_transformers_itself_records_them(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path / "tiny"), attn_implementation="eager").eval()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(IDS, attention_mask=mask, output_attentions=True).attentions
    found: dict[int, torch.Tensor] = {}
    stream_attention_maps(model, IDS, found.__setitem__, attention_mask=mask)
    assert len(found) == len(expected)
    assert all(torch.equal(found[layer], seen) for layer, seen in enumerate(expected))


@pytest.mark.parametrize("name", ["gpt2", "bloom", "mpt", "falcon", "bamba"])
def test_models_that_transformers_does_not_name_the_attention_of(name: str) -> None:
    model = model_named(name)
    found: dict[int, torch.Tensor] = {}
    stream_attention_maps(model, IDS, found.__setitem__)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, output_attentions=True, use_cache=False).attentions
    assert list(found) == ([1] if name == "bamba" else [0, 1])
    assert all(torch.equal(seen, each) for seen, each in zip(found.values(), expected, strict=True))


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(UsageError, match=r"no attention layer 7; the model's are 0 to 2"):
        attention_map(model_of("cog"), IDS, 7)
    with pytest.raises(CheckpointError, match="evalkit models convert"):
        attention_map(DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE)), IDS, 0)
