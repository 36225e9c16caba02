"""Models with unexpected behaviour, and machines that run out of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.errors import CheckpointError, ScoringError
from evalkit.models.context.extension import ContextSettings
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate
from evalkit.models.loading.spec import extension_of
from evalkit.models.memory import is_out_of_memory
from evalkit.models.variants.modeling import EvalkitLlamaConfig
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward, Trunk
from evalkit.scoring.head import Scores
from evalkit.scoring.pack import batches_of
from evalkit.scoring.sequences import Sequences, SequenceSet
from evalkit.scoring.tree import Tree
from tests.models.test_stretch import SHAPE as VARIANT_SHAPE
from tests.models.test_stretch import VARIANTS, saved, stretched
from tests.scoring.conftest import encode, items_of, largest_between, largest_difference, questions, relative, score
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer

Tiny = Callable[..., LoadedModel]
RELATIVE = 1e-4
BUDGET = 512


def patched(loaded: LoadedModel, change: Callable[[dict[str, Any]], None]) -> LoadedModel:
    """Let the base model forget some of what it is given."""
    base = loaded.model.base_model
    forward = base.forward

    def forgetful(*args: Any, **options: Any) -> Any:
        change(options)
        return forward(*args, **options)

    base.forward = forgetful
    return loaded


def drop_mask(options: dict[str, Any]) -> None:
    mask = options.get("attention_mask")
    if mask is not None and mask.dim() == 4:
        options["attention_mask"] = None


def drop_positions(options: dict[str, Any]) -> None:
    options.pop("position_ids", None)


def refuse_positions(options: dict[str, Any]) -> None:
    if options.get("position_ids") is not None:
        raise TypeError("forward() got an unexpected keyword argument 'position_ids'")


def drop_cache(options: dict[str, Any]) -> None:
    """As a model would that keeps its state elsewhere: the trunk is run, and forgotten."""
    if options.get("attention_mask") is not None and options.get("past_key_values") is not None:
        options["past_key_values"] = None
        options["attention_mask"] = options["attention_mask"][..., -options["input_ids"].shape[1] :]


@pytest.mark.parametrize(
    ("template", "dtype"), [("inst", "float32"), ("inst", "bfloat16"), ("plain", "float32"), ("plain", "bfloat16")]
)
@pytest.mark.parametrize(
    ("change", "kernels"),
    [
        (drop_mask, ("dense",)),
        (drop_cache, ("dense",)),
        (drop_positions, ("tiles", "dense")),
        (refuse_positions, ("tiles", "dense")),
    ],
)
def test_a_model_that_cannot_share_is_found_out_and_scored_by_itself(
    tiny: Tiny, change: Callable[[dict[str, Any]], None], kernels: tuple[str, ...], template: str, dtype: str
) -> None:
    # Large weights, so that the effect of the context is similar to a trained model's
    loaded = patched(tiny(spread=0.5, dtype=dtype), change)
    encoded = encode(loaded, load_template(template))
    said: list[str] = []
    engine = Engine(loaded.model, BUDGET, said.append, kernels=kernels)
    engine.check(items_of(encoded[:2]))
    assert not engine.shares
    (line,) = said
    assert line.startswith("warning: this model does not support scoring through shared prefixes")
    assert "\n" not in line
    # In bf16 a pass with one token more rounds differently
    tolerance = RELATIVE if dtype == "float32" else 1e-2
    assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= tolerance


def test_a_model_that_is_not_causal_is_rejected(tiny: Tiny) -> None:
    loaded = tiny()
    base = loaded.model.base_model
    forward = base.forward

    def bidirectional(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    base.forward = bidirectional
    with pytest.raises(CheckpointError, match="not a causal language model"):
        Engine(loaded.model, BUDGET, print).check(items_of(encode(loaded)[:2]))


def test_damaged_weights_are_rejected(tiny: Tiny) -> None:
    loaded = tiny()
    loaded.model.get_output_embeddings().weight[7, 3] = torch.nan
    with pytest.raises(CheckpointError, match="not numbers"):
        Engine(loaded.model, BUDGET, print).check(items_of(encode(loaded)[:2]))


def test_a_score_that_is_not_a_number_names_the_document(tiny: Tiny) -> None:
    """An overflow that the check did not show: here, of a byte of "🌊". It spreads over the documents of its batch."""
    loaded = tiny()
    encoded = encode(loaded)
    (mark,) = loaded.tokenizer("🌊", add_special_tokens=False)["input_ids"][-1:]
    engine = Engine(loaded.model, 4096, print)
    engine.check(items_of(encoded[:2]))
    assert engine.shares
    loaded.model.get_input_embeddings().weight[mark] = torch.inf
    (batch,) = batches_of(items_of(encoded), engine.budget)
    spoilt = [members for members in engine._shared_scores(batch) if np.isnan(members[0].logprobs[1:]).any()]
    assert len(spoilt) > 1
    with pytest.raises(
        ScoringError, match=r"subject_0 document 8: a log-likelihood is not a finite number; .* --dtype float32"
    ):
        score(engine, encoded)


class Scarce:
    """Memory for so many tokens of a batch, and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self.refused = 0
        real = Forward.score

        def forward(own: Forward, tree: Tree, trunk: Trunk) -> Scores:
            if len(tree.tokens) > tokens:
                self.refused += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(own, tree, trunk)

        monkeypatch.setattr(Forward, "score", forward)


def largest(items: Sequences) -> tuple[int, SequenceSet]:
    """Return the most tokens of an item in a batch of its own, and that item."""
    return max(((len(batch.tree.tokens), batch.sets[0]) for batch in batches_of(items, 1)), key=lambda found: found[0])


def test_out_of_memory_halves_the_budget_and_continues(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny()
    encoded = encode(loaded, unconditional=True)
    widest, _ = largest(items_of(encoded))
    plenty = score(Engine(loaded.model, 8 * widest, print), encoded)
    memory = Scarce(monkeypatch, widest)
    said: list[str] = []
    engine = Engine(loaded.model, 8 * widest, said.append)
    first = score(engine, encoded)
    assert largest_between(plenty, first) <= RELATIVE
    refused = memory.refused
    assert refused > 0
    assert len(said) == 1
    assert re.fullmatch(r"out of memory at \d+ tokens a batch: such batches are halved", said[0])
    # Batches are independent: a repetition is split the same way, to the same bits; the plan does not change
    assert largest_between(first, score(engine, encoded)) == 0
    assert memory.refused == 2 * refused
    assert len(said) == 1
    assert engine.budget == 8 * widest


def test_an_item_too_large_for_memory_names_its_document(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document with the most tokens; shorter ones stand before and after it."""
    loaded = tiny()
    encoded = encode(loaded)
    needed, item = largest(items_of(encoded))
    Scarce(monkeypatch, needed - 1)
    for budget in (1, BUDGET):
        engine = Engine(loaded.model, budget, lambda line: None)
        with pytest.raises(ScoringError, match=rf"{item.label}: out of memory on \d+ tokens"):
            score(engine, encoded)


@pytest.mark.parametrize("method", ["score_unshared", "trunk"])
def test_memory_that_lacks_elsewhere_is_an_error_in_one_line(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    loaded = tiny()
    engine = Engine(loaded.model, 1, print)
    engine.check(items_of(encode(loaded)[:2]))
    engine.shares = method == "trunk"
    monkeypatch.setattr(Forward, method, fail)
    with pytest.raises(ScoringError, match=r"subject_\d document \d: out of memory on \d+ tokens") as caught:
        score(engine, encode(loaded))
    assert "\n" not in str(caught.value)


def test_other_errors_are_not_taken_for_lack_of_memory(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("expected scalar type Float but found Half")

    loaded = tiny()
    monkeypatch.setattr(Forward, "score", fail)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        score(Engine(loaded.model, BUDGET, print), encode(loaded))


@pytest.mark.parametrize(
    ("error", "lack"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, lack: bool) -> None:
    assert is_out_of_memory(error) == lack


def other_model(config: Any, folder: Path) -> LoadedModel:
    """A random model of an architecture that `tiny_checkpoint` does not make."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tiny_tokenizer(folder)))
    return LoadedModel(model, tokenizer, "other", "", 0, "float32", "cpu", 256, 0, 1, "sdpa")


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
}


@pytest.mark.parametrize("window", [16, 48, 300])
def test_a_sliding_window_is_respected(tmp_path: Path, window: int) -> None:
    """Shared where every sequence lies within the window, by itself where the window matters."""
    loaded = other_model(MistralConfig(**SHAPE, sliding_window=window), tmp_path)
    encoded = list(Prompter(load_template("plain"), loaded.tokenizer, 256).encode(questions()))
    longest = max(len(s.tokens) for e in encoded for s in e.sequences)
    assert 16 < 48 < longest < 300
    engine = Engine(loaded.model, BUDGET, lambda line: None)
    engine.check(items_of(encoded[-1:] + encoded[1:2]))
    assert engine.shares
    assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= RELATIVE


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("trained", [16, 48, 300])
def test_rotary_embeddings_that_depend_on_length(tmp_path: Path, kind: str, trained: int) -> None:
    """Sequences longer than the model was trained for do not share a batch, where they would change the others."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": trained}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    config = LlamaConfig(**SHAPE, rope_parameters=parameters, max_position_embeddings=4 * trained)
    loaded = other_model(config, tmp_path)
    encoded = list(Prompter(load_template("plain"), loaded.tokenizer, 256).encode(questions()))
    assert 48 < max(len(s.tokens) for e in encoded for s in e.sequences) < 300
    engine = Engine(loaded.model, BUDGET, lambda line: None)
    engine.check(items_of(encoded[-1:] + encoded[1:2]))
    assert engine.shares
    assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= RELATIVE


def test_a_longer_sequence_before_changes_no_score() -> None:
    """transformers' own module keeps the frequencies of the longest one."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}

    def fresh() -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPE, rope_parameters=rope, max_position_embeddings=16)
        return AutoModelForCausalLM.from_config(config).eval()

    long, short = (np.random.default_rng(0).integers(1, VOCABULARY, size).astype(np.int32) for size in (60, 20))
    expected = Forward(fresh()).score_alone(short).logprobs
    for scored in (Forward.score_alone, Forward.score_unshared):
        forward = Forward(fresh())
        scored(forward, long)
        np.testing.assert_allclose(scored(forward, short).logprobs, expected, rtol=1e-5)
    model = fresh()
    for ids in (long, short):
        moved = model(torch.from_numpy(ids[None].astype(np.int64))[:, :-1]).logits[0].log_softmax(-1)
    assert (
        np.abs(
            moved.gather(1, torch.from_numpy(short[1:, None].astype(np.int64)))[:, 0].detach().numpy() - expected[1:]
        ).max()
        > 0.01
    )


def test_a_model_that_cannot_be_given_a_tree_is_scored_right_and_reported(tmp_path: Path) -> None:
    """A state space reads whatever stands before."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "initializer_range": 0.2, "pad_token_id": None}
    loaded = other_model(MambaConfig(**shape, num_hidden_layers=2), tmp_path)
    encoded = list(Prompter(load_template("inst"), loaded.tokenizer, 256).encode(questions()))
    said: list[str] = []
    engine = Engine(loaded.model, BUDGET, said.append)
    engine.check(items_of(encoded[:2]))
    assert not engine.shares
    assert said[-1].startswith("warning: this model does not support scoring through shared prefixes")
    assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= RELATIVE


def test_a_way_to_attend_that_fails_is_reported_and_replaced(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr("evalkit.scoring.attention.TileLayout.attend", fail)
    loaded = tiny()
    encoded = encode(loaded)
    said: list[str] = []
    engine = Engine(loaded.model, 4096, said.append)
    engine.check(items_of(encoded[:2]))
    assert engine.shares
    assert (engine.kernel, engine.budget) == ("dense", 512)
    (line,) = said
    assert line.startswith("attention by dense, which is slower (tiles: it fails (NotImplementedError: no kernel")
    assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= RELATIVE


def test_a_head_that_does_more_than_multiply(tmp_path: Path) -> None:
    """Gemma 2 squashes its logits after the head, and so must we."""
    config = Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=2.0, sliding_window=300)
    loaded = other_model(config, tmp_path)
    encoded = list(Prompter(load_template("inst"), loaded.tokenizer, 256).encode(questions()))
    said: list[str] = []
    engine = Engine(loaded.model, BUDGET, said.append)
    engine.check(items_of(encoded[:2]))
    assert engine.shares
    assert not said
    assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= RELATIVE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unknown_output_head_disables_sharing(tiny: Tiny, dtype: str) -> None:
    """A model that does something of its own to its logits is found out in any dtype, and scored by its own pass."""
    loaded = tiny(dtype=dtype)
    forward = loaded.model.forward

    def scaled(*args: Any, **keywords: Any) -> Any:
        output = forward(*args, **keywords)
        output.logits = output.logits * 1.05
        return output

    loaded.model.forward = scaled
    said: list[str] = []
    encoded = encode(loaded)
    engine = Engine(loaded.model, BUDGET, said.append)
    engine.check(items_of(encoded[:2]))
    assert not engine.shares
    assert "its output head differs from evalkit's" in said[0]
    if dtype == "float32":
        assert largest_difference(loaded.model, encoded, score(engine, encoded)) <= RELATIVE


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn", "ntk", "linear"])
@pytest.mark.parametrize("original", [16, 48])
def test_stretched_contexts_share_what_they_may(tmp_path: Path, method: str, original: int) -> None:
    """Under "dynamic-yarn" frequencies depend on each sequence's own length past the original window."""
    checkpoint = locate(str(tiny_checkpoint(tmp_path / "tiny", window=original)))
    extension = extension_of(checkpoint, ContextSettings(256, method))
    loaded = load(checkpoint, device="cpu", extension=extension)
    encoded = list(Prompter(load_template("plain"), loaded.tokenizer, loaded.window).encode(questions()))
    lengths = [len(s.tokens) for e in encoded for s in e.sequences]
    assert min(lengths) < original < max(lengths)
    engine = Engine(loaded.model, BUDGET, lambda line: None)
    # The longest first: causality is tested within the original window
    engine.check(items_of(sorted(encoded, key=lambda one: -len(one.sequences[0].tokens))[:1]))
    assert engine.shares
    assert largest_from_alone(engine, loaded, encoded) <= RELATIVE


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stretched_variants_share_what_they_may(tmp_path: Path, variant: str, method: str) -> None:
    shape = VARIANT_SHAPE | {"max_position_embeddings": 48, "num_key_value_heads": 2, "initializer_range": 0.2}
    layers = [0] if variant == "cog" else [0, 1]
    folder = saved(EvalkitLlamaConfig(**shape, **VARIANTS[variant][0], variant_layers=layers), tmp_path / "model")
    loaded = stretched(folder, 256, method)
    encoded = encode(loaded)
    engine = Engine(loaded.model, BUDGET, lambda line: None)
    engine.check(items_of(encoded[:2]))
    assert engine.shares
    assert largest_from_alone(engine, loaded, encoded) <= RELATIVE


def largest_from_alone(engine: Engine, loaded: LoadedModel, encoded: Sequence[EncodedQuestion]) -> float:
    """Largest relative difference of a sequence's log-likelihood from the model's own forward pass over it.

    Without its last token, which is only predicted: under "dynamic-yarn" the length counts.
    """
    gaps = []
    for batch in batches_of(items_of(encoded), BUDGET):
        for item, (_, found) in zip(batch.sets, engine.score(batch), strict=True):
            for sequence, scores in zip(item.sequences, found, strict=True):
                alone = Forward(loaded.model).score_alone(sequence).logprobs[1:].sum()
                gaps.append(relative(float(scores.logprobs[1:].sum()), float(alone)))
    return max(gaps)
