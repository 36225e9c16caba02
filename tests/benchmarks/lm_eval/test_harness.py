"""evalkit as an lm-eval model, compared with lm-eval's own Hugging Face class: the same tokens, scores and texts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import evalkit
from evalkit.benchmarks.lm_eval.encoding import NEW_TOKENS, TaskModelRequests
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.lm_eval.requests import requests_of
from evalkit.errors import CheckpointError, ScoringError, UsageError
from evalkit.models.loading.load import LoadedModel
from evalkit.requests.requests import Encoder, Facts, Score
from tests.benchmarks.lm_eval.made import ALL, made_tasks, same_metrics
from tests.marks import fast
from tests.tiny import TRAINING_TEXT, VOCABULARY, tiny_checkpoint, tiny_tokenizer

WINDOW, LONGER = 96, 128
"""Context windows of the models that score, and of those that generate."""
TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama that adds BOS": {"family": "llama", "adds_bos": True},
    "llama": {"family": "llama"},
    "qwen2 without BOS": {"family": "qwen2", "bos": None},
}
PAIRS = [
    ("The river rose", " in the night"),
    ("The river rose", " by day, and in the morning the bridge was gone."),
    ("", "Der Fluss stieg über Nacht"),
    ("Was ist das?\n\n  ", "夜里河水上涨"),
    ("На рассвете дети вышли к реке", " и увидели, что моста больше нет. 🌊"),
    ("The river rose in the night, and " * 30, " gone."),
    ("She counted", " the coins twice, in the left hand and in the right" * 4),
    ("hello wor", "ld"),
    ("<s>He would", " rather"),
    ("", "<s>He would rather"),
    ("a", " b"),
]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGER, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONGER},
    "gemma2": {"sliding_window": 9, "head_dim": 16, "final_logit_softcapping": 2.0},
    "mamba": {"state_size": 4},
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
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 40}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """lm-eval warns about every prompt that it truncates."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module", params=TOKENIZERS, ids=lambda kind: kind.replace(" ", "_"))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=WINDOW, **TOKENIZERS[request.param])
    return evalkit.harness(str(folder), token_budget=300)


@pytest.fixture
def theirs(ours: Harness) -> HFLM:
    # Without its cache of logits, which reads wrong positions if two requests split the same tokens differently
    return HFLM(ours.loaded.model, tokenizer=ours.loaded.tokenizer, batch_size=3, logits_cache=False)


def requests(kind: str, *arguments: tuple[Any, ...], task: str = "made") -> list[Instance]:
    return [Instance(kind, {}, args, 0, (task, number, 1)) for number, args in enumerate(arguments)]


def encoded(ours: Harness, context: str, continuation: str) -> Score:
    asked = TaskModelRequests("made", requests_of(requests("loglikelihood", (context, continuation))))
    [document] = asked.scored(Encoder(ours.tokenizer, Facts(ours.max_length)))
    [score] = document.scores
    return score


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="abc é夜\n <s>/", max_size=12), st.text(alphabet="abc é夜\n <s>/", min_size=1, max_size=8))
def test_the_tokens_are_lm_evals_whatever_the_text(
    ours: Harness, theirs: HFLM, context: str, continuation: str
) -> None:
    if not context.strip():
        return
    head, tail = theirs._encode_pair(context, continuation)
    if not tail:  # lm-eval fails; evalkit encodes the continuation separately
        moved = context[len(context.rstrip()) :] + continuation
        tail = theirs.tok_encode(moved, add_special_tokens=False)
    score = encoded(ours, context, continuation)
    assert score.tokens.tolist() == head + tail
    assert score.is_scored.tolist() == [False] * len(head) + [True] * len(tail)
    assert score.truncated == 0


def test_texts_of_no_task_have_their_own_prompts(ours: Harness) -> None:
    """Other code than lm-eval's may give requests of no task, which are all of document None."""
    arguments = [(text, {"until": ["\n"], "max_gen_toks": 4}) for text in ("the cat", "a dog sat", "the cat")]
    named = ours.generate_until(requests("generate_until", *arguments))
    without = [Instance("generate_until", {}, each, 0) for each in arguments]
    assert ours.generate_until(without) == named


def test_a_truncated_prompt_is_known_as_such(ours: Harness) -> None:
    texts = ["the cat", "the river rose in the night " * 40]
    asked = TaskModelRequests("made", requests_of(requests("generate_until", *((text, {}) for text in texts))))
    short, long = asked.generated(Encoder(ours.tokenizer, Facts(300)))
    assert short.truncated_from is None
    assert len(long.prompt.tokens) == 300 - NEW_TOKENS
    assert long.truncated_from == len(ours.tokenizer(texts[1]).input_ids) > 300


def test_the_scores_are_lm_evals(ours: Harness, theirs: HFLM) -> None:
    pairs = requests("loglikelihood", *PAIRS)
    scores, expected = ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True)
    assert [value for value, _ in scores] == pytest.approx([value for value, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    texts = requests("loglikelihood_rolling", (" ".join(TRAINING_TEXT),), ("short",), ("x" * 95,), ("",))
    windows = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(windows, rel=1e-4)
    words = [ours.tok_decode([token], skip_special_tokens=False) for token in range(3, VOCABULARY)]
    tokens = requests(
        "loglikelihood", *(("The river rose", word) for word in words if word.strip() and "\ufffd" not in word)
    )
    greedy = [is_greedy for _, is_greedy in ours.loglikelihood(tokens)]
    assert greedy == [is_greedy for _, is_greedy in theirs.loglikelihood(tokens, disable_tqdm=True)]


@pytest.mark.parametrize("ours", fast(["llama that adds BOS"], TOKENIZERS), indirect=True)
def test_simple_evaluate_takes_it(ours: Harness, theirs: HFLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    manager = TaskManager(include_path=str(made_tasks(tmp_path / "tasks", count=4)), include_defaults=False)
    results = [
        lm_eval.simple_evaluate(model=model, tasks=list(ALL), task_manager=manager, bootstrap_iters=100)["results"]
        for model in (ours, theirs)
    ]
    same_metrics(*results)


def test_lm_eval_knows_it_by_name(ours: Harness) -> None:
    named = get_model("evalkit").create_from_arg_string(
        f"pretrained={ours.loaded.model.name_or_path},dtype=float32", {"batch_size": 2, "device": "cpu"}
    )
    request = requests("loglikelihood", PAIRS[0])
    assert named.loglikelihood(request)[0] == pytest.approx(ours.loglikelihood(request)[0])
    assert named.batch_size == 2


def test_documents_and_models_that_cannot_be_scored_are_named(ours: Harness, tmp_path: Path) -> None:
    for text in (("The river", ""), ("The river", " rose" * 200)):
        with pytest.raises(ScoringError, match="made document 0"):
            ours.loglikelihood(requests("loglikelihood", text))
    with pytest.raises(CheckpointError, match="BOS"):
        evalkit.harness(str(tiny_checkpoint(tmp_path / "bare", bos=None, eos=None)))
    with pytest.raises(UsageError, match="many"):
        Harness(ours.loaded, batch_size="many")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


def loaded_model(kind: str, tokenizer: Any, **settings: Any) -> LoadedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPE | ARCHITECTURES[kind] | settings))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.requires_grad_(False)
    count = sum(parameter.numel() for parameter in model.parameters())
    return LoadedModel(model, tokenizer, kind, type(model).__name__, count, "float32", "cpu", LONGER, 0, 1, "sdpa")


def texts_of(
    model: HFLM, texts: list[str], settings: dict[str, Any], task: str = "made", repeats: int = 1
) -> list[str]:
    instances = requests("generate_until", *((text, dict(settings)) for text in texts), task=task)
    return list(model.generate_until(instances * repeats, disable_tqdm=True))


def reference(loaded: LoadedModel, size: int = 1) -> HFLM:
    return HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=size, max_length=LONGER)


def stops_in(texts: list[str]) -> list[str]:
    """Pairs of whole characters from texts: an incomplete character may decode differently with the next token."""
    pairs = [text[at : at + 2] for text in texts for at in (2, 5) if "\ufffd" not in text[at : at + 2]]
    return [pair for pair in pairs if len(pair) == 2][:4]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_tokenizer_that_ends_texts(tmp_path: Path, adds_bos: bool) -> None:
    """Its answers are those without EOS after each text; lm-eval scores EOS in place of the choices' own tokens."""
    pairs = requests("loglikelihood", *PAIRS)
    rolling = requests("loglikelihood_rolling", (" ".join(TRAINING_TEXT),), ("short",))
    answers = []
    for name in ("plain", "ends"):
        folder = tiny_checkpoint(tmp_path / name, window=LONGER, adds_bos=adds_bos, adds_eos=name == "ends")
        model = evalkit.harness(str(folder))
        scored = (model.loglikelihood(pairs), model.loglikelihood_rolling(rolling))
        answers.append((*scored, texts_of(model, PROMPTS, GREEDY)))
    assert answers[0] == answers[1]
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=1)
    context, continuation = theirs._encode_pair("The river rose", " in")
    assert context[-1] == continuation[-1] == theirs.tokenizer.eos_token_id


@pytest.mark.parametrize("kind", fast(["llama", "mamba"], ARCHITECTURES))
def test_greedy_texts_are_lm_evals(kind: str, tokenizer: Any) -> None:
    """Compared with lm-eval one by one and in batches, with stops that match and that do not."""
    loaded = loaded_model(kind, tokenizer)
    ours, alone = Harness(loaded), reference(loaded)
    free = texts_of(alone, PROMPTS, GREEDY)
    assert len(set(free)) > 6
    assert texts_of(ours, BEGUN, GREEDY) == texts_of(alone, BEGUN, GREEDY)
    assert texts_of(ours, PROMPTS, GREEDY) == texts_of(Harness(loaded, batch_size=1), PROMPTS, GREEDY) == free
    settings = GREEDY | {"until": stops_in(free)}
    stopped = texts_of(ours, PROMPTS, settings)
    assert stopped == texts_of(alone, PROMPTS, settings)
    assert sum(len(text) < len(other) for text, other in zip(stopped, free, strict=True)) >= 3
    # Models with a state cannot be padded on the left; lm-eval does so, and its batched texts differ
    if kind != "mamba":
        assert stopped == texts_of(reference(loaded, 5), PROMPTS, settings)


@pytest.mark.slow
def test_settings_are_transformers(tokenizer: Any) -> None:
    loaded = loaded_model("llama", tokenizer)
    free = texts_of(Harness(loaded), PROMPTS[:9], GREEDY)
    for changes in (
        {"max_new_tokens": 5, "until": "\n"},
        {"max_length": 120, "max_gen_toks": 20},
        {"repetition_penalty": 1.8},
        {"min_new_tokens": 6, "eos_token_id": list(range(0, VOCABULARY, 3))},
        {"until": ["</s>", "<s>", ""]},
    ):
        texts = texts_of(Harness(loaded), PROMPTS[:9], GREEDY | changes)
        assert texts == texts_of(reference(loaded), PROMPTS[:9], GREEDY | changes) != free, changes


def test_the_models_own_generation_config_counts(tokenizer: Any) -> None:
    """Generation ends at the window, where lm-eval continues."""
    loaded = loaded_model("gemma2", tokenizer)
    before = texts_of(Harness(loaded), PROMPTS[:7], GREEDY)
    loaded.model.generation_config.repetition_penalty = 1.9
    loaded.model.generation_config.eos_token_id = [1, *range(5, 400, 9)]
    texts = texts_of(Harness(loaded), PROMPTS[:7], GREEDY)
    assert texts == texts_of(reference(loaded), PROMPTS[:7], GREEDY) != before
    assert reference(loaded).max_gen_toks == NEW_TOKENS


def test_a_sampled_text_is_its_documents_own(tokenizer: Any) -> None:
    loaded = loaded_model("llama", tokenizer)
    instances = requests("generate_until", *((text, SAMPLED) for text in PROMPTS))
    texts = Harness(loaded).generate_until(instances)
    torch.manual_seed(99)
    assert texts == Harness(loaded, batch_size=3).generate_until(instances[::-1])[::-1]
    ours, river = Harness(loaded), ["The river"]
    assert len(set(texts_of(ours, river * 6, SAMPLED))) > 3
    repeated = texts_of(ours, river, SAMPLED, repeats=6)
    assert len(set(repeated)) > 3 and repeated == texts_of(ours, river, SAMPLED, repeats=6)
    assert texts_of(ours, river, SAMPLED, "other") != repeated[:1]
    greedy = texts_of(ours, PROMPTS, GREEDY)
    assert texts != greedy == texts_of(ours, PROMPTS, SAMPLED | {"top_k": 1})
    # Without a temperature it is the model's own; lm-eval fails here, since it reads it as 0
    free = GREEDY | {"do_sample": True}
    expected = texts_of(ours, PROMPTS, free)
    assert expected == texts_of(ours, PROMPTS, free | {"temperature": 1.0})
    loaded.model.generation_config.temperature = 0.3
    assert expected != texts_of(Harness(loaded), PROMPTS, free)


def test_samples_have_the_models_probabilities(tokenizer: Any) -> None:
    """Of the first token, at a temperature; gemma2 caps its logits, which greedy decoding would not show."""
    loaded, count = loaded_model("gemma2", tokenizer, initializer_range=0.1), 300
    settings = SAMPLED | {"max_gen_toks": 1, "temperature": 0.5, "top_k": 4, "top_p": 1.0}
    counts = Counter(texts_of(Harness(loaded), ["The river rose"] * count, settings))
    best = loaded.model(tokenizer("The river rose", return_tensors="pt").input_ids).logits[0, -1].div(0.5).topk(4)
    probabilities = best.values.softmax(-1)
    assert 0.02 < float(probabilities[-1]) < 0.3
    # Several tokens may be part of a character, and all decode alike
    shares: Counter[str] = Counter()
    for token, share in zip(best.indices.tolist(), probabilities.tolist(), strict=True):
        shares[tokenizer.decode([token], skip_special_tokens=True)] += share
    assert counts.keys() == shares.keys() and len(shares) > 1
    for text, share in shares.items():
        # Five standard errors
        assert counts[text] / count == pytest.approx(share, abs=5 * (share / count) ** 0.5)


def test_unsupported_settings_are_named(tokenizer: Any) -> None:
    """With the document and the setting, before anything is generated; of a task or of the model's own config."""
    loaded = loaded_model("llama", tokenizer)
    changes: dict[str, Any]
    for changes, noun in (
        ({"num_beams": 10}, "num_beams"),
        ({"tempreature": 0.6}, "tempreature"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"max_gen_toks": LONGER}, "max_gen_toks"),
        ({"bad_words_ids": [[1, 9000]]}, "9000"),
    ):
        instances = requests("generate_until", ("a", GREEDY), ("b", GREEDY | changes))
        with pytest.raises(ScoringError, match=f"made document 1: .*{noun}"):
            Harness(loaded).generate_until(instances)
    loaded.model.generation_config.num_beams = 4
    with pytest.raises(ScoringError, match=r"made document 0: .*generation config"):
        texts_of(Harness(loaded), ["a"], GREEDY)
