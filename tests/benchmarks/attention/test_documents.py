"""Sequences of documents and windows of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from evalkit.benchmarks.attention.categories import CATEGORIES, Word
from evalkit.benchmarks.attention.documents import AttentionRequest, batches_of, plan_attention, sequences_of
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.request import request_of
from evalkit.errors import DataError, EvalkitError, ScoringError
from tests.questions import question


def silent(_: str) -> None:
    """Nothing."""


def plan_of(checkpoint: Path, **options: Any) -> Any:
    """A plan without the measures that need a tagger."""
    given = {"measures": "bos", "device": "cpu"} | options
    return plan_attention(request_of(AttentionRequest, checkpoint, given), silent)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def of_documents(checkpoint: Path, documents: Path) -> dict[str, Any]:
    """Arguments of a plan of documents."""
    return {"checkpoint": checkpoint, "data_dir": documents, "allow_unofficial_data": True}


class Nothing:
    """No finished rows."""

    def __contains__(self, key: object) -> bool:
        return False


def words(texts: Any) -> dict[str, list[Word]]:
    """Tag every word without lower-case letters as a number, and the others as nouns."""
    found = {}
    for text in texts:
        tagged, start = [], 0
        for word in text.split():
            start = text.index(word, start)
            tagged.append(Word(start, start + len(word), "NOUN" if any(map(str.islower, word)) else "NUM"))
            start += len(word)
        found[text] = tagged
    return found


def test_the_gold_continuation_is_read(of_documents: dict[str, Any], tokenizer: Any) -> None:
    plan = plan_of(**of_documents, tasks="piqa", sample=3)
    [batch] = batches_of(plan, 4096, tokenizer, Nothing(), silent)
    assert len(batch.content) == batch.documents == 3
    for one, asked in zip(batch.content, plan.questions["piqa"], strict=True):
        assert (one.doc_id, one.choice) == (asked.doc_id, asked.gold)
        assert tokenizer.decode(one.tokens[one.readers]).strip() == asked.continuations[asked.gold].strip()
        assert one.tokens[0] == tokenizer.bos_token_id
        assert one.tokens[-1] == tokenizer.eos_token_id
        assert one.bos
        assert one.categories is None


def test_bos_is_recognised_by_its_id(of_documents: dict[str, Any], tokenizer: Any) -> None:
    """Also where a chat template writes it; EOS, which stands in for it without a context, is no BOS."""
    plan = plan_of(**of_documents, tasks="piqa", sample=1)
    prompter = Prompter(plan.choices.template, tokenizer, 4095, characters=True)
    asked = [question("two red hens", ["lay eggs"])]
    for bos, has in ((tokenizer.bos_token_id, True), (tokenizer.eos_token_id, False), (None, False)):
        [one] = sequences_of(plan, prompter, asked, words, bos)
        assert one.bos is has
        assert CATEGORIES[one.categories[0]] == ("bos" if has else "special")


def test_every_continuation_on_request(of_documents: dict[str, Any], tokenizer: Any) -> None:
    plan = plan_of(**of_documents, tasks="arc_easy", sample=2, continuation="all")
    [batch] = batches_of(plan, 4096, tokenizer, Nothing(), silent)
    expected = [(q.doc_id, n) for q in plan.questions["arc_easy"] for n in range(len(q.contexts))]
    assert [(one.doc_id, one.choice) for one in batch.content] == expected


def test_sequences_are_those_that_are_scored(of_documents: dict[str, Any], tokenizer: Any) -> None:
    plan = plan_of(**of_documents, tasks="winogrande,boolq", sample=6)
    prompter = Prompter(plan.choices.template, tokenizer, 4096)
    for questions in plan.questions.values():
        found = sequences_of(
            plan, Prompter(plan.choices.template, tokenizer, 4095, characters=True), questions, None, 0
        )
        for one, scored in zip(found, prompter.encode(questions), strict=True):
            assert np.array_equal(one.tokens, scored.sequences[one.choice].tokens)


def test_categories_of_added_tokens_markers_and_words(of_documents: dict[str, Any], tokenizer: Any) -> None:
    plan = plan_of(**of_documents, tasks="piqa", sample=1)
    prompter = Prompter(plan.choices.template, tokenizer, 4095, characters=True)
    asked = question("two red 77 hens", ["lay 5 eggs"])
    [one] = sequences_of(plan, prompter, [asked], words, tokenizer.bos_token_id)
    names = [CATEGORIES[number] for number in one.categories]
    assert names[0] == "bos"
    assert names[-1] == "special"
    by_name = {name: tokenizer.decode(one.tokens[[n == name for n in names]]) for name in set(names)}
    assert set(by_name) == {"bos", "special", "content", "other"}
    assert "INST" in by_name["special"]
    assert "hens" in by_name["content"]
    assert "77" in by_name["other"].replace(" ", "")
    assert "5" in by_name["other"]


def test_a_long_document_is_cut_to_the_window(of_documents: dict[str, Any], tokenizer: Any) -> None:
    plan = plan_of(**of_documents, tasks="piqa", sample=1)
    long = question("hen " * 300, ["eggs"])
    whole = Prompter(plan.choices.template, tokenizer, 4095, characters=True)
    [one] = sequences_of(plan, whole, [long], None, 0)
    size = len(one.tokens) - 100
    cut = Prompter(plan.choices.template, tokenizer, size - 1, characters=True)
    [other] = sequences_of(plan, cut, [long], words, 0)
    assert (len(other.tokens), other.truncated) == (size, 100)
    assert len(other.categories) == size
    assert np.array_equal(other.tokens[-50:], one.tokens[-50:])
    with pytest.raises(ScoringError, match="made_up document 0"):
        list(sequences_of(plan, Prompter(plan.choices.template, tokenizer, 8, characters=True), [long], None, 0))


def test_finished_documents_are_left_out_by_whole_batches(of_documents: dict[str, Any], tokenizer: Any) -> None:
    plan = plan_of(**of_documents | {"tasks": "piqa,boolq"}, sample=4)
    every = {("piqa", q.subtask, q.doc_id) for q in plan.questions["piqa"]}

    def numbers(finished: Any) -> list[tuple[str, int]]:
        return [(batch.task, batch.number) for batch in batches_of(plan, 4096, tokenizer, finished, silent)]

    assert numbers(Nothing()) == [("piqa", 0), ("boolq", 0)]
    assert numbers(every) == [("boolq", 0)]
    every.pop()
    assert numbers(every) == [("piqa", 0), ("boolq", 0)]


def test_a_text_is_read_in_windows(checkpoint: Path, tokenizer: Any, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text(" ".join(f"word{n}" for n in range(400)), encoding="utf-8")
    plan = plan_of(checkpoint, text=text)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    size = 101
    found = [batch.content[0] for batch in batches_of(plan, size, tokenizer, Nothing(), silent)]
    assert len(found) == len(ids) // (size - 1) > 3
    joined = np.concatenate([one.tokens[1:] for one in found]).tolist()
    assert joined == ids[: len(joined)]
    assert all(len(one.tokens) == size and one.tokens[0] == tokenizer.bos_token_id for one in found)
    assert all(np.array_equal(one.readers, np.arange(1, size)) for one in found)
    [whole] = [batch.content[0] for batch in batches_of(plan, 100_000, tokenizer, Nothing(), silent)]
    assert whole.tokens[1:].tolist() == ids
    some = plan_of(checkpoint, text=text, sample=2, seed=5)
    assert len(list(batches_of(some, size, tokenizer, Nothing(), silent))) == 2


@pytest.mark.parametrize(("content", "said"), [(b"", "has no text"), (b" \n ", "has no text"), (b"\xff\xfe", "UTF-8")])
def test_texts_that_cannot_be_read(checkpoint: Path, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "book.txt").write_bytes(content)
    with pytest.raises(DataError, match=said):
        plan_of(checkpoint, text=tmp_path / "book.txt")
    with pytest.raises(DataError, match="cannot be read"):
        plan_of(checkpoint, text=tmp_path / "nowhere.txt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"measures": "bos,rnak"}, "did you mean 'rank'"),
        ({"layers": "-1,x"}, "--layers -1,x: expected numbers of layers"),
        ({"text": "book.txt", "tasks": "piqa"}, "--tasks: is for the documents of tasks"),
        ({"text": "book.txt", "continuation": "all"}, "--continuation: is for the documents of tasks"),
        ({"tasks": "nothing"}, "unknown task 'nothing'"),
        ({"continuation": "best"}, "continuation"),
        ({"sample": 0}, "--sample"),
    ],
)
def test_impossible_settings(checkpoint: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(EvalkitError, match=said):
        plan_of(checkpoint, **options)


def test_settings_that_change_numbers_change_the_id(of_documents: dict[str, Any]) -> None:
    """And only these: the order of measures and layers does not."""
    options: list[dict[str, Any]] = [
        {},
        {"measures": "bos,entropy"},
        {"layers": "-1"},
        {"sample": 3},
        {"seed": 1},
        {"continuation": "all"},
        {"tasks": "piqa"},
        {"template": "plain"},
    ]
    ids = [plan_of(**of_documents, **{"tasks": "piqa,boolq"} | one).manifest["id"] for one in options]
    assert len(set(ids)) == len(ids)
    same = [plan_of(**of_documents, measures=names, layers=order).manifest["id"] for names, order in
            (("bos,entropy", "0,-1"), ("entropy,bos", "-1,0"))]  # fmt: skip
    assert same[0] == same[1]


def test_a_text_that_is_too_long_for_the_tokenizer(
    checkpoint: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would be aborted without a message."""
    monkeypatch.setattr("evalkit.inputs.values.LONGEST_TEXT", 20)
    (tmp_path / "book.txt").write_text("word " * 5, encoding="utf-8")
    plan = plan_of(checkpoint, text=tmp_path / "book.txt")
    with pytest.raises(
        ScoringError, match=r"--text .*book.txt: its text has 25 characters, more than the maximum of 20"
    ):
        list(batches_of(plan, 100, tokenizer, Nothing(), silent))
