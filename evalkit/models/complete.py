"""Whether a checkpoint folder that another process writes is complete.

In: a folder. Out: the state of its files, which changes while they are written, and the reason why a checkpoint cannot
be loaded yet. Only headers are read: a file that was reserved at its full size and not filled looks complete, so a
caller waits until the files' states no longer change.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TypeAlias

from evalkit.errors import CheckpointError
from evalkit.models.files import TRAINER_FILES, read_json, safetensors_header, weight_files

FileStates: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""Name, size, time of change in nanoseconds and inode of each file."""

_WEIGHTS = (".safetensors", ".bin")


def file_states(folder: Path) -> FileStates:
    """Return the states of a checkpoint's files, without those that only a trainer reads; empty if it is gone."""
    try:
        with os.scandir(folder) as entries:
            found = [(one.name, one.stat()) for one in entries if one.is_file()]
    except OSError:  # removed, also between two files
        return ()
    return tuple(
        sorted(
            (name, state.st_size, state.st_mtime_ns, state.st_ino)
            for name, state in found
            if not name.startswith(TRAINER_FILES)
        )
    )


def is_begun(states: FileStates) -> bool:
    """Return whether a folder has files of a checkpoint, complete or not."""
    return any(name == "config.json" or name.endswith(_WEIGHTS) for name, *_ in states)


def why_incomplete(folder: Path, *, allow_pickle: bool) -> str:
    """Return why a checkpoint cannot be loaded, in one line; empty if its config and all its weight files are there."""
    try:
        read_json(folder / "config.json")
        for path in weight_files(folder, allow_pickle=allow_pickle):
            if path.suffix == ".safetensors":
                safetensors_header(path)
            else:
                _check_archive(path)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{folder}: cannot be read ({error.strerror or error})"
    return ""


def _check_archive(path: Path) -> None:
    """Raise unless a pickled weight file ends as the ZIP archive that torch writes; older formats have no end mark."""
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if not path.stat().st_size or (is_archive and not zipfile.is_zipfile(path)):
        raise CheckpointError(f"{path}: ends before its end; copy it again")
