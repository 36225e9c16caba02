"""The variants as ordinary transformers models: saved, loaded, sharded, trained and inspected."""

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
from evalkit.models.variants.signed import signed_attention
from tests.marks import fast
from tests.models.variants.building import (
    COG,
    DIFFERENTIAL,
    FAMILIES,
    INTEGRAL,
    VANILLA,
    VARIANTS,
    VOCABULARY,
    attention_of,
    causal,
    config_of,
    left_padded,
    model_of,
    plain_of,
    random_ids,
)


def logits_of(model: Any, scene: Any = None) -> torch.Tensor:
    found: torch.Tensor
    with torch.no_grad():
        found = model(**(scene or causal()).given()).logits
    return found


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    with quiet():
        model.save_pretrained(folder, **settings)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded(family: str, variant: str, tmp_path: Path) -> None:
    """The same to the last bit: weights, λ, norms and the frequencies, which are not saved."""
    model = model_of(family, VARIANTS[variant])
    saved(model, tmp_path, max_shard_size="100KB")
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["model_type"] == f"evalkit_{family}" and content["architectures"] == [type(model).__name__]
    assert {key: content[key] for key in VARIANTS[variant]} == VARIANTS[variant]
    files = sorted(tmp_path.glob("*.safetensors"))
    stored = {name for file in files for name in load_file(file)}
    assert len(files) > 3 and stored == model.state_dict().keys()
    assert any("lambda_q1" in name for name in stored) == variant.startswith("differential")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(model) and loaded.config.variant() == model.config.variant()
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_vanilla_is_its_backbone() -> None:
    for family in FAMILIES:
        model = model_of(family, VANILLA)
        assert torch.equal(logits_of(model), logits_of(plain_of(family, model)))


@pytest.mark.parametrize("heads", ["halve", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lambda_vectors_begin_small_and_norms_with_one(family: str, heads: str) -> None:
    """λ's vectors ~ N(0, 0.1²). Of n numbers, mean and deviation are within four standard errors."""
    attention = DIFFERENTIAL | {"diff_heads": heads, "variant_layers": list(range(12))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config_of(family, attention, num_hidden_layers=12))
    vectors = [p for name, p in model.named_parameters() if "lambda_" in name]
    assert len(vectors) == 4 * 12
    numbers = torch.cat(vectors).detach()
    error = 0.1 / len(numbers) ** 0.5
    assert abs(numbers.mean()) < 4 * error and abs(numbers.std() - 0.1) < 4 * error / 2**0.5
    norms = [p for name, p in model.named_parameters() if "subln" in name]
    assert len(norms) == 12 and all(norm.eq(1).all() for norm in norms)


@pytest.mark.parametrize("variant", ["vanilla", *VARIANTS])
def test_weights_begin_as_the_backbones(variant: str) -> None:
    """Projections ~ N(0, initializer_range²) in variant layers too; the same seed gives the same weights."""
    config = config_of("llama", {"vanilla": VANILLA, **VARIANTS}[variant], initializer_range=0.05)
    models = []
    for seed in (3, 3, 4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models.append(AutoModelForCausalLM.from_config(config))
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for layer in range(3):
        weight = first[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert not torch.equal(weight, other[f"model.layers.{layer}.self_attn.q_proj.weight"])
        assert abs(weight.std() - 0.05) < 4 * 0.05 / (2 * weight.numel()) ** 0.5
    assert not torch.equal(
        first["model.layers.1.self_attn.q_proj.weight"], first["model.layers.2.self_attn.q_proj.weight"]
    )


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
        found = logits_of(model, scene)
        assert found.dtype == torch.bfloat16 and found.isfinite().all()
        wide = logits_of(model.float(), scene)
        model.bfloat16()
        error = (found.float() - wide)[scene.real].norm() / wide[scene.real].norm()
        assert 1e-4 < error < (0.1 if variant == "cog" else 0.03)


@pytest.mark.parametrize("attention", [COG, DIFFERENTIAL], ids=["cog", "differential"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_refused(family: str, attention: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no attention_dropout; set it to 0"):
        AutoModelForCausalLM.from_config(config_of(family, attention, attention_dropout=0.1))
    AutoModelForCausalLM.from_config(config_of(family, INTEGRAL, attention_dropout=0.1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sliding_windows_are_refused(variant: str) -> None:
    """Of layers that have another attention; a vanilla layer may have one."""
    window = {"use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(ValueError, match="has no sliding window; set use_sliding_window to false"):
        EvalkitQwen2ForCausalLM(config_of("qwen2", VARIANTS[variant], max_window_layers=0, **window))
    vanilla_only = config_of(
        "qwen2", VARIANTS[variant], layer_types=["sliding_attention", *["full_attention"] * 2], **window
    )
    assert EvalkitQwen2ForCausalLM(vanilla_only).model.layers[0].self_attn.sliding_window == 4


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("attention", ["differential", "integral", "integral-probabilities"])
def test_logits_past_float16_before_they_are_scaled(attention: str, implementation: str) -> None:
    """transformers' eager attention scales a product that float16 may not hold any more."""
    model = model_of("llama", VARIANTS[attention], implementation=implementation, dtype=torch.float16)
    module = attention_of(model, 1)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 16, generator=draw) for _ in range(3))
    query, key = query.sign() * 96, key.sign() * 96
    key[:, :, :] = query * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])[:, None]
    query[..., 0], scale = 95.0, 16**-0.5
    module.num_key_value_groups = 1
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~visible, torch.finfo(torch.float16).min).half()
    found, _ = module._softmax(query.half(), key.half(), value.half(), mask, scale, {})
    logits = query.double() @ key.double().mT
    assert logits.abs().max() > 2 * 65504
    expected = (logits * scale).masked_fill(~visible, -torch.inf).softmax(-1) @ value.half().double()
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=0, atol=2e-3)


# Token by token, in chunks or at once: the same logits


def uncached(model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Greedy, with a whole forward pass for each token."""
    for _ in range(tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return ids


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
@torch.no_grad()
def test_generation(family: str, variant: str, implementation: str, cache: str) -> None:
    """Token for token what a greedy loop without a cache writes, batched, without and with left padding."""
    # Large weights; otherwise a random model repeats one token for any input
    model = model_of(family, VARIANTS[variant], implementation=implementation, initializer_range=0.3)
    settings: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    for paddings in ((0, 0, 0), (0, 3, 6)):
        scene = left_padded(paddings, 9)
        mask = scene.inputs["attention_mask"]
        found = model.generate(scene.ids, attention_mask=mask, cache_implementation=cache, **settings)
        assert torch.equal(found, uncached(model, scene.ids, mask, 10))
        assert len(set(found[:, 9:].flatten().tolist())) > 5
    # Alone and without padding, the last text is the same as in its batch
    assert torch.equal(uncached(model, scene.ids[2:, 6:], mask[2:, 6:], 10), found[2:, 6:])


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
@torch.no_grad()
def test_prefill_in_pieces(family: str, variant: str, implementation: str, cache: Any) -> None:
    """The logits of one pass. float32: 2e-5 for logits up to 5, some forty roundings; measured 8e-6."""
    model = model_of(family, VARIANTS[variant], implementation=implementation)
    ids = random_ids(2, 24)
    whole = model(ids, use_cache=False).logits
    past = cache(config=model.config) if cache is DynamicCache else cache(config=model.config, max_cache_len=32)
    pieces = [model(piece, past_key_values=past).logits for piece in ids.split([5, 1, 11, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=2e-5)
    assert past.get_seq_length() == 24


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
@torch.no_grad()
def test_no_token_sees_the_future(family: str, variant: str, implementation: str) -> None:
    """Other tokens from the eighth on: nothing before them changes, to the last bit, and all after them does."""
    model = model_of(family, VARIANTS[variant], implementation=implementation)
    ids = random_ids(2, 12)
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % VOCABULARY
    one, two = model(ids).logits, model(other).logits
    assert torch.equal(one[:, :7], two[:, :7])
    assert ((one[:, 7:] - two[:, 7:]).abs().amax(-1) > 1e-2).all()


# Gradients, compared with finite differences

CASES: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "integral-tiled-head": INTEGRAL | {"signal_layout": "tiled", "signal_scale": "head", "num_signals": 4},
    "integral-probabilities-full": INTEGRAL | {"signal_domain": "probabilities", "signal_rope": "full_head"},
    "differential-halves": DIFFERENTIAL | {"diff_pairing": "halves", "diff_subln": "none"},
}


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_finite_differences(family: str, variant: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the hidden states and every weight, norm and λ vector, in float64, by sdpa and, for cog, its own product.

    Numbers near 1 and steps of 1e-6 leave differences good to about 1e-9; gradcheck's own tolerances are 1e-5 and 1e-3.
    """
    monkeypatch.setattr(signed, "_CPU_BLOCK", 1)
    monkeypatch.setattr(signed, "_FEWEST", 3)
    module, call = attention_call(family, CASES[variant], "sdpa", masked)
    names, weights = zip(*module.named_parameters(), strict=True)
    assert ("lambda_q1" in names) == variant.startswith("differential")
    hidden = torch.randn(2, 7, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    given = (hidden.requires_grad_(), *(weight.detach().requires_grad_() for weight in weights))

    def attended(states: torch.Tensor, *changed: torch.Tensor) -> Any:
        return functional_call(module, dict(zip(names, changed, strict=True)), (), call(states))[0]

    torch.autograd.gradcheck(attended, given, fast_mode=True)
    assert all(slope.abs().max() > 1e-6 for slope in torch.autograd.grad(attended(*given).square().sum(), given))


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("family", fast(["llama"], FAMILIES))
def test_eager_has_the_same_gradients(family: str, variant: str) -> None:
    """float32: 1e-4 of a tensor's largest gradient. λ's, a sum over all tokens and channels of which most cancels, is
    the worst with 3e-5.
    """
    ids = random_ids(2, 11)
    gradients = []
    for implementation in ("sdpa", "eager"):
        model = model_of(family, CASES[variant], implementation=implementation)
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def attention_call(family: str, attention: dict[str, Any], implementation: str, masked: bool) -> tuple[Any, Any]:
    """An attention module in float64, and what it is given beside hidden states: [2, 7, d_model]."""
    model = model_of(family, attention, implementation=implementation, dtype=torch.float64)
    positions = torch.arange(7).expand(2, -1)
    turns = model.base_model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    mask = causal(2, 7).seen.clone()
    mask[1, 3:, 1] = False
    fixed = {
        "position_embeddings": turns,
        "position_ids": positions,
        "attention_mask": mask[:, None] if masked else None,
    }
    return attention_of(model, 2), lambda states: {"hidden_states": states, **fixed}


# Mixed precision: a training step under autocast in bfloat16, without a warning

MIXED = {"vanilla": VANILLA, **VARIANTS}


def training_step(
    family: str, case: str, *, mixed: bool, implementation: str = "sdpa", checkpointing: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a loss and the gradient of each weight, of 128 tokens."""
    model = model_of(family, MIXED[case], implementation=implementation).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = random_ids(2, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("family", fast(["gpt_neox"], FAMILIES))
def test_gradients_are_near_those_of_float32(family: str, case: str, implementation: str) -> None:
    """Norm of the difference over the norm. One rounding to bfloat16 is up to 0.4 %. Through three layers vanilla,
    transformers' own code, reaches 2.5 % of all gradients and 4 % of a tensor's; cog, whose signs flip near zero, 4 %
    and 6.5 %; λ's, a sum over all tokens and channels of which most cancels, 24 %. A lost term or sign is 100 %.
    """
    loss, exact = training_step(family, case, mixed=False, implementation=implementation)
    mixed_loss, found = training_step(family, case, mixed=True, implementation=implementation)
    assert (mixed_loss - loss).abs() <= 0.004 * loss
    assert sum_of_squares({name: found[name] - exact[name] for name in exact}) <= 0.06**2 * sum_of_squares(exact)
    for name, gradient in exact.items():
        assert found[name].dtype == torch.float32
        share = (found[name] - gradient).norm() / gradient.norm()
        assert share <= (0.5 if "lambda" in name else 0.1), name


@pytest.mark.parametrize("case", MIXED)
@pytest.mark.parametrize("family", fast(["gpt_neox"], FAMILIES))
def test_recomputed_activations_give_the_same_gradients(family: str, case: str) -> None:
    loss, expected = training_step(family, case, mixed=True)
    again, found = training_step(family, case, mixed=True, checkpointing=True)
    assert torch.equal(again, loss)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_cog_has_the_dtypes_of_torchs_attention() -> None:
    """Of mixed inputs as after rotary embeddings, and of float64, which autocast leaves as it is."""
    for query_dtype, value_dtype in [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)]:
        query = torch.randn(1, 2, 5, 8, dtype=query_dtype, requires_grad=True)
        value = torch.randn(1, 2, 5, 8, dtype=value_dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            expected: Any = torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True)
            found = signed_attention(query, query, value, None, 8**-0.5)
        assert found.dtype == expected.dtype
        found.sum().backward()
        assert query.grad is not None and query.grad.dtype == query_dtype
        assert value.grad is not None and value.grad.dtype == value_dtype


def sum_of_squares(gradients: dict[str, torch.Tensor]) -> float:
    return sum(gradient.square().sum().item() for gradient in gradients.values())
