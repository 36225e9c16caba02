"""Long rows and sequences are checked in one layer of each kind; what is wrong in one layer only is found all the same.

Errors are put into the class of the layers, in ways that attributes do not show unless a test says so. All layers of
others' code are run, so most tests pass it off as transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from evalkit.errors import CheckpointError
from evalkit.models.module_state import changed_code
from evalkit.scoring.forward import Forward
from tests.marks import fast
from tests.scoring.conftest import RELATIVE, from_alone, model_of, with_choices
from tests.scoring.test_checks import ITEMS, blocks_of, checked, drop_cache, drop_mask, drop_positions, item

LAYERS = 12
DTYPES = fast([torch.float32], [torch.float32, torch.bfloat16])
Numbers = Callable[[int], bool]
"""Which layers of a model are wrong."""
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""States after a layer, [1, tokens, d_model], from those before and those after it."""


def deep(kind: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return model_of(kind, dtype, **({"num_hidden_layers": LAYERS} | settings))


def pass_off(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]) -> None:
    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    monkeypatch.setattr("evalkit.scoring.probe.changed_code", lambda _: {})


def changed(monkeypatch: pytest.MonkeyPatch, change: Change, numbers: Numbers, cached: bool | None = None) -> None:
    """Change what layers of some numbers return; `cached`: only with a cache of earlier tokens, or only without."""
    real = LlamaDecoderLayer.forward

    def forward(own: Any, hidden_states: torch.Tensor, **inputs: Any) -> Any:
        output = real(own, hidden_states, **inputs)
        has_cache = inputs.get("past_key_values") is not None
        is_wrong = numbers(own.self_attn.layer_idx) and cached in (None, has_cache)
        return change(hidden_states, output) if is_wrong else output

    pass_off(monkeypatch, forward)


def across_rows(_: torch.Tensor, output: torch.Tensor, length: int) -> torch.Tensor:
    """Tokens see one that is so far before them in the row."""
    earlier = torch.nn.functional.pad(output[:, :-length], (0, 0, length, 0))
    return output + 0.1 * earlier if output.shape[1] > length else output


def crowded(states: torch.Tensor, output: torch.Tensor, length: int) -> torch.Tensor:
    """Capacity: tokens after so many of a row pass a layer unchanged."""
    return torch.cat((output[:, :length], states[:, length:]), dim=1)


def late(states: torch.Tensor, output: torch.Tensor, start: int) -> torch.Tensor:
    """Tokens from a position on see the next one."""
    return torch.cat((output[:, :start], (output + states.roll(-1, 1))[:, start:]), dim=1)


WHICH: dict[str, Numbers] = {
    "all": lambda number: True,
    "every fourth": lambda number: number % 4 == 3,
    "the upper half": lambda number: number >= LAYERS // 2,
    "the middle": lambda number: LAYERS // 3 <= number < LAYERS * 2 // 3,
    "the first": lambda number: number == 0,
    "the last": lambda number: number == LAYERS - 1,
}
EVERYWHERE = WHICH["all"]


def passed_on(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Tokens that reach the attention of each layer of a Llama model, by the layer's number."""
    seen = dict.fromkeys(range(LAYERS), 0)
    real = LlamaDecoderLayer.forward

    def forward(own: Any, hidden_states: torch.Tensor, **inputs: Any) -> Any:
        seen[own.self_attn.layer_idx] += hidden_states.shape[1]
        return real(own, hidden_states, **inputs)

    pass_off(monkeypatch, forward)
    return seen


# What is right


def test_layers_of_one_kind_compute_short_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = passed_on(monkeypatch)
    engine, said = checked(deep(), start=item(600))
    assert engine.way == "tree" and not said
    kept = {number for number, tokens in seen.items() if tokens == max(seen.values())}
    assert kept == {0, 1, 2, 3, 6, 10, 11}
    assert all(seen[number] < seen[0] / 3 for number in set(range(LAYERS)) - kept)
    assert from_alone(engine, engine._model, ITEMS) <= RELATIVE


@pytest.mark.parametrize("difference", ["attribute", "buffer", "hook", "forward", "class", "shape"])
def test_a_layer_that_differs_is_kept(monkeypatch: pytest.MonkeyPatch, difference: str) -> None:
    seen = passed_on(monkeypatch)
    model = deep()
    attention = model.model.layers[8].self_attn
    if difference == "attribute":
        attention.window = 512
    elif difference == "buffer":
        for layer in model.model.layers:
            layer.register_buffer("reach", torch.zeros(4, dtype=torch.bool), persistent=False)
        model.model.layers[8].reach[1] = True
    elif difference == "hook":
        attention.o_proj.register_forward_hook(lambda *_: None)
    elif difference == "forward":
        attention.o_proj.forward = attention.o_proj.forward
    elif difference == "class":
        model.model.layers[8].post_attention_layernorm = torch.nn.RMSNorm(64)
    else:
        attention.q_proj = torch.nn.Linear(64, 64, bias=True).requires_grad_(False)
    assert checked(model)[0].way == "tree"
    assert seen[8] == seen[0] > 2 * seen[9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"head_dim": 16, "sliding_window": 900}),
        ("gpt2", {"n_layer": LAYERS, "n_head": 4, "n_embd": 64, "n_positions": 2048}),
        ("bloom", {"n_layer": LAYERS, "n_head": 4}),
        ("mixtral", {"num_local_experts": 4, "sliding_window": 900}),
        ("gemma3n_text", {"head_dim": 16, "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 256}),
    ],
)
def test_architectures_that_share(kind: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Some layers return more than their states, or read what an earlier layer has kept."""
    model = deep(kind, dtype, **settings)
    engine, _ = checked(model)
    assert engine.way == "tree", engine.why
    if dtype == torch.float32:
        assert from_alone(engine, model, with_choices([4, 300])) <= RELATIVE


# Wrong ways of sharing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("change", "kernels"), [(drop_mask, ("dense",)), (drop_cache, ("dense",)), (drop_positions, ("tiles", "dense"))]
)
def test_a_model_that_forgets_its_inputs(change: Any, kernels: tuple[str, ...], dtype: torch.dtype) -> None:
    model = deep(dtype=dtype)
    forward = model.model.forward

    def forgetful(**inputs: Any) -> Any:
        change(inputs)
        return forward(**inputs)

    model.model.forward = forgetful
    assert checked(model, 512, kernels=kernels)[0].way != "tree"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached", [None, False, True])
@pytest.mark.parametrize("length", [200, 1200])
@pytest.mark.parametrize("error", [across_rows, crowded])
@pytest.mark.parametrize("which", fast(["the upper half"], WHICH))
def test_a_row_that_changes_layers(
    monkeypatch: pytest.MonkeyPatch, which: str, error: Any, length: int, cached: bool | None, dtype: torch.dtype
) -> None:
    """Without a cache of the trunk, with it, and in both; from a length on that short rows have, or only long ones."""
    changed(monkeypatch, partial(error, length=length), WHICH[which], cached)
    engine, _ = checked(deep(dtype=dtype), kernels=("tiles",))
    assert engine.way != "tree" and "states differ by" in engine.why
    assert ("with a cached prefix" in engine.why) == (cached is True)


@pytest.mark.parametrize("cached", [None, True])
def test_a_layer_in_between_that_is_wrong_in_short_rows(monkeypatch: pytest.MonkeyPatch, cached: bool | None) -> None:
    """All layers run there."""
    changed(monkeypatch, partial(across_rows, length=30), lambda number: number == 7, cached)
    engine, _ = checked(deep(), kernels=("tiles",))
    assert "states differ by" in engine.why and "rows of 256 tokens" in engine.why


@pytest.mark.parametrize("number", [5, 9])
def test_one_layer_that_is_replaced(number: int) -> None:
    model = deep()
    layer = model.model.layers[number]
    forward = layer.forward
    layer.forward = lambda *inputs, **options: across_rows(inputs[0], forward(*inputs, **options), 1200)
    assert "states differ by" in checked(model, kernels=("tiles",))[0].why


@pytest.mark.parametrize("cached", [False, True])
def test_others_code_that_picks_a_layer_by_its_number(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    changed(monkeypatch, partial(across_rows, length=1200), lambda number: number == 7, cached)
    monkeypatch.setattr("evalkit.scoring.probe.changed_code", changed_code)
    assert "states differ by" in checked(deep(), kernels=("tiles",))[0].why


@pytest.mark.parametrize("with_trunk", [False, True])
def test_a_kernel_in_half_precision_that_is_wrong_in_long_rows(
    monkeypatch: pytest.MonkeyPatch, with_trunk: bool
) -> None:
    real = Forward._tree_states

    def wrong(own: Forward, tree: Any, trunk: Any) -> torch.Tensor:
        states = real(own, tree, trunk)
        is_wrong = own._is_own_dtype and (len(trunk.tokens) > 0) == with_trunk
        return torch.cat((states[:1200], 0.5 * states[1200:])) if is_wrong else states

    monkeypatch.setattr(Forward, "_tree_states", wrong)
    assert "rounding explains" in checked(deep(dtype=torch.bfloat16), kernels=("tiles",))[0].why


def test_greater_lengths_within_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """What acts beyond the lengths of the start-up check is found when they come."""
    changed(monkeypatch, partial(across_rows, length=700), WHICH["the upper half"])
    model = deep()
    engine, said = checked(model, 300)
    assert engine.way == "tree" and not said
    assert from_alone(engine, model, item(900)) <= RELATIVE
    assert len(said) == 1 and "prefixes are not shared" in said[0]


def test_no_layer_shows_the_smallest_error() -> None:
    model = deep()
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.zero_()
    engine, _ = checked(model)
    assert engine.way != "tree" and "inconclusive" in engine.why


# Causality


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", fast(["the upper half"], WHICH))
@pytest.mark.parametrize(
    "change",
    [blocks_of(128, least=100), partial(late, start=100), partial(late, start=220)],
    ids=["blocks", "from position 100 on", "from position 220 on"],
)
def test_long_sequences_that_see_later_tokens(
    monkeypatch: pytest.MonkeyPatch, change: Change, which: str, dtype: torch.dtype
) -> None:
    changed(monkeypatch, change, WHICH[which])
    model = deep(dtype=dtype)
    checked(model, start=item(60))
    with pytest.raises(CheckpointError, match="not a causal language model"):
        checked(model, start=item(240))
    engine, _ = checked(model, start=item(60), kernels=("dense",))
    with pytest.raises(CheckpointError, match="not a causal language model"):
        from_alone(engine, model, item(240))
