"""The journal under every kind of file damage, its rows as Arrow columns, and what a resumed run reads of it."""

from __future__ import annotations

import json
import math
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evalkit.errors import RunError
from evalkit.runs import columns, writing
from evalkit.runs.columns import from_bytes, record_batch, schema_digest, schema_of, to_bytes
from evalkit.runs.folder import JOURNAL, digest, load_run
from evalkit.runs.journal import Entry, FinishedRows, Journal
from evalkit.runs.traits import BatchDevice
from evalkit.runs.writing import open_run
from tests.journals import line_of
from tests.marks import fast
from tests.runs.conftest import MANIFEST, RESULT

RUN = "0123456789ab"
HERE = BatchDevice("cpu", "x86_64", "tiles", "here")
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Row(NamedTuple):
    """A column of each kind."""

    task: str
    doc_id: int
    likelihood: float | None
    greedy: bool = False
    entropy: float = 0.0


ROW = Row("piqa", 0, -1.5, True)
Written = tuple[Entry, list[Row]]
ENTRIES: list[Written] = [
    (Entry("piqa", 0, 0.25, HERE), [ROW]),
    (Entry("piqa", 1, 0.5, HERE), [Row("piqa", 1, -0.1 - 0.2), Row("é\n😀", 1, None)]),
    (Entry("boolq", 0, 1, HERE._replace(device="cuda:1")), []),
]


def journal(path: Path, say: Callable[[str], None] = print) -> Journal:
    return Journal(path, RUN, Row, say)


def read(journal: Journal) -> list[Written]:
    """Entries with their rows; what can be read at once can be read again by itself."""
    entries = list(journal.read())
    assert all(journal.rows(entry).equals(batch) for entry, batch in entries)
    return [(entry, [Row(**values) for values in batch.to_pylist()]) for entry, batch in entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL


def written(path: Path, entries: list[Written] = ENTRIES) -> bytes:
    """Write entries; what `append` returns is what `read` gives."""
    for entry, rows in entries:
        added, batch = journal(path).append(entry, rows)
        assert journal(path).rows(added).equals(batch)
    return path.read_bytes() if path.exists() else b""


def reread(path: Path) -> tuple[list[Written], list[str]]:
    """What a journal gives and says; a second reading must find nothing left to repair."""
    said: list[str] = []
    entries = read(journal(path, said.append))
    assert read(journal(path, pytest.fail)) == entries
    return entries, said


# Damage


@pytest.mark.parametrize("step", fast([7], [7, 1]))
def test_torn_at_every_byte(path: Path, step: int) -> None:
    """A kill in the middle of a write loses that entry and no other, and writing goes on after it."""
    assert reread(path) == ([], [])
    whole = written(path)
    assert reread(path) == (ENTRIES, [])
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    assert [entry.offset for entry, _ in journal(path).read()] == [0, *ends[:-1]]
    for size in sorted({*range(0, len(whole) + 1, step), *ends, *(end - 1 for end in ends)}):
        path.write_bytes(whole[:size])
        # The line feed alone may be missing: then the entry is whole
        kept = sum(end - 1 <= size for end in ends)
        entries, said = reread(path)
        assert entries == ENTRIES[:kept]
        assert len(said) == (size not in (0, *ends, *(end - 1 for end in ends)))
        assert written(path, ENTRIES[kept:]) == whole


@FEW
@given(st.data())
def test_a_flipped_bit_costs_its_own_entry_only(path: Path, data: st.DataObject) -> None:
    path.unlink(missing_ok=True)
    whole = bytearray(written(path))
    at = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(bytes(whole[:at]) + bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[at + 1 :])
    entries, _ = reread(path)
    hit = whole[:at].count(b"\n")
    # A flipped line feed joins two lines, and then neither matches its checksum
    others = [entry for number, entry in enumerate(ENTRIES) if number not in (hit, hit + (whole[at] == ord("\n")))]
    assert [entry for entry in entries if entry in others] == others
    assert all(entry in ENTRIES for entry in entries)


@FEW
@given(st.binary(max_size=300))
@example(b"0")
@example(b"00000000 ")
def test_garbage_is_no_entry(path: Path, garbage: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(garbage + b"\n" + written(path))
    assert reread(path)[0] == ENTRIES


def test_a_long_line_is_read_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = written(path).splitlines(keepends=True)
    monkeypatch.setattr("evalkit.runs.journal._LONGEST", 1000)
    path.write_bytes(first + b"x" * 4500 + b"\n" + b"".join(others))
    entries, [line] = reread(path)
    assert entries == ENTRIES and "5 damaged line(s)" in line


LATE = [RUN, "piqa", 2**63, 1, HERE, schema_digest(Row)]


@pytest.mark.parametrize(
    ("header", "noun"), [(b"[" * 100_000 + b"]", "recursion"), (json.dumps(LATE).encode(), "'batch'")]
)
def test_a_whole_line_of_another_form_is_an_error(path: Path, header: bytes, noun: str) -> None:
    """No batch is dropped for it. More are in tests/guards."""
    whole = written(path) + line_of(header + b" x")
    path.write_bytes(whole)
    with pytest.raises(RunError, match=f"{JOURNAL}, line 4: .*{noun}"):
        read(journal(path, pytest.fail))
    assert path.read_bytes() == whole


def test_a_file_that_changes(path: Path) -> None:
    written(path, ENTRIES[:1])
    [(entry, _)] = journal(path).read()
    path.write_bytes(path.read_bytes().replace(b"piqa", b"piqb"))
    with pytest.raises(RunError, match="changed"):
        journal(path).rows(entry)
    path.unlink()
    path.mkdir()
    with pytest.raises(RunError, match=JOURNAL):
        read(journal(path))


# Rows as columns

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.builds(Row, TEXTS, st.integers(-(2**63), 2**63 - 1), st.none() | FLOATS, st.booleans(), FLOATS)


@FEW
@given(st.lists(ROWS, max_size=30), st.integers(0, 30))
def test_rows_come_back_bit_for_bit(rows: list[Row], cut: int) -> None:
    batch = record_batch(rows, Row)
    table = pa.Table.from_batches([batch.slice(0, cut), batch.slice(cut)])
    for form in (batch, table, pa.table({name: table[name].combine_chunks() for name in Row._fields})):
        back = from_bytes(to_bytes(record_batch(form, Row)), Row)
        assert back.equals(batch)
        assert [Row(**values) for values in back.to_pylist()] == rows
        signs = [math.copysign(1, value) for value in back["entropy"].to_pylist()]
        assert signs == [math.copysign(1, row.entropy) for row in rows]


def test_other_columns_have_another_digest() -> None:
    forms = ([("a", int)], [("b", int)], [("a", float)], [("a", int | None)], [("a", int), ("b", int)])
    assert len({schema_digest(NamedTuple("Form", form)) for form in forms}) == 5  # type: ignore[misc]
    [row] = record_batch([["piqa", 1, 2**60 + 1, False, 3]], Row).to_pylist()
    assert (row["likelihood"], row["entropy"]) == (float(2**60 + 1), 3.0)


@pytest.mark.parametrize(
    ("rows", "noun"),
    [
        ([ROW, ROW._replace(entropy=-math.inf)], "'entropy'"),
        ([ROW._replace(doc_id=1.5)], "'doc_id'"),
        ([ROW._replace(greedy=1)], "'greedy'"),
        ([ROW, ROW[:4]], "4 fields"),
        (pa.table({"task": ["a"]}), "doc_id"),
        (pa.Table.from_pylist([ROW._replace(likelihood=None)._asdict()]), "'likelihood'"),
    ],
)
def test_rows_of_another_form_are_not_written(path: Path, rows: Any, noun: str) -> None:
    with pytest.raises(RunError, match=f"batch 3 of piqa .*{noun}"):
        journal(path).append(Entry("piqa", 3, 0.5, HERE), rows)
    assert not path.exists()


GOOD = record_batch([ROW._replace(task="é")] * 40, Row)


def messages(batch: pa.RecordBatch, **options: Any) -> list[bytes]:
    """The messages of a stream: its schema, then the batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [reader.read_next_message().serialize().to_pybytes() for _ in range(2)]


def nullable(**changed: Any) -> bytes:
    """A row with values that the schema does not allow; the bytes of a batch do not say."""
    schema = pa.schema([field.with_nullable(True) for field in schema_of(Row)])
    return zlib.compress(messages(pa.RecordBatch.from_pylist([ROW._asdict() | changed], schema))[1])


@pytest.mark.parametrize(
    ("content", "noun"),
    [
        (to_bytes(GOOD)[:-1], "truncated"),
        (to_bytes(GOOD) + b"\0", "other data follows"),
        (zlib.compress(messages(GOOD)[0]), "record batch"),
        (zlib.compress(messages(GOOD)[1].replace("é".encode(), b"\xff\xff")), r"(?i)utf-?8"),
        (nullable(task=None), "'task'"),
        (nullable(likelihood=math.nan), "'likelihood'"),
    ],
)
def test_bytes_that_hold_something_else(content: bytes, noun: str) -> None:
    with pytest.raises(ValueError, match=noun) as caught:
        from_bytes(content, Row)
    assert "\n" not in str(caught.value)


def test_what_is_too_large_is_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bombs: zlib's, and Arrow's own compression inside."""
    large = record_batch([ROW._replace(task="a" * (16 << 20))], Row)
    bombs = zlib.compress(b"\0" * (64 << 20), 9), zlib.compress(messages(large, compression="zstd")[1])
    monkeypatch.setattr(columns, "MAX_BYTES", 1 << 20)
    for content in bombs:
        assert len(content) < 100_000
        with pytest.raises(ValueError, match="1048576"):
            from_bytes(content, Row)
    with pytest.raises(ValueError, match="1048576"):
        to_bytes(large)


def changed(content: bytes, dice: random.Random) -> bytes:
    """A flipped bit, a number of the metadata that becomes a large one, or zeros."""
    at, kind = dice.randrange(len(content)), dice.randrange(3)
    if kind == 0:
        return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]
    if kind == 1:
        at = dice.randrange(0, min(len(content) - 8, 600) // 4) * 4
        return content[:at] + struct.pack("<q", dice.choice([2**62, 2**40, 2**31 - 1, -1])) + content[at + 8 :]
    return content[:at] + b"\0" * len(content[at : at + 40]) + content[at + 40 :]


def test_damage_under_a_right_checksum_is_rejected_or_harmless() -> None:
    """Nothing crashes, and what is taken can be read to its last value."""
    message, dice, rejected = messages(GOOD)[1], random.Random(5), 0
    for _ in range(800):
        damaged = changed(message, dice)
        try:
            batch = from_bytes(zlib.compress(changed(damaged, dice) if dice.random() < 0.3 else damaged, 0), Row)
        except ValueError as error:
            rejected += 1
            assert "\n" not in str(error)
        else:
            assert batch.schema == schema_of(Row) and len(batch.to_pylist()) == batch.num_rows <= 1000
    assert rejected > 80


# Finished rows, and the tables that are written from them


class Part(NamedTuple):
    """One of several rows of a document."""

    document: str
    part: int
    value: float


def parts(document: str, value: float, count: int = 2) -> list[Part]:
    return [Part(document, part, value + part) for part in range(count)]


def test_rows_are_found_by_their_keys_in_the_order_of_batches(path: Path) -> None:
    """The batches overlap, as a run leaves them that lost its manifest: of a key the first one in the file counts."""

    def finished() -> FinishedRows:
        return FinishedRows(Journal(path, RUN, Part, pytest.fail), ("document",))

    appended = finished()
    assert not appended
    appended.append(Entry("piqa", 1, 0.5, HERE), [*parts("b", 1), *parts("c", 1)])
    appended.append(Entry("piqa", 0, 0.5, HERE), [*parts("a", 2), *parts("b", 2)])
    appended.append(Entry("piqa", 0, 0.5, HERE), parts("a", 3, count=3))
    appended.append(Entry("boolq", 0, 0.5, HERE), parts("a", 4))
    for rows in (appended, finished()):
        assert rows and ("piqa", "c") in rows and ("boolq", "a") in rows and ("boolq", "b") not in rows
        assert rows.seconds == {"piqa": 1.5, "boolq": 0.5}
        assert list(rows.rows("piqa")) == [*parts("a", 2), *parts("b", 1), *parts("c", 1)]
        assert rows.table("piqa").to_pylist() == [row._asdict() for row in rows.rows("piqa")]
        assert all(batch.num_rows for batch in rows.batches("piqa"))
        assert rows.table("hellaswag").equals(schema_of(Part).empty_table())


def test_a_table_is_written_piece_by_piece_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_GROUP", 1000)
    with open_run(tmp_path, "run", dict(MANIFEST)) as writer:
        rows = writer.finished(Part, ("document",))
        for number in range(20):
            rows.append(Entry("piqa", number, 0.5, HERE), parts(str(number), number / 7, count=30))
        writer.save_batches("states.parquet", schema_of(Part), rows.batches("piqa"))
        writer.save_batches("none.parquet", schema_of(Part), iter(()))
        writer.save_results(RESULT)
        path = writer.folder / "states.parquet"
        assert 2 <= pq.ParquetFile(path).metadata.num_row_groups < 20
        assert pq.read_table(path).equals(rows.table("piqa"))
        assert pq.read_table(writer.folder / "none.parquet").equals(schema_of(Part).empty_table())
        run, before = load_run(writer.folder), path.read_bytes()
        assert run.files["states.parquet"] == digest(before)
        assert run.table("states.parquet", Part._fields).shape == (600, 3)
        assert run.manifest["devices"][0]["batches"] == {"piqa": "0-19"}
        # The journal changes while its rows are read
        journal = writer.folder / JOURNAL
        journal.write_bytes(journal.read_bytes()[:-9])
        with pytest.raises(RunError, match="changed"):
            writer.save_batches("states.parquet", schema_of(Part), rows.batches("piqa"))
        assert path.read_bytes() == before and not list(writer.folder.glob(".*.tmp"))
        path.write_bytes(before[:-9])
        with pytest.raises(RunError, match=r"states\.parquet is damaged"):
            run.table("states.parquet", Part._fields)
