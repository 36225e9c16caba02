"""The start-up checks reject every wrong way of sharing and every model that is not causal, and pass what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evalkit.errors import CheckpointError, ScoringError
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward
from evalkit.scoring.pack import Sequences, SequenceSet, batches_of
from evalkit.scoring.passes import Pass, Rows
from evalkit.scoring.probe import in_float32
from evalkit.scoring.sharing import SharingCheck
from evalkit.scoring.tree import Tree
from tests.marks import fast
from tests.scoring.conftest import RELATIVE, VOCABULARY, Scarce, from_alone, model_of, with_choices

BUDGET = 1100
START = with_choices([4, 6], [1, 1, 1])
"""Short, with choices of one token: nothing that is wrong in long rows is seen here."""
ITEMS = with_choices([4, 6, 700, 90, 300, 8, 40, 120, 500, 60])
SHORT, LONG = 40, 200


def checked(model: Any, budget: int = BUDGET, start: Sequences = START, **settings: Any) -> tuple[Engine, list[str]]:
    """An engine after its check, and what it said."""
    said: list[str] = []
    engine = Engine(model, budget, said.append, **settings)
    engine.check(start)
    return engine, said


# Wrong ways of sharing


def drop_mask(inputs: dict[str, Any]) -> None:
    mask = inputs.get("attention_mask")
    if mask is not None and mask.dim() == 4:
        inputs["attention_mask"] = None


def drop_positions(inputs: dict[str, Any]) -> None:
    inputs.pop("position_ids", None)


def drop_cache(inputs: dict[str, Any]) -> None:
    """As a model would that keeps its state elsewhere: the trunk is run, and forgotten."""
    if inputs.get("attention_mask") is not None and inputs.get("past_key_values") is not None:
        inputs["past_key_values"] = None
        inputs["attention_mask"] = inputs["attention_mask"][..., -inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize(
    ("change", "kernels"), [(drop_mask, ("dense",)), (drop_cache, ("dense",)), (drop_positions, ("tiles", "dense"))]
)
def test_a_model_that_forgets_its_inputs(change: Any, kernels: tuple[str, ...]) -> None:
    model = model_of("llama")
    forward = model.model.forward

    def forgetful(**inputs: Any) -> Any:
        change(inputs)
        return forward(**inputs)

    model.model.forward = forgetful
    engine, [line] = checked(model, 512, kernels=kernels)
    assert engine.way in ("rows", "state") and "cannot be shared in a tree" in line and "\n" not in line
    assert from_alone(engine, model, ITEMS) <= RELATIVE


def by_rows(monkeypatch: pytest.MonkeyPatch, window: int, with_trunk: bool | None = None) -> None:
    """Have attention see the last `window` tokens of the row: with a trunk, without, or both."""
    real = Forward._tree_states

    def windowed(own: Forward, tree: Tree, trunk: Any) -> torch.Tensor:
        if with_trunk in (None, len(trunk.tokens) > 0):
            tree = replace(tree, ends=np.minimum(tree.ends, np.arange(len(tree.ends)) + window).astype(np.int32))
        return real(own, tree, trunk)

    monkeypatch.setattr(Forward, "_tree_states", windowed)


@pytest.mark.parametrize("with_trunk", [False, True])
@pytest.mark.parametrize("kernel", ["tiles", "dense"])
def test_a_window_over_the_row(monkeypatch: pytest.MonkeyPatch, kernel: str, with_trunk: bool) -> None:
    """Also where it goes wrong in no row of the documents."""
    # The mask of a whole row is given fewer tokens at a time
    monkeypatch.setattr("evalkit.scoring.engine.DENSE_TOKENS", BUDGET)
    by_rows(monkeypatch, BUDGET - 1, with_trunk)
    engine, [line] = checked(model_of("llama"), kernels=(kernel,))
    assert engine.way != "tree" and engine.why in line
    assert "states differ by" in engine.why
    assert ("with a cached prefix" in engine.why) == with_trunk


def test_one_masked_token() -> None:
    """The smallest error: the check measures its effect, and passes no check that could not have detected it."""
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.zero_()
    engine, _ = checked(model)
    assert engine.way != "tree" and "inconclusive" in engine.why


def test_experts_that_rounding_decides_between_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One state in a hundred may be another, if it is not the same one with other tokens."""
    real = Forward.hidden_shared
    for nodes, shares in ((iter(range(10, 10**6, 7)), True), (iter([30] * 100), False)):

        def flipped(own: Forward, tree: Any, trunk: Any, nodes: Any = nodes) -> torch.Tensor:
            states = real(own, tree, trunk).clone()
            states[next(nodes)] += 1
            return states

        monkeypatch.setattr(Forward, "hidden_shared", flipped)
        assert (checked(model_of("llama"))[0].way == "tree") == shares


# States


def test_states_are_not_stored_where_single_tokens_behind_them_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Zamba 2 and Nemotron-H, whose time steps have no bounds in passes of one token."""
    model = model_of("mamba2", num_heads=8, head_dim=16, n_groups=1, state_size=16)
    assert "states cannot be stored" not in checked(model)[0].why
    real = type(model.backbone).forward

    def forward(own: Any, input_ids: torch.Tensor, cache_params: Any = None, **inputs: Any) -> Any:
        output = real(own, input_ids=input_ids, cache_params=cache_params, **inputs)
        if cache_params is not None and input_ids.shape[1] == 1:
            output.last_hidden_state = output.last_hidden_state * 1.01 + 0.01
        return output

    monkeypatch.setattr(type(model.backbone), "forward", forward)
    engine, _ = checked(model)
    assert engine.way == "rows" and "states cannot be stored: its states differ by" in engine.why


def test_caches_without_layers_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mamba2", num_heads=8, head_dim=16, n_groups=1, state_size=16)
    real = type(model.backbone).forward

    class Own:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def reorder_cache(self, rows: torch.Tensor) -> None:
            self.cache.reorder_cache(rows)

    def forward(own: Any, input_ids: torch.Tensor, cache_params: Any = None, **inputs: Any) -> Any:
        cache = None if cache_params is None else cache_params.cache
        output = real(own, input_ids=input_ids, cache_params=cache, **inputs)
        if output.cache_params is not None:
            output.cache_params = Own(output.cache_params)
        return output

    monkeypatch.setattr(type(model.backbone), "forward", forward)
    engine, _ = checked(model)
    assert engine.way == "rows"
    assert from_alone(engine, model, ITEMS) <= RELATIVE


def test_a_tree_that_another_process_planned_is_scored_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out in the check of the head in one process only; its head is then the model's own."""
    model = model_of("llama")
    with monkeypatch.context() as patched:

        def out_of_memory(*_: Any) -> str:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        patched.setattr(SharingCheck, "head", out_of_memory)
        engine, _ = checked(model)
    assert engine.way != "tree"
    planned = [(batch, engine.score(batch, "tree", 256)) for batch in batches_of(ITEMS, engine.budget)]
    reference = Forward(model)
    for batch, scored in planned:
        for item, (_, members) in zip(batch.sets, scored, strict=True):
            for tokens, scores, mask in zip(item.sequences, members, item.is_scored, strict=True):
                assert scores.logprobs[mask] == pytest.approx(reference.score_alone(tokens).logprobs[mask], abs=1e-4)


# Right ways of sharing

SHARING: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "tiles"),
    "gemma2": ({"head_dim": 16, "sliding_window": 900, "final_logit_softcapping": 2.0}, "dense"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "dense"),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048}, "dense"),
    "mixtral": ({"num_local_experts": 4, "sliding_window": 900}, "tiles"),
    "granite": ({"logits_scaling": 3.0}, "tiles"),
    "cohere": ({"logit_scale": 2.0}, "tiles"),
}


@pytest.mark.parametrize("dtype", fast([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("kind", SHARING)
def test_architectures_that_share(kind: str, dtype: torch.dtype) -> None:
    settings, kernel = SHARING[kind]
    model = model_of(kind, dtype, **settings)
    engine, _ = checked(model)
    assert (engine.way, engine.kernel, engine.why) == ("tree", kernel, "")
    if dtype == torch.float32:
        assert from_alone(engine, model, ITEMS) <= RELATIVE


def test_longer_batches_than_were_checked_are_compared_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document larger than the budget is a batch by itself: with a window of rows, larger than it too."""
    alone: list[int] = []
    real = Forward.score_pass

    def counted(own: Forward, rows: Rows, part: Pass) -> Any:
        alone.append(len(part.rows))
        return real(own, rows, part)

    monkeypatch.setattr(Forward, "score_pass", counted)
    model = model_of("llama")
    engine, said = checked(model, budget=200, kernels=("tiles",))
    first = engine.describe()["checked"]
    assert from_alone(engine, model, ITEMS) <= RELATIVE
    assert not alone and not said and engine.describe()["checked"] == first
    by_rows(monkeypatch, 400)
    engine, said = checked(model, budget=200, kernels=("tiles",))
    assert engine.way == "tree" and not said
    assert from_alone(engine, model, ITEMS) <= RELATIVE
    assert len(said) == 1 and "warning: from " in said[0] and alone


def test_documents_that_fill_the_window_share() -> None:
    """The last token is predicted and not read, so that one more than the window fits."""
    model = model_of("gpt2", n_positions=128, n_embd=64, n_layer=2, n_head=4)
    full = with_choices([90], [9, 9, 9])
    engine, said = checked(model, start=full)
    assert from_alone(engine, model, full) <= RELATIVE
    assert engine.way == "tree" and not said


def test_a_window_that_is_too_short_for_the_check() -> None:
    assert "too short" in checked(model_of("mistral", sliding_window=7))[0].why


def test_a_kernel_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr("evalkit.scoring.attention.TileLayout.attend", fail)
    model = model_of("llama")
    engine, [line] = checked(model, 4096)
    assert (engine.way, engine.kernel, engine.budget) == ("tree", "dense", 512)
    assert "NotImplementedError: no kernel" in line
    assert from_alone(engine, model, ITEMS) <= RELATIVE


# Heads


def test_an_unknown_output_head() -> None:
    """A model that does something of its own to its logits is scored by its own pass."""
    model = model_of("llama")
    model.register_forward_hook(lambda _, __, output: setattr(output, "logits", 1.05 * output.logits))
    engine, said = checked(model)
    assert engine.way in ("rows", "state") and "output head" in said[0]
    assert from_alone(engine, model, ITEMS) <= RELATIVE


def test_base_models_that_cannot_be_run_by_themselves() -> None:
    """Mamba rounds its states to the dtype of its head's weights before the head."""
    model = model_of("mamba", state_size=8)
    engine, _ = checked(model)
    assert engine.way == "rows"
    assert from_alone(engine, model, START) <= RELATIVE


def test_small_logits_do_not_hide_their_cap() -> None:
    """At 1 the cap at 30, which evalkit does not know, changes logits by 0.0002 nats; in trained models by 60."""
    blocks = {"block_types": ["recurrent", "attention"], "lru_width": 64, "attention_window_size": 256}
    model = model_of("recurrent_gemma", num_hidden_layers=4, **blocks)
    assert SharingCheck(model)._head_gap(Forward(model), ITEMS[2].sequences[0]) < 5e-3
    engine, _ = checked(model)
    assert engine.way in ("rows", "state") and "output head" in engine.why


# Causality


def item(length: int) -> Sequences:
    """A document whose longest choice has so many tokens."""
    return with_choices([length - 35], [3, 5])


def scored(model: Any, *lengths: int) -> None:
    """Check with the first document only, and score all; compare with the model's own forward pass."""
    engine, _ = checked(model, start=item(lengths[0]))
    for length in lengths:
        assert from_alone(engine, model, item(length)) <= RELATIVE


def rejected(model: Any, *lengths: int) -> None:
    with pytest.raises(CheckpointError, match="not a causal language model"):
        scored(model, *lengths)


def hooked(model: Any, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Change what the first layer's MLP returns, given its input and output."""
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, output: change(inputs[0], output))
    return model


def blocks_of(size: int, least: int = 0) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Each token sees the mean of its block of tokens, in sequences of at least some length."""

    def change(_: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] < least:
            return output
        return torch.cat([part + part.mean(1, keepdim=True) for part in output.split(size, dim=1)], dim=1)

    return change


def chosen(states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Experts choose their tokens: a few of each sequence get what others would get in a shorter one."""
    return output.index_fill(1, states[0].sum(-1).topk(8).indices, 1.0)


def prefix(_: torch.Tensor, output: torch.Tensor, size: int = 20) -> torch.Tensor:
    """The first tokens see each other."""
    return torch.cat((output[:, :size] + output[:, :size].mean(1, keepdim=True), output[:, size:]), dim=1)


def last(states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Each token sees the last one."""
    return output + states[:, -1:]


def next_one(states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """As by a convolution that is padded on both sides."""
    return output + torch.nn.functional.pad(states, (0, 0, 0, 1))[:, 1:]


CHANGES = [*map(blocks_of, (2, 3, 9, 15, 16, 47, 63, 128)), chosen, prefix, partial(prefix, size=12), last, next_one]


@pytest.mark.parametrize("change", CHANGES)
def test_tokens_that_see_later_ones(change: Any) -> None:
    """A sequence that is cut at the end of a block would not show it."""
    rejected(hooked(model_of("llama"), change), SHORT)
    rejected(hooked(model_of("llama"), change), LONG)


def test_what_takes_effect_in_long_sequences_only() -> None:
    for window in (None, 16):  # also where a sliding window is shorter than the sequences of the check
        model = hooked(model_of("mistral", sliding_window=window), blocks_of(128, least=100))
        scored(model, SHORT, SHORT + 20)
        rejected(model, SHORT, LONG)


def test_lookahead_beyond_the_length_of_rotary_embeddings() -> None:
    """All embeddings change with the length there, which is no lookahead."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    settings = {"rope_parameters": rope, "max_position_embeddings": 256}
    checked(model_of("llama", **settings), start=item(LONG))
    rejected(hooked(model_of("llama", **settings), blocks_of(2, least=30)), LONG)


def test_tokens_that_a_model_never_predicts() -> None:
    """Their logits are minus infinity."""
    model = model_of("llama")
    even = torch.arange(0, VOCABULARY, 2)
    model.register_forward_hook(
        lambda _, __, output: setattr(output, "logits", output.logits.index_fill(-1, even, -torch.inf))
    )
    odd = SequenceSet("document", "task", [2 * np.arange(30, dtype=np.int32) + 1], [np.arange(30) > 0])
    engine, _ = checked(model, start=Sequences.of([odd]))
    [(_, [scores])] = engine.score(batches_of(Sequences.of([odd]), engine.budget)[0])
    assert np.isfinite(scores.logprobs[1:]).all()


# Models that do not run, numbers that are none, and memory


def test_a_model_that_does_not_run() -> None:
    model = model_of("qwen2")
    model.model.layers[1].self_attn.q_proj = torch.nn.Linear(64, 24)
    with pytest.raises(CheckpointError, match=r"^the model does not run \(RuntimeError: .*") as caught:
        checked(model)
    assert "\n" not in str(caught.value)


def test_memory_that_does_not_hold_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows; the head; neither."""
    with monkeypatch.context() as patched:
        Scarce(patched, 700, "hidden_shared")
        engine, [line] = checked(model_of("llama"))
        assert engine.way == "tree" and engine.budget == 550 and "1375 tokens" in line
    for error in (torch.OutOfMemoryError(), RuntimeError("not enough memory: you tried to allocate")):
        with monkeypatch.context() as patched:

            def failing(*_: Any, error: Exception = error) -> Any:
                raise error

            patched.setattr(SharingCheck, "_head_gap", failing)
            assert "out of memory" in checked(model_of("llama"))[0].why
            patched.setattr(Forward, "hidden_alone", failing)
            patched.setattr(Forward, "logits_alone", failing)
            with pytest.raises(ScoringError, match="out of memory"):
                checked(model_of("llama"))


# Float32


def test_half_precision_runs_in_float32_without_a_copy() -> None:
    """Zamba 2's mixer reads the weights of its convolution, and rounds the convolution's input to their dtype."""
    layers = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "mamba_headdim": 16}
    heads = {"n_mamba_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4}
    tokens = np.arange(47, dtype=np.int32)
    for kind, dtype in (("llama", torch.bfloat16), ("gpt_neox", torch.float16), ("zamba2", torch.bfloat16)):
        model = model_of(kind, dtype, **(layers | heads if kind == "zamba2" else {}))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with in_float32(model):
            wide = Forward(model, dtype=torch.float32).hidden_alone(tokens)
        assert all(value.dtype == before[n].dtype and value.equal(before[n]) for n, value in model.state_dict().items())
        half, exact = Forward(model).hidden_alone(tokens), Forward(model.float()).hidden_alone(tokens)
        assert wide.dtype == torch.float32 and torch.allclose(wide, exact, rtol=1e-4, atol=1e-4)
        assert half.dtype == dtype and not torch.allclose(half.float(), exact, rtol=1e-4, atol=1e-4)


def test_weights_are_restored_after_a_failure() -> None:
    model = model_of("llama", torch.bfloat16)
    hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_float32(model):
        Forward(model, dtype=torch.float32).hidden_alone(np.arange(9, dtype=np.int32))
    hook.remove()
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert not model.model.layers[0].mlp.gate_proj._forward_pre_hooks


# Cached verdicts


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """How many rows have been compared since it was last asked; the cache is the test's own."""
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    real, made = Forward.hidden_shared, []
    monkeypatch.setattr(Forward, "hidden_shared", lambda own, tree, trunk: made.append(1) or real(own, tree, trunk))

    def since() -> int:
        count = len(made)
        made.clear()
        return count

    return since


def test_a_verdict_is_kept_for_an_architecture(comparisons: Callable[[], int], tmp_path: Path) -> None:
    def again(kind: str = "llama", dtype: torch.dtype = torch.float32, budget: int = 300, **settings: Any) -> Engine:
        return checked(model_of(kind, dtype, **settings), budget, remembers=True)[0]

    first = again()
    assert comparisons()
    assert again().describe() == first.describe() and not comparisons()
    assert not checked(model_of("llama"), 300)[0].describe()["stored"] and comparisons()  # a model changed by hand
    others: list[dict[str, Any]] = [{"kind": "qwen2"}, {"dtype": torch.half}, {"budget": 500}, {"rms_norm_eps": 0.1}]
    for other in others:
        again(**other)
        assert comparisons(), other
    local = {"attention_types": [[["global", "local"], 1]], "window_size": 64, "num_layers": 2, "num_heads": 4}
    for _ in range(2):  # a failure may depend on the weights, so it is not cached
        assert again("gpt_neo", **local).way != "tree" and comparisons()
    stored = sorted((tmp_path / "cache" / "sharing").iterdir())
    contents = [file.read_bytes() for file in stored]
    for changed in ([b"[3]"] * len(stored), [*contents[1:], contents[0]]):  # damaged, and of another architecture
        for file, content in zip(stored, changed, strict=True):
            file.write_bytes(content)
        assert again().way == "tree" and comparisons()


def test_few_checks_cover_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs several forward passes; where memory does not hold the greatest length, a smaller one is checked."""
    real, ran = SharingCheck.sharing, list[int]()
    for most, greatest, checks in ((1024, 1000, 1), (700, 600, 1), (560, 600, 0)):

        def limited(own: SharingCheck, kernel: str, lengths: Any, is_first: bool, most: int = most) -> str:
            if lengths.row > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            ran.append(lengths.row)
            return real(own, kernel, lengths, is_first)

        monkeypatch.setattr(SharingCheck, "sharing", limited)
        model = model_of("llama")
        engine, said = checked(model, 300)
        ran.clear()
        for length in range(540, greatest + 1, 60):
            [batch] = batches_of(item(length), engine.budget)
            engine.score(batch)
        assert len(ran) == checks
        assert bool(said) == (not checks)  # a warning that these sequences are scored one at a time


def test_checks_of_weights_are_kept_for_their_files_and_failed_ones_never(
    comparisons: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for part in ("lookahead", "head"):
        real = getattr(SharingCheck, part)
        monkeypatch.setattr(
            SharingCheck,
            part,
            lambda own, *given, real=real, part=part, **how: ran.append(part) or real(own, *given, **how),
        )

    def runs(model: Any, files: str | None, remembers: bool = True) -> int:
        ran.clear()
        engine, _ = checked(model, 300, remembers=remembers, files=files)
        assert engine.way == "tree" and engine.describe()["stored"] == (not ran)
        return len(ran)

    model = model_of("llama")
    assert [runs(model, files) for files in ("a", "a", "b", "b", "a")] == [2, 0, 2, 0, 0]
    assert runs(model, None) == runs(model, "a", remembers=False) == 2
    assert runs(model_of("llama", torch.bfloat16), "a") == runs(model_of("llama", rms_norm_eps=1e-4), "a") == 2
    # Weights that are not numbers, predictions that change with later tokens, and a head that is not evalkit's
    nan, ahead, scaled = (model_of("llama") for _ in range(3))
    nan.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    ahead.model.layers[0].register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    scaled.register_forward_hook(lambda _, __, out: setattr(out, "logits", 2 * out.logits))
    for _ in range(2):
        for wrong, why in ((nan, "NaN"), (ahead, "not a causal language model")):
            with pytest.raises(CheckpointError, match=why):
                checked(wrong, remembers=True, files=why)
        engine, _ = checked(scaled, remembers=True, files="scaled")
        assert "output head" in engine.why and not engine.describe()["stored"]
