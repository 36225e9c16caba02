"""Paths of evalkit's own files; atomic writes; temporary folders.

Own files are `configs/`, `tasks/` and `results/published/`, in a checkout or in an installed wheel.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR
from typing import IO

from evalkit.errors import CheckpointError

PACKAGE = Path(__file__).resolve().parent
RUNS = Path("results/runs")
"""Default folder of run folders."""


def resource(*parts: str) -> Path:
    """Return the path of one of evalkit's own files, e.g. `resource("configs", "templates")`."""
    installed = PACKAGE / "_resources"
    root = installed if installed.is_dir() else PACKAGE.parent
    return root.joinpath(*parts)


def replace_file(path: Path, content: bytes | Iterable[bytes | memoryview], *, locked: bool = False) -> None:
    """Replace a file's content atomically; no partial file is left if that fails.

    If a lock excludes other writers (`locked`), kills leave at most one temporary file behind.
    """
    with replacing(path, locked=locked) as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextmanager
def replacing(path: Path, *, locked: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which replaces `path` at the end of the block; see `replace_file`."""
    own = "" if locked else f".{platform.node()}-{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}{own}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


_PREFIX = ".evalkit-"
_LOCK = "lock"
_YOUNG = 60.0
"""Seconds after which a running process has locked its folder."""


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `parent`, or in the system's folder for temporary files."""
    from filelock import FileLock

    root = parent or Path(tempfile.gettempdir())
    _remove_abandoned(root)
    with ExitStack() as stack:
        try:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root, prefix=_PREFIX)))
            folder, lock = directory / "files", FileLock(directory / _LOCK)
            folder.mkdir()
            # On a file system without locks, the folder is never considered abandoned
            with suppress(NotImplementedError):
                lock.acquire(timeout=0)
        except OSError as error:
            raise CheckpointError(f"no folder can be created in {root} ({error.strerror}); set TMPDIR") from error
        stack.callback(lock.release)
        yield folder


def _remove_abandoned(root: Path) -> None:
    """Remove this user's folders whose process has ended; ignore errors."""
    from filelock import FileLock, Timeout

    with suppress(OSError):
        for path in root.glob(f"{_PREFIX}*"):
            with suppress(OSError, Timeout, NotImplementedError):
                about, lock = path.lstat(), (path / _LOCK).lstat()
                own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
                if own and S_ISDIR(about.st_mode) and time.time() - lock.st_mtime > _YOUNG:
                    # Released before removal, because Windows does not remove open files
                    with FileLock(path / _LOCK, timeout=0):
                        pass
                    shutil.rmtree(path, ignore_errors=True)
