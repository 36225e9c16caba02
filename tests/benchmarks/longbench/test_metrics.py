"""The metrics, compared with closed forms, difflib, the package rouge, and known behaviour of the official code."""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.benchmarks.longbench.official import (
    classification,
    code_line,
    count,
    edit_similarity,
    first_line,
    qa_f1,
    retrieval,
    rouge_l,
    score_prediction,
)
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.errors import DataError, UsageError

LINES = st.text(alphabet="ab (){}=\t'", max_size=60)
SENTENCES = st.lists(st.sampled_from(["the", "cat", "Cat", "a", "sat.", "12", "Mat", "!"]), max_size=8).map(" ".join)
WORDS = st.lists(st.sampled_from([*"abcdeA", ".", ".", ". ", " ", "\n", "é", "a.b", ""]), max_size=40)
LETTERS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=14).map(" ".join)
TEXTS = WORDS.map(" ".join) | WORDS.map("".join) | LETTERS | st.text(max_size=60)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("The cat, sat.", "a CAT sat", 1.0),
        ("cat cat mat", "cat mat", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("well-known", "wellknown", 1.0),
        ("theatre", "theatre the", 1.0),
        ("“cat”", "cat", 0.0),  # only ASCII punctuation is removed
    ],
)
def test_f1(prediction: str, answer: str, score: float) -> None:
    assert qa_f1(prediction, answer) == pytest.approx(score, abs=1e-15)


@given(SENTENCES, SENTENCES)
def test_f1_is_a_symmetric_fraction(one: str, other: str) -> None:
    assert 0 <= qa_f1(one, other) <= 1
    assert qa_f1(one, other) == pytest.approx(qa_f1(other, one), abs=1e-15)
    assert qa_f1(f"{one} zebra", f"{one} zebra") == 1
    assert qa_f1(" ".join(reversed(one.split())), other) == pytest.approx(qa_f1(one, other), abs=1e-15)


@pytest.mark.parametrize(
    ("prediction", "score"), [("Other entity", 1.0), ("either City or Other entity", 1 / 2), ("other entity", 0.0)]
)
def test_classification(prediction: str, score: float) -> None:
    assert classification(prediction, "Other entity", ["City", "Other entity", "Food"]) == score
    # The official code, which removes while it iterates, keeps "entity" here and gives half
    assert classification(prediction, "Other entity", ["City", "Other", "entity", "Other entity"]) == score


@pytest.mark.parametrize(("prediction", "score"), [("Paragraph 3", 1.0), ("3, 4 and 3", 2 / 3), ("03 13 three", 0.0)])
def test_retrieval_and_count(prediction: str, score: float) -> None:
    assert retrieval(prediction, "Paragraph 3") == score
    assert count(prediction, "3") == score
    with pytest.raises(DataError, match="Paragraph"):
        retrieval("3", "three")


@given(LINES, LINES)
def test_edit_similarity(prediction: str, answer: str) -> None:
    """difflib's ratio in whole percent; rapidfuzz's is 1 - (insertions + deletions) / T, that is 2 LCS / T."""
    ratio = SequenceMatcher(None, prediction, answer).ratio() if prediction or answer else 1.0
    assert edit_similarity(prediction, answer) == round(100 * ratio) / 100
    assert edit_similarity(answer, answer) == 1
    pytest.importorskip("rapidfuzz")
    table = [[0] * (len(answer) + 1)]
    for left in prediction:
        above, row = table[-1], [0]
        for column, right in enumerate(answer):
            row.append(above[column] + 1 if left == right else max(above[column + 1], row[-1]))
        table.append(row)
    total = len(prediction) + len(answer)
    expected = round(100 * 2 * table[-1][-1] / total) / 100 if total else 1.0
    assert edit_similarity(prediction, answer, "rapidfuzz") == pytest.approx(expected, abs=0.0100001)


def test_edit_similarity_depends_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (edit_similarity("tide", "diet"), edit_similarity("diet", "tide")) == (0.25, 0.5)
    assert edit_similarity("", "x") == edit_similarity("x", "") == 0
    monkeypatch.setitem(__import__("sys").modules, "rapidfuzz.distance", None)
    with pytest.raises(UsageError, match="pip install rapidfuzz"):
        edit_similarity("a", "b", "rapidfuzz")


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        ("\n\n    return x\nmore", "    return x"),
        ("```python\n# why\nx = 1", "x = 1"),
        ("// why\n\nx = 1", ""),  # a blank line counts
        ("# only", ""),
        ("x = 1 # why\ny", "y"),
    ],
)
def test_code_line(prediction: str, line: str) -> None:
    assert code_line(prediction) == line


def test_the_scored_part() -> None:
    """The best of the answers; the first line of few-shot tasks."""
    assert (first_line("\n\n one \ntwo"), first_line(" \none")) == (" one ", " ")  # only newlines are skipped
    assert score_prediction(TASKS["hotpotqa"], "cat", ["dog", "cat"]) == 1
    assert score_prediction(TASKS["lcc"], "\n  x = 1\ny", ["no", "  x = 1"]) == 1
    assert score_prediction(TASKS["trec"], "\nPerson\nPlace", ["Person"], ["Person", "Place"]) == 1
    assert score_prediction(TASKS["triviaqa"], "\nparis\nis it", ["Paris"]) == 1
    assert score_prediction(TASKS["hotpotqa"], "paris\nlondon", ["paris"]) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="hotpotqa"):
        score_prediction(TASKS["hotpotqa"], "cat", [])


@given(st.sampled_from(list(TASKS)), st.text(max_size=80), st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_every_score_is_a_fraction(name: str, prediction: str, answers: list[str]) -> None:
    answers = ["Paragraph 1"] if name == "passage_retrieval_en" else answers
    assert 0 <= score_prediction(TASKS[name], prediction, answers, answers) <= 1


def by_the_package(prediction: str, answer: str) -> float:
    """As LongBench's code calls it; 0 where the package raises."""
    rouge = pytest.importorskip("rouge")
    try:
        scores = rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return float(scores["rouge-l"]["f"])


@settings(max_examples=300)
@given(TEXTS, TEXTS)
def test_rouge_is_the_packages(prediction: str, answer: str) -> None:
    assert rouge_l(prediction, answer) == pytest.approx(by_the_package(prediction, answer), abs=1e-12)
    assert 0 <= rouge_l(prediction, answer) < 1
    assert rouge_l(answer, answer) == (pytest.approx(1, abs=1e-8) if answer.strip(".") else 0)


def compare_texts(predictions: Path, every: int) -> None:
    lines = predictions.read_bytes().splitlines()[::every]
    assert len(lines) >= 5
    for row in map(json.loads, lines):
        expected = by_the_package(row["pred"], row["answers"][0])
        assert rouge_l(row["pred"], row["answers"][0]) == pytest.approx(expected, abs=1e-12)


def test_rouge_is_the_packages_on_real_texts(golden: Path) -> None:
    compare_texts(golden / "gov_report.jsonl", 20)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "every"), [("gov_report", 25), ("multi_news", 15), ("samsum", 1)])
def test_rouge_is_the_packages_on_more_real_texts(all_golden: Path, task: str, every: int) -> None:
    compare_texts(all_golden / f"{task}.jsonl", every)


@pytest.mark.slow
def test_rouge_of_long_texts() -> None:
    text = " ".join(f"w{number}" for number in range(3000))
    assert rouge_l(text, text) == pytest.approx(1, abs=1e-8)
    assert by_the_package(text[:6000], text[:6000]) == 0  # the defect that evalkit does not reproduce


def test_rouge_of_lins_example() -> None:
    # The union of "w1 w2" and "w1 w3 w5" has four of five words; precision counts distinct words
    recall, precision = 4 / 5, 4 / 8
    score = rouge_l("w1 w2 w6 w7 w8.w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5")
    assert score == pytest.approx(2 * recall * precision / (recall + precision), abs=1e-7)
