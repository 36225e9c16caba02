"""Metrics of generated answers: closed forms, and the maximum over references. LongBench's tests have the functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evalkit.benchmarks.answer_metrics import ANSWER_METRICS, AnswerMetric, find_answer_metric
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.scales import Scale
from tests.packages import install

OWN = AnswerMetric(Scale("own", "characters"), lambda answer, references: float(len(answer)))


@pytest.mark.parametrize(
    ("metric", "answer", "references", "score"),
    [
        ("exact_match", " The PARIS, ", ["Lyon", "paris"], 1),
        ("exact_match", "Paris France", ["Paris"], 0),
        ("exact_match", "", ["Paris"], 0),
        # References without a word are compared as they are
        ("exact_match", "?", ["!"], 0),
        ("exact_match", " the ", ["the"], 1),
        ("contains", "It is paris.", ["Lyon", "Paris"], 1),
        ("contains", "It is", ["Paris"], 0),
        ("f1", "the city of Paris", ["Paris", "city Paris"], 0.8),
        ("rouge_l", "a b c d", ["x", "a b"], 2 / 3),
        ("edit_similarity", "diet", ["tide", "diets"], 0.89),
    ],
)
def test_closed_forms(metric: str, answer: str, references: list[str], score: float) -> None:
    found = ANSWER_METRICS[metric].score
    assert found(answer, references) == pytest.approx(score, abs=1e-7)
    assert found(answer, references[::-1]) == found(answer, references)
    assert found(answer, references) == max(found(answer, [one]) for one in references)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    find_answer_metric.cache_clear()
    yield tmp_path
    find_answer_metric.cache_clear()


def test_a_package_adds_a_metric(packages: Path) -> None:
    where = "tests.benchmarks.test_answer_metrics:OWN"
    install(packages, "own", {"evalkit.answer_metrics": {"own": where, "other": where, "text": "builtins:str"}})
    assert find_answer_metric("own") is OWN and OWN.measure.unit == "characters"
    for name in ("other", "text"):
        with pytest.raises(UsageError, match=name):
            find_answer_metric(name)
    with pytest.raises(UnknownNameError, match="exact_match"):
        find_answer_metric("exact")
