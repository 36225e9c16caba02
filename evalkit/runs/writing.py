"""A run folder, written: by one process at a time, each file whole or not at all.

In: a run's manifest, and what completes it. Out: the finished `Run`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from evalkit.atomic import replace_file, replacing
from evalkit.errors import RunError
from evalkit.runs.batch_devices import BatchDevice, devices, places
from evalkit.runs.finished_rows import FinishedRows
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, WITHOUT_JOURNAL, Run, is_file, load_run
from evalkit.runs.journal import Entry, Journal
from evalkit.runs.seal import DIGEST, RUN, digest, json_bytes, sealed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_GROUP = 32 << 20
"""Bytes of a table that are gathered before they are written."""


def finished_run(
    folder: Path,
    manifest: dict[str, Any],
    is_finished: Callable[[Run], bool],
    complete: Callable[[RunWriter], None],
    say: Callable[[str], None],
    device: str,
) -> Run:
    """Open a run; where something is missing, have it completed before.

    Args:
        folder: the run's, whether it exists yet or not.
        manifest: as `open_run` takes it.
        is_finished: whether a run with results has all that is asked for.
        complete: writes what is missing, the results last.
        say: called with what the user should know: damage, or a device that computes nothing.
        device: asked for.
    """
    if is_file(folder / RESULTS) and is_file(folder / MANIFEST):
        run = load_run(folder)
        _refuse_other(run, manifest)
        if is_finished(run):
            _say_nothing_is_computed(run, device, say)
            return run
    with open_run(folder.parent, folder.name, manifest, say) as writer:
        complete(writer)
    return load_run(folder)


def _refuse_other(run: Run, manifest: Mapping[str, Any]) -> None:
    """Raise a `RunError` where what stands in a folder is not the run that a manifest is of."""
    if run.manifest["id"] != manifest["id"]:
        raise RunError(f"run folder {run.folder} belongs to another specification; choose another --output")


def _say_nothing_is_computed(run: Run, device: str, say: Callable[[str], None]) -> None:
    """Where a finished run was computed elsewhere than its command says now."""
    known = list(dict.fromkeys(place.device for place in places(run.manifest)))
    if device != "auto" and known and _index(device) not in map(_index, known):
        say(f"this run is finished: it was computed on {' and '.join(known)}, and nothing is computed on {device} now")


def _index(device: str) -> str:
    """With the index that torch takes where none is named."""
    return device if ":" in device else f"{device}:0"


class RunWriter:
    """A run folder, opened to be written. Use `open_run` or `finished_run`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], say: Callable[[str], None]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.say = say
        self._entries: Sequence[Entry] = ()
        self._files: dict[str, str] = {}
        """Name → digest of what has been written."""

    def refuse_without_journal(self) -> None:
        """Raise a `RunError` where the journal of a finished run is gone: all of it would be scored again."""
        made = [path.name for path in (self.folder / RESULTS, *self.folder.glob("*.parquet")) if path.exists()]
        if made and not (self.folder / JOURNAL).exists():
            raise RunError(
                f"run {self.folder} has {made[0]} but no {JOURNAL} to make the rest from; put back what is missing, "
                f"or {WITHOUT_JOURNAL}"
            )

    def finished(self, row: type[tuple[Any, ...]], key: Sequence[str]) -> FinishedRows:
        """What the journal holds, to go on from; what was made of it before passes for a result no longer.

        Args:
            row: see `Journal`.
            key: see `FinishedRows`.

        Raises:
            RunError: as `Journal.read`, or the results cannot be removed.
        """
        finished = FinishedRows(Journal(self.folder / JOURNAL, self.manifest["id"], row, self.say), key)
        self._entries = finished.entries
        try:
            (self.folder / RESULTS).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{self.folder / RESULTS} cannot be replaced: {error.strerror or error}") from error
        return finished

    def compute_on(self, place: BatchDevice) -> None:
        """Say so where earlier batches were computed on another kind of device."""
        kinds = [" ".join(entry.place.kind) for entry in self._entries]
        if others := [kind for kind in dict.fromkeys(kinds) if kind != " ".join(place.kind)]:
            self.say(
                f"warning: this run was begun on {' and '.join(others)}; what is computed on {' '.join(place.kind)} "
                f"may differ in its last digits, and texts from there on; {MANIFEST} will say which batches"
            )

    def save_manifest(self, **more: Any) -> str:
        """Write the manifest, with more keys; returns the digest of its content."""
        self.manifest |= more
        content = sealed(self.manifest)
        self._save(MANIFEST, _json(content))
        return str(content[DIGEST])

    def save_results(self, content: Any) -> None:
        """Write the results, bound to all that has been written. Last, since their presence says that a run is done."""
        places = devices((entry.task, entry.batch, entry.place) for entry in self._entries)
        files = {MANIFEST: self.save_manifest(devices=places)} | self._files
        self._save(RESULTS, _json(sealed({"run": self.manifest["id"], "files": files, **content})))

    def save_table(self, name: str, table: pd.DataFrame) -> None:
        """Write a Parquet file of the folder, whole or not at all."""
        import pyarrow as pa

        content = pa.Table.from_pandas(table, preserve_index=False)
        self.save_batches(name, content.schema, content.to_batches())

    def save_batches(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """The same of a table that comes piece by piece and is never in memory as a whole."""
        import pyarrow.parquet as pq

        schema = schema.with_metadata((schema.metadata or {}) | {RUN: self.manifest["id"]})
        path = self.folder / name
        with self._saving(path), replacing(path) as file, pq.ParquetWriter(file, schema) as writer:
            for group in _groups(batches, schema):
                writer.write_table(group)
        with self._saving(path), path.open("rb") as file:
            self._files[name] = hashlib.file_digest(file, "sha256").hexdigest()

    def save_bytes(self, name: str, content: bytes) -> None:
        """Write a file of the folder, whole or not at all, to be read back through `Run.read`.

        Raises:
            RunError: it could not be written.
        """
        self._save(name, content)
        self._files[name] = digest(content)

    def _save(self, name: str, content: bytes) -> None:
        with self._saving(self.folder / name):
            replace_file(self.folder / name, content)

    @contextmanager
    def _saving(self, path: Path) -> Iterator[None]:
        """Makes the file's folder; raises a `RunError` where the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            safe = "; what was scored is safe in the journal" if (self.folder / JOURNAL).exists() else ""
            raise RunError(
                f"{path} cannot be written ({error.strerror or error}){safe}; repair that and run the same command "
                "again"
            ) from error


def _groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Batches put together, so that a file has few row groups."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _GROUP:
            yield pa.Table.from_batches(waiting, schema)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting, schema)


@contextmanager
def open_run(
    root: Path, name: str, manifest: dict[str, Any], say: Callable[[str], None] = lambda _: None
) -> Iterator[RunWriter]:
    """Open a run folder for this process alone, new or begun before.

    Args:
        root: folder of runs.
        name: the run's folder in it.
        manifest: written if the folder is new; otherwise the stored one is kept, and is in the writer.
        say: called with what damage was repaired.

    Raises:
        RunError: another process has it open, it cannot be written, it belongs to another specification, or it was
            finished and has lost both its journal and another file.
    """
    folder = root / name
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"output folder {folder} cannot be made ({error.strerror or error}); choose another --output"
        ) from error
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        owner = _read_text(folder / ".owner")
        raise RunError(
            f"run folder {folder} is in use by another process{f' ({owner})' if owner else ''}; wait for it"
        ) from None
    except OSError as error:
        raise RunError(f"output folder {folder} cannot be written ({error.strerror or error})") from error
    try:
        writer = RunWriter(folder, manifest, say)
        if begun := (folder / MANIFEST).exists():
            stored = load_run(folder)
            _refuse_other(stored, manifest)
            writer.manifest = stored.manifest
        writer.refuse_without_journal()
        if not begun:
            writer.save_manifest()
        with suppress(OSError):  # it only makes the message above say more
            (folder / ".owner").write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield writer
    except BaseException:
        if new and not (folder / JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)  # nothing was scored: a model that does not load, say
        raise
    finally:
        lock.release()


def _json(content: Any) -> bytes:
    return json_bytes(content, indent=2) + b"\n"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
