"""The variants as ordinary transformers models: saved, loaded, sharded, generated with and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from evalkit.compatibility.transformers import quiet
from evalkit.models.variants import signed
from evalkit.models.variants.modeling import EvalkitQwen2ForCausalLM
from tests.marks import fast
from tests.models.variants.building import (
    COG,
    DIFFERENTIAL,
    FAMILIES,
    INTEGRAL,
    VANILLA,
    VARIANTS,
    attention_of,
    causal,
    config_of,
    left_padded,
    logits_of,
    model_of,
    random_ids,
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["qwen2"], FAMILIES))
def test_saved_and_loaded(family: str, variant: str, tmp_path: Path) -> None:
    """The same to the last bit: weights, λ, norms and the frequencies, which are not saved."""
    model = model_of(family, VARIANTS[variant])
    with quiet():
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["model_type"] == f"evalkit_{family}" and content["architectures"] == [type(model).__name__]
    assert {key: content[key] for key in VARIANTS[variant]} == VARIANTS[variant]
    files = sorted(tmp_path.glob("*.safetensors"))
    stored = {name for file in files for name in load_file(file)}
    assert len(files) > 3 and stored == model.state_dict().keys()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(model) and loaded.config.variant() == model.config.variant()
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize("family", fast(["gpt_neox"], FAMILIES))
def test_weights_begin_as_in_training(family: str) -> None:
    """λ's vectors ~ N(0, 0.1²), norms 1, projections ~ N(0, initializer_range²); the seed decides every bit.

    Of n numbers, mean and deviation are within four standard errors.
    """
    attention = DIFFERENTIAL | {"variant_layers": list(range(12))}
    config = config_of(family, attention, num_hidden_layers=12, initializer_range=0.05)
    models = []
    for seed in (7, 7, 8):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models.append(AutoModelForCausalLM.from_config(config))
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    vectors = torch.cat([tensor for name, tensor in first.items() if "lambda_" in name])
    error = 0.1 / len(vectors) ** 0.5
    assert abs(vectors.mean()) < 4 * error and abs(vectors.std() - 0.1) < 4 * error / 2**0.5
    assert all(tensor.eq(1).all() for name, tensor in first.items() if "subln" in name)
    projections = [name for name in first if name.endswith(("q_proj.weight", "query_key_value.weight"))]
    for name in projections:
        assert not torch.equal(first[name], other[name])
        assert abs(first[name].std() - 0.05) < 4 * 0.05 / (2 * first[name].numel()) ** 0.5
    assert not torch.equal(first[projections[0]], first[projections[1]])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["qwen2"], FAMILIES))
def test_bfloat16(family: str, variant: str, implementation: str) -> None:
    """Near float32 with the same weights, in the norm of all logits; unrelated logits would be at 1.4.

    3 %, some eight of bfloat16's roundings, 2^-8; measured 2.0 %, and 1.6 % for the backbones. Cog is given 10 %
    (measured 6.2 %): a rounding that brings a logit across zero changes the sign of its weight, wherever it is done.
    """
    model = model_of(family, VARIANTS[variant], implementation=implementation, dtype=torch.bfloat16)
    for scene in (causal(), left_padded()):
        narrow = logits_of(model, scene)
        wide = logits_of(model.float(), scene)
        model.bfloat16()
        error = (narrow.float() - wide)[scene.real].norm() / wide[scene.real].norm()
        assert 1e-4 < error < (0.1 if variant == "cog" else 0.03)


def test_what_is_refused() -> None:
    """Dropout of attention, and sliding windows of layers that have another attention; a vanilla layer may have one."""
    window = {"use_sliding_window": True, "sliding_window": 4}
    for attention in (COG, DIFFERENTIAL, INTEGRAL):
        if attention != INTEGRAL:
            with pytest.raises(ValueError, match="attention_dropout"):
                AutoModelForCausalLM.from_config(config_of("llama", attention, attention_dropout=0.1))
        with pytest.raises(ValueError, match="use_sliding_window"):
            EvalkitQwen2ForCausalLM(config_of("qwen2", attention, max_window_layers=0, **window))
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        config = config_of("qwen2", attention, layer_types=kinds, **window)
        assert EvalkitQwen2ForCausalLM(config).model.layers[0].self_attn.sliding_window == 4


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_logits_past_float16_before_they_are_scaled(implementation: str) -> None:
    """transformers' eager attention scales a product that float16 may not hold any more."""
    module = attention_of(model_of("llama", INTEGRAL, implementation=implementation, dtype=torch.float16), 1)
    module.num_key_value_groups = 1
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 16, generator=draw) for _ in range(3))
    query = query.sign() * 96
    key = query * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])[:, None]
    query[..., 0], scale = 95.0, 16**-0.5
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~visible, torch.finfo(torch.float16).min).half()
    out, _ = module._softmax(query.half(), key.half(), value.half(), mask, scale, {})
    logits = query.double() @ key.double().mT
    assert logits.abs().max() > 2 * 65504
    expected = (logits * scale).masked_fill(~visible, -torch.inf).softmax(-1) @ value.half().double()
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=0, atol=2e-3)


# Token by token, in chunks or at once: the same logits


def uncached(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Greedy, with a whole forward pass for each token."""
    for _ in range(tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return ids


@pytest.mark.parametrize("implementation", fast(["sdpa"], ["sdpa", "eager"]))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
@torch.no_grad()
def test_generation_and_prefill_in_pieces(family: str, variant: str, implementation: str) -> None:
    """Token for token what a greedy loop without a cache writes, batched, without and with left padding.

    Prefilled in pieces, the logits are those of one pass: 2e-5 for logits up to 5, some forty roundings of float32;
    measured 8e-6.
    """
    # Large weights; otherwise a random model repeats one token for any input
    model = model_of(family, VARIANTS[variant], implementation=implementation, initializer_range=0.3)
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    for cache, paddings in (("dynamic", (0, 0, 0)), ("dynamic", (0, 3, 6)), ("static", (0, 3, 6))):
        scene = left_padded(paddings, 9)
        mask = scene.inputs["attention_mask"]
        ids = model.generate(scene.ids, attention_mask=mask, cache_implementation=cache, **settings)
        assert torch.equal(ids, uncached(model, scene.ids, mask, 10))
        assert len(set(ids[:, 9:].flatten().tolist())) > 5
    # Alone and without padding, the last text is the same as in its batch
    assert torch.equal(uncached(model, scene.ids[2:, 6:], mask[2:, 6:], 10), ids[2:, 6:])
    model = model_of(family, VARIANTS[variant], implementation=implementation)
    ids = random_ids(2, 24)
    whole = model(ids, use_cache=False).logits
    for past in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=32)):
        pieces = [model(piece, past_key_values=past).logits for piece in ids.split([5, 1, 11, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=2e-5)


# Gradients

CASES: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "integral-tiled-head": INTEGRAL | {"signal_layout": "tiled", "signal_scale": "head", "num_signals": 4},
    "integral-probabilities-full": INTEGRAL | {"signal_domain": "probabilities", "signal_rope": "full_head"},
    "differential-halves": DIFFERENTIAL | {"diff_pairing": "halves", "diff_subln": "none"},
}


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_finite_differences(family: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the hidden states and every weight, norm and λ vector, in float64, with and without a mask.

    Numbers near 1 and steps of 1e-6 leave differences good to about 1e-9; gradcheck's own tolerances are 1e-5 and 1e-3.
    """
    monkeypatch.setattr(signed, "_CPU_BLOCK", 1)
    monkeypatch.setattr(signed, "_FEWEST", 3)
    model = model_of(family, CASES[variant], dtype=torch.float64)
    module, positions = attention_of(model, 2), torch.arange(7).expand(2, -1)
    turns = model.base_model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    names, weights = zip(*module.named_parameters(), strict=True)
    assert ("lambda_q1" in names) == variant.startswith("differential")
    hidden = torch.randn(2, 7, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    given = (hidden.requires_grad_(), *(weight.detach().requires_grad_() for weight in weights))
    seen = causal(2, 7).seen.clone()
    seen[1, 3:, 1] = False
    for mask in (None, seen[:, None]):
        fixed = {"position_embeddings": turns, "position_ids": positions, "attention_mask": mask}

        def attended(states: torch.Tensor, *changed: torch.Tensor, fixed: Any = fixed) -> Any:
            parameters = dict(zip(names, changed, strict=True))
            return functional_call(module, parameters, (), {"hidden_states": states, **fixed})[0]

        torch.autograd.gradcheck(attended, given, fast_mode=True)
        assert all(slope.abs().max() > 1e-6 for slope in torch.autograd.grad(attended(*given).square().sum(), given))


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_eager_has_the_same_gradients(family: str, variant: str) -> None:
    """float32: 1e-4 of a tensor's largest gradient; λ's, a sum of which most cancels, is the worst with 3e-5."""
    ids = random_ids(2, 11)
    gradients = []
    for implementation in ("sdpa", "eager"):
        model = model_of(family, CASES[variant], implementation=implementation)
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for gradient, other in zip(*gradients, strict=True):
        assert (gradient - other).abs().max() <= 1e-4 * other.abs().max()


MIXED = {"vanilla": VANILLA, **VARIANTS}


def training_step(
    family: str, case: str, *, mixed: bool, implementation: str = "sdpa", checkpointing: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a loss and the gradient of each weight, of 128 tokens, also under autocast in bfloat16."""
    model = model_of(family, MIXED[case], implementation=implementation).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = random_ids(2, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("implementation", fast(["sdpa"], ["sdpa", "eager"]))
@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("family", fast(["gpt_neox"], FAMILIES))
def test_mixed_precision(family: str, case: str, implementation: str) -> None:
    """Gradients near those of float32, as the norm of the difference over the norm; recomputed ones are the same.

    One rounding to bfloat16 is up to 0.4 %. Through three layers vanilla, transformers' own code, reaches 2.5 % of all
    gradients and 4 % of a tensor's; cog, whose signs flip near zero, 4 % and 6.5 %; λ's, a sum over all tokens and
    channels of which most cancels, 24 %. A lost term or sign is 100 %.
    """
    loss, exact = training_step(family, case, mixed=False, implementation=implementation)
    mixed_loss, mixed = training_step(family, case, mixed=True, implementation=implementation)
    assert (mixed_loss - loss).abs() <= 0.004 * loss
    squares = [(float((mixed[name] - exact[name]).square().sum()), float(exact[name].square().sum())) for name in exact]
    assert sum(error for error, _ in squares) <= 0.06**2 * sum(square for _, square in squares)
    for name, (error, square) in zip(exact, squares, strict=True):
        assert mixed[name].dtype == torch.float32
        assert error <= (0.5 if "lambda" in name else 0.1) ** 2 * square, name
    if implementation == "sdpa":
        again, recomputed = training_step(family, case, mixed=True, checkpointing=True)
        assert torch.equal(again, mixed_loss) and all(torch.equal(recomputed[name], mixed[name]) for name in mixed)
