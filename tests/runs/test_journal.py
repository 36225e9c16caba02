"""The journal under every kind of file damage: torn, flipped, doubled, empty, full disk."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evalkit.errors import RunError
from evalkit.paths import replace_file
from evalkit.runs.batch_devices import BatchDevice
from evalkit.runs.columns import record_batch, schema_digest, to_bytes
from evalkit.runs.journal import Entry, Journal
from tests.journals import line_of

RUN = "0123456789ab"
PLACE = BatchDevice("cpu", "x86_64", "tiles", "here")


class Row(NamedTuple):
    """What a line of these tests holds."""

    task: str
    doc_id: int
    likelihood: float | None
    greedy: bool = False


PACKED = base64.b64encode(to_bytes(record_batch([Row("piqa", 0, -1.5, True)], Row)))
Written = tuple[Entry, list[Row]]
ENTRIES: list[Written] = [
    (Entry("piqa", 0, 0.25, PLACE), [Row("piqa", 0, -1.5, True)]),
    (Entry("piqa", 1, 0.5, PLACE), [Row("piqa", 1, -0.1 - 0.2), Row("é\n😀", 1, None)]),
    (Entry("boolq", 0, 1, PLACE._replace(device="cuda:1")), []),
]


def journal(path: Path, say: Callable[[str], None] = print) -> Journal:
    return Journal(path, RUN, Row, say)


def read(journal: Journal) -> list[Written]:
    """Entries with their rows; what can be read at once can be read again by itself."""
    found = list(journal.read())
    for entry, batch in found:
        assert journal.rows(entry).equals(batch)
    return [(entry, [Row(**values) for values in batch.to_pylist()]) for entry, batch in found]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def written(path: Path, entries: list[Written] = ENTRIES) -> bytes:
    for entry, rows in entries:
        journal(path).append(entry, rows)
    return path.read_bytes()


def reread(path: Path) -> tuple[list[Written], list[str]]:
    """What a journal gives and says; a second reading must find nothing left to repair."""
    said: list[str] = []
    found = read(journal(path, said.append))
    again: list[str] = []
    assert read(journal(path, again.append)) == found
    assert again == []
    return found, said


def test_what_is_written_is_read(path: Path) -> None:
    written(path)
    assert reread(path) == (ENTRIES, [])


def test_an_entry_says_where_it_stands(path: Path) -> None:
    """What `append` returns is what `read` gives, so that a session reads its own rows back."""
    for entry, rows in ENTRIES:
        added, batch = journal(path).append(entry, rows)
        assert journal(path).rows(added).equals(batch)
        assert [Row(**values) for values in batch.to_pylist()] == rows
    assert [entry.offset for entry, _ in journal(path).read()] == [
        0, *(at + 1 for at, byte in enumerate(path.read_bytes()[:-1]) if byte == ord("\n"))
    ]  # fmt: skip


def test_rows_that_are_not_there_any_more(path: Path) -> None:
    written(path)
    [*_, (entry, _)] = journal(path).read()
    path.write_bytes(path.read_bytes().replace(b"boolq", b"boolk"))
    with pytest.raises(RunError, match=r"journal .* was changed while it was read; run the same command again"):
        journal(path).rows(entry)
    path.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        journal(path).rows(entry)


def test_no_journal_is_an_empty_one(path: Path) -> None:
    assert reread(path) == ([], [])
    assert not path.exists()
    path.touch()
    assert reread(path) == ([], [])


def test_torn_at_every_byte(path: Path) -> None:
    """A kill in the middle of a write loses that entry and no other, and writing goes on after it."""
    whole = written(path)
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        # The line feed alone may be missing: then the entry is whole
        kept = sum(end - 1 <= size for end in ends)
        found, said = reread(path)
        assert found == ENTRIES[:kept]
        torn = size not in (0, *ends, *(end - 1 for end in ends))
        assert len(said) == torn
        assert written(path, ENTRIES[kept:]) == whole


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_costs_its_own_entry_only(path: Path, data: st.DataObject) -> None:
    path.unlink(missing_ok=True)
    whole = bytearray(written(path))
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytes(whole[:at]) + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + bytes(whole[at + 1 :])
    path.write_bytes(damaged)
    found, _ = reread(path)
    hit = whole[:at].count(b"\n")
    # A flipped line feed joins two lines, and then neither matches its checksum
    others = [entry for number, entry in enumerate(ENTRIES) if number not in (hit, hit + (whole[at] == ord("\n")))]
    assert [entry for entry in found if entry in others] == others
    assert all(entry in ENTRIES for entry in found)


def test_damage_in_the_middle_is_said_and_repaired(path: Path) -> None:
    lines = written(path).split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1].replace(b"piqa", b"piqb"), *lines[2:]]))
    found, said = reread(path)
    assert found == [ENTRIES[0], ENTRIES[2]]
    assert said == [f"{path}: 1 damaged line(s) dropped; their documents are scored again"]


def test_an_empty_line_and_no_last_line_feed(path: Path) -> None:
    """The file's size is then that of a whole one, and no line stands where it seems to."""
    whole = written(path)
    path.write_bytes(b"\n" + whole[:-1])
    assert reread(path) == (ENTRIES, [])
    assert path.read_bytes() == whole


def test_a_batch_written_twice_counts_once(path: Path) -> None:
    path.write_bytes(written(path) + path.read_bytes())
    found, said = reread(path)
    assert sorted(found, key=ENTRIES.index) == ENTRIES
    assert said == []
    assert path.read_bytes().count(b"\n") == len(ENTRIES)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
@example(b"0")
@example(b"00000000 ")
def test_garbage_is_no_entry(path: Path, garbage: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(garbage + b"\n" + written(path))
    found, _ = reread(path)
    assert found == ENTRIES


def line(content: Any) -> bytes:
    return line_of(content if isinstance(content, bytes) else json.dumps(content).encode())


def columns(packed: bytes, **changed: Any) -> bytes:
    """A line's content in the form of columns, with another header or other rows."""
    header = {"run": RUN, "task": "piqa", "batch": 0, "seconds": 0.25, "place": PLACE, "columns": schema_digest(Row)}
    return json.dumps([*(header | changed).values()]).encode() + b" " + packed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{} x", "run"),
        (b"[] x", "run"),
        (b"[" * 100_000 + b"] x", "recursion"),
        (b"\xff x", "JSON"),
        (b"\xff", "JSON"),
        (columns(PACKED, batch="0"), "batch"),
        (columns(PACKED, batch=True), "batch"),
        (columns(PACKED, batch=10**400), "batch"),
        (columns(PACKED, batch=2**63), "batch"),
        (columns(PACKED, seconds=None), "seconds"),
        (columns(PACKED, seconds=float("nan")), "seconds"),
        (columns(PACKED, seconds=float("inf")), "seconds"),
        (columns(PACKED, task=["piqa"]), "task"),
        (columns(PACKED, place=None), "place"),
        (columns(PACKED, run="ba9876543210"), f"it belongs to run ba9876543210; expected {RUN}"),
        (columns(PACKED, place=["cpu"]), "place"),
        (columns(PACKED, seconds=-1), "seconds"),
        (columns(PACKED, columns=["task"]), "columns"),
        (columns(PACKED, columns="01234567"), "its rows have other columns; expected task, doc_id, likelihood, greedy"),
        (columns(PACKED, more=1), "batch of this run"),
        (columns(b""), "its rows are truncated"),
        (columns(b"=" + PACKED), "padding"),
        (columns(PACKED[:-4]), "its rows are truncated, or other data follows them"),
        (columns(base64.b64encode(b"no rows")), "its rows cannot be decompressed"),
    ],
)
def test_a_whole_line_of_another_run_or_form_is_refused(path: Path, content: Any, words: str) -> None:
    """It was written so, by whatever wrote it: no batch is dropped for it, and nothing is scored again unasked."""
    written(path)
    whole = path.read_bytes() + line(content)
    path.write_bytes(whole)
    with pytest.raises(
        RunError, match=r"journal .*, line 4: not a batch of this run \(.*\); restore the run"
    ) as caught:
        read(journal(path, pytest.fail))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == whole


def test_a_line_longer_than_any_is_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in pieces, never as a whole."""
    monkeypatch.setattr("evalkit.runs.journal._LONGEST", 1000)
    first, *others = written(path).splitlines(keepends=True)
    path.write_bytes(first + b"x" * 4500 + b"\n" + b"".join(others))
    found, [said] = reread(path)
    assert found == ENTRIES
    assert "5 damaged line(s) dropped" in said


def test_batches_with_the_same_number_are_all_kept(path: Path) -> None:
    """As a run leaves them that lost its manifest, and with it its token budget."""
    entries = [ENTRIES[0], (Entry("piqa", 0, 0.5, PLACE), [Row("piqa", 7, -3.0)])]
    written(path, entries)
    assert reread(path) == (entries, [])


def test_a_full_disk_is_an_error_and_costs_nothing_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(path, ENTRIES[:1])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            RunError, match=r"No space left on device.*batch 1 of piqa is not saved, earlier batches are"
        ):
            journal(path).append(*ENTRIES[1])
    assert reread(path)[0][0] == ENTRIES[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_device_that_takes_nothing() -> None:
    with pytest.raises(RunError, match="No space left on device"):
        journal(Path("/dev/full")).append(*ENTRIES[0])


def test_a_journal_that_is_a_folder(path: Path) -> None:
    path.mkdir()
    with pytest.raises(RunError, match=r"journal .* cannot be read"):
        read(journal(path))


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_replacing_a_file_keeps_the_old_one_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "results.json"
    replace_file(target, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if failing == "fsync" else Path, failing, full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_kill_left_of_a_replacement_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    target.with_name(".results.json.tmp").write_bytes(b"half of")
    replace_file(target, b"new", locked=True)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert target.read_bytes() == b"new"


def test_line_ends_of_another_system(path: Path) -> None:
    """As a copy through a version control or an editor may leave them."""
    content = written(path)
    path.write_bytes(content.replace(b"\n", b"\r\n"))
    found, said = reread(path)
    assert (found, said) == (ENTRIES, [])
    assert path.read_bytes() == content
