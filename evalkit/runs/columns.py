"""Journal rows as Arrow columns: rows of a `NamedTuple` class → a record batch with the class's schema → bytes.

The bytes are one Arrow IPC message (a record batch without its schema, which the class defines), compressed by zlib.
They are untrusted input: content that is larger than `MAX_BYTES`, compressed again inside, not of the schema, or not
finite raises `ValueError` before it is used; so does what the class's own `check_columns` rejects, if it has one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from itertools import chain
from numbers import Integral, Real
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from evalkit.errors import first_line
from evalkit.inputs.values import text_digest

Rows: TypeAlias = Sequence[tuple[Any, ...]] | pa.RecordBatch | pa.Table

MAX_BYTES = 256 << 20
"""Largest uncompressed size of a batch's columns."""

_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_ACCEPTED = {pa.string(): str, pa.int64(): Integral, pa.float64(): Real, pa.bool_(): bool}
"""Python types accepted for each column type. An integer is accepted as a float; a boolean is neither."""


@cache
def schema_of(row: type[tuple[Any, ...]]) -> pa.Schema:
    """Return the Arrow schema of a `NamedTuple` of str, int, float and bool fields, and lists of these.

    `float | None` is nullable, also as the type of a list's elements.
    """
    return pa.schema([_field(name, hint) for name, hint in get_type_hints(row).items()])


def _field(name: str, hint: Any) -> pa.Field:
    if get_origin(hint) is list:
        return pa.field(name, pa.list_(_field(name, *get_args(hint))), nullable=False)
    kinds = get_args(hint) or (hint,)
    [kind] = (kind for kind in kinds if kind is not type(None))
    return pa.field(name, _TYPES[kind], nullable=len(kinds) > 1)


@cache
def schema_digest(row: type[tuple[Any, ...]]) -> str:
    """Return a hash of a schema's names and types: eight hexadecimal digits."""
    text = ", ".join(f"{field.name} {field.type}{' or null' * field.nullable}" for field in schema_of(row))
    return text_digest(text)[:8]


def record_batch(rows: Rows, row: type[tuple[Any, ...]]) -> pa.RecordBatch:
    """Convert rows (tuples, or columns of the `NamedTuple` class `row`) to one record batch."""
    schema = schema_of(row)
    if isinstance(rows, pa.Table):
        rows = pa.RecordBatch.from_arrays([column.combine_chunks() for column in rows.columns], schema=rows.schema)
    if not isinstance(rows, pa.RecordBatch):
        if others := {len(values) for values in rows} - {len(schema)}:
            raise ValueError(f"a row has {min(others)} fields; expected {', '.join(schema.names)}")
        columns = zip(*rows, strict=True) if rows else [()] * len(schema)
        rows = pa.RecordBatch.from_arrays(list(map(_array, columns, schema)), schema=schema)
    return _checked(rows, row)


def to_bytes(batch: pa.RecordBatch) -> bytes:
    """Serialise a record batch; see the module's docstring for the format."""
    content = batch.serialize()
    if content.size > MAX_BYTES:
        raise ValueError(f"{batch.num_rows} rows are {content.size} bytes; expected batches of at most {MAX_BYTES}")
    return zlib.compress(content, level=1)  # the default level would reduce the size by only a tenth


def from_bytes(content: bytes, row: type[tuple[Any, ...]]) -> pa.RecordBatch:
    """Deserialise a record batch; the inverse of `to_bytes`."""
    unpacked, too_large = zlib.decompressobj(), f"its rows are larger than {MAX_BYTES} bytes"
    try:
        message = unpacked.decompress(content, MAX_BYTES + 1)
        if len(message) > MAX_BYTES:
            raise ValueError(too_large)
        if not unpacked.eof or unpacked.unused_data:
            raise ValueError("its rows are truncated, or other data follows them")
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema_of(row))
        batch.validate(full=True)
    except (zlib.error, pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(f"its rows are not a valid record batch: {first_line(error)}") from error
    if batch.nbytes > 2 * MAX_BYTES:  # compressed again inside
        raise ValueError(too_large)
    return _checked(batch, row)


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    if pa.types.is_list(field.type):
        for kind in {*map(type, values)}:
            if not issubclass(kind, (list, tuple)):
                raise ValueError(f"'{field.name}' has the type {kind.__name__} in a row; expected {field.type}")
        lengths = pa.array([0, *map(len, values)], pa.int64())
        items = _array(list(chain.from_iterable(values)), field.type.value_field)
        return pa.ListArray.from_arrays(pc.cumulative_sum(lengths).cast(pa.int32()), items, type=field.type)
    # Arrow itself truncates 1.5 to 1 where integers are expected, and rejects integers above 2^53 as floats
    for kind in {*map(type, values)} - {type(None)}:
        if not issubclass(kind, _ACCEPTED[field.type]) or (kind is bool) != (field.type == pa.bool_()):
            raise ValueError(f"'{field.name}' has the type {kind.__name__} in a row; expected {field.type}")
    if field.type == pa.float64():
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError) as error:
        raise ValueError(f"'{field.name}': {first_line(error)}") from error


def _checked(batch: pa.RecordBatch, row: type[tuple[Any, ...]]) -> pa.RecordBatch:
    schema = schema_of(row)
    if batch.schema.names != schema.names:
        raise ValueError(f"its columns are {', '.join(batch.schema.names)[:200]}; expected {', '.join(schema.names)}")
    for column, field in zip(batch.columns, schema, strict=True):
        if column.type != field.type:
            raise ValueError(f"'{field.name}' is of type {column.type}; expected {field.type}")
        _check_values(column, field, field.name)
    if check := getattr(row, "check_columns", None):
        check(batch)
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _check_values(column: pa.Array, field: pa.Field, name: str) -> None:
    if column.null_count and not field.nullable:
        raise ValueError(f"'{name}' is null in a row")
    if pa.types.is_list(field.type):
        _check_values(column.flatten(), field.type.value_field, name)
    elif field.type == pa.float64() and pc.all(pc.is_finite(column)).as_py() is False:
        raise ValueError(f"'{name}' contains NaN or infinity; expected finite numbers")
