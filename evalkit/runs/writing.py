"""Writing a run folder: one process at a time, under a lock, and each file atomically.

The lock is the operating system's (`.lock`), which ends with its process. File systems of clusters may not pass it on
between machines, so the holder also renews the time of a file (`.owner`) with its name and progress: a folder whose
owner is on another machine and has renewed its file lately is in use, whatever the operating system says.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from evalkit.data.wheels import file_digest
from evalkit.errors import RunError, RunInUseError
from evalkit.inputs.reading import read_json
from evalkit.inputs.validated import Stored, validated
from evalkit.paths import replace_file, replacing
from evalkit.runs.folder import (
    DIGEST,
    JOURNAL,
    MANIFEST,
    RESULTS,
    RUN,
    Run,
    digest,
    is_file,
    json_bytes,
    load_run,
    sealed,
)
from evalkit.runs.journal import Entry, FinishedRows, Journal
from evalkit.runs.traits import BatchDevice, devices, places

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_LOCK, _OWNER = ".lock", ".owner"
RENEWAL = 15.0
"""Seconds between two renewals of the owner's file."""
LEASE = 120.0
"""Seconds without a renewal after which an owner on another machine is gone."""
_PATIENCE = 0.2
"""Seconds to wait for the lock, which `is_locked` of another process may hold for a moment."""
_ATTEMPTS = 20
_GROUP = 32 << 20
"""Bytes of a table that are buffered before a row group is written."""


class Owner(Stored):
    """The process that writes a run, or the last one that did."""

    host: str
    process: int
    done: float = 0.0
    """Finished share of the run, from 0 to 1."""
    seconds_left: float | None = None
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class Lock:
    """A held lock, whose owner's file a thread renews. Use `locked`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = Owner(host=platform.node(), process=os.getpid())
        self._removed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="evalkit-lock", daemon=True)

    def __enter__(self) -> Lock:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder; the progress stays in the file."""
        self._stop.set()
        self._thread.join()
        self._owner = self._owner.model_copy(update={"released": True})
        if not self._removed:
            self._write()

    def report(self, done: float, seconds_left: float | None) -> None:
        """Store the progress, which is written with the next renewal; arguments as the fields of `Owner`."""
        self._owner = self._owner.model_copy(update={"done": done, "seconds_left": seconds_left})

    def remove_folder(self) -> None:
        """Remove the folder; a process that waits for its lock makes a new folder, with a lock of its own."""
        self._stop.set()
        self._thread.join()
        # Renamed first: file by file, those that another process has just written would be removed too
        aside = self._folder.with_name(f".{self._folder.name}-{os.getpid()}.removed")
        with suppress(OSError):
            self._folder.rename(aside)
            self._removed = True
            shutil.rmtree(aside, ignore_errors=True)

    def _renew(self) -> None:
        while not self._stop.wait(RENEWAL):
            self._write()

    def _write(self) -> None:
        # A file that cannot be written costs the protection between machines only; the journal reports a full disk.
        # Not flushed to the disk: after a crash of the machine it means nothing
        new = self._folder / f"{_OWNER}.new"
        with suppress(OSError):
            new.write_text(json.dumps(self._owner.model_dump()), encoding="utf-8")
            new.replace(self._folder / _OWNER)


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold the lock of an existing run folder within the block; it is created again if another process removes it."""
    lock = FileLock(folder / _LOCK, timeout=_PATIENCE)
    try:
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError):  # another process has removed the folder in the meantime
                lock.acquire()
                break
            folder.mkdir(parents=True, exist_ok=True)
        else:
            lock.acquire()
    except Timeout:
        raise _in_use(folder, read_owner(folder)) from None
    except OSError as error:
        raise RunError(f"output folder {folder} cannot be written ({error.strerror or error})") from error
    try:
        owner = read_owner(folder)
        if owner and owner.host != platform.node() and _is_active(folder, owner):
            raise _in_use(folder, owner)
        with Lock(folder) as held:
            yield held
    finally:
        lock.release()


def read_owner(folder: Path) -> Owner | None:
    """Return the process that writes a run or did so last; None if it is unknown."""
    with suppress(RunError):
        return validated(read_json(folder / _OWNER, RunError, most=1 << 16), Owner, RunError, _OWNER)
    return None


def is_locked(folder: Path) -> bool:
    """Return whether a process writes a run: by the system's lock or, of another machine, by the lease."""
    owner, may_lock = read_owner(folder), True
    if (folder / _LOCK).exists():
        try:
            with FileLock(folder / _LOCK, timeout=0):
                pass
        except Timeout:
            return True
        except OSError:
            may_lock = False
    return owner is not None and not (may_lock and owner.host == platform.node()) and _is_active(folder, owner)


def _is_active(folder: Path, owner: Owner) -> bool:
    """Whether an owner has renewed its file lately, by the clock of the file system, and not released it."""
    if owner.released:
        return False
    now = time.time()
    with suppress(OSError):
        (folder / _LOCK).touch()
        now = (folder / _LOCK).stat().st_mtime
    with suppress(OSError):
        return now - (folder / _OWNER).stat().st_mtime < LEASE
    return False


def _in_use(folder: Path, owner: Owner | None) -> RunInUseError:
    by = f" ({owner})" if owner and not owner.released else ""
    return RunInUseError(f"run folder {folder} is in use by another process{by}; wait for it")


def find_finished(
    folder: Path,
    manifest: Mapping[str, Any],
    is_finished: Callable[[Run], bool],
    say: Callable[[str], None],
    device: str,
) -> Run | None:
    """Return a manifest's run if it has all that is requested; `say` if it was computed on another device."""
    has_both = is_file(folder / RESULTS) and is_file(folder / MANIFEST)
    if not has_both or not is_finished(run := _load_same(folder, manifest)):
        return None

    def indexed(name: str) -> str:  # torch's default index is 0
        return name if ":" in name else f"{name}:0"

    known = list(dict.fromkeys(batches.device for batches in places(run.manifest)))
    if device != "auto" and known and indexed(device) not in map(indexed, known):
        say(f"this run is finished and was computed on {' and '.join(known)}; nothing is computed on {device}")
    return run


@contextmanager
def open_run(
    root: Path, name: str, manifest: dict[str, Any], say: Callable[[str], None] = lambda _: None
) -> Iterator[RunWriter]:
    """Open a run folder for writing, under a lock; a new folder gets the manifest, otherwise the stored one is used."""
    folder = root / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"output folder {folder} cannot be created ({reason}); choose another --output") from error
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
    run = load_run(folder)
    if run.manifest["id"] != manifest["id"]:
        raise RunError(f"run folder {folder} belongs to another specification; choose another --output")
    return run


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
            raise RunError(f"run {self.folder} has {made[0]} but no {JOURNAL}; restore it, or delete the folder")

    def finished(self, rows: Sequence[type[tuple[Any, ...]]], key: Sequence[str]) -> FinishedRows:
        """Return the rows to resume from by their `key` columns; delete results.json: the run is incomplete."""
        finished = FinishedRows(Journal(self.folder / JOURNAL, self.manifest["id"], rows, self.say), key)
        self._entries = finished.entries
        self.remove_results()
        return finished

    def remove_results(self) -> None:
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

    def save_caveats(self, caveats: Mapping[str, Sequence[str]]) -> None:
        """Write task → what makes its numbers doubtful into the manifest, where tables and exports find it."""
        if doubtful := {task: texts for task, texts in caveats.items() if texts}:
            self.save_manifest(caveats=doubtful)

    def save_results(self, content: Any) -> None:
        """Write the results, with digests of all written files and the manifest's caveats.

        Last, since their presence marks a run as complete.
        """
        used = devices((entry.task, entry.batch, entry.place) for entry in self._entries)
        files = {MANIFEST: self.save_manifest(devices=used)} | self._files
        if "caveats" in self.manifest:
            content = content | {"caveats": self.manifest["caveats"]}
        self._save_sealed(RESULTS, {"run": self.manifest["id"], "files": files, **content})

    def save_table(self, name: str, table: pd.DataFrame) -> None:
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
        """Write a file of the folder, to be read back through `Run.read`."""
        with self._saving(self.folder / name):
            replace_file(self.folder / name, content, locked=True)
        self._files[name] = digest(content)

    def _save_sealed(self, name: str, content: Mapping[str, Any]) -> str:
        whole = sealed(content)
        with self._saving(self.folder / name):
            replace_file(self.folder / name, json_bytes(whole, indent=2) + b"\n", locked=True)
        return str(whole[DIGEST])

    @contextmanager
    def _saving(self, path: Path) -> Iterator[None]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            safe = "; the scores are safe in the journal" if (self.folder / JOURNAL).exists() else ""
            reason = f"{error.strerror or error}{safe}"
            raise RunError(f"{path} cannot be written ({reason}); fix the cause and run the command again") from error
