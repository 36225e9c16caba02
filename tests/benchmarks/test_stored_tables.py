"""Tables in the cache: read as written, never from a damaged file, and within a limit of bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

import evalkit.cache
from evalkit.benchmarks.multiple_choice.stored import read_table, write_table

TABLE = pa.table({"a": [1, 2, 3], "b": [["x"], [], ["y", "z"]]}).replace_schema_metadata({"task": "夜"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path))
    return tmp_path


def test_a_table_is_read_as_written_under_its_kind_and_key() -> None:
    assert read_table("kind", "key") is None
    write_table("kind", "key", TABLE)
    found = read_table("kind", "key")
    assert found is not None
    assert found.equals(TABLE, check_metadata=True)
    assert read_table("kind", "other") is None
    assert read_table("other", "key") is None


@pytest.mark.parametrize("place", [0, 31, 32, 200, -1])
def test_a_changed_byte_is_noticed(cache: Path, place: int) -> None:
    write_table("kind", "key", TABLE)
    [file] = (cache / "kind").iterdir()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert read_table("kind", "key") is None


@pytest.mark.parametrize("size", [0, 10, 32, 100])
def test_a_file_that_was_cut_off_is_noticed(cache: Path, size: int) -> None:
    write_table("kind", "key", TABLE)
    [file] = (cache / "kind").iterdir()
    file.write_bytes(file.read_bytes()[:size])
    assert read_table("kind", "key") is None


def test_the_tables_that_were_not_used_for_longest_are_deleted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, key in enumerate("abc"):
        write_table("questions", key, TABLE)
        newest = max((cache / "questions").iterdir(), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (1000 + number, 1000 + number))
    size = newest.stat().st_size
    assert read_table("questions", "a") is not None  # used now
    monkeypatch.setattr(evalkit.cache, "MOST_BYTES", 3 * size)
    write_table("questions", "d", TABLE)
    assert [read_table("questions", key) is not None for key in "abcd"] == [True, False, True, True]


def test_a_folder_that_cannot_be_written_costs_only_time(cache: Path) -> None:
    (cache / "kind").write_text("a file")
    write_table("kind", "key", TABLE)
    assert read_table("kind", "key") is None
