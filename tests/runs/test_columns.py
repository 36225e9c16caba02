"""Rows as Arrow columns: exact, and rejected with a one-line error if made with another schema."""

from __future__ import annotations

import math
import random
import resource
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.runs import columns
from evalkit.runs.columns import from_bytes, record_batch, schema_digest, schema_of, to_bytes


class Row(NamedTuple):
    """A column of each kind."""

    task: str
    doc_id: int
    likelihood: float
    entropy: float | None
    greedy: bool
    text: str | None


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.builds(
    Row,
    TEXTS,
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none() | TEXTS,
)
ONE = Row("piqa", 1, -0.5, None, True, "é")


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    return [Row(**values) for values in batch.to_pylist()]


@settings(max_examples=200)
@given(st.lists(ROWS, max_size=30))
def test_rows_come_back_bit_for_bit(rows: list[Row]) -> None:
    found = rows_of(from_bytes(to_bytes(record_batch(rows, Row)), Row))
    assert found == rows
    assert [math.copysign(1, row.likelihood) for row in found] == [math.copysign(1, row.likelihood) for row in rows]
    assert [list(map(type, row)) for row in found] == [list(map(type, row)) for row in rows]


def test_whole_numbers_of_a_journal_in_json_are_numbers() -> None:
    [row] = rows_of(record_batch([["piqa", 1, 2**60 + 1, 3, False, None]], Row))
    assert (row.likelihood, row.entropy) == (float(2**60 + 1), 3.0)


def test_a_table_or_a_slice_of_a_batch_is_as_good_as_rows() -> None:
    rows = [ONE._replace(doc_id=number, text=None if number % 3 else "x" * number) for number in range(50)]
    batch = record_batch(rows, Row)
    assert rows_of(from_bytes(to_bytes(batch.slice(7, 9)), Row)) == rows[7:16]
    table = pa.Table.from_batches([batch.slice(0, 20), batch.slice(20)])
    assert rows_of(record_batch(table, Row)) == rows
    assert record_batch(schema_of(Row).empty_table(), Row).num_rows == 0
    # As made of arrays, where every column may be null
    plain = pa.table({name: table[name].combine_chunks() for name in Row._fields})
    assert to_bytes(record_batch(plain, Row)) == to_bytes(batch)


@pytest.mark.parametrize("kind", [list, int | str, bytes])
def test_a_field_that_no_column_holds_is_named(kind: Any) -> None:
    fields = [("what", kind)]
    other = NamedTuple("other", fields)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"other.what: expected one of str, int, float, bool, or that and None"):
        schema_of(other)


def test_other_columns_have_another_digest() -> None:
    digests = {
        schema_digest(NamedTuple("one", fields))  # type: ignore[misc]
        for fields in ([("a", int)], [("b", int)], [("a", float)], [("a", int | None)], [("a", int), ("b", int)])
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ONE._replace(likelihood=math.nan)], "'likelihood' contains NaN or infinity; expected finite numbers"),
        ([ONE, ONE._replace(entropy=-math.inf)], "'entropy' contains NaN or infinity"),
        ([ONE._replace(likelihood=None)], "'likelihood' is null in a row"),
        ([ONE._replace(doc_id=1.5)], r"'doc_id' has the type float in a row; expected int64"),
        ([ONE._replace(likelihood="3")], r"'likelihood' has the type str in a row; expected double"),
        ([ONE._replace(entropy=True)], r"'entropy' has the type bool in a row"),
        ([ONE._replace(greedy=1)], r"'greedy' has the type int in a row"),
        ([ONE._replace(text=b"x")], r"'text' has the type bytes in a row"),
        ([ONE._replace(doc_id=2**63)], "'doc_id': "),
        ([ONE._replace(doc_id=True)], r"'doc_id' has the type bool in a row"),
        ([ONE._replace(task=3)], r"'task' has the type int in a row"),
        ([ONE._replace(task="\ud800")], "surrogates not allowed"),
        ([ONE[:5]], "a row has 5 fields; expected task, doc_id"),
        ([ONE, ONE[:5]], "a row has 5 fields"),
        (pa.table({"task": ["a"]}), "its columns are task; expected task, doc_id, likelihood"),
        (pa.Table.from_pylist([ONE._asdict()]), "'entropy' is of type null; expected double"),
    ],
)
def test_rows_of_another_form_are_not_written(rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        record_batch(rows, Row)


# Tables made by other code


def packed(batch: pa.RecordBatch, **options: Any) -> bytes:
    """As `to_bytes`, of any schema and with any options of Arrow's."""
    return zlib.compress(messages(batch, **options)[1])


def messages(batch: pa.RecordBatch, **options: Any) -> list[bytes]:
    """The messages of a stream: its schema, dictionaries, the batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    found = pa.ipc.MessageReader.open_stream(sink.getvalue())
    result = []
    while True:
        try:
            result.append(found.read_next_message().serialize().to_pybytes())
        except StopIteration:
            return result


def nullable(rows: list[Row]) -> pa.RecordBatch:
    """With nulls where the schema has none; the bytes of a batch do not say."""
    schema = pa.schema([field.with_nullable(True) for field in schema_of(Row)])
    return pa.RecordBatch.from_pylist([row._asdict() for row in rows], schema)


GOOD = record_batch([ONE] * 40, Row)
NUMBERS = pa.record_batch({name: np.arange(40) for name in Row._fields})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (to_bytes(GOOD)[:-1], "truncated, or other data follows"),
        (to_bytes(GOOD) + b"\0", "truncated, or other data follows"),
        (zlib.compress(b""), "its rows are not a valid record batch"),
        (zlib.compress(b"\0" * 100), "its rows are not a valid record batch"),
        (zlib.compress(messages(GOOD)[0]), "its rows are not a valid record batch"),  # a schema
        (zlib.compress(messages(GOOD)[1][:-64]), "its rows are not a valid record batch"),
        (packed(GOOD.select(["task", "doc_id"])), "its rows are not a valid record batch"),
        (packed(NUMBERS), "its rows are not a valid record batch"),
        (packed(nullable([ONE, ONE._replace(task=None)])), "'task' is null in a row"),
        (packed(nullable([ONE._replace(likelihood=math.nan)])), "'likelihood' contains NaN"),
        (packed(nullable([ONE._replace(entropy=math.inf)])), "'entropy' contains NaN or infinity"),
    ],
)
def test_bytes_that_hold_something_else(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        from_bytes(content, Row)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_is_refused() -> None:
    message = messages(GOOD)[1].replace("é".encode(), b"\xff\xff")
    with pytest.raises(ValueError, match=r"(?i)utf-?8"):
        from_bytes(zlib.compress(message), Row)


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bombs: zlib's, and Arrow's own compression inside."""
    bomb = zlib.compress(b"\0" * (64 << 20), 9)
    inside = packed(record_batch([ONE._replace(text="a" * (16 << 20))], Row), compression="zstd")
    monkeypatch.setattr(columns, "MAX_BYTES", 1 << 20)
    for content in (bomb, inside):
        assert len(content) < 100_000
        with pytest.raises(ValueError, match="its rows are larger than 1048576 bytes"):
            from_bytes(content, Row)


def test_a_batch_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_BYTES", 1 << 12)
    with pytest.raises(ValueError, match=r"40 rows are \d+ bytes; expected batches of at most 4096"):
        to_bytes(record_batch([ONE._replace(text="x" * 200)] * 40, Row))


def peak() -> int:
    """Highest resident memory of this process, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flipped(content: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]


def huge(content: bytes, dice: random.Random) -> bytes:
    """A number of the metadata becomes a large one."""
    at = dice.randrange(0, min(len(content) - 8, 600) // 4) * 4
    return content[:at] + struct.pack("<q", dice.choice([2**62, 2**40, 2**31 - 1, -1, -(2**63)])) + content[at + 8 :]


def zeroed(content: bytes, dice: random.Random) -> bytes:
    at, size = dice.randrange(len(content)), dice.randrange(64)
    return content[:at] + b"\0" * len(content[at : at + size]) + content[at + size :]


@pytest.mark.parametrize("change", [flipped, huge, zeroed])
def test_damage_under_a_right_checksum_is_refused_or_harmless(change: Callable[[bytes, random.Random], bytes]) -> None:
    """Nothing crashes, nothing large is allocated, and what is taken can be read to its last value."""
    message, dice = messages(GOOD)[1], random.Random(5)
    refused, before = 0, peak()
    for _ in range(3000):
        damaged = change(message, dice)
        if dice.random() < 0.3:
            damaged = change(damaged, dice)
        try:
            batch = from_bytes(zlib.compress(damaged, 0), Row)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            assert batch.schema == schema_of(Row)
            assert len(batch.to_pylist()) == batch.num_rows <= 1000
    assert refused > 100
    assert peak() - before < 64 << 20
