"""Finished rows of a run's journal.

In: a journal and its key columns. Out: which keys are finished, and their rows for tables. Keys and entries without
their rows are in memory; rows are read from the file, a batch at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from evalkit.runs.journal import Entry, Journal

if TYPE_CHECKING:
    import pyarrow as pa

    from evalkit.runs.columns import Rows

Key = tuple[Hashable, ...]
"""The journal's task, then the values of the key columns."""


class FinishedRows:
    """Finished batches of a run.

    Args:
        journal: the run's journal.
        key: columns that identify what a row belongs to, such as a document. All rows of a key are in one batch; if
            several batches have the same key, the first in the file is used.

    Raises:
        RunError: as `Journal.read`.
    """

    def __init__(self, journal: Journal, key: Sequence[str]) -> None:
        self.entries: list[Entry] = []
        """Entries in file order."""
        self.seconds: dict[str, float] = {}
        """Seconds spent on each task of the journal."""
        self._journal = journal
        self._columns = key
        self._keys: set[Key] = set()
        self._repeated: dict[int, set[Key]] = {}
        """Offset of an entry → its keys that an earlier entry has."""
        for entry, batch in journal.read():
            self._add(entry, batch)

    def append(self, entry: Entry, rows: Rows, packed: bytes | None = None) -> None:
        """Add a finished batch to the journal; see `Journal.append`."""
        self._add(*self._journal.append(entry, rows, packed))

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def batches(self, task: str) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows, batch by batch in the order of batch numbers.

        Raises:
            RunError: as `Journal.rows`.
        """
        import pyarrow as pa

        entries = [entry for entry in self.entries if entry.task == task]
        for entry in sorted(entries, key=lambda entry: entry.batch):
            batch = self._journal.rows(entry)
            if repeated := self._repeated.get(entry.offset):
                batch = batch.filter(pa.array([(task, *values) not in repeated for values in self._values_of(batch)]))
            if batch.num_rows:
                yield batch

    def table(self, task: str) -> pa.Table:
        """Return a task's rows as one table."""
        import pyarrow as pa

        from evalkit.runs.columns import schema_of

        return pa.Table.from_batches(self.batches(task), schema_of(self._journal.row))

    def rows(self, task: str) -> Iterator[Any]:
        """Yield a task's rows as `NamedTuple`s."""
        for batch in self.batches(task):
            for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                yield self._journal.row(*values)

    def _add(self, entry: Entry, batch: pa.RecordBatch) -> None:
        self.entries.append(entry)
        self.seconds[entry.task] = self.seconds.get(entry.task, 0.0) + entry.seconds
        keys = {(entry.task, *values) for values in set(self._values_of(batch))}
        if repeated := keys & self._keys:
            self._repeated[entry.offset] = repeated
        self._keys |= keys

    def _values_of(self, batch: pa.RecordBatch) -> Iterator[tuple[Hashable, ...]]:
        """Yield the values of the key columns, row by row."""
        return zip(*(batch[name].to_pylist() for name in self._columns), strict=True)
