"""Whole rows, and rows behind stored states, have the scores of each sequence alone; what changes them is found."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evalkit.errors import CheckpointError, ScoringError
from evalkit.models.called import CalledModel
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward, Scores
from evalkit.scoring.pack import Sequences, SequenceSet, batches_of
from evalkit.scoring.passes import Pass, Rows
from tests.marks import fast
from tests.models.loading import load_folder
from tests.models.test_own_code import BUFFER, own_checkpoint
from tests.scoring.conftest import VOCABULARY, model_of, with_choices

LARGEST = 2e-5
"""Difference of a sequence's log-likelihood from that of the sequence alone, as a share of it, in float32."""
HALF = 2e-2
"""The same by the rounding of bfloat16."""
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    "qwen3_next": {
        "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 16,
        **_EXPERTS,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
        "expert_layer_period": 2, "mamba_dt_rank": 8,
    },
    "bamba": {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "mamba_headdim": 16,
        "n_mamba_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
        "mamba_d_state": 16, "chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {
        "num_hidden_layers": 3, "block_types": ["recurrent", "attention"], "lru_width": 64, "attention_window_size": 32,
    },
    "bert": {"is_decoder": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16, "num_layers": 2, "num_heads": 4},
    "deepseek_v32": {
        "num_key_value_heads": 4, "head_dim": 8, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 16,
        "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **_EXPERTS,
    },
    "llama": {},
}  # fmt: skip
"""Recurrent and hybrid models, heads of their own (RecurrentGemma, BERT), a window, an indexer; and one with a tree."""
STATES = ("mamba2", "falcon_h1", "lfm2", "bert", "gpt_neo", "deepseek_v32", "llama")
"""Those whose own caches are exact; Zamba 2's is not where a single token follows."""
FAST = ("falcon_h1", "gpt_neo")


def mixed(context: int = 24, items: int = 5, unconditional: bool = True) -> Sequences:
    """Ragged contexts behind a prefix, answers of one token with equal inputs, sequences that are prefixes of others,
    equal ones, and `unconditional` ones, with which a batch has no trunk."""
    dice = np.random.default_rng(3)
    start = dice.integers(0, VOCABULARY, 20)
    made = []
    for number in range(items):
        before = np.concatenate((start, dice.integers(0, VOCABULARY, context + 7 * number)))
        long = dice.integers(0, VOCABULARY, 11)
        endings = [dice.integers(0, VOCABULARY, 1), dice.integers(0, VOCABULARY, 1), long, long[:4], long]
        sequences = [np.concatenate((before, ending)).astype(np.int32) for ending in endings]
        masks = [np.arange(len(tokens)) >= len(before) for tokens in sequences]
        if unconditional and number % 2:
            sequences.append(np.concatenate((start[:1], long)).astype(np.int32))
            masks.append(np.arange(12) > 0)
        made.append(SequenceSet(f"document {number}", "task", sequences, masks))
    return Sequences.of(made)


def engine_of(model: Any, sequences: Sequences, budget: int = 160, greedy: bool = False) -> Engine:
    engine = Engine(model, budget, lambda _: None, greedy)
    engine.check(sequences)
    return engine


def ways_of(engine: Engine, sequences: Sequences) -> list[str]:
    """Ways without a tree that the checks allow."""
    longest = int(sequences.lengths.max()) - 1
    return [way for way in ("state", "rows") if engine._possible(way, longest) == way]


def scored(engine: Engine, sequences: Sequences, way: str, pass_tokens: int = 0) -> list[Scores]:
    """The scores of all sequences, in order."""
    by_item = {
        item: members
        for batch in batches_of(sequences, engine.budget)
        for item, members in engine.score(batch, way, pass_tokens)
    }
    return [scores for item in range(len(sequences)) for scores in by_item[item]]


def alone(model: Any, sequences: Sequences) -> list[Scores]:
    forward = Forward(model)
    return [forward.score_alone(tokens) for item in range(len(sequences)) for tokens in sequences[item].sequences]


def likelihoods(scores: list[Scores], sequences: Sequences) -> np.ndarray:
    masks = [mask for item in range(len(sequences)) for mask in sequences[item].is_scored]
    sums = [each.logprobs[mask].sum(dtype=np.float64) for each, mask in zip(scores, masks, strict=True)]
    return np.array(sums)


def gap(scores: list[Scores], expected: list[Scores], sequences: Sequences) -> float:
    """Largest difference of a log-likelihood, as a share of it."""
    sums, right = likelihoods(scores, sequences), likelihoods(expected, sequences)
    return float((np.abs(sums - right) / np.abs(right)).max())


def assert_right(model: Any, engine: Engine, sequences: Sequences, sizes: tuple[int, ...] = (1, 90, 10**6)) -> None:
    expected = alone(model, sequences)
    for way in (*ways_of(engine, sequences), "alone"):
        for size in sizes:
            assert gap(scored(engine, sequences, way, size), expected, sequences) <= LARGEST, (way, size)


# What is right


@pytest.mark.parametrize("kind", fast(FAST, KINDS))
def test_every_way_gives_the_scores_of_each_sequence_alone(kind: str) -> None:
    """In several batches with a trunk and without, in passes of any size; argmax tokens too."""
    model = model_of(kind, **KINDS[kind])
    engine = engine_of(model, mixed(), greedy=True)
    expected_ways = ["state", "rows"] if kind in STATES else ["rows"]
    for unconditional in (False, True):
        sequences = mixed(unconditional=unconditional)
        batches = batches_of(sequences, engine.budget)
        assert len(batches) > 1 and all(bool(len(batch.trunk)) != unconditional for batch in batches)
        assert ways_of(engine, sequences) == expected_ways
        assert_right(model, engine, sequences)
    expected = alone(model, sequences)
    for way in expected_ways:
        for scores, right in zip(scored(engine, sequences, way), expected, strict=True):
            is_scored = np.isfinite(scores.logprobs)
            assert (scores.greedy == right.greedy)[is_scored].all()


@pytest.mark.parametrize("kind", fast(["falcon_h1"], KINDS))
def test_half_precision_is_as_near_to_float32_as_alone(kind: str) -> None:
    exact, half = model_of(kind, **KINDS[kind]), model_of(kind, torch.bfloat16, **KINDS[kind])
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())
    sequences = mixed(items=8)
    engine = engine_of(half, sequences)
    expected, rounded = (likelihoods(alone(model, sequences), sequences) for model in (exact, half))
    rounding = np.abs(rounded - expected)
    ways = ways_of(engine, sequences)
    assert "rows" in ways
    for way in ways:
        distance = np.abs(likelihoods(scored(engine, sequences, way), sequences) - expected)
        assert distance.mean() <= 1.5 * rounding.mean(), way


@pytest.mark.parametrize("way", ["rows", "state"])
def test_repetition_and_another_process_give_the_same_bits(way: str) -> None:
    model, sequences = model_of("falcon_h1", **KINDS["falcon_h1"]), mixed()
    engine, other = (engine_of(model, sequences) for _ in range(2))
    for batch in batches_of(sequences, engine.budget):
        copy = pickle.loads(pickle.dumps(batch))
        first = engine.score(batch, way, 100)
        for again in (engine.score(batch, way, 100), other.score(copy, way, 100)):
            for (_, left), (_, right) in zip(first, again, strict=True):
                pairs = zip(left, right, strict=True)
                assert all(np.array_equal(a.logprobs, b.logprobs, equal_nan=True) for a, b in pairs)


def test_code_of_a_checkpoint_is_scored_in_rows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention takes no mask, and it has no cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own_checkpoint(tmp_path / "own", init=BUFFER.format("torch.tensor(SLOPES)"))
    model = load_folder(tmp_path / "own", trust_remote_code=True).model
    sequences = mixed(context=5, items=3)
    engine = engine_of(model, sequences)
    assert engine.way == "rows"
    assert_right(model, engine, sequences)


def test_a_module_patched_by_hooks() -> None:
    """Attention over its own scores: each token adds the mean of those before it."""
    model = model_of("llama")

    def changed(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, output.shape[1] + 1)[:, None]
        return output + output.cumsum(1) / counts

    model.model.layers[0].mlp.register_forward_hook(changed)
    sequences = mixed()
    engine = engine_of(model, sequences)
    assert ways_of(engine, sequences) == ["rows"] and engine.way == "rows"
    assert_right(model, engine, sequences)


# Plain modules


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Plain(nn.Module):
    """Logits alone; `positions` are computed from the ids, `change` is of the states between the blocks."""

    def __init__(self, positions: Callable[[torch.Tensor], torch.Tensor] | None = None, change: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(block_size=512)
        self.embed, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(1024, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.positions, self.change = positions, change
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)

    def states(self, idx: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(idx.shape[1]) if self.positions is None else self.positions(idx)
        x = self.blocks[0](self.embed(idx) + self.places(positions))
        x = x if self.change is None else self.change(x)
        return self.blocks[1](x)

    def forward(self, idx: torch.Tensor) -> Any:
        return self.head(self.states(idx))


class LikeNanoGPT(Plain):
    """Logits of the last position only, unless targets are given, and the loss."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.states(idx)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LikeNanochat(Plain):
    """Logits that are capped, in float32, whatever it computes in."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, kv_cache: Any = None) -> Any:
        return 15 * torch.tanh(self.head(self.states(idx)).float() / 15)


def called(module: nn.Module, dtype: torch.dtype = torch.float32) -> CalledModel:
    model = CalledModel(module.to(dtype).eval().requires_grad_(False), None, lambda: None)
    model.probe()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [Plain, LikeNanoGPT, LikeNanochat])
def test_plain_modules_are_scored_in_rows(form: type[Plain], dtype: torch.dtype) -> None:
    model, sequences = called(form(), dtype), mixed()
    engine = engine_of(model, sequences)
    assert engine.way == "rows" and ways_of(engine, sequences) == ["rows"]
    if dtype == torch.float32:
        assert_right(model, engine, sequences)
        return
    exact = form().eval()
    exact.load_state_dict(model.module.state_dict())
    expected, rounded = (likelihoods(alone(each, sequences), sequences) for each in (called(exact), model))
    distance = np.abs(likelihoods(scored(engine, sequences, "rows"), sequences) - expected)
    assert distance.mean() <= 1.5 * np.abs(rounded - expected).mean()


# What a batch, or padding, changes: it is found, and each sequence scored alone, or the model refused

Change = Callable[[torch.Tensor], torch.Tensor]


def statistics(x: torch.Tensor) -> torch.Tensor:
    """Batch statistics of each position."""
    return x - 0.3 * x.mean(0, keepdim=True)


def small_statistics(x: torch.Tensor) -> torch.Tensor:
    return x - 0.05 * x.mean(0, keepdim=True)


def first_row(x: torch.Tensor) -> torch.Tensor:
    """Each row sees the first one."""
    return x + 0.3 * x[:1]


def capacity_of(most: int) -> Change:
    """Experts take so many tokens of a batch each; others are left out."""

    def capacity(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        expert = (flat[:, :2] > 0).long() @ torch.tensor([1, 2])
        taken = nn.functional.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None]) <= most
        return (flat + flat.flip(-1) * taken).view_as(x)

    return capacity


def relative_capacity(x: torch.Tensor) -> torch.Tensor:
    """Experts take a share of the tokens of a batch."""
    flat = x.flatten(0, 1)
    expert = (flat[:, :2] > 0).long() @ torch.tensor([1, 2])
    taken = nn.functional.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None]) <= len(flat) * 0.3
    return (flat + flat.flip(-1) * taken).view_as(x)


def by_length(x: torch.Tensor) -> torch.Tensor:
    """As frequencies that depend on the longest row of a batch."""
    return x * (1 + x.shape[1] / 500)


def by_length_from_120(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + max(0, x.shape[1] - 120) / 300)


def by_rows_from_120(x: torch.Tensor) -> torch.Tensor:
    """Batch statistics in long rows only; of a row alone they are its own."""
    return statistics(x) if x.shape[1] >= 120 else 0.7 * x


CHANGES: tuple[Change, ...] = (
    statistics, small_statistics, first_row, capacity_of(40), relative_capacity, by_length, by_length_from_120,
    by_rows_from_120,
)  # fmt: skip


def right_or_refused(model: Any, is_half: bool, *, may_be_refused: bool) -> None:
    """Short sequences are checked first; longer ones come later."""
    short, long = mixed(), with_choices([90, 130, 160, 220], (1, 9))
    try:
        engine = engine_of(model, short)
        for sequences in (short, long):
            expected, scores = alone(model, sequences), scored(engine, sequences, engine.way)
            assert gap(scores, expected, sequences) <= (HALF if is_half else LARGEST)
    except CheckpointError as error:
        assert may_be_refused and "not a causal language model" in str(error)


FORMS = {
    "plain": torch.float32, "plain, half": torch.bfloat16, "hooked": torch.float32, "hooked, half": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", fast(["hooked"], FORMS))
def test_what_a_batch_changes_is_found(form: str, change: Change) -> None:
    dtype = FORMS[form]
    if form.startswith("plain"):
        model: Any = called(Plain(change=change), dtype)
    else:
        model = model_of("llama", dtype)
        model.model.layers[0].register_forward_hook(lambda _, __, output: change(output))
    may_be_refused = change in (relative_capacity, by_length, by_length_from_120)
    right_or_refused(model, dtype != torch.float32, may_be_refused=may_be_refused)


def test_what_only_large_passes_change_is_found() -> None:
    """No pass over a few rows is above this capacity of an expert."""
    sequences = with_choices(range(20, 60, 2), (1, 9, 5, 7))
    for most, way in ((100, "alone"), (2000, "rows")):
        model = called(Plain(change=capacity_of(most)))
        engine = engine_of(model, sequences, budget=1500)
        assert engine.way == way
        assert gap(scored(engine, sequences, way, 1500), alone(model, sequences), sequences) <= LARGEST


def from_padding(ids: torch.Tensor) -> torch.Tensor:
    """Positions of rows that are padded by token 0 on the left."""
    return (ids != 0).long().cumsum(1).sub(1).clamp_min(0)


def from_repetition(ids: torch.Tensor) -> torch.Tensor:
    """Positions that end where the last token begins to be repeated, as of right padding: no causal positions."""
    same = ids == ids[:, -1:]
    padding = same.flip(1).long().cumprod(1).sum(1, keepdim=True) - 1
    return torch.arange(ids.shape[1])[None] + padding


def from_longest(ids: torch.Tensor) -> torch.Tensor:
    """Positions that count from the end of the batch."""
    return torch.arange(512 - ids.shape[1], 512)


@pytest.mark.parametrize("positions", [from_padding, from_repetition, from_longest])
def test_positions_from_padding(positions: Any) -> None:
    """Also with sequences that have the token for padding."""
    model = called(Plain(positions))
    right_or_refused(model, False, may_be_refused=positions != from_padding)


# Caches that are wrong: states are not used


class Cached:
    """Changes how a model's base is called behind a cache."""

    def __init__(self, change: Callable[[dict[str, Any], int], None], dtype: torch.dtype) -> None:
        self.model = model_of("llama", dtype)
        real = self.model.model.forward

        def forward(**inputs: Any) -> Any:
            cache = inputs.get("past_key_values")
            if cache is not None and inputs.get("attention_mask") is None:
                change(inputs, cache.get_seq_length())
            return real(**inputs)

        self.model.model.forward = forward


def forgets(inputs: dict[str, Any], before: int) -> None:
    length = inputs["input_ids"].shape[1]
    inputs["position_ids"] = torch.arange(before, before + length)[None]
    inputs["past_key_values"] = None


def duplicates(inputs: dict[str, Any], _: int) -> None:
    """All rows continue the first one's."""
    cache = inputs["past_key_values"]
    cache.reorder_cache(torch.zeros(len(inputs["input_ids"]), dtype=torch.long))


def one_ahead(inputs: dict[str, Any], before: int) -> None:
    length = inputs["input_ids"].shape[1]
    inputs["position_ids"] = torch.arange(before + 1, before + 1 + length)[None]


def one_ahead_in_steps(inputs: dict[str, Any], before: int) -> None:
    """Only where a single token follows, for which many models have other code."""
    if inputs["input_ids"].shape[1] == 1:
        one_ahead(inputs, before)


def one_ahead_in_chunks(inputs: dict[str, Any], before: int) -> None:
    """Only where many tokens follow."""
    length = inputs["input_ids"].shape[1]
    places = torch.arange(before, before + length)
    inputs["position_ids"] = (places + (torch.arange(length) >= 24))[None]


def window(size: int) -> Callable[[dict[str, Any], int], None]:
    def change(inputs: dict[str, Any], before: int) -> None:
        inputs["position_ids"] = torch.arange(before, before + inputs["input_ids"].shape[1])[None]
        for layer in inputs["past_key_values"].layers:
            layer.keys, layer.values = layer.keys[:, :, -size:], layer.values[:, :, -size:]

    return change


WRONG = {
    "forgets": forgets, "duplicates": duplicates, "one ahead": one_ahead, "one ahead in steps": one_ahead_in_steps,
    "one ahead in chunks": one_ahead_in_chunks, "window of 10": window(10), "window of 100": window(100),
}  # fmt: skip


@pytest.mark.parametrize("dtype", fast([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("wrong", fast(["one ahead in steps", "window of 100"], WRONG))
def test_a_cache_that_is_wrong_is_not_used(wrong: str, dtype: torch.dtype) -> None:
    """A window shows only in sequences that are longer, and is found when they come."""
    model = Cached(WRONG[wrong], dtype).model
    largest = LARGEST if dtype == torch.float32 else HALF
    engine = engine_of(model, mixed())
    for sequences in (mixed(), with_choices([100, 140, 200], (1, 9, 40)), with_choices([9, 60], (2, 2, 2))):
        expected = alone(model, sequences)
        for way in ("state", "rows"):
            assert gap(scored(engine, sequences, way), expected, sequences) <= largest
    assert ways_of(engine, with_choices([200])) == ["rows"]


# Memory, and numbers that are not finite


class LittleMemory:
    """Memory for so many tokens of a pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        self.refused = 0
        real = Forward.score_pass

        def limited(own: Forward, rows: Rows, part: Pass) -> Any:
            if rows.computed([part]) > most:
                self.refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(own, rows, part)

        monkeypatch.setattr(Forward, "score_pass", limited)


@pytest.mark.parametrize("way", ["rows", "state"])
def test_passes_that_memory_does_not_hold_are_split(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = model_of("lfm2", **KINDS["lfm2"]), mixed()
    engine = engine_of(model, sequences)
    expected = alone(model, sequences)
    longest = int(sequences.lengths.max()) - 1
    memory = LittleMemory(monkeypatch, longest)
    assert gap(scored(engine, sequences, way, 10**6), expected, sequences) <= LARGEST
    assert memory.refused
    LittleMemory(monkeypatch, longest - 1)
    with pytest.raises(ScoringError, match="document 4: out of memory"):
        scored(engine, sequences, way, 10**6)


@pytest.mark.parametrize("way", ["rows", "state", "tree"])
def test_numbers_that_are_not_finite_name_their_document(way: str) -> None:
    """Though other documents are in the same pass."""
    model, sequences = model_of("llama"), mixed()
    engine = engine_of(model, sequences)
    tokens = sequences[3].sequences[2]
    model.model.embed_tokens.weight[int(tokens[-3])] = torch.nan
    others = [item for item in range(len(sequences)) if item != 3]
    assert all(int(tokens[-3]) not in np.concatenate(sequences[item].sequences) for item in others)
    engine.budget = 10**6
    with pytest.raises(ScoringError, match="document 3: a log-likelihood is not a finite number"):
        scored(engine, sequences, way, 10**6)
