"""Temporary folders, with removal of those that killed processes left behind.

In: the parent folder. Out: an empty folder, removed at the end. Each folder is locked while its process runs. The
operating system releases the lock however the process ends, on any machine and in any container, so a folder that can
be locked is abandoned.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from evalkit.errors import CheckpointError

_PREFIX = ".evalkit-"
_LOCK = "lock"
_YOUNG = 60.0
"""Seconds after which a running process has locked its folder."""


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `place`, or in the system's folder for temporary files.

    Raises:
        CheckpointError: the folder cannot be created.
    """
    root = place or Path(tempfile.gettempdir())
    _remove_abandoned(root)
    try:
        directory = tempfile.TemporaryDirectory(dir=root, prefix=_PREFIX)
    except OSError as error:
        raise CheckpointError(
            f"no temporary folder can be created in {root} ({error.strerror}); set TMPDIR to a writable folder"
        ) from error
    with directory as name:
        folder, lock = Path(name) / "files", FileLock(Path(name) / _LOCK)
        try:
            folder.mkdir()
            # On a file system without locks, the folder is never considered abandoned
            with contextlib.suppress(NotImplementedError):
                lock.acquire(timeout=0)
        except OSError as error:
            raise CheckpointError(
                f"no temporary folder can be created in {root} ({error.strerror}); set TMPDIR to a writable folder"
            ) from error
        try:
            yield folder
        finally:
            lock.release()


def _remove_abandoned(root: Path) -> None:
    """Remove this user's folders whose process has ended; ignore errors."""
    with contextlib.suppress(OSError):
        for path in root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError, Timeout, NotImplementedError):
                if _may_be_abandoned(path):
                    # Released before removal, because Windows does not remove open files
                    with FileLock(path / _LOCK, timeout=0):
                        pass
                    shutil.rmtree(path, ignore_errors=True)


def _may_be_abandoned(path: Path) -> bool:
    """Return whether a folder is this user's, has a lock file, and is old enough to be locked. Raises `OSError`."""
    about, lock = path.lstat(), (path / _LOCK).lstat()
    own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    return own and path.is_dir() and not path.is_symlink() and time.time() - lock.st_mtime > _YOUNG
