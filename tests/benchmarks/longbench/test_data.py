"""Official files: documents, which are recognised, marked or rejected, and predictions of the official code."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.benchmarks.longbench.data import (
    OFFICIAL_BLOBS,
    blob_hash,
    load_rows,
    read_predictions,
    write_predictions,
)
from evalkit.benchmarks.longbench.official import template
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.data import sources
from evalkit.data.sampling import FirstDocuments
from evalkit.data.sources import Hub
from evalkit.errors import DataError, EvalkitError
from tests.benchmarks.longbench.made import generations, prediction, record, write


def load(folder: Path, task: str = "hotpotqa", **options: Any) -> TaskDocuments:
    return load_rows(TASKS[task], folder, say=pytest.fail, **options)


def test_documents_are_pinned_by_content(real_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert blob_hash(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    content = (real_rows / "hotpotqa.jsonl").read_bytes()
    [row], stored = load(real_rows).documents, json.loads(content)
    assert (row.context, row.input, list(row.answers)) == tuple(stored[key] for key in ("context", "input", "answers"))
    monkeypatch.setitem(OFFICIAL_BLOBS, "hotpotqa", blob_hash(content))
    path = tmp_path / "hotpotqa.jsonl"
    path.write_bytes(content.replace(b"\n", b"\r\n"))
    assert load(tmp_path).official
    path.write_bytes(content.replace(b"Great South Bay", b"Great South Bey", 1))
    assert not load(tmp_path).official
    (tmp_path / "gov_report.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"hotpotqa.*gov_report"):
        load(tmp_path, "gov_report")


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
    twice, other = record(_id=None), record(number=1, _id=None)
    write(tmp_path / "hotpotqa.jsonl", [twice, other, twice])
    first, second, again = (row.id for row in load(tmp_path).documents)
    assert again == f"{first}-2"
    write(tmp_path / "hotpotqa.jsonl", [other, twice])
    assert [row.id for row in load(tmp_path).documents] == [second, first]


@pytest.mark.parametrize(
    ("task", "bad", "noun"),
    [
        ("hotpotqa", {"context": " "}, "'context'"),
        ("hotpotqa", {"answers": ["", " "]}, "'answers'"),
        # The hub's re-worked copies: the prompt in the documents, or the question in a field of another name
        ("hotpotqa", {"input": None, "question": "Question: Who?", "answer_prefix": "A"}, "re-worked.*'question'"),
        ("hotpotqa", {"context": template(TASKS["hotpotqa"]).split("{context}")[0]}, "re-worked.*'context'"),
        ("trec", {"all_classes": ["Place"]}, "'all_classes'"),
        ("passage_retrieval_en", {"answers": ["3"]}, "'answers'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, task: str, bad: dict[str, Any], noun: str) -> None:
    write(tmp_path / f"{task}.jsonl", [record(task, 9), record(task, **bad)])
    with pytest.raises(DataError, match=rf"{task}\.jsonl, line 2 \({task}\): .*{noun}"):
        load(tmp_path, task)
    assert load(tmp_path, task, selection=FirstDocuments(1)).documents[0].id == f"{task}-9"


def test_the_hub_serves_what_the_folder_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of hotpotqa and trec, whose rows of hotpotqa are a re-worked copy; a hub that fails is asked once."""
    archive, asked = tmp_path / "hub" / "data.zip", list[str]()
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as opened:
        for row in (record("trec"), record(max_new_tokens=3)):
            opened.writestr(f"data/{row['dataset']}.jsonl", json.dumps(row) + "\n")
    monkeypatch.setattr(sources, "reach", lambda: None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(archive))

    def served(task: str, hub: Hub, folder: Path | None = None) -> TaskDocuments:
        return load_rows(TASKS[task], folder, say=lambda _: None, hub=hub)

    hub, inner = Hub(), write(tmp_path / "own" / "hotpotqa.jsonl", [record(number=1)]).parent
    assert served("hotpotqa", hub, inner).documents[0].id == "hotpotqa-1"
    rows = served("trec", hub, inner)
    about = (rows.documents[0].id, rows.official, rows.source)
    assert about == ("trec-0", False, "hub THUDM/LongBench, data/trec.jsonl")
    for task, noun in (("hotpotqa", "data/hotpotqa.jsonl, line 1 .*re-worked"), ("lcc", r"data\.zip \(lcc\)")):
        with pytest.raises(DataError, match=noun):
            served(task, hub)

    def fail(repository: str, *_: Any, **__: Any) -> str:
        asked.append(repository)
        raise ConnectionError("cut off")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    failing = Hub()
    for task in ("trec", "lcc"):
        with pytest.raises(DataError, match=r"<task>\.jsonl.*cut off.*--data-dir"):
            served(task, failing, tmp_path)
    assert len(asked) == 1


def test_irregular_predictions_are_reported(tmp_path: Path) -> None:
    once = [prediction("a", [f"answer {number}"], number) for number in range(3)]
    write(tmp_path / "lcc.jsonl", once + once[::-1])  # several processes write in arbitrary order
    write(tmp_path / "qasper.jsonl", once)
    write(tmp_path / "multifieldqa_en.jsonl", [prediction("a", [str(number)], number) for number in range(151)])
    write(tmp_path / "vcsum.jsonl", once)
    out = " ".join(read_predictions([tmp_path])[1])
    expected = ("lcc.jsonl 6 for 3 (each 2 times)", "qasper.jsonl 3 for 200", "multifieldqa_en.jsonl 151 for 150")
    assert all(note in out for note in (*expected, "--e", "vcsum.jsonl"))


def test_a_bad_prediction_is_named(tmp_path: Path) -> None:
    for bad, noun in (
        (prediction("x", []), "'answers'"),
        (prediction("x", ["x"], "9", ["x"]), "'length'"),
        (prediction("x", ["x"]), "'all_classes'"),
    ):
        file = write(tmp_path / "trec.jsonl", [prediction("x", ["x"], all_classes=["x"]), bad])
        with pytest.raises(DataError, match=rf"trec\.jsonl, line 2 \(trec\): .*{noun}"):
            read_predictions([file])


def test_files_of_predictions(tmp_path: Path) -> None:
    table = generations("lcc", ("x = '\u2028'\n", "é"), ("y", "z"), lengths=[3, 4])
    [file] = write_predictions(table, tmp_path / "pred")
    assert json.loads(file.read_bytes().split(b"\n")[0]) == prediction("x = '\u2028'\n", ["é"], 3)
    columns = ["task", "length", "prediction", "answers", "all_classes"]
    assert read_predictions([file])[0][columns].to_dict("list") == table[columns].to_dict("list")
    hotpotqa = write(tmp_path / "hotpotqa.jsonl", [{"pred": "x", "answers": ["x"], "all_classes": None}])
    assert len(read_predictions([hotpotqa])[0]) == 1
    for paths, suite, noun in (
        ([hotpotqa], "longbench-e", "'length'"),  # of which LongBench-E has buckets
        ([file, write(tmp_path / "lcc_e.jsonl", [prediction("x", ["x"])])], "longbench", "lcc"),
        ([write(tmp_path / "empty" / "lcc.jsonl", [b""])], "longbench", r"lcc\.jsonl"),
        ([write(tmp_path / "hotpot.jsonl", [])], "longbench", "hotpotqa"),
    ):
        with pytest.raises(EvalkitError, match=noun):
            read_predictions(paths, suite)
