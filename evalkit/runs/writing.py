"""Writing a run folder, by one process at a time and each file atomically.

In: a run's manifest. Out: a `RunWriter`, or the finished `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.data.wheels import file_digest
from evalkit.errors import RunError
from evalkit.paths import replace_file, replacing
from evalkit.runs.batch_devices import BatchDevice, devices, places
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, WITHOUT_JOURNAL, Run, is_file, load_run
from evalkit.runs.forms import DIGEST, RUN, digest, json_bytes, sealed
from evalkit.runs.journal import Entry, FinishedRows, Journal
from evalkit.runs.lock import Lock, locked

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_GROUP = 32 << 20
"""Bytes of a table that are buffered before a row group is written."""


def find_finished(
    folder: Path,
    manifest: Mapping[str, Any],
    is_finished: Callable[[Run], bool],
    say: Callable[[str], None],
    device: str,
) -> Run | None:
    """Return a run that has everything that is requested; None if something is missing.

    Args:
        folder: the run's folder; it need not exist yet.
        manifest: see `open_run`.
        is_finished: returns whether a run with results has everything that is requested.
        say: called if the run was computed on another device than the requested one, `device`.
    """
    if not (is_file(folder / RESULTS) and is_file(folder / MANIFEST)):
        return None
    run = _load_same(folder, manifest)
    if not is_finished(run):
        return None
    known = list(dict.fromkeys(place.device for place in places(run.manifest)))
    if device != "auto" and known and _index(device) not in map(_index, known):
        say(f"this run is finished and was computed on {' and '.join(known)}; nothing is computed on {device}")
    return run


@contextmanager
def open_run(
    root: Path, name: str, manifest: dict[str, Any], say: Callable[[str], None] = lambda _: None
) -> Iterator[RunWriter]:
    """Open a run folder for writing, new or existing, with a lock against other processes.

    The manifest is written if the folder is new; otherwise the writer has the stored one.
    """
    folder = root / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"output folder {folder} cannot be created ({error.strerror or error}); choose another --output"
        ) from error
    with locked(folder) as lock:
        # Hidden files are the lock's; another process may have made the folder and written nothing
        new = all(path.name.startswith(".") for path in folder.iterdir())
        try:
            exists = (folder / MANIFEST).exists()
            writer = RunWriter(folder, _load_same(folder, manifest).manifest if exists else manifest, say, lock)
            writer.require_journal()
            if not exists:
                writer.remove_results()  # they belong to the manifest that is missing
                writer.save_manifest()
            yield writer
        except BaseException:
            if new and not any((folder / name).exists() for name in (JOURNAL, RESULTS)):
                lock.remove_folder()  # nothing was scored, e.g. the model could not be loaded
            raise


def _load_same(folder: Path, manifest: Mapping[str, Any]) -> Run:
    """Open a folder's run, which must be the one of a manifest."""
    run = load_run(folder)
    if run.manifest["id"] != manifest["id"]:
        raise RunError(f"run folder {folder} belongs to another specification; choose another --output")
    return run


def _index(device: str) -> str:
    """Return a device's name with its index; torch's default is 0."""
    return device if ":" in device else f"{device}:0"


class RunWriter:
    """A run folder, opened for writing. Use `open_run`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], say: Callable[[str], None], lock: Lock) -> None:
        self.folder = folder
        self.lock = lock
        self.manifest = manifest
        self.say = say
        self._entries: Sequence[Entry] = ()
        self._files: dict[str, str] = {}
        """Name of each written file → its digest."""

    def require_journal(self) -> None:
        """Raise `RunError` if the journal of a finished run is missing: everything would be scored again."""
        if "imported" in self.manifest:  # its log is imported again
            return
        made = [path.name for path in (self.folder / RESULTS, *self.folder.glob("*.parquet")) if path.exists()]
        if made and not (self.folder / JOURNAL).exists():
            raise RunError(
                f"run {self.folder} has {made[0]} but no {JOURNAL} to rebuild the rest from; restore the missing "
                f"files, or {WITHOUT_JOURNAL}"
            )

    def finished(self, row: type[tuple[Any, ...]], key: Sequence[str]) -> FinishedRows:
        """Return the journal's finished rows to resume from, and delete results.json so that the run is incomplete.

        `row` is the type of the rows (`Journal`), and `key` their columns that identify a document (`FinishedRows`).
        """
        finished = FinishedRows(Journal(self.folder / JOURNAL, self.manifest["id"], row, self.say), key)
        self._entries = finished.entries
        self.remove_results()
        return finished

    def remove_results(self) -> None:
        """Delete results.json, so that the run is incomplete."""
        try:
            (self.folder / RESULTS).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{self.folder / RESULTS} cannot be replaced: {error.strerror or error}") from error

    def compute_on(self, place: BatchDevice) -> None:
        """Warn if earlier batches were computed on another kind of device."""
        kind, kinds = " ".join(place.kind), dict.fromkeys(" ".join(entry.place.kind) for entry in self._entries)
        if others := [other for other in kinds if other != kind]:
            self.say(
                f"warning: this run was started on {' and '.join(others)}; scores computed on {kind} may differ in "
                f"their last digits, and generated texts may diverge; {MANIFEST} will list the batches"
            )

    def save_manifest(self, **more: Any) -> str:
        """Write the manifest with more keys; return the digest of its content."""
        self.manifest |= more
        return self._save_sealed(MANIFEST, self.manifest)

    def save_results(self, content: Any) -> None:
        """Write the results, with digests of all written files. Last, since their presence marks a run as complete."""
        used = devices((entry.task, entry.batch, entry.place) for entry in self._entries)
        files = {MANIFEST: self.save_manifest(devices=used)} | self._files
        self._save_sealed(RESULTS, {"run": self.manifest["id"], "files": files, **content})

    def save_table(self, name: str, table: pd.DataFrame) -> None:
        """Write a Parquet file of the folder atomically."""
        import pyarrow as pa

        content = pa.Table.from_pandas(table, preserve_index=False)
        self.save_batches(name, content.schema, content.to_batches())

    def save_batches(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Write a Parquet file from batches, without the whole table in memory."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = schema.with_metadata((schema.metadata or {}) | {RUN: self.manifest["id"]})
        path = self.folder / name
        with self._saving(path):
            with replacing(path, locked=True) as file, pq.ParquetWriter(file, schema) as writer:
                # In row groups of many batches
                waiting: list[pa.RecordBatch] = []
                size = 0
                for batch in batches:
                    waiting.append(batch)
                    size += batch.nbytes
                    if size >= _GROUP:
                        writer.write_table(pa.Table.from_batches(waiting, schema))
                        waiting, size = [], 0
                if waiting:
                    writer.write_table(pa.Table.from_batches(waiting, schema))
            self._files[name] = file_digest(path)

    def save_bytes(self, name: str, content: bytes) -> None:
        """Write a file of the folder atomically, to be read back through `Run.read`."""
        self._save(name, content)
        self._files[name] = digest(content)

    def _save_sealed(self, name: str, content: Mapping[str, Any]) -> str:
        """Write a JSON file; return its digest."""
        whole = sealed(content)
        self._save(name, json_bytes(whole, indent=2) + b"\n")
        return str(whole[DIGEST])

    def _save(self, name: str, content: bytes) -> None:
        with self._saving(self.folder / name):
            replace_file(self.folder / name, content, locked=True)

    @contextmanager
    def _saving(self, path: Path) -> Iterator[None]:
        """Create the file's folder; raise `RunError` if the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            safe = "; the scores are safe in the journal" if (self.folder / JOURNAL).exists() else ""
            raise RunError(
                f"{path} cannot be written ({error.strerror or error}){safe}; fix the cause and run the same command "
                "again"
            ) from error
