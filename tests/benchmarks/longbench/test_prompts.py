"""Prompts are truncated as in the official code and always fit; stopping early changes no score."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from evalkit.benchmarks.longbench.official import (
    CODE_LINE,
    FIRST_LINE,
    code_line,
    first_line,
    fit_prompt,
    score_prediction,
    stops_of,
)
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.errors import DataError, TemplateError
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt, end_tokens
from tests.generation.made import by_transformers, tokens
from tests.models.variants.building import VANILLA, model_of
from tests.tiny import TRAINING_TEXT, tiny_tokenizer

MIXED = "".join(f"{number}: {line}\n\n" for number, line in enumerate(TRAINING_TEXT * 6))
CHINESE = "夜里河水上涨，清晨时桥已经不见了。" * 40
CHAT = (
    "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} [answer]{% endif %}"
)
STOPPED = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
LINES = st.text(alphabet="ab#`/ \n", max_size=30)


def official(tokenizer: Any, prompt: str, max_length: int) -> list[int]:
    """Steps 2, 3 and 5 of LongBench's `pred.py`, written out."""
    tokenized = tokenizer(prompt, truncation=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(tokenized) > max_length:
        half = int(max_length / 2)
        prompt = tokenizer.decode(tokenized[:half], skip_special_tokens=True) + tokenizer.decode(
            tokenized[-half:], skip_special_tokens=True
        )
    return [int(token) for token in tokenizer(prompt, truncation=False, verbose=False).input_ids]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), adds_bos=True))


@pytest.mark.parametrize("text", [MIXED, CHINESE, "short", ""], ids=["mixed", "chinese", "short", "empty"])
@pytest.mark.parametrize("window", [2, 3, 77, 400, 401])
def test_the_official_recipe(tokenizer: Any, window: int, text: str) -> None:
    ids, truncated_from = fit_prompt(tokenizer, text, window, 10**6, chat=False, label="row")
    assert ids == official(tokenizer, text, window)
    length = len(tokenizer(text, verbose=False).input_ids)
    assert truncated_from == (length if length > window else None)


def test_the_official_recipe_on_real_rows(tokenizer: Any, real_rows: Path) -> None:
    texts = [json.loads(path.read_bytes().split(b"\n")[0])["context"] for path in sorted(real_rows.glob("*.jsonl"))]
    prompts = [fit_prompt(tokenizer, text, 1500, 10**6, chat=False, label="row") for text in texts]
    assert [ids for ids, _ in prompts] == [official(tokenizer, text, 1500) for text in texts]
    assert sum(truncated_from is not None for _, truncated_from in prompts) >= 7


def test_text_that_grows_when_it_is_tokenised_again(tokenizer: Any) -> None:
    """Cut characters come back as several tokens; the official code lets them run over."""
    assert max(len(official(tokenizer, CHINESE, window)) - window for window in range(20, 60)) > 0
    for window in range(20, 60):
        ids, truncated_from = fit_prompt(tokenizer, CHINESE, window, window, chat=False, label="row")
        assert truncated_from is not None
        assert window - 12 < len(ids) <= window


def test_a_chat_template_encloses_the_truncated_prompt(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        fit_prompt(tokenizer, "Why?", 50, 50, chat=True, label="row")
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    short, _ = fit_prompt(tokenizer, "Why?", 100, 100, chat=True, label="row")
    # One begin token, the template's own
    assert short == tokenizer("<s>[user] Why? [answer]", add_special_tokens=False).input_ids
    # The window is that of the text, as in the official code; the template comes on top
    long, _ = fit_prompt(tokenizer, MIXED, 50, 200, chat=True, label="row")
    inside = tokenizer.decode(official(tokenizer, MIXED, 50), skip_special_tokens=True)
    assert long == tokenizer(f"<s>[user] {inside} [answer]", add_special_tokens=False).input_ids
    # Where both have no room, the text gives way, also one that fits without its template
    for text, window in ((MIXED, 50), (TRAINING_TEXT[0], len(tokenizer(TRAINING_TEXT[0]).input_ids))):
        ids, truncated_from = fit_prompt(tokenizer, text, window, window, chat=True, label="row")
        assert truncated_from == len(tokenizer(text).input_ids)
        assert window - 12 < len(ids) <= window
    with pytest.raises(DataError, match=r"qasper row 7: .*--context"):
        fit_prompt(tokenizer, MIXED, 50, 5, chat=True, label="qasper row 7")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no user here') }}")
    with pytest.raises(TemplateError, match="no user here"):
        fit_prompt(tokenizer, "Why?", 50, 50, chat=True, label="row")


def before_the_stop(pieces: list[Any], is_enough: Callable[[list[Any]], bool]) -> list[Any]:
    return next((pieces[:end] for end in range(1, len(pieces)) if is_enough(pieces[:end])), pieces)


def stopped_scores_the_same(name: str, rows: Iterable[dict[str, Any]], tokenizer: Any) -> int:
    """Compare the scores of whole and stopped predictions; return the number of stopped ones."""
    task, saved = TASKS[name], 0
    pattern = stops_of(task, frozenset({1}), tokenizer).pattern

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    for row in rows:
        whole = row["pred"]
        by_letter = "".join(before_the_stop(list(whole), lambda letters: bool(re.search(pattern, "".join(letters)))))
        ids = tokenizer(whole, add_special_tokens=False).input_ids
        by_token = text_of(before_the_stop(ids, lambda some: bool(re.search(pattern, text_of(some)))))
        texts = (whole, by_letter, by_token)
        scores = {score_prediction(task, text, row["answers"], row["all_classes"] or ()) for text in texts}
        assert len(scores) == 1, row
        saved += len(by_token) < len(whole)
    return saved


def read(predictions: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in predictions.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPED)
def test_every_golden_prediction_scores_the_same(name: str, all_golden: Path, tokenizer: Any) -> None:
    saved = stopped_scores_the_same(name, read(all_golden / f"{name}.jsonl"), tokenizer)
    # Llama2-7B-chat began no second line on samsum, where newlines ended its predictions too
    assert (saved > 50) == (name != "samsum")


@pytest.mark.parametrize("name", STOPPED)
def test_a_prediction_that_goes_on_scores_the_same(name: str, golden: Path, tokenizer: Any) -> None:
    """As a base model does: after its answer come another question, or more code."""
    if name in ("lcc", "repobench-p"):
        lines = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)[:90]
        starts = range(len(lines) - 6)
        answers = [lines[start + 3].rstrip("\n") for start in starts]
        rows = [{"pred": "".join(lines[start : start + 6]), "answers": [answers[start]]} for start in starts]
        rows = [row | {"all_classes": None} for row in rows]
        assert stopped_scores_the_same(name, rows, tokenizer) > 50
    else:
        rows = read(golden / ("trec.jsonl" if name == "trec" else "2wikimqa.jsonl"))[:100]
        follow = [f"\n{row['pred']}\n\nQuestion: What next?\nAnswer: {rows[-n]['pred']}" for n, row in enumerate(rows)]
        rows = [row | {"pred": text} for row, text in zip(rows, follow, strict=True)]
        assert stopped_scores_the_same(name, rows, tokenizer) == len(rows)


@given(LINES, LINES)
def test_stops_are_where_no_continuation_changes_the_score(text: str, more: str) -> None:
    for pattern, scored in ((FIRST_LINE, first_line), (CODE_LINE, code_line)):
        if re.search(pattern, text):
            assert scored(text + more) == scored(text)
    whole = text.lstrip("\n")
    if "\n" in whole:
        assert re.search(FIRST_LINE, text) or first_line(text + "\n") == whole.rstrip("\n")
        kept = [line for line in whole.split("\n")[:-1] if not any(mark in line for mark in ("`", "#", "//"))]
        assert (re.search(CODE_LINE, text) is not None) == bool(kept)


@pytest.mark.parametrize(("stored", "ends"), [(7, {7}), ([7, 9], {7, 9}), (None, {1})])
def test_end_tokens(stored: Any, ends: set[int], tokenizer: Any, tmp_path: Path) -> None:
    """Those of the generation config, else the tokenizer's; only some tasks have a pattern."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=stored))
    stops = {name: stops_of(task, end_tokens(model, tokenizer), tokenizer) for name, task in TASKS.items()}
    assert (stops["qasper"].ends, stops["qasper"].barred_first) == (ends, frozenset())
    assert {name for name in stops if stops[name].pattern} == set(STOPPED)
    without_end = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, eos=None))
    newline = without_end("\n", add_special_tokens=False).input_ids[-1]
    expected = {newline} | (ends if stored else set())
    assert stops_of(TASKS["samsum"], end_tokens(model, without_end), without_end).ends == expected


def test_samsum_is_transformers_generate_with_two_end_tokens(tokenizer: Any) -> None:
    """`eos_token_id=[eos, newline]` with a minimum length of one token, as in the official code."""
    stops = stops_of(TASKS["samsum"], frozenset({7, 9}), tokenizer)
    newline = tokenizer("\n", add_special_tokens=False).input_ids[-1]
    assert stops.ends == stops.barred_first == {tokenizer.eos_token_id, newline}
    model = model_of("llama", VANILLA, vocab_size=512)
    many = tokens(*range(4, 40, 3))
    # A random model rarely generates a newline: its output head is changed to generate them often
    with_newlines = sorted(stops.ends)
    head = model.get_output_embeddings().weight.data
    free = [by_transformers(model, ids) for ids in many]
    common = np.bincount(np.concatenate([texts[1:] for texts in free])).argmax()
    head[with_newlines] = head[[free[0][0], common]] * 1.01
    batch = [Prompt(number, ids, 14, stops) for number, ids in enumerate(many)]
    generated = [row.tokens for row in Generator(model, 16, tokenizer).generate(batch)]
    assert generated == [by_transformers(model, ids, ends=with_newlines, barred=True) for ids in many]
    assert sum(row[-1] in stops.ends for row in generated) > 2
    assert any(by_transformers(model, ids, ends=with_newlines)[0] in stops.ends for ids in many)
