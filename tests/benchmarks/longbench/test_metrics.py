"""The metrics, against closed forms, difflib, and what the official code is known to do."""

from __future__ import annotations

from difflib import SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.longbench.metrics import (
    classification,
    code_line,
    count,
    edit_similarity,
    first_line,
    qa_f1,
    retrieval,
    score_prediction,
)
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.errors import DataError, UsageError

lines = st.text(alphabet="ab (){}=\t'", max_size=260)
sentences = st.lists(st.sampled_from(["the", "cat", "Cat", "a", "sat.", "12", "Mat", "!"]), max_size=8).map(" ".join)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("The cat, sat.", "a CAT sat", 1.0),
        ("cat cat mat", "cat mat", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("well-known", "wellknown", 1.0),
        ("theatre", "theatre the", 1.0),
        ("“cat”", "cat", 0.0),  # only ASCII punctuation goes
    ],
)
def test_f1(prediction: str, answer: str, score: float) -> None:
    assert qa_f1(prediction, answer) == pytest.approx(score, abs=1e-15)


@given(sentences, sentences)
def test_f1_is_a_symmetric_fraction(one: str, other: str) -> None:
    assert 0 <= qa_f1(one, other) <= 1
    assert qa_f1(one, other) == pytest.approx(qa_f1(other, one), abs=1e-15)
    assert qa_f1(f"{one} zebra", f"{one} zebra") == 1
    assert qa_f1(" ".join(reversed(one.split())), other) == pytest.approx(qa_f1(one, other), abs=1e-15)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Other entity", 1.0),
        ("either City or Other entity", 1 / 2),
        ("City", 0.0),
        ("other entity", 0.0),
        ("", 0.0),
    ],
)
def test_classification(prediction: str, score: float) -> None:
    assert classification(prediction, "Other entity", ["City", "Other entity", "Food"]) == score


def test_labels_within_the_gold_label_do_not_count() -> None:
    # The official code, which removes while it iterates, keeps "entity" here and gives 1/2
    assert classification("Other entity", "Other entity", ["Other", "entity", "Other entity"]) == 1.0


@pytest.mark.parametrize(
    ("prediction", "score"), [("Paragraph 3", 1.0), ("3, 4 and 3", 2 / 3), ("03", 0.0), ("13", 0.0), ("three", 0.0)]
)
def test_retrieval_and_count(prediction: str, score: float) -> None:
    assert retrieval(prediction, "Paragraph 3") == score
    assert count(prediction, "3") == score


def test_an_answer_without_its_paragraph_is_told() -> None:
    with pytest.raises(DataError, match="expected an answer like 'Paragraph 3'"):
        retrieval("3", "three")


@given(lines, lines)
def test_edit_similarity_is_difflibs_in_whole_percent(prediction: str, answer: str) -> None:
    found = edit_similarity(prediction, answer)
    ratio = SequenceMatcher(None, prediction, answer).ratio() if prediction or answer else 1.0
    assert found == round(100 * ratio) / 100
    assert 0 <= found <= 1
    assert edit_similarity(answer, answer) == 1


def test_edit_similarity_depends_on_the_order() -> None:
    assert SequenceMatcher(None, "tide", "diet").ratio() == 0.25
    assert SequenceMatcher(None, "diet", "tide").ratio() == 0.5
    assert (edit_similarity("tide", "diet"), edit_similarity("diet", "tide")) == (0.25, 0.5)


@pytest.mark.parametrize("backend", ["difflib", "rapidfuzz"])
def test_edit_similarity_of_empty_lines(backend: str) -> None:
    if backend == "rapidfuzz":
        pytest.importorskip("rapidfuzz")
    assert edit_similarity("", "", backend) == 1
    assert edit_similarity("", "x", backend) == edit_similarity("x", "", backend) == 0


@given(lines, lines)
def test_rapidfuzz_is_the_indel_distance(prediction: str, answer: str) -> None:
    pytest.importorskip("rapidfuzz")
    # 1 - (insertions + deletions) / T is 2 LCS / T
    table = [[0] * (len(answer) + 1)]
    for left in prediction:
        above, row = table[-1], [0]
        for column, right in enumerate(answer):
            row.append(above[column] + 1 if left == right else max(above[column + 1], row[-1]))
        table.append(row)
    total = len(prediction) + len(answer)
    expected = round(100 * 2 * table[-1][-1] / total) / 100 if total else 1.0
    assert edit_similarity(prediction, answer, "rapidfuzz") == pytest.approx(expected, abs=0.0100001)
    assert edit_similarity(prediction, answer, "rapidfuzz") == edit_similarity(answer, prediction, "rapidfuzz")


def test_a_missing_rapidfuzz_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rapidfuzz.distance", None)
    with pytest.raises(UsageError, match="pip install rapidfuzz"):
        edit_similarity("a", "b", "rapidfuzz")


def test_first_line() -> None:
    assert first_line("\n\n one \ntwo") == " one "
    assert first_line(" \none") == " "  # only newlines are skipped
    assert first_line("") == ""


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


def test_the_best_of_the_answers_counts() -> None:
    assert score_prediction(TASKS["hotpotqa"], "cat", ["dog", "cat"]) == 1
    assert score_prediction(TASKS["lcc"], "\n  x = 1\ny", ["no", "  x = 1"]) == 1
    with pytest.raises(DataError, match="without gold answers"):
        score_prediction(TASKS["hotpotqa"], "cat", [])


def test_only_the_first_line_of_few_shot_tasks_counts() -> None:
    two_lines = "\nPerson\nPlace"
    assert score_prediction(TASKS["trec"], two_lines, ["Person"], ["Person", "Place"]) == 1
    assert score_prediction(TASKS["triviaqa"], "\nparis\nis it", ["Paris"]) == 1
    assert score_prediction(TASKS["hotpotqa"], "paris\nlondon", ["paris"]) == pytest.approx(2 / 3)


@given(st.sampled_from(list(TASKS)), st.text(max_size=80), st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_every_score_is_a_fraction(name: str, prediction: str, answers: list[str]) -> None:
    if name == "passage_retrieval_en":
        answers = ["Paragraph 1"]
    assert 0 <= score_prediction(TASKS[name], prediction, answers, answers) <= 1
    wider = [*answers, "Paragraph 2" if name == "passage_retrieval_en" else prediction]
    if name != "trec":  # whose labels are all answers here
        assert score_prediction(TASKS[name], prediction, wider, wider) >= score_prediction(
            TASKS[name], prediction, answers, answers
        )
