"""Lock of a run folder: one process at a time writes it.

In: a run folder. Out: the lock, or a `RunInUseError` that names the holder. A holder that is gone is replaced.

The lock is the operating system's (`.lock`), which ends with its process. File systems of clusters may not pass it on
between machines, so the holder also renews the time of a file (`.owner`), with its name and its progress. A folder
whose owner is on another machine and has renewed its file lately is in use, whatever the operating system says.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from evalkit.errors import RunError, RunInUseError
from evalkit.inputs.reading import read_json
from evalkit.inputs.validated import Stored, validated

_LOCK, _OWNER = ".lock", ".owner"
_LARGEST = 1 << 16
"""Most bytes of the owner's file."""
RENEWAL = 15.0
"""Seconds between two renewals."""
LEASE = 120.0
"""Seconds without a renewal after which an owner on another machine is gone."""
_PATIENCE = 0.2
"""Seconds to wait for the lock, which `is_locked` of another process may hold for a moment."""
_ATTEMPTS = 20
"""At creating a folder that other processes remove."""


class Owner(Stored):
    """The process that writes a run, or the last one that did."""

    host: str
    process: int
    done: float = 0.0
    """Finished share of the run, from 0 to 1."""
    seconds_left: float | None = None
    """Estimate; None: unknown."""
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine, where the operating system's lock counts."""
        return self.host == platform.node()


class Lock:
    """A held lock. Use `locked`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = Owner(host=platform.node(), process=os.getpid())
        self._removed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="evalkit-lock", daemon=True)

    def report(self, done: float, seconds_left: float | None) -> None:
        """Store the progress, which is written with the next renewal; arguments as the fields of `Owner`."""
        self._owner = self._owner.model_copy(update={"done": done, "seconds_left": seconds_left})

    def __enter__(self) -> Lock:
        """Name this process as the owner, and renew it from now on."""
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
    lock = FileLock(folder / _LOCK)
    try:
        for attempt in range(_ATTEMPTS):
            try:
                lock.acquire(timeout=_PATIENCE)
                break
            except FileNotFoundError:  # another process has removed the folder in the meantime
                if attempt == _ATTEMPTS - 1:
                    raise
                folder.mkdir(parents=True, exist_ok=True)
    except Timeout:
        raise _in_use(folder, read_owner(folder)) from None
    except OSError as error:
        raise RunError(f"output folder {folder} cannot be written ({error.strerror or error})") from error
    try:
        owner = read_owner(folder)
        if owner and not owner.is_here and is_active(folder, owner):
            raise _in_use(folder, owner)
        with Lock(folder) as held:
            yield held
    finally:
        lock.release()


def read_owner(folder: Path) -> Owner | None:
    """Return the process that writes a run or did so last; None if it is unknown."""
    with suppress(RunError):
        return validated(read_json(folder / _OWNER, RunError, most=_LARGEST), Owner, RunError, _OWNER)
    return None


def is_active(folder: Path, owner: Owner) -> bool:
    """Return whether an owner has renewed its file lately, by the clock of the file system, and not released it."""
    if owner.released:
        return False
    now = time.time()
    with suppress(OSError):
        (folder / _LOCK).touch()
        now = (folder / _LOCK).stat().st_mtime
    with suppress(OSError):
        return now - (folder / _OWNER).stat().st_mtime < LEASE
    return False


def is_locked(folder: Path) -> bool:
    """Return whether a process writes a run at the moment.

    The operating system's lock counts; the lease counts too for an owner on another machine, or where this user may
    not lock.
    """
    owner, may_lock = read_owner(folder), True
    if (folder / _LOCK).exists():
        try:
            with FileLock(folder / _LOCK, timeout=0):
                pass
        except Timeout:
            return True
        except OSError:
            may_lock = False
    return owner is not None and not (may_lock and owner.is_here) and is_active(folder, owner)


def _in_use(folder: Path, owner: Owner | None) -> RunInUseError:
    by = f" ({owner})" if owner and not owner.released else ""
    return RunInUseError(f"run folder {folder} is in use by another process{by}; wait for it")
