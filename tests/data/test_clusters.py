"""Which documents share a source, on made-up documents and on the official ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.benchmarks.multiple_choice.tasks import load_questions
from evalkit.data.clusters import clusters_of

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


def raw(folder: Path, task: str) -> list[dict[str, Any]]:
    text = (folder / "zeroshot8" / f"{task}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_the_official_twins_are_those_that_their_identifiers_name(shared_data: Path) -> None:
    documents = raw(shared_data, "winogrande")
    named: dict[str, int] = {}
    expected = [named.setdefault(one["qID"].rsplit("-", 1)[0], place) for place, one in enumerate(documents)]
    without = [{key: value for key, value in one.items() if key != "qID"} for one in documents]
    assert clusters_of(without, TWINS) == expected
    assert Counter(Counter(expected).values()) == {1: 699, 2: 284}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_questions_know_their_sources(shared_data: Path) -> None:
    """Through the task files: BoolQ's passages, WinoGrande's twins; the documents of other tasks are their own."""
    from dataclasses import replace

    from evalkit.data import Library

    tasks = ("winogrande", "boolq", "openbookqa")
    suite = replace(load_suite("zeroshot8"), groups={"Some": tasks})
    questions = load_questions(suite, Library(shared_data / "zeroshot8"))
    sources = {task: len({question.cluster for question in members}) for task, members in questions.items()}
    # SuperGLUE's passages begin with their titles, and one of BoolQ's 2,938 stands under two of them
    assert sources == {"winogrande": 983, "boolq": 2939, "openbookqa": 500}
