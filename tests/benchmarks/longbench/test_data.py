"""Constants, documents and prompt templates: the official ones are recognised, anything else is marked or rejected."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.benchmarks.longbench import official
from evalkit.benchmarks.longbench.data import (
    OFFICIAL_BLOBS,
    LongBenchDocument,
    blob_hash,
    load_rows,
)
from evalkit.benchmarks.longbench.official import prompt_text, template
from evalkit.benchmarks.longbench.protocol import E_TASKS, GROUPS, TASKS, suite_tasks
from evalkit.data import sources
from evalkit.data.sampling import FirstDocuments
from evalkit.data.sources import Hub
from evalkit.errors import DataError, TemplateError, UsageError
from tests.benchmarks.longbench.made import record, write
from tests.fixtures import LONGBENCH_ROWS, facts

BRACES = st.text(alphabet="{}contexipu \\n%")


def load(folder: Path, task: str = "hotpotqa", **options: Any) -> TaskDocuments:
    return load_rows(TASKS[task], folder, say=pytest.fail, **options)


def test_constants_are_the_official_ones() -> None:
    expected = facts("protocol")
    assert list(TASKS) == list(expected["tasks"])
    for name, task in TASKS.items():
        fact = expected["tasks"][name]
        keys = ("group", "metric", "max_new_tokens", "documents", "prompt_sha256")
        assert [getattr(task, key) for key in keys] == [fact[key] for key in keys]
        assert task.chat == (name not in expected["chat_wrapper_skipped"])
        assert task.first_line_only == (name in expected["first_line_only"])
        assert task.newline_ends == (name == "samsum")
    assert sum(task.documents for task in TASKS.values()) == 3750
    assert set(GROUPS) == {task.group for task in TASKS.values()}
    assert facts("blobs") == OFFICIAL_BLOBS
    assert set(E_TASKS) == {name.removesuffix("_e") for name in facts("blobs") if name.endswith("_e")}
    assert [task.name for task in suite_tasks("longbench-e")] == list(E_TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_every_template_is_the_official_one(name: str) -> None:
    text = template(TASKS[name])
    assert hashlib.sha256(text.encode()).hexdigest() == TASKS[name].prompt_sha256
    assert text.count("{context}") == 1
    assert text.count("{input}") == (name not in ("gov_report", "multi_news", "passage_count", "lcc"))


@given(BRACES, BRACES)
def test_rows_are_inserted_verbatim(context: str, question: str) -> None:
    before, _, rest = template(TASKS["hotpotqa"]).partition("{context}")
    between, _, after = rest.partition("{input}")
    row = LongBenchDocument("hotpotqa", "1", 0, context, question, ("a",), 1, ())
    assert prompt_text(TASKS["hotpotqa"], row) == before + context + between + question + after


@pytest.mark.parametrize("content", [None, b"a: [", b"other: 1", b"7", b"\xff", b'doc_to_text: "{{context}} new"'])
def test_another_lm_eval_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    monkeypatch.setattr(official, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    template.cache_clear()
    if content is not None:
        write(tmp_path / "tasks" / "longbench" / "trec.yaml", [content])
    with pytest.raises(TemplateError, match=r"trec\.yaml.*install lm-eval 0\.4\.13"):
        template(TASKS["trec"])


def test_official_documents_are_recognised(longbench_data: Path) -> None:
    rows = load(longbench_data, "multi_news")
    assert (rows.official, len(rows.documents)) == (True, 200)
    assert rows.digest == "83ed3cc49ebbd880d0512d6dfdbad82b6fbf3a71"
    limited = load(longbench_data, "multi_news", selection=FirstDocuments(3))
    assert (limited.documents, limited.official, limited.digest) == (rows.documents[:3], True, rows.digest)


def test_documents_are_pinned_by_content(real_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert blob_hash(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    content = (real_rows / "hotpotqa.jsonl").read_bytes()
    monkeypatch.setitem(OFFICIAL_BLOBS, "hotpotqa", blob_hash(content))
    path = tmp_path / "hotpotqa.jsonl"
    path.write_bytes(content.replace(b"\n", b"\r\n"))
    assert load(tmp_path).official
    path.write_bytes(content.replace(b"Great South Bay", b"Great South Bey", 1))
    assert not load(tmp_path).official
    (tmp_path / "gov_report.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"hotpotqa.*gov_report"):
        load(tmp_path, "gov_report")


@pytest.mark.parametrize("task", LONGBENCH_ROWS)
def test_real_rows(real_rows: Path, task: str) -> None:
    [row] = load(real_rows, task).documents
    stored = json.loads((real_rows / f"{task}.jsonl").read_text(encoding="utf-8"))
    assert (row.context, row.input, list(row.answers)) == tuple(stored[key] for key in ("context", "input", "answers"))


def test_rows_of_a_file(tmp_path: Path) -> None:
    """A byte-order mark, blank lines, a subfolder; LongBench-E's own files; ids from the content."""
    lines = [b"\xef\xbb\xbf" + json.dumps(record("trec")).encode(), b"", record("trec", 2)]
    path = write(tmp_path / "data" / "trec.jsonl", lines)
    rows = load(tmp_path, "trec")
    assert [(row.id, row.index) for row in rows.documents] == [("trec-0", 0), ("trec-2", 1)]
    assert (rows.documents[1].all_classes, rows.documents[1].length) == (("Person", "Place"), 2005)
    assert rows.source == f"data-dir {path}"
    write(tmp_path / "hotpotqa_e.jsonl", [record(number=1, dataset="hotpotqa_e"), record(number=2)])
    assert [row.id for row in load(tmp_path, suite="longbench-e").documents] == ["hotpotqa-1", "hotpotqa-2"]
    with pytest.raises(UsageError, match="musique"):
        load(tmp_path, "musique", suite="longbench-e")
    twice, other = record(_id=None), record(number=1, _id=None)
    write(tmp_path / "hotpotqa.jsonl", [twice, other, twice])
    first, second, again = (row.id for row in load(tmp_path).documents)
    assert again == f"{first}-2"
    write(tmp_path / "hotpotqa.jsonl", [other, twice])
    assert [row.id for row in load(tmp_path).documents] == [second, first]


@pytest.mark.parametrize(
    ("bad", "noun"),
    [
        (record(context=None), "'context'"),
        (record(context=" "), "'context'"),
        (record(context="\ud800"), "surrogate"),
        (record(input=None), "'input'"),
        (record(answers=["", " "]), "'answers'"),
        (record(answers="one"), "'answers'"),
        (record(answers=[3]), "'answers'"),
        (record(length=True), "'length'"),
        (record(length=10**30), "'length'"),
        (record(_id=7), "'_id'"),
        (record(_id="hotpotqa-9"), "'_id'.*line 1"),
        (record("musique"), "'dataset'.*'musique'"),
        # The hub's re-worked copies: the prompt in the documents, or the question in a field of another name
        (record(input=None, question="Question: Who?", answer_prefix="Answer:"), "re-worked.*'question'"),
        (record(context=template(TASKS["hotpotqa"]).split("{context}")[0] + "Passage 1"), "re-worked.*'context'"),
        (["a"], "list"),
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "nested"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, bad: Any, noun: str) -> None:
    write(tmp_path / "hotpotqa.jsonl", [record(number=9), bad])
    with pytest.raises(DataError, match=rf"hotpotqa\.jsonl, line 2 \(hotpotqa\): .*{noun}") as raised:
        load(tmp_path)
    assert len(str(raised.value)) < 400
    assert load(tmp_path, selection=FirstDocuments(1)).documents[0].id == "hotpotqa-9"


@pytest.mark.parametrize(
    ("task", "changes", "noun"),
    [
        ("trec", {"all_classes": ["Place"]}, "'all_classes'"),
        ("passage_retrieval_en", {"answers": ["3"]}, "'answers'"),
        ("trec", {"input": "Question: Who ?"}, "re-worked.*'Type:'"),
        ("triviaqa", {"input": "Passage:\nx\nQuestion:\ny"}, "re-worked.*'Answer:'"),
        ("samsum", {"input": "A: hi"}, "re-worked.*'Summary:'"),
    ],
)
def test_rows_that_the_task_cannot_score(tmp_path: Path, task: str, changes: dict[str, Any], noun: str) -> None:
    write(tmp_path / f"{task}.jsonl", [record(task, **changes)])
    with pytest.raises(DataError, match=rf"{task}\.jsonl, line 1 .*{noun}"):
        load(tmp_path, task)


def test_files_without_rows(tmp_path: Path) -> None:
    write(tmp_path / "hotpotqa.jsonl", [b"", b" "])
    (tmp_path / "qasper.jsonl").mkdir()
    (tmp_path / "musique.parquet").touch()
    files = {"hotpotqa": "hotpotqa.jsonl", "qasper": "qasper.jsonl", "musique": "musique.parquet"}
    for task, name in files.items():
        with pytest.raises(DataError, match=name):
            load(tmp_path, task)
    with pytest.raises(DataError, match=f"--data-dir {tmp_path / 'absent'}"):
        load(tmp_path / "absent")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TaskDocuments]:
    """Load from a hub that serves an archive of hotpotqa and trec, whose rows of hotpotqa are a re-worked copy."""
    archive = tmp_path / "hub" / "data.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as opened:
        for row in (record("trec"), record(max_new_tokens=3)):
            opened.writestr(f"data/{row['dataset']}.jsonl", json.dumps(row) + "\n")
    monkeypatch.setattr(sources, "reach", lambda: None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(archive))
    hub, said = Hub(), list[str]()
    return lambda task, folder=None: load_rows(TASKS[task], folder, say=said.append, hub=hub)


def test_the_hub_serves_what_the_folder_lacks(tmp_path: Path, served: Callable[..., TaskDocuments]) -> None:
    write(tmp_path / "own" / "hotpotqa.jsonl", [record(number=1)])
    assert served("hotpotqa", tmp_path / "own").documents[0].id == "hotpotqa-1"
    rows = served("trec", tmp_path / "own")
    assert (rows.documents[0].id, rows.official, rows.source) == (
        "trec-0",
        False,
        "hub THUDM/LongBench, data/trec.jsonl",
    )
    with pytest.raises(DataError, match=r"hub THUDM/LongBench, data/hotpotqa.jsonl, line 1 .*re-worked"):
        served("hotpotqa")
    with pytest.raises(DataError, match=r"data\.zip \(lcc\)"):
        served("lcc")
    (tmp_path / "hub" / "data.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"data\.zip \(trec\).*delete it"):
        served("trec")


def test_a_hub_that_fails_is_asked_once(
    tmp_path: Path, served: Callable[..., TaskDocuments], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fail(*_: Any, **__: Any) -> str:
        asked.append(1)
        raise ConnectionError("cut off")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for task in ("trec", "lcc"):
        with pytest.raises(DataError, match=rf"no documents for {task}: no {task}\.jsonl.*cut off.*--data-dir"):
            served(task, tmp_path)
    assert len(asked) == 1
