"""Task files: every format gives the same records, and errors are one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from evalkit.data import Library
from evalkit.data.files import did_you_mean, find, read
from evalkit.errors import DataError
from tests.data.samples import sample, write

GOOD = json.dumps(sample("piqa")).encode()


def _load(path: Path) -> str:
    """Return the error message of loading an invalid piqa file; it is invalid as unofficial data too."""
    with pytest.raises(DataError) as caught:
        Library(path.parent, allow_unofficial=True).load("piqa")
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "piqa" in message
    return message


WRONG_LINES: list[tuple[bytes, str]] = [
    (b'{"goal": "x",', "line 3 .*expected one JSON object a line"),
    (b"[1, 2]", "line 3 .*expected a JSON object, found list"),
    (b'{"goal": "\xff"}', "line 3 .*expected UTF-8, found the byte 0xff"),
    (b"[" * 100_000, "line 3 .*expected one JSON object a line"),
    (b'{"goal": ' + b"9" * 5000 + b"}", "line 3 .*expected one JSON object a line"),
    (
        json.dumps(sample("piqa", label=7)).encode(),
        "line 3 .*'label'.* 7",
    ),
    (json.dumps(sample("arc_easy")).encode(), "line 3 .*'goal'"),
]


@pytest.mark.parametrize(("line", "expected"), WRONG_LINES)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"", line, GOOD]))
    assert re.search(expected, _load(path))


def _empty(path: Path) -> None:
    path.write_text("\n\n")


def _folder(path: Path) -> None:
    path.mkdir()


def _broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_empty, "expected 1838 documents, found none"),
        (_folder, "expected a file, found a folder"),
        (_broken_link, "cannot be read: No such file"),
        (_loop, "cannot be read: Too many levels"),
    ],
)
def test_what_is_no_file_of_documents(tmp_path: Path, make: Callable[[Path], None], expected: str) -> None:
    make(tmp_path / "piqa.jsonl")
    assert expected in _load(tmp_path / "piqa.jsonl")


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "piqa", sample("piqa"))

    def refuse(self: Path, *_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # permissions do not apply to root, so they are mocked
    assert "cannot be read: Permission denied" in _load(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("piqa.json", b'{"goal": 1}', "expected a JSON list of documents, found dict"),
        ("piqa.json", b"[", "expected a JSON list of documents"),
        ("piqa.json", b"[]", "found none"),
        ("piqa.json", b'[{"goal": ""}]', "record 1 (piqa): the document: 'goal'"),
        ("piqa.parquet", b"PAR1 no", "expected a Parquet file"),
    ],
)
def test_wrong_json_and_parquet(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in _load(tmp_path / name)


def test_all_formats_give_the_same_records(tmp_path: Path) -> None:
    records = [sample("openbookqa"), sample("openbookqa", question_stem="Ünïcode \u2028 “stem”")]
    lines = write(tmp_path, "openbookqa", *records)
    (tmp_path / "a.json").write_text(json.dumps(records))
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.read_bytes().replace(b"\n", b"\r\n"))
    for name in ("openbookqa.jsonl", "a.json", "b.parquet", "c.jsonl"):
        assert [record for _, record in read(tmp_path / name, "openbookqa")] == records, name


def test_find_prefers_json_lines(tmp_path: Path) -> None:
    assert find(tmp_path, "piqa") is None
    (tmp_path / "piqa.parquet").touch()
    assert find(tmp_path, "piqa") == tmp_path / "piqa.parquet"
    (tmp_path / "piqa.jsonl").touch()
    assert find(tmp_path, "piqa") == tmp_path / "piqa.jsonl"


def test_a_folder_beneath_is_named(tmp_path: Path) -> None:
    """The folder with most matching files, the uppermost of equals; not hidden or too deep ones."""

    def hint() -> str:
        return did_you_mean(tmp_path, lambda folder: sum(find(folder, task) is not None for task in "ab"))

    for name in (".cache", "one/two/three/four"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.jsonl").touch()
    assert hint() == ""
    (tmp_path / "one/two/b.parquet").touch()
    assert hint() == f" (did you mean {tmp_path / 'one/two'}?)"
    (tmp_path / "one/two/three/a.jsonl").touch()
    assert hint() == f" (did you mean {tmp_path / 'one/two'}?)"
    (tmp_path / "one/two/three/b.json").touch()
    assert hint() == f" (did you mean {tmp_path / 'one/two/three'}?)"
