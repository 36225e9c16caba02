"""Early stopping changes no score; samsum's newline follows transformers' own rule."""

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

from evalkit.benchmarks.longbench.metrics import code_line, first_line, score_prediction
from evalkit.benchmarks.longbench.prompts import CODE_LINE, FIRST_LINE, stops_of
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt, end_tokens
from tests.generation.made import by_transformers, tokens
from tests.models.variants.building import VANILLA, model_of
from tests.tiny import tiny_tokenizer

CUT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
LINES = st.text(alphabet="ab#`/ \n", max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def model_with(ends: int | list[int] | None) -> Any:
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))


def has_first_line(text: str) -> bool:
    return re.search(FIRST_LINE, text) is not None


def has_code_line(text: str) -> bool:
    return re.search(CODE_LINE, text) is not None


def cut(pieces: list[Any], enough: Callable[[list[Any]], bool]) -> list[Any]:
    """Return the pieces up to the stop."""
    return next((pieces[:end] for end in range(1, len(pieces)) if enough(pieces[:end])), pieces)


def cut_scores_the_same(name: str, rows: Iterable[dict[str, Any]], tokenizer: Any) -> int:
    """Compare the scores of whole and stopped predictions; return the number of stopped ones."""
    task = TASKS[name]
    pattern = stops_of(task, frozenset({1}), tokenizer).pattern
    assert pattern
    has_all = has_first_line if task.first_line_only else has_code_line
    saved = 0

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    for row in rows:
        whole = row["pred"]
        by_letter = "".join(cut(list(whole), lambda letters: has_all("".join(letters))))
        ids = tokenizer(whole, add_special_tokens=False).input_ids
        by_token = text_of(cut(ids, lambda some: re.search(pattern, text_of(some)) is not None))
        scores = {
            score_prediction(task, text, row["answers"], row["all_classes"] or ())
            for text in (whole, by_letter, by_token)
        }
        assert len(scores) == 1, row
        saved += len(by_token) < len(whole)
    return saved


@pytest.mark.parametrize("name", CUT)
def test_every_golden_prediction_scores_the_same(name: str, all_golden: Path, tokenizer: Any) -> None:
    saved = cut_scores_the_same(name, read(all_golden / f"{name}.jsonl"), tokenizer)
    # Llama2-7B-chat began no second line on samsum, where newlines ended its predictions too
    assert (saved > 50) == (name != "samsum")


@pytest.mark.parametrize("name", ["trec", "triviaqa", "samsum"])
def test_a_prediction_that_goes_on_scores_the_same(name: str, golden: Path, tokenizer: Any) -> None:
    """As a base model does: after its answer come another question and the answer to that one."""
    rows = read(golden / ("trec.jsonl" if name == "trec" else "2wikimqa.jsonl"))
    follow = [
        f"\n{row['pred']}\n\nQuestion: What next?\nAnswer: {rows[-place]['pred']}" for place, row in enumerate(rows)
    ]
    on = [row | {"pred": text} for row, text in zip(rows, follow, strict=True)]
    assert cut_scores_the_same(name, on, tokenizer) == len(rows) == 300


@pytest.mark.parametrize("name", ["lcc", "repobench-p"])
def test_code_that_goes_on_scores_the_same(name: str, tokenizer: Any) -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [
        {"pred": "".join(lines[place : place + 6]), "answers": [lines[place + 3].rstrip("\n")], "all_classes": None}
        for place in range(len(lines) - 6)
    ]
    assert cut_scores_the_same(name, rows, tokenizer) > 50


def read(predictions: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in predictions.read_text(encoding="utf-8").split("\n")[:-1]]


@given(LINES, LINES)
def test_read_values_are_not_converted(text: str, more: str) -> None:
    if has_first_line(text):
        assert first_line(text + more) == first_line(text)
    if has_code_line(text):
        assert code_line(text + more) == code_line(text)


@given(LINES)
def test_nothing_is_waited_for_once_it_is_there(text: str) -> None:
    """The stop is found as soon as no continuation changes the scored text, except for an incomplete line."""
    whole = text.lstrip("\n")
    if "\n" in whole:
        assert has_first_line(text) or first_line(text + "\n") == whole.rstrip("\n")
        kept = [line for line in whole.split("\n")[:-1] if not any(mark in line for mark in ("`", "#", "//"))]
        assert has_code_line(text) == bool(kept)


def test_other_tasks_are_read_to_their_end(tokenizer: Any) -> None:
    assert {name for name, task in TASKS.items() if stops_of(task, frozenset({1}), tokenizer).pattern} == set(CUT)


@pytest.mark.parametrize(("named", "ends"), [(7, {7}), ([7, 9], {7, 9}), (None, {1})])
def test_end_tokens_are_the_generation_configs_else_the_tokenizers(
    named: int | list[int] | None, ends: set[int], tokenizer: Any
) -> None:
    assert tokenizer.eos_token_id == 1
    stops = stops_of(TASKS["qasper"], end_tokens(model_with(named), tokenizer), tokenizer)
    assert (stops.ends, stops.barred_first) == (ends, frozenset())


def test_a_tokenizer_without_an_end_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path, eos=None))
    assert stops_of(TASKS["qasper"], end_tokens(model_with(None), tokenizer), tokenizer).ends == frozenset()
    newline = tokenizer("\n", add_special_tokens=False).input_ids[-1]
    assert stops_of(TASKS["samsum"], end_tokens(model_with(None), tokenizer), tokenizer).ends == {newline}


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
    common = np.bincount(np.concatenate([one[1:] for one in free])).argmax()
    head[with_newlines] = head[[free[0][0], common]] * 1.01
    batch = [Prompt(n, ids, 14, stops) for n, ids in enumerate(many)]
    found = [one.tokens for one in Generator(model, 16, tokenizer).generate(batch)]
    assert found == [by_transformers(model, ids, ends=with_newlines, barred=True) for ids in many]
    assert sum(one[-1] in stops.ends for one in found) > 2
    assert any(by_transformers(model, ids, ends=with_newlines)[0] in stops.ends for ids in many)
