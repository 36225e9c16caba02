"""Temporary folders of this process; those that a killed process left are removed when the next one is made.

In: where the folder is to be. Out: an empty folder, removed at the end. Each is locked for as long as its process
lives: the operating system releases the lock however the process ends, on whichever machine or in whichever container
it ran, so a folder that can be locked has no owner.
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
"""Seconds after which a folder's owner has locked it, if it lives."""


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """Yield a folder of this process: in `place`, or where temporary ones are.

    Raises:
        CheckpointError: none can be made there.
    """
    root = place or Path(tempfile.gettempdir())
    _remove_abandoned(root)
    try:
        held = tempfile.TemporaryDirectory(dir=root, prefix=_PREFIX)
    except OSError as error:
        raise CheckpointError(f"no temporary folder can be made ({error.strerror}); set TMPDIR to one") from error
    with held as name:
        folder, lock = Path(name) / "files", FileLock(Path(name) / _LOCK)
        try:
            folder.mkdir()
            # A file system without locks: the folder is never taken for abandoned
            with contextlib.suppress(NotImplementedError):
                lock.acquire(timeout=0)
        except OSError as error:
            raise CheckpointError(f"no temporary folder can be made ({error.strerror}); set TMPDIR to one") from error
        try:
            yield folder
        finally:
            lock.release()


def _remove_abandoned(root: Path) -> None:
    """Remove the user's own folders whose process is gone; best effort."""
    with contextlib.suppress(OSError):
        for path in root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError, Timeout, NotImplementedError):
                if _may_be_abandoned(path):
                    # Released before the removal, which Windows refuses of an open file
                    with FileLock(path / _LOCK, timeout=0):
                        pass
                    shutil.rmtree(path, ignore_errors=True)


def _may_be_abandoned(path: Path) -> bool:
    """Whether it is a folder of this user with a lock, and old enough to be locked by its owner. Raises `OSError`."""
    about, lock = path.lstat(), (path / _LOCK).lstat()
    own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    return own and path.is_dir() and not path.is_symlink() and time.time() - lock.st_mtime > _YOUNG
