"""Files and folders that a study file names.

In: paths and patterns relative to the study file. Out: names of folders, as they are on disk, or as the records of
finished runs name them where the folders are gone; and options with the paths of their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from evalkit.inputs.numbered import by_number
from evalkit.models.matching import is_pattern, matching

_FILES = ("context_config", "template", "text")
_FOLDERS = ("data_dir", "include_path", "tokenizer", "text")
"""Options whose values may be paths."""


def is_written_as_path(model: str) -> bool:
    """Return whether a name is that of a file or folder, whether or not it exists."""
    return model.startswith(("/", "./", "../", "~"))


@dataclass(frozen=True)
class StudyFolders:
    """The folders beside a study file."""

    root: Path
    """Folder of the study file."""
    recorded: frozenset[str] = frozenset()
    """Checkpoints that were evaluated, relative to `root`; they need not exist any more."""

    def path(self, name: str) -> Path:
        """Return the path of a file or folder; `~` is the user's folder."""
        with suppress(RuntimeError):  # of an unknown user
            return self.root / Path(name).expanduser()
        return self.root / name

    def exists(self, name: str) -> bool:
        """Return whether there is such a file or folder."""
        with suppress(OSError):
            return self.path(name).exists()
        return False

    def is_folder(self, model: str) -> bool:
        """Return whether a name is that of a folder, not of a model on the hub."""
        with suppress(OSError):
            if self.path(model).is_dir():
                return True
        return self._was_folder(model)

    def located(self, model: str) -> str:
        """Return a model of the study file as `--model` takes it: its path, unless it can only be a hub name."""
        return str(self.path(model)) if self.exists(model) or is_written_as_path(model) else model

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with the paths of their files and folders, where these exist."""
        return {name: self._option(name, value) for name, value in given.items()}

    def models(self, text: str) -> list[str]:
        """Return the folders that a pattern matches, those of records if no other; a name that is no pattern as it is.

        Seeds of a folder that was deleted are not counted where others exist: the user removed them.
        """
        if not is_pattern(text, self.root):
            return [text]
        return sorted(self._on_disk(self.root, text) or self._recorded("", text), key=by_number)

    def steps(self, model: str, text: str) -> list[str]:
        """Return the folders in a model's folder that a pattern matches, with recorded ones: trainers delete steps."""
        folder = self.path(model)
        if not is_pattern(text, folder):
            return [text]
        return sorted(self._on_disk(folder, text) | self._recorded(f"{model.rstrip('/')}/", text), key=by_number)

    def _was_folder(self, model: str) -> bool:
        inside = f"{model.rstrip('/')}/"
        return any(given.startswith(inside) for given in self.recorded)

    def _option(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._option(name, one) for one in value]
        if isinstance(value, str) and name in (*_FILES, *_FOLDERS):
            path = self.path(value)
            with suppress(OSError):
                if (name in _FILES and path.is_file()) or (name in _FOLDERS and path.is_dir()):
                    return str(path)
        return value

    def _on_disk(self, folder: Path, text: str) -> set[str]:
        return set(matching(text, folder))

    def _recorded(self, prefix: str, text: str) -> set[str]:
        """Return the beginnings of recorded checkpoints that match, folder by folder as a shell matches."""
        patterns = text.split("/")
        inside = (given.removeprefix(prefix).split("/") for given in self.recorded if given.startswith(prefix))
        return {
            "/".join(parts[: len(patterns)])
            for parts in inside
            if len(parts) >= len(patterns) and all(map(fnmatchcase, parts, patterns))
        }
