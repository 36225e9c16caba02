"""Files of --text → documents, and the messages about those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.perplexity.texts import read_texts
from evalkit.errors import DataError, ScoringError, UsageError


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(one) for one in records) + "\n", encoding="utf-8")
    return path


def test_a_file_is_a_task(tmp_path: Path) -> None:
    (tmp_path / "book.part.txt").write_bytes("\ufeffEin Fluß.\r\nUnd\n".encode())
    wiki = lines(tmp_path / "wiki.jsonl", {"text": "a 👍"}, {"text": "b", "more": 1})
    found = read_texts([tmp_path / "book.part.txt", wiki], "text")
    assert list(found) == ["book.part", "wiki"]
    [book] = found["book.part"].documents
    assert book.content == "Ein Fluß.\r\nUnd\n".encode()  # line ends count, a byte order mark does not
    assert [(one.number, one.text, one.place) for one in found["wiki"].documents] == [
        (0, "a 👍", f"{wiki}, line 1"),
        (1, "b", f"{wiki}, line 2"),
    ]


def test_a_folder(tmp_path: Path) -> None:
    """Its .txt files are documents of one task, in numeric order; other files are not read."""
    for number in (10, 9, 1):
        (tmp_path / f"chapter{number}.txt").write_text(f"chapter {number}", encoding="utf-8")
    (tmp_path / "notes.md").write_text("no", encoding="utf-8")
    lines(tmp_path / "more.jsonl", {"body": "x"})
    found = read_texts([tmp_path], "body")
    assert [one.text for one in found[tmp_path.name].documents] == ["chapter 1", "chapter 9", "chapter 10"]
    assert [one.text for one in found["more"].documents] == ["x"]


def test_the_hash_is_that_of_the_documents(tmp_path: Path) -> None:
    def digest(*texts: str, key: str = "text") -> str:
        path = lines(tmp_path / "a.jsonl", *({key: text} for text in texts))
        return read_texts([path], key)["a"].digest

    assert digest("ab", "c") == digest("ab", "c", key="other")
    assert len({digest("ab", "c"), digest("a", "bc"), digest("c", "ab"), digest("abc")}) == 4


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "a.txt: the file is empty"),
        ("a.txt", b"one\ntw\xff\n", "a.txt, line 2: expected UTF-8, found the byte 0xff"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": ""}', "a.jsonl, line 3: 'text' is empty"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x"}', "a.jsonl, line 2: has no key 'text', but 'body'; name the key"),
        ("a.jsonl", b'{"text": ["x"]}', "a.jsonl, line 1: 'text' is ['x']; expected a text"),
        ("a.jsonl", b'["x"]', "a.jsonl, line 1: expected a JSON object with the text under 'text'"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\xff"}',
            "a.jsonl, line 2 (a): ",
        ),
        ("a.jsonl", b'{"text": "\\ud800"}', "half of a surrogate pair"),
        ("a.jsonl", b"{", "a.jsonl, line 1 (a): "),
        ("a.jsonl", b"\n", "a.jsonl: has no documents"),
    ],
)
def test_documents_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        read_texts([tmp_path / name], "text")
    assert said in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_a_document_that_is_too_long_for_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * (2**23 + 1), encoding="utf-8")
    with pytest.raises(ScoringError, match=r"a\.txt: its text has 8,388,609 characters, more than the maximum"):
        read_texts([tmp_path / "a.txt"], "text")


def test_a_folder_whose_name_has_a_dot(tmp_path: Path) -> None:
    (tmp_path / "v1.0").mkdir()
    (tmp_path / "v1.0" / "a.txt").write_text("x", encoding="utf-8")
    assert list(read_texts([tmp_path / "v1.0"], "text")) == ["v1.0"]


def test_options_that_name_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a text: --text FILE"):
        read_texts([], "text")
    with pytest.raises(DataError, match=r"nowhere.txt cannot be read: No such file"):
        read_texts([tmp_path / "nowhere.txt"], "text")
    with pytest.raises(UsageError, match=r"the folder has no \.txt or \.jsonl files"):
        read_texts([tmp_path], "text")
    with pytest.raises(UsageError, match=r"\.parquet files are not read; give \.txt or \.jsonl"):
        read_texts([tmp_path / "a.parquet"], "text")
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    lines(tmp_path / "a.jsonl", {"text": "x"})
    with pytest.raises(UsageError, match="would both be task a; rename one"):
        read_texts([tmp_path / "a.txt", tmp_path / "a.jsonl"], "text")
