"""What is read: sequences of documents, windows of texts, which settings make another run, and estimated costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from evalkit.attention.categories import Word
from evalkit.attention.documents import (
    AttentionRequest,
    batches_of,
    plan_attention,
    sequences_of,
    task_costs,
)
from evalkit.attention.groups import CATEGORIES
from evalkit.benchmarks.request import request_of
from evalkit.errors import DataError, ScoringError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.suites.prompts import Prompter
from tests.questions import question


def plan_of(checkpoint: Path, **options: Any) -> Any:
    return plan_attention(
        request_of(AttentionRequest, checkpoint, {"measures": "bos", "device": "cpu"} | options), silent
    )


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def of_documents(checkpoint: Path, documents: Path) -> dict[str, Any]:
    return {"checkpoint": checkpoint, "data_dir": documents, "allow_unofficial_data": True}


def batches(plan: Any, tokenizer: Any, window: int = 4096, finished: Any = frozenset()) -> list[Any]:
    return list(batches_of(plan, window, tokenizer, finished, silent))


def words(texts: Any) -> dict[str, list[Word]]:
    """Tag every word without lower-case letters as a number, and the others as nouns."""
    tags = {}
    for text in texts:
        tagged, start = [], 0
        for word in text.split():
            start = text.index(word, start)
            tagged.append(Word(start, start + len(word), "NOUN" if any(map(str.islower, word)) else "NUM"))
            start += len(word)
        tags[text] = tagged
    return tags


@pytest.mark.parametrize("continuation", ["gold", "all"])
def test_sequences_are_those_that_are_scored(of_documents: dict[str, Any], tokenizer: Any, continuation: str) -> None:
    plan = plan_of(**of_documents, tasks="winogrande,boolq,arc_easy", sample=3, continuation=continuation)
    prompter = Prompter(plan.choices.template, tokenizer, 4096)
    for batch, (task, questions) in zip(batches(plan, tokenizer), plan.tasks.items(), strict=True):
        assert (batch.task, batch.documents) == (task, len(questions))
        chosen = [
            (asked, choice)
            for asked in questions
            for choice in (range(len(asked.contexts)) if continuation == "all" else [asked.gold])
        ]
        for sequence, (asked, choice) in zip(batch.content, chosen, strict=True):
            [scored] = prompter.encode([asked])
            assert (sequence.doc_id, sequence.choice) == (asked.doc_id, choice)
            assert np.array_equal(sequence.tokens, scored.sequences[choice].tokens)
            assert tokenizer.decode(sequence.tokens[sequence.readers]).strip() == asked.continuations[choice].strip()
            assert sequence.last == sequence.readers[-1]
            assert sequence.categories is None


def test_categories_of_added_tokens_markers_and_words(of_documents: dict[str, Any], tokenizer: Any) -> None:
    """EOS, which stands in for BOS without a context, is no BOS."""
    plan = plan_of(**of_documents, tasks="piqa", sample=1)
    prompter = Prompter(plan.choices.template, tokenizer, 4095, characters=True)
    asked = [question("two red 77 hens", ["lay 5 eggs"])]
    for bos, has in ((tokenizer.eos_token_id, False), (None, False), (tokenizer.bos_token_id, True)):
        [sequence] = sequences_of(plan, prompter, asked, words, bos)
        names = [CATEGORIES[number] for number in sequence.categories]
        assert (sequence.bos, names[0], names[-1]) == (has, "bos" if has else "special", "special")
    by_name = {name: tokenizer.decode(sequence.tokens[[n == name for n in names]]) for name in set(names)}
    assert set(by_name) == {"bos", "special", "content", "other"}
    assert "INST" in by_name["special"]
    assert "hens" in by_name["content"]
    assert "".join(by_name["other"].split()) == "775"


def test_a_long_document_is_cut_to_the_window(of_documents: dict[str, Any], tokenizer: Any) -> None:
    plan = plan_of(**of_documents, tasks="boolq", sample=1)
    [whole] = batches(plan, tokenizer)[0].content
    [cut] = batches(plan, tokenizer, len(whole.tokens) - 5)[0].content
    assert (len(cut.tokens), cut.truncated) == (len(whole.tokens) - 5, 5)
    assert np.array_equal(cut.tokens[-9:], whole.tokens[-9:])


def test_a_text_is_read_in_windows(
    checkpoint: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "book.txt"
    text.write_text(" ".join(f"word{n}" for n in range(400)), encoding="utf-8")
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    size, plan = 101, plan_of(checkpoint, text=text)
    windows = [batch.content[0] for batch in batches(plan, tokenizer, size)]
    assert len(windows) == len(ids) // (size - 1) > 3
    joined = np.concatenate([window.tokens[1:] for window in windows]).tolist()
    assert joined == ids[: len(joined)]
    assert all(len(window.tokens) == size and window.tokens[0] == tokenizer.bos_token_id for window in windows)
    assert all(np.array_equal(window.readers, np.arange(1, size)) and window.bos for window in windows)
    [whole] = [batch.content[0] for batch in batches(plan, tokenizer, 100_000)]
    assert whole.tokens[1:].tolist() == ids
    assert len(batches(plan_of(checkpoint, text=text, sample=2, seed=5), tokenizer, size)) == 2
    monkeypatch.setattr("evalkit.inputs.values.LONGEST_TEXT", 20)  # such texts would abort the process
    with pytest.raises(ScoringError, match=r"--text .*book.txt"):
        batches(plan, tokenizer)
    text.write_bytes(b"\xff\xfe")
    for path in (text, tmp_path / "nowhere.txt"):
        with pytest.raises(DataError, match=path.name):
            plan_of(checkpoint, text=path)


def test_impossible_settings(checkpoint: Path) -> None:
    for options, noun in (({"layers": "-1,x"}, "--layers is .x."), ({"text": "a.txt", "tasks": "piqa"}, "--tasks")):
        with pytest.raises(UsageError, match=noun):
            plan_of(checkpoint, **options)


def test_settings_that_change_numbers_change_the_id(of_documents: dict[str, Any]) -> None:
    """And only these: the order of measures and layers does not."""

    def run_id(**options: Any) -> str:
        return str(plan_of(**of_documents, **{"tasks": "piqa,boolq"} | options).manifest["id"])

    changes: list[dict[str, Any]] = [
        {}, {"measures": "bos,entropy"}, {"layers": "-1"}, {"sample": 3}, {"seed": 1}, {"continuation": "all"},
        {"tasks": "piqa"}, {"template": "plain"},
    ]  # fmt: skip
    assert len({run_id(**options) for options in changes}) == len(changes)
    assert run_id(measures="bos,entropy", layers="0,-1") == run_id(measures="entropy,bos", layers="-1,0")


@pytest.mark.slow
def test_costs_are_the_tokens_and_the_time_of_the_ranks(
    of_documents: dict[str, Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sum over sequences, layers and heads grows as the cube of the length."""
    monkeypatch.setattr("evalkit.attention.documents._timed", lambda: 1.0)
    plan = plan_of(**of_documents, tasks="piqa,mmlu", sample=12, measures="bos,rank")
    lengths = [len(sequence.tokens) for batch in batches(plan, tokenizer) for sequence in batch.content]
    costs = task_costs(plan, tokenizer, 1000, silent)
    assert (sum(cost.rows for cost in costs), sum(cost.alone for cost in costs)) == (len(lengths), sum(lengths))
    maps = 2 * 4  # layers and heads
    expected = maps * sum((length / 256) ** 3 for length in lengths)
    assert sum(cost.seconds for cost in costs) == pytest.approx(expected)
    assert not any(cost.seconds for cost in task_costs(plan_of(**of_documents, sample=2), tokenizer, 9, silent))
