"""Documents: official ones are recognised, others marked, invalid ones and reformatted copies rejected."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from evalkit.benchmarks.longbench import data
from evalkit.benchmarks.longbench.data import OFFICIAL_BLOBS, blob_hash, load_rows
from evalkit.benchmarks.longbench.prompts import template
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.data import hub as hub_module
from evalkit.data.hub import Hub
from evalkit.data.sampling import FirstDocuments
from evalkit.errors import DataError, UsageError
from tests.benchmarks.longbench.made import record, write
from tests.fixtures import LONGBENCH_ROWS

HOTPOT = TASKS["hotpotqa"]


def load(folder: Path, task: str = "hotpotqa", **options: Any) -> data.LongBenchRows:
    return load_rows(TASKS[task], folder, say=pytest.fail, **options)


def test_official_documents_are_recognised(longbench_data: Path) -> None:
    found = load(longbench_data, "multi_news")
    assert (found.official, len(found.rows)) == (True, 200)
    assert found.sha == "83ed3cc49ebbd880d0512d6dfdbad82b6fbf3a71"
    first = json.loads((longbench_data / "multi_news.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert found.rows[0].id == first["_id"]
    assert (found.rows[0].context, list(found.rows[0].answers)) == (first["context"], first["answers"])
    assert len({row.id for row in found.rows}) == 200
    limited = load(longbench_data, "multi_news", selection=FirstDocuments(3))
    assert (limited.rows, limited.official, limited.sha) == (found.rows[:3], True, found.sha)


@pytest.fixture
def pinned(real_rows: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A file of hotpotqa's, pinned as if it were the official one."""
    content = (real_rows / "hotpotqa.jsonl").read_bytes()
    monkeypatch.setitem(OFFICIAL_BLOBS, "hotpotqa", blob_hash(content))
    return content


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_line_ends_of_windows_are_the_same_file(pinned: bytes, tmp_path: Path, line_end: bytes) -> None:
    (tmp_path / "hotpotqa.jsonl").write_bytes(pinned.replace(b"\n", line_end))
    assert load(tmp_path, selection=FirstDocuments(1)).official


def test_one_changed_byte_is_not_official(pinned: bytes, tmp_path: Path) -> None:
    changed = pinned.replace(b"Great South Bay", b"Great South Bey", 1)
    assert changed != pinned
    (tmp_path / "hotpotqa.jsonl").write_bytes(changed)
    found = load(tmp_path)
    assert (found.official, len(found.rows)) == (False, 1)


def test_an_official_file_under_another_name_is_refused(pinned: bytes, tmp_path: Path) -> None:
    (tmp_path / "gov_report.jsonl").write_bytes(pinned)
    with pytest.raises(DataError, match="official file of hotpotqa, where gov_report's was expected"):
        load(tmp_path, "gov_report")


@pytest.mark.parametrize("task", LONGBENCH_ROWS)
def test_real_rows_load(real_rows: Path, task: str) -> None:
    found = load(real_rows, task)
    assert not found.official
    [row] = found.rows
    [stored] = map(json.loads, (real_rows / f"{task}.jsonl").read_text(encoding="utf-8").split("\n")[:-1])
    assert (row.context, row.input, list(row.answers)) == tuple(stored[key] for key in ("context", "input", "answers"))


@pytest.mark.parametrize("task", TASKS)
def test_more_real_rows_of_every_task_load(longbench_data: Path, task: str) -> None:
    found = load(longbench_data / "minilongbench_en", task)
    assert not found.official
    assert [row.index for row in found.rows] == list(range(len(found.rows)))
    assert len({row.id for row in found.rows}) == len(found.rows)  # this copy has no ids of its own


def test_the_hash_is_gits() -> None:
    assert blob_hash(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object


def test_rows_are_read_as_they_stand(tmp_path: Path) -> None:
    write(
        tmp_path / "data" / "trec.jsonl",
        [b"\xef\xbb\xbf" + json.dumps(record("trec")).encode(), b"", record("trec", 2)],
    )
    found = load(tmp_path, "trec")
    assert [row.id for row in found.rows] == ["trec-0", "trec-2"]
    assert [row.index for row in found.rows] == [0, 1]
    assert found.rows[1].all_classes == ("Person", "Place")
    assert found.rows[1].length == 2005
    assert found.source == f"data-dir {tmp_path / 'data' / 'trec.jsonl'}"


def test_e_reads_its_own_files(tmp_path: Path) -> None:
    write(tmp_path / "hotpotqa.jsonl", [record()])
    write(tmp_path / "hotpotqa_e.jsonl", [record(number=1, dataset="hotpotqa_e"), record(number=2)])
    assert [row.id for row in load(tmp_path, suite="longbench-e").rows] == ["hotpotqa-1", "hotpotqa-2"]
    with pytest.raises(UsageError, match="LongBench-E has no task musique"):
        load(tmp_path, "musique", suite="longbench-e")


def test_rows_without_ids_get_theirs_from_their_content(tmp_path: Path) -> None:
    twice = record(_id=None)
    write(tmp_path / "hotpotqa.jsonl", [twice, record(number=1, _id=None), twice])
    first, second, again = (row.id for row in load(tmp_path).rows)
    assert again == f"{first}-2"
    write(tmp_path / "hotpotqa.jsonl", [record(number=1, _id=None), twice])
    assert [row.id for row in load(tmp_path).rows] == [second, first]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(context=None), "field 'context'.*missing"),
        (record(input=None), "field 'input'.*missing"),
        (record(length=None), "field 'length'.*missing"),
        (record(answers=[]), "field 'answers'"),
        (record(answers=["", " "]), "field 'answers': expected at least one gold answer"),
        (record(answers="one"), "field 'answers'"),
        (record(answers=[3]), "field 'answers'"),
        (record(length="12"), "field 'length'"),
        (record(length=True), "field 'length'"),
        (record(context=" "), "field 'context'"),
        (record(context="\ud800"), "holds half of a surrogate pair"),
        (record(_id=7), "field '_id'"),
        (record(_id="\ud800"), "holds half of a surrogate pair"),
        (record(length=10**30), "field 'length': expected a number of words"),
        (record("musique"), "field 'dataset': expected 'hotpotqa', found 'musique'"),
        (record(_id="hotpotqa-9"), "'hotpotqa-9' is in line 1 already"),
        (["a"], "expected a JSON object, found list"),
        (b"{", "one JSON object a line"),
        (b"[" * 100_000, "one JSON object a line"),
        (b'{"context": "\xff"}', "expected UTF-8, found the byte 0xff"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, bad: Any, message: str) -> None:
    write(tmp_path / "hotpotqa.jsonl", [record(number=9), bad])
    with pytest.raises(DataError, match=rf"hotpotqa\.jsonl, line 2 \(hotpotqa\): .*{message}") as raised:
        load(tmp_path)
    assert len(str(raised.value)) < 400
    assert load(tmp_path, selection=FirstDocuments(1)).rows[0].id == "hotpotqa-9"


def test_another_tasks_rows_are_not_called_reworked(tmp_path: Path) -> None:
    write(tmp_path / "trec.jsonl", [record("qasper")])
    with pytest.raises(DataError, match="field 'dataset': expected 'trec', found 'qasper': another task's file"):
        load_rows(TASKS["trec"], tmp_path)


def test_labels_and_paragraphs_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "trec.jsonl", [record("trec", all_classes=["Place"])])
    with pytest.raises(DataError, match="field 'all_classes': expected the labels of trec, including the gold answer"):
        load(tmp_path, "trec")
    write(tmp_path / "passage_retrieval_en.jsonl", [record("passage_retrieval_en", answers=["3"])])
    with pytest.raises(DataError, match="expected 'Paragraph' and a number"):
        load(tmp_path, "passage_retrieval_en")


def test_empty_files_and_folders_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "hotpotqa.jsonl", [b"", b" "])
    with pytest.raises(DataError, match="expected rows, found none"):
        load(tmp_path)
    with pytest.raises(DataError, match="nothing there"):
        load(tmp_path / "absent")
    (tmp_path / "qasper.jsonl").mkdir()
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load(tmp_path, "qasper")
    (tmp_path / "musique.parquet").touch()
    with pytest.raises(DataError, match=r"musique\.parquet: LongBench's documents are read from its official files"):
        load(tmp_path, "musique")


# The hub's reformatted copies: the prompt in the documents, the question in a field of another name,
# and the answer cue removed from the input
REWORKED: list[tuple[str, dict[str, Any], str]] = [
    ("hotpotqa", record(input=None, question="Question: Who?", answer_prefix="Answer:"), "field 'question'"),
    ("hotpotqa", record(max_new_tokens=32), "field 'max_new_tokens'"),
    ("hotpotqa", record(context=template(HOTPOT).split("{context}")[0] + "Passage 1"), "prompt is already in"),
    ("trec", record("trec", input="Question: Who ?"), "does not end with 'Type:'"),
    ("triviaqa", record("triviaqa", input="Passage:\nx\nQuestion:\ny"), "does not end with 'Answer:'"),
    ("samsum", record("samsum", input="A: hi"), "does not end with 'Summary:'"),
]


@pytest.mark.parametrize(("task", "row", "message"), REWORKED)
def test_reworked_copies_are_refused(tmp_path: Path, task: str, row: dict[str, Any], message: str) -> None:
    write(tmp_path / f"{task}.jsonl", [row])
    with pytest.raises(DataError, match=f"a re-worked copy of LongBench .*{message}.*data.zip"):
        load(tmp_path, task)


class Served:
    """A hub that serves one archive."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: dict[str, list[Any]]) -> None:
        self.asked: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.archive = tmp_path / "hub" / "data.zip"
        self.archive.parent.mkdir()
        with zipfile.ZipFile(self.archive, "w") as archive:
            for name, records in members.items():
                archive.writestr(name, "".join(json.dumps(item) + "\n" for item in records))
        monkeypatch.setattr(hub_module, "reach", lambda: None)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self._download)
        self.hub = Hub()

    def _download(self, repository: str, name: str, *, repo_type: str) -> str:
        assert repo_type == "dataset"
        self.asked.append((repository, name))
        return str(self.archive)

    def load(self, task: str, folder: Path | None = None) -> data.LongBenchRows:
        return load_rows(TASKS[task], folder, say=self.said.append, hub=self.hub)


def test_the_hub_serves_what_the_folder_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"data/trec.jsonl": [record("trec")], "data/hotpotqa.jsonl": [record(number=5)]}
    served = Served(tmp_path, monkeypatch, members)
    write(tmp_path / "own" / "hotpotqa.jsonl", [record(number=1)])
    assert served.load("hotpotqa", tmp_path / "own").rows[0].id == "hotpotqa-1"
    assert served.asked == []
    found = served.load("trec", tmp_path / "own")
    assert (found.rows[0].id, found.official) == ("trec-0", False)
    assert found.source == "hub THUDM/LongBench, data/trec.jsonl"
    assert served.asked == [("THUDM/LongBench", "data.zip")]
    assert served.said == ["fetching data.zip of THUDM/LongBench from the Hugging Face hub"]


@pytest.mark.parametrize(("task", "row", "message"), REWORKED[:1])
def test_a_reworked_copy_from_the_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, row: dict[str, Any], message: str
) -> None:
    served = Served(tmp_path, monkeypatch, {f"data/{task}.jsonl": [row]})
    with pytest.raises(DataError, match=f"hub THUDM/LongBench, data/hotpotqa.jsonl, line 1 .*re-worked.*{message}"):
        served.load(task)


def test_a_wrong_or_broken_archive_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tmp_path, monkeypatch, {"data/other.jsonl": []})
    with pytest.raises(DataError, match=r"has no trec.jsonl; it is not LongBench's data.zip"):
        served.load("trec")
    served.archive.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"cannot be read .*delete it"):
        served.load("trec")


def test_a_cached_archive_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tmp_path, monkeypatch, {"data/trec.jsonl": [record("trec")]})
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(served.archive))
    monkeypatch.setattr(hub_module, "reach", lambda: pytest.fail("the hub was asked"))
    assert len(served.load("trec").rows) == 1
    assert served.said == []


def test_without_folder_and_hub_the_way_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(DataError, match=r"no documents for trec: .*HF_HUB_OFFLINE is set\).*--data-dir"):
        load_rows(TASKS["trec"], say=lambda _: None, hub=Hub())
    with pytest.raises(DataError, match=r"no trec\.jsonl in "):
        load_rows(TASKS["trec"], tmp_path, say=lambda _: None, hub=Hub())


def test_a_failing_download_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tmp_path, monkeypatch, {})

    def fail(repository: str, name: str, **_: Any) -> str:
        served.asked.append((repository, name))
        raise ConnectionError("cut off")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    for task in ("trec", "lcc"):
        with pytest.raises(DataError, match=r"the hub cannot be used .*cut off"):
            served.load(task)
    assert len(served.asked) == 1
