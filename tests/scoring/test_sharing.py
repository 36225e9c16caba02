"""The start-up check rejects every wrong way of sharing and passes correct ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evalkit.errors import CheckpointError, ScoringError
from evalkit.scoring import attention, flex
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward
from evalkit.scoring.pack import batches_of
from evalkit.scoring.probe import in_float32, make_probe, mask_first
from evalkit.scoring.sequences import Sequences, SequenceSet
from evalkit.scoring.sharing import SharingCheck
from evalkit.scoring.tree import Ints, build_tree
from tests.marks import fast

VOCABULARY = 256
BUDGET = 1100
RELATIVE = 1e-4
"""Of a log-likelihood, in float32: sums of the same numbers in another order."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def model_of(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPE | settings))
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def engine_of(model: Any, budget: int = BUDGET, **settings: Any) -> tuple[Engine, list[str]]:
    said: list[str] = []
    return Engine(model, budget, said.append, **settings), said


def items(count: int | None = None) -> Sequences:
    """The first two short and with choices of one token, then contexts of up to 700 tokens."""
    dice = np.random.default_rng(0)
    made = []
    instruction = dice.integers(0, VOCABULARY, 30)
    for index, length in enumerate([4, 6, 700, 90, 300, 8, 40, 120, 500, 60]):
        context = np.concatenate((instruction, dice.integers(0, VOCABULARY, length)))
        endings = dice.integers(1, 40, 3) if index > 1 else np.ones(3, int)
        sequences = tuple(
            np.concatenate((context, dice.integers(0, VOCABULARY, int(n)))).astype(np.int32) for n in endings
        )
        made.append(
            SequenceSet(
                f"document {index}",
                "task",
                sequences,
                tuple(np.arange(len(s)) >= len(context) for s in sequences),
            )
        )
    return Sequences.of(made[:count])


def largest_difference(engine: Engine, model: Any) -> float:
    """Of a continuation's log-likelihood from the model's own forward pass; relative, or in nats below 1."""
    gaps = []
    alone = Forward(model)
    for batch in batches_of(items(), engine.budget):
        for item, (_, members) in zip(batch.sets, engine.score(batch), strict=True):
            for sequence, mask, scores in zip(item.sequences, item.is_scored, members, strict=True):
                expected = float(alone.score_alone(sequence).logprobs[mask].sum())
                gaps.append(abs(float(scores.logprobs[mask].sum()) - expected) / max(1.0, abs(expected)))
    return max(gaps)


# A model that counts by rows


def by_rows(monkeypatch: pytest.MonkeyPatch, kernel: str, window: int, with_trunk: bool | None = None) -> None:
    """Have attention see the last `window` keys of the row, whatever their positions are.

    Args:
        with_trunk: only behind a trunk, or only without one; None: always.
    """

    def applies(trunk: int) -> bool:
        return with_trunk is None or bool(trunk) == with_trunk

    def too_far(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return queries[:, None] - keys[None] >= window

    if kernel == "tiles":
        real_tile = attention._tile_mask

        def tile_mask(ends: Any, tile: attention.Tile, trunk: int, dtype: torch.dtype) -> torch.Tensor:
            mask = real_tile(ends, tile, trunk, dtype)
            keys = torch.cat((torch.arange(trunk), trunk + torch.from_numpy(tile.keys)))
            if applies(trunk):
                mask[0, 0].masked_fill_(
                    too_far(trunk + torch.arange(tile.start, tile.end), keys), torch.finfo(dtype).min
                )
            return mask

        monkeypatch.setattr(attention, "_tile_mask", tile_mask)
    elif kernel == "dense":
        real_mask = Forward._tree_mask

        def tree_mask(own: Forward, ends: torch.Tensor, trunk: int) -> torch.Tensor:
            mask = real_mask(own, ends, trunk)
            keys = torch.arange(trunk + len(ends))
            if applies(trunk):
                mask[0, 0].masked_fill_(too_far(keys[trunk:], keys), torch.finfo(mask.dtype).min)
            return mask

        monkeypatch.setattr(Forward, "_tree_mask", tree_mask)
    else:
        real_ranges = flex.query_ranges

        def query_ranges(ends: Ints, trunk: int, gap: int, padded: int) -> tuple[Ints, Ints]:
            first, last = real_ranges(ends, trunk, gap, padded)
            if applies(trunk):
                # The trunk's keys are filled up to whole blocks
                places = np.arange(len(last))
                last = np.minimum(last, np.where(places < trunk, places, places - gap) - trunk + window)
            return first, last.astype(np.int32)

        monkeypatch.setattr(flex, "query_ranges", query_ranges)


SLOW_ON_A_CPU = pytest.param("flex", marks=pytest.mark.slow)
"""It is compiled on a GPU only."""


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("dtype", fast([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("with_trunk", [False, True])
@pytest.mark.parametrize("kernel", ["tiles", "dense", SLOW_ON_A_CPU])
@pytest.mark.parametrize("window", [64, 256, 1024, -1])
def test_attention_by_rows_is_found(
    monkeypatch: pytest.MonkeyPatch, window: int, kernel: str, with_trunk: bool, dtype: torch.dtype
) -> None:
    """Also where it goes wrong in no row of the documents, and in half precision."""
    # The mask of a whole row is given fewer tokens at a time
    monkeypatch.setattr("evalkit.scoring.engine.DENSE_TOKENS", BUDGET)
    by_rows(monkeypatch, kernel, BUDGET - 1 if window < 0 else window, with_trunk)
    engine, said = engine_of(model_of("llama", dtype), kernels=(kernel,))
    engine.check(items(2))
    assert not engine.shares
    assert said == [
        f"warning: this model does not support scoring through shared prefixes ({engine.why_not}); every sequence is "
        "scored alone, which is several times slower"
    ]
    assert "states differ by" in engine.why_not
    assert engine.why_not.endswith("with a cached prefix") == with_trunk


SHARING = {
    "llama": ({}, "tiles"),
    "mistral": ({"sliding_window": 900}, "tiles"),
    "qwen2": ({}, "tiles"),
    "gpt_neox": ({}, "tiles"),
    "gemma2": ({"head_dim": 16, "sliding_window": 900}, "dense"),
    "llama4_text": ({"num_local_experts": 2, "head_dim": 16, "intermediate_size_mlp": 96}, "tiles"),
    "afmoe": (
        {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 16, "sliding_window": 900},
        "tiles",
    ),
    "doge": ({"keep_window_size": 1024}, "dense"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "dense"),
    "falcon": ({"alibi": True}, "dense"),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048}, "dense"),
    "mixtral": ({"num_local_experts": 4, "sliding_window": 900}, "tiles"),
}


@pytest.mark.parametrize("dtype", fast([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("kind", SHARING)
def test_architectures_share_and_score_as_by_themselves(kind: str, dtype: torch.dtype) -> None:
    settings, kernel = SHARING[kind]
    model = model_of(kind, dtype, **settings)
    if kind == "doge":  # untrained, its attention chooses among equals
        for layer in model.model.layers:
            layer.self_attn.A.add_(torch.randn_like(layer.self_attn.A))
    engine, _ = engine_of(model)
    engine.check(items(2))
    assert (engine.shares, engine.kernel, engine.why_not) == (True, kernel, "")
    if dtype == torch.float32:
        assert largest_difference(engine, model) <= RELATIVE
        assert engine.shares


def test_a_window_of_rows_in_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-Neo's local layers look back so many rows; short documents in small batches never show it."""
    model = model_of("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=256)
    engine, said = engine_of(model)
    engine.check(items(2))
    assert not engine.shares and len(said) == 1
    assert largest_difference(engine, model) <= RELATIVE


def test_longer_batches_than_were_checked_are_compared_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document larger than the budget is a batch by itself: here larger than the window of rows too."""
    monkeypatch.setattr("evalkit.scoring.attention._WIDEST", 512)
    by_rows(monkeypatch, "tiles", 400)
    model = model_of("llama")
    engine, said = engine_of(model, budget=200, kernels=("tiles",))
    engine.check(items(2))
    assert engine.shares and not said
    assert largest_difference(engine, model) <= RELATIVE
    (line,) = said
    assert line.startswith("warning: from ") and "such sequences are scored one at a time" in line


def test_longer_batches_than_were_checked_still_share_where_that_is_right() -> None:
    model = model_of("llama")
    engine, said = engine_of(model, budget=200)
    engine.check(items(2))
    first = engine.describe()["checked"]
    lone = Forward.score_unshared
    calls = 0

    def counted(own: Forward, tokens: Any) -> Any:
        nonlocal calls
        calls += 1
        return lone(own, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "score_unshared", counted)
        assert largest_difference(engine, model) <= RELATIVE
    assert not calls and not said
    assert engine.describe()["checked"] == first
    compared = engine._failures
    assert compared and not any(compared.values())
    assert all(lengths.row > first["row"] or lengths.longest > first["longest"] for lengths in compared)
    assert max(lengths.longest for lengths in compared) >= 730


def test_an_inconclusive_check_does_not_pass() -> None:
    """Without values, attention changes nothing, and a wrong mask would not show."""
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.zero_()
    engine, _ = engine_of(model)
    engine.check(items(2))
    assert not engine.shares
    assert "inconclusive" in engine.why_not


@pytest.mark.parametrize("window", [1, 7])
def test_a_window_too_short_to_tell(window: int) -> None:
    engine, _ = engine_of(model_of("mistral", sliding_window=window))
    engine.check(items(2))
    assert engine.why_not == f"sequences of {window} tokens are too short for the check"


def test_experts_that_rounding_decides_between_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One state in a hundred may be another, if it is not the same one with other tokens."""
    real = Forward.hidden_shared
    places = iter(range(10, 10**6, 7))

    def flipped(own: Forward, tree: Any, trunk: Any) -> torch.Tensor:
        states = real(own, tree, trunk).clone()
        states[next(places)] += 1
        return states

    monkeypatch.setattr(Forward, "hidden_shared", flipped)
    engine, _ = engine_of(model_of("llama"))
    engine.check(items(2))
    assert engine.shares, engine.why_not
    places = iter([30] * 100)
    engine, _ = engine_of(model_of("llama"))
    engine.check(items(2))
    assert not engine.shares


def test_memory_for_half_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Forward.hidden_shared

    def scarce(own: Forward, tree: Any, trunk: Any) -> torch.Tensor:
        if len(tree.tokens) > 700:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
        return real(own, tree, trunk)

    monkeypatch.setattr(Forward, "hidden_shared", scarce)
    engine, said = engine_of(model_of("llama"))
    engine.check(items(2))
    assert engine.shares and engine.budget == 550
    assert said == ["out of memory at 1375 tokens: continuing with batches of 550"]


def test_a_model_that_does_not_run_is_named_in_one_line() -> None:
    model = model_of("qwen2")
    model.model.layers[1].self_attn.q_proj = torch.nn.Linear(64, 24)
    engine, _ = engine_of(model)
    with pytest.raises(CheckpointError, match=r"^the model does not run \(RuntimeError: .*") as caught:
        engine.check(items(2))
    assert "\n" not in str(caught.value)


# Cached verdicts


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """How many rows have been compared since it was last asked; the cache is the test's own."""
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    real, made = Forward.hidden_shared, 0

    def counted(own: Forward, tree: Any, trunk: Any) -> torch.Tensor:
        nonlocal made
        made += 1
        return real(own, tree, trunk)

    monkeypatch.setattr(Forward, "hidden_shared", counted)

    def since() -> int:
        nonlocal made
        made, found = 0, made
        return found

    return since


def test_a_verdict_is_found_once_for_an_architecture(comparisons: Callable[[], int], tmp_path: Path) -> None:
    def checked(
        kind: str = "llama", dtype: torch.dtype = torch.float32, budget: int = BUDGET, **settings: Any
    ) -> Engine:
        engine, _ = engine_of(model_of(kind, dtype, **settings), budget, remembers=True)
        engine.check(items(2))
        return engine

    first = checked()
    assert comparisons()
    assert checked().describe() == first.describe()
    assert not comparisons()
    for other in (
        {"kind": "qwen2"},
        {"dtype": torch.bfloat16},
        {"budget": BUDGET + 100},
        {"rms_norm_eps": 1e-4},
        {"hidden_act": "gelu"},
    ):
        checked(**other)
        assert comparisons(), other
    wrong = {"attention_types": [[["global", "local"], 1]], "window_size": 256, "num_layers": 2, "num_heads": 4}
    for _ in range(2):  # may depend on the weights, so it is not cached
        assert not checked("gpt_neo", **wrong).shares
        assert comparisons()
    for content in ("", "[]", "[3]", '{"tiles row 1375 longest 687": ""}', "[" * 10**5):
        for file in (tmp_path / "cache" / "sharing").iterdir():
            file.write_text(content)
        assert checked().shares
        assert comparisons()


def test_a_verdict_of_another_architecture_is_not_used(comparisons: Callable[[], int], tmp_path: Path) -> None:
    def checked(kind: str) -> set[Path]:
        engine, _ = engine_of(model_of(kind), remembers=True)
        engine.check(items(2))
        return set((tmp_path / "cache" / "sharing").iterdir())

    [ours] = checked("llama")
    [theirs] = checked("qwen2") - {ours}
    ours.write_bytes(theirs.read_bytes())
    assert comparisons()
    checked("llama")
    assert comparisons()


def test_a_model_changed_by_hand_is_always_compared(comparisons: Callable[[], int]) -> None:
    for _ in range(2):
        engine, _ = engine_of(model_of("llama"))
        engine.check(items(2))
        assert comparisons()


def test_the_checks_of_weights_are_repeated_for_other_weights(
    comparisons: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for part in ("lookahead", "head"):
        real = getattr(SharingCheck, part)
        monkeypatch.setattr(
            SharingCheck, part, lambda own, *lengths, real=real, part=part: ran.append(part) or real(own, *lengths)
        )

    def runs(model: Any, files: str | None, remembers: bool = True) -> int:
        engine, _ = engine_of(model, remembers=remembers, files=files)
        ran.clear()
        engine.check(items(2))
        assert engine.shares and engine.describe()["stored"] == (not ran)
        return len(ran)

    model = model_of("llama")
    assert [runs(model, files) for files in ("a", "a", "b", "b", "a")] == [2, 0, 2, 0, 0]
    assert runs(model, None) == runs(model, "a", remembers=False) == 2
    assert runs(model_of("llama", torch.bfloat16), "a") == runs(model_of("llama", rms_norm_eps=1e-4), "a") == 2
    assert runs(model, "a") == 0


def test_failed_checks_of_weights_are_not_stored(comparisons: Callable[[], int]) -> None:
    """Weights that are not numbers, predictions that change with later tokens, and a head that is not evalkit's."""
    nan, ahead, scaled = (model_of("llama") for _ in range(3))
    nan.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    ahead.model.layers[0].register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    scaled.register_forward_hook(lambda _, __, out: setattr(out, "logits", 2 * out.logits))
    for _ in range(2):
        for model, why in ((nan, "NaN"), (ahead, "not a causal language model")):
            with pytest.raises(CheckpointError, match=why):
                engine_of(model, remembers=True, files=why)[0].check(items(2))
        engine, _ = engine_of(scaled, remembers=True, files="scaled")
        engine.check(items(2))
        assert "output head differs" in engine.why_not and not engine.describe()["stored"]


# The check's probes


@pytest.mark.parametrize(("row", "longest"), [(256, 8), (256, 64), (700, 350), (640, 600), (3000, 1000)])
def test_a_probe_is_the_tree_of_its_sequences(row: int, longest: int) -> None:
    """Each token stands after the tokens of its own sequence, and sees just these."""
    probe = make_probe(VOCABULARY, row, longest)
    tree = probe.tree
    assert len(tree.tokens) == row
    lengths = [len(sequence) for sequence in probe.sequences]
    assert max(lengths) == longest and len(set(lengths)) > 3
    index = np.arange(row)
    sees = (index[None] <= index[:, None]) & (index[:, None] < tree.ends[None])
    for node in range(row):
        path = np.flatnonzero(sees[node])
        assert tree.positions[path].tolist() == list(range(len(path)))
        assert tree.tokens[path].tolist() == probe.sequences[probe.owner[node]][: len(path)].tolist()
    assert sees[:, 0].all()
    assert not (np.flatnonzero(~sees[:, 0]).size) and mask_first(tree).ends[0] == 1
    after = probe.after(probe.trunk)
    assert 0 < probe.trunk < longest and len(after.tokens) == row - probe.trunk
    assert after.ends.max() == row - probe.trunk


def test_a_probe_of_one_block_is_what_the_planner_lays_out() -> None:
    probe = make_probe(VOCABULARY, 5000, 60)
    laid_out = build_tree(probe.sequences, [np.ones(len(s), bool) for s in probe.sequences])
    # The same distinct tokens, but for the last of each sequence, which the planner leaves out
    ours = {(tuple(s[: i + 1])) for s in probe.sequences for i in range(len(s))}
    ends = {tuple(s) for s in probe.sequences}
    assert len(laid_out.tokens) == len(ours - ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SHARING)
def test_half_precision_runs_in_float32_without_a_copy(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, dtype, **SHARING[kind][0])
    tokens = np.arange(40, dtype=np.int32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with in_float32(model):
        found = Forward(model, dtype=torch.float32).hidden_alone(tokens)
    assert found.dtype == torch.float32
    after = model.state_dict()
    assert all(after[name].dtype == tensor.dtype and after[name].equal(tensor) for name, tensor in before.items())
    half = Forward(model).hidden_alone(tokens)
    copy = model.float()
    exact = Forward(copy).hidden_alone(tokens)
    assert torch.allclose(found, exact, rtol=1e-5, atol=1e-5)
    assert half.dtype == dtype and not torch.allclose(half.float(), exact, rtol=1e-5, atol=1e-5)


def test_weights_that_are_read_by_another_module_run_in_float32() -> None:
    """Zamba 2's mixer reads those of its convolution, and rounds the convolution's input to their dtype."""
    layers = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "mamba_headdim": 16}
    heads = {"n_mamba_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4}
    model = model_of("zamba2", torch.bfloat16, **layers, **heads)
    tokens = np.arange(47, dtype=np.int32)
    with in_float32(model):
        found = Forward(model, dtype=torch.float32).hidden_alone(tokens)
    assert all(tensor.dtype == torch.bfloat16 for tensor in model.parameters())
    assert torch.allclose(found, Forward(model.float()).hidden_alone(tokens), rtol=1e-4, atol=1e-4)


# Checks other than sharing


def recurrent(scale: float) -> Any:
    """A checkpoint whose logits are capped at 30, in a way that evalkit does not know of."""
    model = model_of(
        "recurrent_gemma",
        num_hidden_layers=4,
        lru_width=64,
        attention_window_size=256,
        block_types=["recurrent", "attention"],
    )
    model.model.embed_tokens.weight.mul_(scale)
    return model


def test_logits_that_are_small_do_not_hide_their_cap() -> None:
    """As those of random weights are: at 1 the cap changes them by 0.0002 nats, at 30 by 60."""
    model = recurrent(1)
    assert SharingCheck(model)._head_gap(Forward(model), items()[2].sequences[0]) < 5e-3
    engine, said = engine_of(model)
    engine.check(items(2))
    assert not engine.shares
    assert "output head differs from evalkit's" in said[-1]


def test_what_depends_on_the_weights_is_found_for_each_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    real = SharingCheck._head_gap
    monkeypatch.setattr(
        SharingCheck, "_head_gap", lambda check, forward, tokens, largest=None: real(check, forward, tokens)
    )
    for scale in (1, 30):
        model = recurrent(scale)
        engine, said = engine_of(model, remembers=True)
        engine.check(items(2))
        assert largest_difference(engine, model) < 1e-3
    assert "output head" in said[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_run_in_float32_is_scored_one_by_one(dtype: torch.dtype) -> None:
    """Mamba rounds its states to the dtype of its head's weights before the head is called, and these are widened."""
    model = model_of("mamba", dtype, state_size=8)
    engine, _ = engine_of(model)
    engine.check(items(2))
    assert not engine.shares
    [(_, members)] = engine.score(batches_of(items(1), engine.budget)[0])
    item = items(1)[0]
    expected = Forward(model).score_alone(item.sequences[0]).logprobs[1:]
    assert members[0].logprobs[1:] == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 0.05)


def test_documents_that_fill_the_window_share() -> None:
    """The last token is predicted and not read, so that one more than the window fits."""
    model = model_of("gpt2", n_positions=128, n_embd=64, n_layer=2, n_head=4)
    dice = np.random.default_rng(0)
    context = dice.integers(0, VOCABULARY, 120)
    sequences = tuple(np.concatenate((context, dice.integers(0, VOCABULARY, 9))).astype(np.int32) for _ in range(3))
    full = Sequences.of([SequenceSet("full", "task", sequences, [np.arange(129) >= 120 for _ in sequences])])
    engine, said = engine_of(model)
    engine.check(full)
    engine.score(batches_of(full, engine.budget)[0])
    assert engine.shares
    assert said == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("not enough memory: you tried to allocate")])
def test_memory_that_does_not_hold_a_check(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(SharingCheck, "_head_gap", fails)
        engine, said = engine_of(model_of("llama"))
        engine.check(items(2))
        assert not engine.shares
        assert "out of memory in the check" in said[-1]
    monkeypatch.setattr(Forward, "hidden_alone", fails)
    monkeypatch.setattr(Forward, "logits_alone", fails)
    with pytest.raises(ScoringError, match="out of memory"):
        engine_of(model_of("llama"))[0].check(items(2))


def test_weights_are_restored_after_a_failure() -> None:
    model = model_of("llama", torch.bfloat16)

    def fail(*_: Any) -> None:
        raise RuntimeError("no kernel")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no kernel"), in_float32(model):
        Forward(model, dtype=torch.float32).hidden_alone(np.arange(9, dtype=np.int32))
    hook.remove()
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert not model.model.layers[0].mlp.gate_proj._forward_pre_hooks
