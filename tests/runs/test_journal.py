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


class Lists(NamedTuple):
    """The other type of rows of the run, with lists."""

    task: str
    codes: list[int]
    sums: list[float | None]
    names: list[str]
    is_greedy: bool | None


ROW = Row("piqa", 0, -1.5, True)
LISTS = Lists("piqa", [0, 3], [None, -0.25], ["é", ""], None)
Written = tuple[Entry, list[Any]]
ENTRIES: list[Written] = [
    (Entry("piqa", 0, 0.25, HERE), [ROW]),
    (Entry("texts", 0, 0.25, HERE), [LISTS, Lists("piqa", [], [], [], True)]),
    (Entry("piqa", 1, 0.5, HERE), [Row("piqa", 1, -0.1 - 0.2), Row("é\n😀", 1, None)]),
    (Entry("boolq", 0, 1, HERE._replace(device="cuda:1")), []),
]


def journal(path: Path, say: Callable[[str], None] = print) -> Journal:
    return Journal(path, RUN, (Row, Lists), say)


def rows_of(batch: pa.RecordBatch) -> list[Any]:
    row: Any = Row if batch.schema.equals(schema_of(Row)) else Lists
    return [row(**values) for values in batch.to_pylist()]


def read(journal: Journal) -> list[Written]:
    """Entries with their rows; what can be read at once can be read again by itself."""
    entries = list(journal.read())
    assert all(journal.rows(entry).equals(batch) for entry, batch in entries)
    return [(entry, rows_of(batch)) for entry, batch in entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL


def written(path: Path, entries: list[Written] = ENTRIES) -> bytes:
    """Write entries; what `append` returns is what `read` gives."""
    for entry, rows in entries:
        added, batch = journal(path).append(entry, rows, type(rows[0]) if rows else Row)
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


def test_rows_of_a_type_that_the_run_does_not_have_are_an_error(path: Path) -> None:
    """The journal is not changed."""
    whole = written(path)
    for types, noun in (((Row,), "line 2: .*'?doc_id"), ((Lists,), "line 1: .*codes")):
        with pytest.raises(RunError, match=f"{JOURNAL}, {noun}"):
            list(Journal(path, RUN, types, pytest.fail).read())
    assert path.read_bytes() == whole


LATE = [RUN, "piqa", 2**63, 1, HERE, schema_digest(Row)]


@pytest.mark.parametrize(
    ("header", "noun"), [(b"[" * 100_000 + b"]", "recursion"), (json.dumps(LATE).encode(), "'batch'")]
)
def test_a_whole_line_of_another_form_is_an_error(path: Path, header: bytes, noun: str) -> None:
    """No batch is dropped for it. More are in tests/guards."""
    whole = written(path) + line_of(header + b" x")
    path.write_bytes(whole)
    with pytest.raises(RunError, match=f"{JOURNAL}, line {len(ENTRIES) + 1}: .*{noun}"):
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
INTEGERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.builds(Row, TEXTS, INTEGERS, st.none() | FLOATS, st.booleans(), FLOATS)
LISTED = st.builds(
    Lists, TEXTS, st.lists(INTEGERS), st.lists(st.none() | FLOATS), st.lists(TEXTS), st.none() | st.booleans()
)


@FEW
@given(st.lists(ROWS, max_size=30) | st.lists(LISTED, max_size=10), st.integers(0, 30))
def test_rows_come_back_bit_for_bit(rows: list[Any], cut: int) -> None:
    row = type(rows[0]) if rows else Row
    batch = record_batch(rows, row)
    table = pa.Table.from_batches([batch.slice(0, cut), batch.slice(cut)])
    for form in (batch, table, pa.table({name: table[name].combine_chunks() for name in row._fields})):
        back = from_bytes(to_bytes(record_batch(form, row)), row)
        assert back.equals(batch)
        restored = [row(**values) for values in back.to_pylist()]
        # The digits of a float are exact, and -0.0 has its sign
        assert list(map(repr, restored)) == list(map(repr, rows))


def test_other_columns_have_another_digest() -> None:
    forms: Any = (
        [("a", int)],
        [("b", int)],
        [("a", float)],
        [("a", int | None)],
        [("a", int), ("b", int)],
        [("a", list[int])],
        [("a", list[float])],
        [("a", list[float | None])],
    )
    assert len({schema_digest(NamedTuple("Form", form)) for form in forms}) == len(forms)  # type: ignore[misc]
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
        ([LISTS], "'doc_id'"),  # of the run's other type
    ],
)
def test_rows_of_another_form_are_not_written(path: Path, rows: Any, noun: str) -> None:
    with pytest.raises(RunError, match=f"batch 3 of piqa .*{noun}"):
        journal(path).append(Entry("piqa", 3, 0.5, HERE), rows, Row)
    assert not path.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"sums": [-1.0, math.nan]},
        {"sums": [-math.inf]},
        {"sums": [True]},
        {"sums": None},
        {"codes": [1, 2.5]},
        {"codes": [1, None]},
        {"codes": [2**63]},
        {"codes": 3},
        {"codes": [[1]]},
        {"names": ["a", 1]},
        {"names": "ab"},
        {"is_greedy": 1},
    ],
    ids=repr,
)
def test_lists_of_another_form_are_not_written(path: Path, changes: dict[str, Any]) -> None:
    """The rows before and after are of the right form."""
    [name] = changes
    with pytest.raises(RunError, match=f"batch 3 of piqa .*'{name}'"):
        journal(path).append(Entry("piqa", 3, 0.5, HERE), [LISTS, LISTS._replace(**changes), LISTS], Lists)
    assert not path.exists()


GOOD = record_batch([ROW._replace(task="é")] * 40, Row)
GOOD_LISTS = record_batch([LISTS, LISTS._replace(codes=[], names=["a"])] * 20, Lists)


def messages(batch: pa.RecordBatch, **options: Any) -> list[bytes]:
    """The messages of a stream: its schema, then the batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [reader.read_next_message().serialize().to_pybytes() for _ in range(2)]


def nullable(row: Any = ROW, **changed: Any) -> bytes:
    """A row with values that the schema does not allow; the bytes of a batch do not say."""
    fields = [
        pa.field(field.name, pa.list_(field.type.value_type) if pa.types.is_list(field.type) else field.type)
        for field in schema_of(type(row))
    ]
    return zlib.compress(messages(pa.RecordBatch.from_pylist([row._asdict() | changed], pa.schema(fields)))[1])


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


@pytest.mark.parametrize("changes", [{"sums": [math.nan]}, {"codes": [1, None]}, {"codes": None}, {"names": [None]}])
def test_bytes_that_hold_other_lists(changes: dict[str, Any]) -> None:
    assert from_bytes(nullable(LISTS), Lists).to_pylist() == [LISTS._asdict()]
    [name] = changes
    with pytest.raises(ValueError, match=f"'{name}'"):
        from_bytes(nullable(LISTS, **changes), Lists)


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


@pytest.mark.parametrize(("good", "row"), [(GOOD, Row), (GOOD_LISTS, Lists)], ids=["values", "lists"])
def test_damage_under_a_right_checksum_is_rejected_or_harmless(good: pa.RecordBatch, row: Any) -> None:
    """Nothing crashes, and what is taken can be read to its last value."""
    message, dice, rejected = messages(good)[1], random.Random(5), 0
    for _ in range(800):
        damaged = changed(message, dice)
        try:
            batch = from_bytes(zlib.compress(changed(damaged, dice) if dice.random() < 0.3 else damaged, 0), row)
        except ValueError as error:
            rejected += 1
            assert "\n" not in str(error)
        else:
            assert batch.schema == schema_of(row) and len(batch.to_pylist()) == batch.num_rows <= 1000
    assert rejected > 80


# Finished rows, and the tables that are written from them


class Part(NamedTuple):
    """One of several rows of a document, which are not counted."""

    document: str
    part: int
    value: float


def parts(document: str, value: float, count: int = 2) -> list[Part]:
    return [Part(document, part, value + part) for part in range(count)]


def test_rows_are_found_by_their_keys_in_the_order_of_batches(path: Path) -> None:
    """The batches overlap, as a run leaves them that lost its manifest: of a key the first one in the file counts."""

    def finished() -> FinishedRows:
        return FinishedRows(Journal(path, RUN, (Part,), pytest.fail), ("document",))

    appended = finished()
    assert not appended
    for task, number, rows in (
        ("piqa", 1, [*parts("b", 1), *parts("c", 1)]),
        ("piqa", 0, [*parts("a", 2), *parts("b", 2)]),
        ("piqa", 0, parts("a", 3, count=3)),
        ("boolq", 0, parts("a", 4)),
    ):
        appended.append(Entry(task, number, 0.5, HERE), rows, Part)
    for found in (appended, finished()):
        assert found and ("piqa", "c") in found and ("boolq", "a") in found and ("boolq", "b") not in found
        assert found.seconds == {"piqa": 1.5, "boolq": 0.5}
        assert list(found.rows("piqa")) == [*parts("a", 2), *parts("b", 1), *parts("c", 1)]
        assert found.table("piqa").to_pylist() == [row._asdict() for row in found.rows("piqa")]
        assert all(batch.num_rows for batch in found.batches("piqa"))
        assert found.table("hellaswag").equals(schema_of(Part).empty_table())


class Window(NamedTuple):
    """One of so many rows of a document, with lists."""

    document: str
    part: int
    parts: int
    sums: list[float]


def windows(document: str, count: int, stored: int | None = None) -> list[Window]:
    """The first rows of a document that has `count`."""
    return [Window(document, part, count, [0.5] * part) for part in range(count if stored is None else stored)]


def test_rows_of_two_types_in_one_run(path: Path) -> None:
    """Each task has its own type; the parts of a document are counted where they are not one."""
    key = ("document", "part")

    def finished(path: Path) -> FinishedRows:
        return FinishedRows(Journal(path, RUN, (Part, Window), pytest.fail), key)

    appended = finished(path)
    appended.append(Entry("words", 0, 0.5, HERE), parts("a", 1), Part)
    appended.append(Entry("texts", 0, 0.5, HERE), [*windows("a", 3), *windows("b", 1)], Window)
    appended.append(Entry("texts", 1, 0.5, HERE), windows("c", 3, stored=2), Window)
    for found in (appended, finished(path)):
        assert list(found.rows("words")) == parts("a", 1)
        assert list(found.rows("texts")) == [*windows("a", 3), *windows("b", 1), *windows("c", 3, stored=2)]
        assert (found.table("words").schema, found.table("texts").schema) == (schema_of(Part), schema_of(Window))
        assert found.parts == {("texts", "a"): 3, ("texts", "c"): 3}
    # Rows that another run takes keep their types
    taken = finished(path.with_name("other"))
    taken.take(finished(path), {("words", "a", 1), ("texts", "a", 0), ("texts", "b", 0)}, in_batches=False)
    for found in (taken, finished(path.with_name("other"))):
        assert list(found.rows("words")) == parts("a", 1)[1:]
        assert list(found.rows("texts")) == [windows("a", 3)[0], *windows("b", 1)]
        assert not found.has_batches
        assert found.without_batch == {("words", "a", 1), ("texts", "a", 0), ("texts", "b", 0)}


def test_a_table_is_written_piece_by_piece_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_GROUP", 1000)
    with open_run(tmp_path, "run", dict(MANIFEST)) as writer:
        rows = writer.finished((Part,), ("document",))
        for number in range(20):
            rows.append(Entry("piqa", number, 0.5, HERE), parts(str(number), number / 7, count=30), Part)
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
