"""Questions in the cache: equal to those that lm-eval builds, and never those of other documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.multiple_choice import tasks
from evalkit.benchmarks.multiple_choice.suites import choose_tasks, load_suite, with_fewshot
from evalkit.benchmarks.multiple_choice.tasks import load_questions, pinned_questions
from evalkit.data import Library
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, DocumentSelection, FirstDocuments
from evalkit.errors import DataError

SUITE = load_suite("zeroshot8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def library(folder: Path) -> Library:
    return Library(folder, allow_unofficial=True)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The tasks of each call of `load_questions`."""
    calls = []

    def load(suite: Any, *others: Any) -> Any:
        calls.append(suite.tasks)
        return load_questions(suite, *others)

    monkeypatch.setattr(tasks, "load_questions", load)
    return calls


@pytest.mark.parametrize("selection", [ALL_DOCUMENTS, FirstDocuments(3), DocumentSample(3, 1)])
def test_what_is_read_is_what_lm_eval_built(documents: Path, counted: list[Any], selection: DocumentSelection) -> None:
    expected = load_questions(SUITE, library(documents), selection)
    first = pinned_questions(SUITE, library(documents), selection)
    second = pinned_questions(SUITE, library(documents), selection)
    assert first == second == expected
    assert list(second) == list(SUITE.tasks)
    assert repr(second) == repr(expected)  # types too: 1 is not 1.0 or True
    assert counted == [SUITE.tasks]


def test_only_what_is_missing_is_built(documents: Path, counted: list[Any]) -> None:
    pinned_questions(choose_tasks(SUITE, ("piqa", "boolq")), library(documents), ALL_DOCUMENTS)
    pinned_questions(SUITE, library(documents), ALL_DOCUMENTS)
    pinned_questions(choose_tasks(SUITE, ("piqa",)), library(documents), FirstDocuments(2))
    rest = tuple(task for task in SUITE.tasks if task not in ("piqa", "boolq"))
    assert counted == [choose_tasks(SUITE, ("piqa", "boolq")).tasks, rest, ("piqa",)]


def test_other_documents_are_built_anew(documents: Path, tmp_path: Path, counted: list[Any]) -> None:
    """Also where a field differs that does not count for the content hash."""
    suite = choose_tasks(SUITE, ("arc_easy",))
    lines = (documents / "arc_easy.jsonl").read_text("utf-8").splitlines()
    named = [json.dumps(json.loads(line) | {"id": "renamed"}) for line in lines]
    for number, content in enumerate((lines, named, lines[1:])):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "arc_easy.jsonl").write_text("\n".join(content), "utf-8")
        assert pinned_questions(suite, library(folder), ALL_DOCUMENTS) == load_questions(
            suite, library(folder), ALL_DOCUMENTS
        )
    assert len(counted) == 3


@pytest.mark.parametrize("part", ["version", "source_digest", "folder_digest"])
def test_other_libraries_code_and_task_files_build_anew(
    documents: Path, counted: list[Any], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = choose_tasks(SUITE, ("piqa",))
    pinned_questions(suite, library(documents), ALL_DOCUMENTS)
    monkeypatch.setattr(tasks, part, lambda *_: "another")
    pinned_questions(suite, library(documents), ALL_DOCUMENTS)
    assert len(counted) == 2


def test_examples_belong_to_the_questions(documents: Path, tmp_path: Path, counted: list[Any]) -> None:
    suite = choose_tasks(SUITE, ("mmlu",))
    try:
        shot = with_fewshot(suite, 1)
        expected = load_questions(shot, library(documents), FirstDocuments(2))
    except DataError:
        pytest.skip("the examples of MMLU are not on this machine")
    assert pinned_questions(shot, library(documents), FirstDocuments(2)) == expected
    assert pinned_questions(suite, library(documents), FirstDocuments(2)) == load_questions(
        suite, library(documents), FirstDocuments(2)
    )
    assert len(counted) == 2


def test_documents_that_are_not_plain_json_are_not_stored(
    documents: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*given: Any) -> Any:
        found = load_questions(*given)
        return {task: [replace(one, doc={"id": {1, 2}}) for one in members] for task, members in found.items()}

    monkeypatch.setattr(tasks, "load_questions", load)
    suite = choose_tasks(SUITE, ("piqa",))
    assert pinned_questions(suite, library(documents), ALL_DOCUMENTS)["piqa"][0].doc == {"id": {1, 2}}
    assert not (cache / "questions").exists()
