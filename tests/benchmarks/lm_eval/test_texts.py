"""Generated texts, compared with lm-eval's own Hugging Face class; independence of batches and order."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from evalkit.benchmarks.lm_eval.generation import NEW_TOKENS
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.errors import ScoringError
from evalkit.models.loading.load import LoadedModel
from tests.marks import fast
from tests.tiny import TRAINING_TEXT, VOCABULARY, tiny_tokenizer

WINDOW = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": WINDOW},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gemma2": {"sliding_window": 9, "head_dim": 16, "final_logit_softcapping": 2.0},
    "mixtral": {"num_local_experts": 2},
    "modernbert-decoder": {"cls_token_id": 0, "sep_token_id": 1},
    "mamba": {"state_size": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 9, "head_dim": 16},
}
PROMPTS = [
    *TRAINING_TEXT[:6],
    "Was ist das? ",
    " ".join(TRAINING_TEXT),  # longer than the window
    "a",
    "Question: Why does ice float on water? Answer:",
    "Question: Why does rice float? Answer:",
]
BEGUN = ["<s>The river", "<s> She counted the coins"]
"""With a begin token already; of a batch, lm-eval looks at its first text only."""
GREEDY: dict[str, Any] = {"until": [], "max_gen_toks": 16, "do_sample": False}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """lm-eval warns about every prompt that it truncates."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


def loaded_model(kind: str, tokenizer: Any, **settings: Any) -> LoadedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | KINDS[kind] | settings))).eval()
    model.requires_grad_(False)
    count = sum(parameter.numel() for parameter in model.parameters())
    return LoadedModel(model, tokenizer, kind, type(model).__name__, count, "float32", "cpu", WINDOW, 0, 1, "sdpa")


def theirs(loaded: LoadedModel, size: int) -> HFLM:
    return HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=size, max_length=WINDOW)


def asked(texts: list[str], settings: dict[str, Any], task: str = "made", start: int = 0) -> list[Instance]:
    return [
        Instance("generate_until", {}, (text, dict(settings)), 0, (task, number, 1))
        for number, text in enumerate(texts, start)
    ]


def stops_in(texts: list[str]) -> list[str]:
    """Pairs of whole characters from texts: an incomplete character may decode differently with the next token."""
    found = [text[place : place + 2] for text in texts for place in (2, 5) if "\ufffd" not in text[place : place + 2]]
    return [text for text in found if len(text) == 2][:4]


@pytest.mark.parametrize("kind", fast(["llama", "gpt2", "mamba"], KINDS))
def test_greedy_texts_are_lm_evals(kind: str, tokenizer: Any) -> None:
    """Compared with lm-eval one by one and in batches, with stops that match and that do not."""
    loaded = loaded_model(kind, tokenizer)
    ours, alone = Harness(loaded), theirs(loaded, 1)
    free = alone.generate_until(asked(PROMPTS, GREEDY), disable_tqdm=True)
    begun = alone.generate_until(asked(BEGUN, GREEDY), disable_tqdm=True)
    assert ours.generate_until(asked(BEGUN, GREEDY)) == begun
    assert len(set(free)) > 6
    assert ours.generate_until(asked(PROMPTS, GREEDY)) == free
    assert Harness(loaded, batch_size=1).generate_until(asked(PROMPTS, GREEDY)) == free
    settings = GREEDY | {"until": stops_in(free)}
    stopped = ours.generate_until(asked(PROMPTS, settings))
    assert stopped == alone.generate_until(asked(PROMPTS, settings), disable_tqdm=True)
    assert sum(len(one) < len(other) for one, other in zip(stopped, free, strict=True)) >= 3
    # Models with a state cannot be padded on the left; lm-eval does so, and its batched texts differ
    if not ours.generator.without_cache:
        assert stopped == theirs(loaded, 5).generate_until(asked(PROMPTS, settings), disable_tqdm=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_gen_toks": 5},
        {"max_new_tokens": 5, "until": "\n"},
        {"max_length": 120, "max_gen_toks": 20},
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6, "eos_token_id": list(range(0, VOCABULARY, 3))},
        {"eos_token_id": list(range(0, VOCABULARY, 3))},
        {"suppress_tokens": list(range(0, VOCABULARY, 2))},
        {"num_beams": 1, "temperature": 0.0, "top_p": 0.5},
        {"until": ["</s>", "<s>", ""]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_are_transformers(settings: dict[str, Any], tokenizer: Any) -> None:
    loaded = loaded_model("llama", tokenizer)
    requests = asked(PROMPTS[:9], GREEDY | settings)
    found = Harness(loaded).generate_until(requests)
    assert found == theirs(loaded, 1).generate_until(requests, disable_tqdm=True)
    assert found != Harness(loaded).generate_until(asked(PROMPTS[:9], GREEDY)) or "num_beams" in settings


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba"])
def test_the_models_own_generation_config_counts(kind: str, tokenizer: Any) -> None:
    loaded = loaded_model(kind, tokenizer)
    before = Harness(loaded).generate_until(asked(PROMPTS, GREEDY))
    loaded.model.generation_config.repetition_penalty = 1.9
    loaded.model.generation_config.eos_token_id = [1, *range(5, 400, 9)]
    found = Harness(loaded).generate_until(asked(PROMPTS, GREEDY))
    assert found == theirs(loaded, 1).generate_until(asked(PROMPTS, GREEDY), disable_tqdm=True)
    assert found != before


@pytest.mark.parametrize("own", [{"max_new_tokens": 3}, {"max_new_tokens": 30}, {"encoder_repetition_penalty": 1.6}])
def test_what_generate_puts_before_a_task_s_settings(own: dict[str, Any], tokenizer: Any) -> None:
    """Generation ends at the window, where lm-eval continues."""
    loaded = loaded_model("llama", tokenizer)
    before = Harness(loaded).generate_until(asked(PROMPTS[:7], GREEDY))
    for name, value in own.items():
        setattr(loaded.model.generation_config, name, value)
    found = Harness(loaded).generate_until(asked(PROMPTS[:7], GREEDY))
    assert found == theirs(loaded, 1).generate_until(asked(PROMPTS[:7], GREEDY), disable_tqdm=True)
    assert found != before


def test_the_default_number_of_tokens_is_lm_evals(tokenizer: Any) -> None:
    assert theirs(loaded_model("llama", tokenizer), 1).max_gen_toks == NEW_TOKENS


SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 40}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba"])
def test_a_sampled_text_is_its_documents_own(kind: str, tokenizer: Any) -> None:
    """Whatever shares its batch or precedes it, in any order."""
    loaded = loaded_model(kind, tokenizer)
    requests = asked(PROMPTS, SAMPLED)
    found = Harness(loaded).generate_until(requests)
    torch.manual_seed(99)
    again = Harness(loaded, batch_size=3).generate_until(requests[::-1])[::-1]
    parts = [Harness(loaded).generate_until([request])[0] for request in requests]
    assert found == again == parts
    assert found != Harness(loaded).generate_until(asked(PROMPTS, GREEDY))


def test_samples_differ_by_document_and_by_repeat(tokenizer: Any) -> None:
    ours = Harness(loaded_model("llama", tokenizer))
    assert len(set(ours.generate_until(asked(["The river"] * 6, SAMPLED)))) > 3
    repeated = asked(["The river"], SAMPLED) * 6
    assert len(set(ours.generate_until(repeated))) > 3
    assert ours.generate_until(repeated) == ours.generate_until(repeated)
    assert ours.generate_until(asked(["The river"], SAMPLED, "other")) != ours.generate_until(repeated[:1])


def test_one_candidate_is_the_likeliest(tokenizer: Any) -> None:
    ours = Harness(loaded_model("gemma2", tokenizer))
    greedy = ours.generate_until(asked(PROMPTS, GREEDY))
    assert ours.generate_until(asked(PROMPTS, SAMPLED | {"top_k": 1})) == greedy


def test_without_a_temperature_it_is_the_models_own(tokenizer: Any) -> None:
    """lm-eval fails here, since it reads it as 0."""
    loaded = loaded_model("llama", tokenizer)
    requests = asked(PROMPTS, GREEDY | {"do_sample": True})
    found = Harness(loaded).generate_until(requests)
    assert found == Harness(loaded).generate_until(asked(PROMPTS, GREEDY | {"do_sample": True, "temperature": 1.0}))
    loaded.model.generation_config.temperature = 0.3
    assert found != Harness(loaded).generate_until(requests)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba"])
def test_samples_have_the_models_probabilities(kind: str, tokenizer: Any) -> None:
    """Of the first token, at a temperature; gemma2 caps its logits, which greedy decoding would not show."""
    loaded, count = loaded_model(kind, tokenizer, initializer_range=0.1), 600
    settings = SAMPLED | {"max_gen_toks": 1, "temperature": 0.5, "top_k": 4, "top_p": 1.0}
    found = Counter(Harness(loaded).generate_until(asked(["The river rose"] * count, settings)))
    ids = tokenizer("The river rose", return_tensors="pt").input_ids
    best = loaded.model(ids).logits[0, -1].div(0.5).topk(4)
    expected = best.values.softmax(-1)
    assert 0.02 < float(expected[-1]) < 0.3
    # Several tokens may be part of a character, and all decode alike
    shares: Counter[str] = Counter()
    for token, share in zip(best.indices.tolist(), expected.tolist(), strict=True):
        shares[tokenizer.decode([token], skip_special_tokens=True)] += share
    assert found.keys() == shares.keys()
    assert len(shares) > 1
    for text, share in shares.items():
        # Five standard errors
        assert found[text] / count == pytest.approx(share, abs=5 * (share / count) ** 0.5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 10}, "num_beams is 10, and evalkit generates one text at a time, without beams"),
        ({"penalty_alpha": 0.6}, "'penalty_alpha' is not a generation setting that evalkit supports"),
        ({"tempreature": 0.6}, "'tempreature' is not a generation setting"),
        ({"do_sample": True, "temperature": 0.0}, r"transformers rejects its settings \(`temperature`"),
        ({"do_sample": True, "temperature": 0.7, "top_k": -3}, r"transformers rejects its settings \(`top_k`"),
        ({"until": [3]}, r"its generation_kwargs are not valid \(until is not a text"),
        ({"max_gen_toks": "many"}, r"its generation_kwargs are not valid \(invalid literal"),
        ({"max_gen_toks": 0}, r"are not valid \(max_gen_toks is 0; it must be at least 1"),
        ({"do_sample": "no"}, r"are not valid \(do_sample is 'no'; it must be true or false"),
        ({"bad_words_ids": [[1, 9000]]}, r"transformers rejects its settings \("),
    ],
)
def test_unsupported_settings_are_named(settings: dict[str, Any], words: str, tokenizer: Any) -> None:
    ours = Harness(loaded_model("llama", tokenizer))
    requests = [*asked(["a"], GREEDY), *asked(["b"], GREEDY | settings, start=1)]
    with pytest.raises(ScoringError, match=f"made document 1: .*{words}"):
        ours.generate_until(requests)


def test_a_model_that_asks_for_beams_is_refused(tokenizer: Any) -> None:
    loaded = loaded_model("llama", tokenizer)
    loaded.model.generation_config.num_beams = 4
    with pytest.raises(ScoringError, match="the model's generation config has num_beams 4"):
        Harness(loaded).generate_until(asked(["a"], GREEDY))


@pytest.mark.parametrize("own", [{"penalty_alpha": 0.6}, {"stop_strings": ["a"]}, {"bad_words_ids": [[9000]]}])
def test_a_model_that_asks_for_something_else_is_refused(own: dict[str, Any], tokenizer: Any) -> None:
    loaded = loaded_model("llama", tokenizer)
    for name, value in own.items():
        setattr(loaded.model.generation_config, name, value)
    with pytest.raises(
        ScoringError, match="made document 0: its generation_kwargs, with the model's generation config"
    ):
        Harness(loaded).generate_until(asked(["a"], GREEDY))


def test_settings_that_leave_no_token_are_reported(tokenizer: Any) -> None:
    nothing = GREEDY | {"do_sample": True, "temperature": 1.0, "suppress_tokens": list(range(VOCABULARY))}
    with pytest.raises(ScoringError, match="settings leave no token to choose from"):
        Harness(loaded_model("llama", tokenizer)).generate_until(asked(["a"], nothing))


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 1])
def test_texts_of_real_weights_are_lm_evals(most: int | None, demo: Path, shared_data: Path) -> None:
    """Four examples, then a question: each as lm-eval's task files have them."""
    lines = (shared_data / "zeroshot8" / "arc_easy.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    rows = [json.loads(line) for line in lines]
    answers = [row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])] for row in rows]
    shown = [f"Question: {row['question']}\nAnswer: {answer}" for row, answer in zip(rows, answers, strict=True)]
    texts = ["\n\n".join([*shown[n : n + 4], f"Question: {rows[n + 4]['question']}\nAnswer:"]) for n in range(0, 12, 2)]
    ours = Harness(str(demo), dtype="float32", batch_size=most)
    reference = HFLM(ours.loaded.model, tokenizer=ours.loaded.tokenizer, batch_size=most or 3)
    for settings in (GREEDY | {"max_gen_toks": 24}, GREEDY | {"until": ["\n", "Question:"]}):
        found = ours.generate_until(asked(texts, settings))
        assert found == reference.generate_until(asked(texts, settings), disable_tqdm=True)
        assert any(found)
