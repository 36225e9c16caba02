"""ROUGE-L, compared with the package that LongBench's code uses, and inputs on which that package fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.benchmarks.longbench.metrics import rouge_l

rouge = pytest.importorskip("rouge")

words = st.lists(st.sampled_from([*"abcdeA", ".", ".", ". ", " ", "\n", "é", "a.b", ""]), max_size=40)
texts = words.map(" ".join) | words.map("".join) | st.text(max_size=60)


def by_the_package(prediction: str, answer: str) -> float:
    """As LongBench's code calls it; 0 where the package raises."""
    try:
        scores = rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return float(scores["rouge-l"]["f"])


@settings(max_examples=400)
@given(texts, texts)
def test_it_is_the_packages(prediction: str, answer: str) -> None:
    assert rouge_l(prediction, answer) == pytest.approx(by_the_package(prediction, answer), abs=1e-12)


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=14),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=14),
)
def test_it_is_the_packages_where_subsequences_are_many(prediction: list[str], answer: list[str]) -> None:
    one, other = " ".join(prediction), " ".join(answer)
    assert rouge_l(one, other) == pytest.approx(by_the_package(one, other), abs=1e-12)


@given(texts, texts)
def test_it_is_a_fraction_and_a_text_is_like_itself(prediction: str, answer: str) -> None:
    assert 0 <= rouge_l(prediction, answer) < 1
    assert rouge_l(answer, answer) == (pytest.approx(1, abs=1e-8) if answer.strip(".") else 0)


def test_it_is_the_packages_on_real_texts(golden: Path) -> None:
    compare_texts(golden / "gov_report.jsonl", 20)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "every"), [("gov_report", 25), ("multi_news", 15), ("samsum", 1)])
def test_it_is_the_packages_on_more_real_texts(all_golden: Path, task: str, every: int) -> None:
    compare_texts(all_golden / f"{task}.jsonl", every)


def compare_texts(predictions: Path, every: int) -> None:
    lines = predictions.read_bytes().splitlines()[::every]
    assert len(lines) >= 5
    for row in map(json.loads, lines):
        found = rouge_l(row["pred"], row["answers"][0])
        assert found == pytest.approx(by_the_package(row["pred"], row["answers"][0]), abs=1e-12)


@pytest.mark.slow
def test_long_texts_are_scored() -> None:
    text = " ".join(f"w{number}" for number in range(3000))
    assert rouge_l(text, text) == pytest.approx(1, abs=1e-8)
    assert by_the_package(text[:6000], text[:6000]) == 0  # the defect that evalkit does not reproduce


def test_the_known_answer() -> None:
    # Lin's example: the union of "w1 w2" and "w1 w3 w5" has four of five words; precision counts distinct words
    recall, precision = 4 / 5, 4 / 8
    found = rouge_l("w1 w2 w6 w7 w8.w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5")
    assert found == pytest.approx(2 * recall * precision / (recall + precision), abs=1e-7)
