"""Documents that share a source, on synthetic and official documents."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.benchmarks.multiple_choice.tasks import load_questions
from evalkit.data.sampling import clusters_of

TWINS = {"twins": "sentence"}


def sentence(text: str, *options: str) -> dict[str, Any]:
    return {"sentence": text, "option1": options[0], "option2": options[1]}


def test_documents_of_one_text_are_a_cluster_named_after_the_first() -> None:
    passages = [{"passage": text} for text in ("a", "b", "a", "c", "b", "a")]
    assert clusters_of(passages, {"source": "passage"}) == [0, 1, 0, 3, 1, 0]
    assert clusters_of(passages, {}) == [0, 1, 2, 3, 4, 5]
    # A sample's first documents have the clusters that they have in the whole
    assert clusters_of(passages[:3], {"source": "passage"}) == [0, 1, 0]


def test_a_document_without_the_text_stands_alone() -> None:
    assert clusters_of([{"passage": ""}, {}, {"passage": ""}, {"passage": "a"}], {"source": "passage"}) == [0, 1, 2, 3]


def test_twins_differ_in_their_trigger_and_have_the_same_options() -> None:
    documents = [
        sentence("Sarah was a much better surgeon than Maria so _ always got the easier cases.", "Sarah", "Maria"),
        sentence("Sarah asked Maria for the way because _ was new in town.", "Sarah", "Maria"),
        sentence("Sarah was a much better surgeon than Maria so _ always got the harder cases.", "maria", "Sarah"),
        sentence("Sarah was a much better surgeon than Maria so _ always got the harder cases.", "Sarah", "Mary"),
    ]
    assert clusters_of(documents, TWINS) == [0, 1, 0, 3]


def sizes_of_twins(folder: Path) -> dict[int, int]:
    """Return the numbers of clusters of one and of two documents; they must match the identifiers."""
    lines = (folder / "winogrande.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    documents = [json.loads(line) for line in lines]
    named: dict[str, int] = {}
    expected = [named.setdefault(one["qID"].rsplit("-", 1)[0], place) for place, one in enumerate(documents)]
    without = [{key: value for key, value in one.items() if key != "qID"} for one in documents]
    assert clusters_of(without, TWINS) == expected
    return Counter(Counter(expected).values())


def test_official_twins_are_those_that_their_identifiers_name(real_documents: Path) -> None:
    assert sizes_of_twins(real_documents) == {1: 4, 2: 3}


def test_all_official_twins_are_those_that_their_identifiers_name(shared_data: Path) -> None:
    assert sizes_of_twins(shared_data / "zeroshot8") == {1: 699, 2: 284}


def number_of_sources(folder: Path) -> dict[str, int]:
    """Through the task files: BoolQ's passages, WinoGrande's twins; other tasks' documents are clusters of one."""
    from evalkit.data import Library

    tasks = ("winogrande", "boolq", "openbookqa")
    suite = load_suite("zeroshot8").model_copy(update={"groups": {"Some": tasks}})
    questions = load_questions(suite, Library(folder, allow_unofficial=True))
    return {task: len({question.cluster for question in members}) for task, members in questions.items()}


def test_questions_know_their_sources(real_documents: Path) -> None:
    assert number_of_sources(real_documents) == {"winogrande": 7, "boolq": 7, "openbookqa": 6}


@pytest.mark.slow
def test_all_questions_know_their_sources(shared_data: Path) -> None:
    # SuperGLUE's passages begin with their titles, and one of BoolQ's 2,938 occurs under two of them
    expected = {"winogrande": 983, "boolq": 2939, "openbookqa": 500}
    assert number_of_sources(shared_data / "zeroshot8") == expected
