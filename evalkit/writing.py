"""A run folder, written: by one process at a time, each file whole or not at all.

In: a run's manifest, and what completes it. Out: the finished `Run`.
"""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from evalkit.errors import RunError
from evalkit.journal import Journal, replace_file
from evalkit.runs import JOURNAL, MANIFEST, RESULTS, Run, load_run

if TYPE_CHECKING:
    import pandas as pd


def finished_run(
    folder: Path,
    manifest: dict[str, Any],
    is_finished: Callable[[Run], bool],
    complete: Callable[[RunWriter], None],
    say: Callable[[str], None],
) -> Run:
    """Open a run; where something is missing, have it completed before.

    Args:
        folder: the run's, whether it exists yet or not.
        manifest: as `open_run` takes it.
        is_finished: whether a run with results has all that is asked for.
        complete: writes what is missing, the results last.
        say: told of mended damage.
    """
    if (folder / RESULTS).is_file():
        run = load_run(folder)
        if is_finished(run):
            return run
    with open_run(folder.parent, folder.name, manifest, say) as writer:
        complete(writer)
    return load_run(folder)


class RunWriter:
    """A run folder, opened to be written. Use `open_run` or `finished_run`."""

    def __init__(self, folder: Path, manifest: dict[str, Any], say: Callable[[str], None]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.journal = Journal(folder / JOURNAL, say)

    def save_json(self, name: str, content: Any) -> None:
        """Write a JSON file of the folder, whole or not at all."""
        self.save_bytes(name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def save_table(self, name: str, table: pd.DataFrame) -> None:
        """Write a Parquet file of the folder, whole or not at all."""
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        self.save_bytes(name, buffer.getvalue())

    def save_bytes(self, name: str, content: bytes) -> None:
        """Write a file of the folder, whole or not at all.

        Raises:
            RunError: it could not be written.
        """
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            safe = "; what was scored is safe in the journal" if (self.folder / JOURNAL).exists() else ""
            raise RunError(
                f"{path} cannot be written ({error.strerror or error}){safe}; mend that and run the same command again"
            ) from error


@contextmanager
def open_run(
    root: Path, name: str, manifest: dict[str, Any], say: Callable[[str], None] = lambda _: None
) -> Iterator[RunWriter]:
    """Open a run folder for this process alone, new or begun before.

    Args:
        root: folder of runs.
        name: the run's folder in it.
        manifest: written if the folder is new; otherwise the stored one is kept, and is in the writer.
        say: told of mended damage.

    Raises:
        RunError: another process has it open, it cannot be written, or it belongs to another specification.
    """
    folder = root / name
    new = not folder.exists()
    try:
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
        if (folder / MANIFEST).exists():
            stored = load_run(folder).manifest
            if stored["id"] != manifest["id"]:
                raise RunError(f"run folder {folder} belongs to another specification; choose another --output")
            writer.manifest = stored
        else:
            writer.save_json(MANIFEST, manifest)
        with suppress(OSError):  # it only makes the message above say more
            (folder / ".owner").write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield writer
    except BaseException:
        if new and not (folder / JOURNAL).exists():
            shutil.rmtree(folder, ignore_errors=True)  # nothing was scored: a model that does not load, say
        raise
    finally:
        lock.release()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
