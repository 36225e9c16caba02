"""evalkit as an lm-eval model, compared with lm-eval's own Hugging Face class: the same tokens, scores and texts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import evalkit
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.lm_eval.requests import Continuation, continuations_of, requests_of
from evalkit.display import Say
from evalkit.errors import CheckpointError, ScoringError, UsageError
from evalkit.models.loading.locate import silent
from tests.benchmarks.lm_eval.made import ALL, made_tasks, same_metrics
from tests.tiny import TRAINING_TEXT, VOCABULARY, tiny_checkpoint

WINDOW = 96
KINDS: dict[str, dict[str, Any]] = {
    "llama that adds BOS": {"family": "llama", "adds_bos": True},
    "llama": {"family": "llama"},
    "qwen2 without BOS": {"family": "qwen2", "bos": None},
}
TEXTS = [
    ("The river rose", " in the night"),
    ("The river rose", " by day, and in the morning the bridge was gone."),
    ("", "Der Fluss stieg über Nacht"),
    ("Question: ", "yes"),
    ("Was ist das?\n\n  ", "夜里河水上涨"),
    ("На рассвете дети вышли к реке", " и увидели, что моста больше нет. 🌊"),
    ("The river rose in the night, and " * 30, " gone."),
    ("She counted", " the coins twice, in the left hand and in the right" * 4),
    ("hello wor", "ld"),
    ("<s>He would", " rather"),
    ("", "<s>He would rather"),
    ("a", " b"),
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.replace(" ", "_"))
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=WINDOW, **KINDS[request.param])
    return evalkit.harness(str(folder), token_budget=300)


@pytest.fixture
def theirs(ours: Harness) -> Iterator[HFLM]:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    # Without its cache of logits, which reads wrong positions if two requests split the same tokens differently
    yield HFLM(ours.loaded.model, tokenizer=ours.loaded.tokenizer, batch_size=3, logits_cache=False)
    logger.setLevel(level)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("made", number, 1)) for number, args in enumerate(arguments)]


def encoded(ours: Harness, *texts: tuple[str, str], say: Say = silent) -> list[Continuation]:
    return continuations_of(requests_of(asked("loglikelihood", *texts)), ours.encoding, say)


def test_the_tokens_are_lm_evals(ours: Harness, theirs: HFLM) -> None:
    with_context = [text for text in TEXTS if text[0]]
    for text, pair in zip(with_context, encoded(ours, *with_context), strict=True):
        context, continuation = theirs._encode_pair(*text)
        assert pair.continuation == continuation
        assert pair.context + pair.continuation == (context + continuation)[-(WINDOW + 1) :]
        assert pair.cut == max(0, len(context) + len(continuation) - WINDOW - 1)


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
    [pair] = encoded(ours, (context, continuation))
    assert (pair.context, pair.continuation, pair.cut) == (head, tail, 0)


def test_the_log_likelihoods_are_lm_evals(ours: Harness, theirs: HFLM) -> None:
    found = ours.loglikelihood(asked("loglikelihood", *TEXTS))
    expected = theirs.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True)
    assert [likelihood for likelihood, _ in found] == pytest.approx([value for value, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_greedy_continuation_is_recognised(ours: Harness, theirs: HFLM) -> None:
    """The model's own argmax, where its text has the same token, and every other token."""
    ids = ours.tok_encode("The river rose")
    best = int(ours.loaded.model(torch.tensor([ids])).logits[0, -1].argmax())
    texts = [ours.tok_decode([token], skip_special_tokens=False) for token in range(3, VOCABULARY)]
    requests = asked(
        "loglikelihood", *(("The river rose", text) for text in texts if text.strip() and "\ufffd" not in text)
    )
    found = [greedy for _, greedy in ours.loglikelihood(requests)]
    assert found == [greedy for _, greedy in theirs.loglikelihood(requests, disable_tqdm=True)]
    expected = [encoded(ours, request.args)[0].continuation == [best] for request in requests]
    assert [greedy for greedy, alone in zip(found, expected, strict=True) if alone] == [True] * sum(expected)
    assert not all(found)


def test_long_texts_are_taken_apart_as_by_lm_eval(ours: Harness, theirs: HFLM) -> None:
    texts = asked("loglikelihood_rolling", (" ".join(TRAINING_TEXT),), ("short",), ("x" * 95,), ("",))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-4
    )


def test_texts_are_generated_as_by_lm_eval(ours: Harness, theirs: HFLM) -> None:
    until = {"until": ["."], "max_gen_toks": 12, "do_sample": False}
    texts = asked(
        "generate_until", ("The river " * 30, until), ("short", until), ("a b c", until | {"max_gen_toks": 5})
    )
    assert ours.generate_until(texts) == theirs.generate_until(texts, disable_tqdm=True)


def test_simple_evaluate_takes_it(ours: Harness, theirs: HFLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All metrics of a task of each kind, through lm-eval's `simple_evaluate`."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    manager = TaskManager(include_path=str(made_tasks(tmp_path / "tasks", count=4)), include_defaults=False)
    results = [
        lm_eval.simple_evaluate(model=model, tasks=list(ALL), task_manager=manager, bootstrap_iters=100)["results"]
        for model in (ours, theirs)
    ]
    same_metrics(*results)


def test_lm_eval_knows_it_by_name(ours: Harness) -> None:
    from lm_eval.api.registry import get_model

    named = get_model("evalkit").create_from_arg_string(
        f"pretrained={ours.loaded.model.name_or_path},dtype=float32", {"batch_size": 2, "device": "cpu"}
    )
    request = asked("loglikelihood", TEXTS[0])
    assert named.loglikelihood(request)[0] == pytest.approx(ours.loglikelihood(request)[0])
    assert named.batch_size == 2


def test_a_token_over_the_boundary_is_reported(ours: Harness) -> None:
    said: list[str] = []
    context, continuation = next(t for t in ours.tokenizer.get_vocab() if len(t) == 2 and t.isascii() and t.isalpha())
    [pair] = encoded(ours, (context, continuation), say=said.append)
    assert pair.context == ours.tok_encode(context)
    assert pair.continuation == ours.tok_encode(continuation, add_special_tokens=False)
    assert len(said) == 1
    assert "made document 0 for one" in said[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (("The river", ""), r"made document 0: its continuation has no token"),
        (("", ""), r"made document 0: its continuation has no token"),
        (("The river", " rose" * 200), rf"made document 0: its continuation has \d+ tokens.*window of {WINDOW}"),
    ],
)
def test_unscorable_documents_are_reported(ours: Harness, text: tuple[str, str], words: str) -> None:
    with pytest.raises(ScoringError, match=words):
        ours.loglikelihood(asked("loglikelihood", text))


def test_more_text_than_the_window_is_refused(ours: Harness) -> None:
    with pytest.raises(ScoringError, match=r"made document 0: asks for 256 tokens of text.*max_gen_toks"):
        ours.generate_until(asked("generate_until", ("a", {"until": ["."]})))


def test_a_tokenizer_without_begin_and_end(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "bare", bos=None, eos=None)
    with pytest.raises(CheckpointError, match="neither a BOS nor an EOS token"):
        evalkit.harness(str(folder))


@pytest.mark.parametrize("option", ["batch_size", "token_budget"])
def test_options_that_are_no_numbers(ours: Harness, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option.replace('_', '.')} is 'many'"):
        Harness(ours.loaded, **{option: "many"})
