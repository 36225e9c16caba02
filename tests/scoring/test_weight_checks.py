"""What is scored must not depend on later tokens, at every length that is scored and by whatever head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ProphetNetConfig, ProphetNetForCausalLM

from evalkit.errors import CheckpointError, ScoringError
from evalkit.scoring.forward import Forward
from evalkit.scoring.pack import batches_of
from evalkit.scoring.sequences import Sequences, SequenceSet
from tests.marks import fast
from tests.scoring.test_sharing import VOCABULARY, engine_of, model_of

SHORT, LONG = 40, 200


def item(length: int) -> Sequences:
    """A document whose longest choice has so many tokens."""
    dice = np.random.default_rng(length)
    context = dice.integers(0, VOCABULARY, length - 5)
    sequences = tuple(np.concatenate((context, dice.integers(0, VOCABULARY, n))).astype(np.int32) for n in (3, 5))
    masks = [np.arange(len(s)) > 0 for s in sequences]
    return Sequences.of([SequenceSet(f"document of {length}", "task", sequences, masks)])


def score(model: Any, *lengths: int) -> None:
    """Check with the first document only, and score all; compare with the model's own forward pass."""
    engine, _ = engine_of(model)
    engine.check(item(lengths[0]))
    for length in lengths:
        [batch] = batches_of(item(length), engine.budget)
        for scored, (_, members) in zip(batch.sets, engine.score(batch), strict=True):
            for tokens, scores in zip(scored.sequences, members, strict=True):
                logs = model(input_ids=torch.from_numpy(tokens)[None].long(), use_cache=False).logits[0].log_softmax(-1)
                expected = logs[np.arange(len(tokens) - 1), tokens[1:]]
                np.testing.assert_allclose(scores.logprobs[1:], expected, atol=1e-4)


def refused(model: Any, *lengths: int) -> None:
    with pytest.raises(CheckpointError, match="not a causal language model"):
        score(model, *lengths)


def test_logits_from_another_stream_than_the_last_hidden_state() -> None:
    """The states of ProphetNet's main stream are causal, and its logits come from the predicting stream."""
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2, "decoder_ffn_dim": 96, "init_std": 0.2}
    heads = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "is_encoder_decoder": False}
    config = ProphetNetConfig(vocab_size=VOCABULARY, hidden_size=64, is_decoder=True, **layers, **heads)
    torch.manual_seed(0)
    refused(ProphetNetForCausalLM(config).eval().requires_grad_(False), SHORT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_looks_ahead(dtype: torch.dtype) -> None:
    model = model_of("llama", dtype)

    def ahead(_: Any, __: Any, output: Any) -> None:
        output.logits = output.logits + 0.5 * output.logits.roll(-1, 1)

    model.register_forward_hook(ahead)
    refused(model, SHORT)


def doge(keep: int, seed: int) -> Any:
    """A model that attends to the tokens of the highest scores, which are equal for equal tokens in the first layer."""
    model = model_of("doge", keep_window_size=keep)
    torch.manual_seed(seed)
    for layer in model.model.layers:
        layer.self_attn.A.add_(torch.randn_like(layer.self_attn.A))
    return model


@pytest.mark.parametrize("seed", fast([1, 2], range(8)))
@pytest.mark.parametrize("keep", [16, 40])
def test_a_selection_of_tokens_among_equal_ones(keep: int, seed: int) -> None:
    refused(doge(keep, seed), SHORT)


def test_a_selection_that_takes_effect_in_long_sequences_only() -> None:
    score(doge(512, 0), SHORT, LONG)
    score(doge(100, 0), SHORT, SHORT + 20, 100)
    refused(doge(100, 0), SHORT, LONG)
    refused(doge(100, 0), LONG)


def looking_ahead(model: Any, block: int, least: int) -> Any:
    """Let each token see the mean of its block of tokens, in sequences of at least some length."""

    def blocks(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] < least:
            return output
        parts = [part + part.mean(1, keepdim=True) for part in output.split(block, dim=1)]
        return torch.cat(parts, dim=1)

    model.model.layers[0].mlp.register_forward_hook(blocks)
    return model


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("block", [2, 16, 32, 64, 128])
def test_blocks_of_tokens_that_see_each_other(block: int, own_head: bool) -> None:
    """A sequence that is cut at the end of a block would not show it."""
    model = looking_ahead(model_of("llama"), block, least=0)
    if own_head:
        model.register_forward_hook(lambda _, __, output: setattr(output, "logits", 1.1 * output.logits))
    refused(model, SHORT)


@pytest.mark.parametrize("size", [20, 40])
def test_a_prefix_whose_tokens_see_each_other(size: int) -> None:
    model = model_of("llama")

    def prefix(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        first = output[:, :size]
        return torch.cat((first + first.mean(1, keepdim=True), output[:, size:]), dim=1)

    model.model.layers[0].mlp.register_forward_hook(prefix)
    refused(model, SHORT)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_experts_that_choose_their_tokens(length: int) -> None:
    """A few tokens of each sequence get what others would get in a shorter one."""
    model = model_of("llama")

    def chosen(_: Any, states: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        tokens = states[0][0].sum(-1).topk(8).indices
        return output.index_fill(1, tokens, 1.0)

    model.model.layers[0].mlp.register_forward_hook(chosen)
    refused(model, length)


@pytest.mark.parametrize("sliding", [None, 16])
def test_a_window_that_takes_effect_in_long_sequences_only(sliding: int | None) -> None:
    """Also where a sliding window is shorter than the sequences of the check."""
    model = looking_ahead(model_of("mistral", sliding_window=sliding), 128, least=100)
    score(model, SHORT, SHORT + 20)
    refused(model, SHORT, LONG)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_looking_ahead_beyond_the_length_of_rotary_embeddings(length: int) -> None:
    """All embeddings change with the length there, which is no lookahead."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    settings = {"rope_parameters": rope, "max_position_embeddings": 256}
    engine, _ = engine_of(model_of("llama", **settings))
    engine.check(item(length))
    refused(looking_ahead(model_of("llama", **settings), 2, least=30), length)


def test_tokens_that_a_model_never_predicts() -> None:
    """Their logits are minus infinity."""
    model = model_of("llama")

    def masked(_: Any, __: Any, output: Any) -> None:
        output.logits = output.logits.index_fill(-1, torch.arange(0, VOCABULARY, 2), -torch.inf)

    model.register_forward_hook(masked)
    engine, _ = engine_of(model)
    odd = SequenceSet("document", "task", (2 * np.arange(30, dtype=np.int32) + 1,), (np.arange(30) > 0,))
    engine.check(Sequences.of([odd]))
    [(_, [scores])] = engine.score(batches_of(Sequences.of([odd]), engine.budget)[0])
    assert np.isfinite(scores.logprobs[1:]).all()


def test_a_check_that_memory_holds_at_the_exact_length_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Forward.hidden_alone

    def scarce(most: int) -> Callable[..., torch.Tensor]:
        def hidden(forward: Forward, tokens: Any) -> torch.Tensor:
            if len(tokens) > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(forward, tokens)

        return hidden

    model = model_of("llama")
    engine, _ = engine_of(model)
    engine.check(item(SHORT))
    monkeypatch.setattr(Forward, "hidden_alone", scarce(LONG))
    batches = batches_of(item(LONG), engine.budget)
    assert engine.score(batches[0])
    engine, _ = engine_of(model)
    monkeypatch.setattr(Forward, "hidden_alone", scarce(64))
    engine.check(item(SHORT))
    with pytest.raises(ScoringError, match="out of memory"):
        engine.score(batches[0])


HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "pad_token_id": 0}
WITHOUT_CACHE: dict[str, dict[str, Any]] = {
    "xlstm": {"embedding_dim": 64, "num_blocks": 2, "num_heads": 4, "pad_token_id": 0},
    "bamba": HYBRID | {"attn_layer_indices": []},
    "jamba": {"attn_layer_offset": 3, "num_experts": 2, "mamba_dt_rank": 8, "mamba_d_state": 16, "pad_token_id": 0},
}


@pytest.mark.parametrize("kind", WITHOUT_CACHE)
def test_models_that_cannot_make_a_cache(kind: str) -> None:
    """transformers' caches of these types need an attention layer, or a mode of generation."""
    score(model_of(kind, **WITHOUT_CACHE[kind]), SHORT, LONG)


def test_documents_longer_than_the_positions_that_a_model_has() -> None:
    """A document within the window that config.json promises, and beyond the table of positions."""
    model = model_of("gpt2", max_position_embeddings=128)
    score(model, SHORT, 120)
    model.config.max_position_embeddings = 512
    with pytest.raises(CheckpointError, match="does not run"):
        score(model, SHORT, LONG)


def test_a_forward_pass_without_the_option_of_a_cache() -> None:
    """As in models of one's own; where the base model cannot be run, they are scored by their own head."""
    model = model_of("llama")
    base, whole = model.model.forward, model.forward

    def without_option(use_cache: bool | None = None, **inputs: Any) -> Any:
        if use_cache is not None:
            raise TypeError("forward() got an unexpected keyword argument 'use_cache'")
        return base(**inputs)

    model.model.forward, model.forward = without_option, lambda input_ids: whole(input_ids=input_ids)
    engine, _ = engine_of(model)
    engine.check(item(SHORT))
    assert not engine.shares and "TypeError" in engine.why_not
    assert engine.score(batches_of(item(LONG), engine.budget)[0])
