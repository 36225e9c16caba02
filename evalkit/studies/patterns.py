"""Folders that a study file's patterns match.

In: a pattern relative to the study file. Out: names of folders, as they are on disk, or as the records of finished runs
name them where the folders are gone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from evalkit.inputs.numbered import by_number
from evalkit.models.matching import matching

_PATTERN = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class StudyFolders:
    """The folders beside a study file."""

    root: Path
    """Folder of the study file."""
    recorded: frozenset[str] = frozenset()
    """Checkpoints that were evaluated, relative to `root`; they need not exist any more."""

    def is_folder(self, model: str) -> bool:
        """Return whether a name is that of a folder, not of a model on the hub."""
        inside = f"{model.rstrip('/')}/"
        return (self.root / model).is_dir() or any(given.startswith(inside) for given in self.recorded)

    def located(self, model: str) -> str:
        """Return a model of the study file as `--model` takes it: its path if there is such a file or folder."""
        return str(self.root / model) if (self.root / model).exists() else model

    def models(self, text: str) -> list[str]:
        """Return the folders that a pattern matches, those of records if no other; a name that is no pattern as it is.

        Seeds of a folder that was deleted are not counted where others exist: the user removed them.
        """
        if not _PATTERN.search(text) or (self.root / text).exists():
            return [text]
        return sorted(self._on_disk("", text) or self._recorded("", text), key=by_number)

    def steps(self, model: str, text: str) -> list[str]:
        """Return the folders in a model's folder that a pattern matches, with recorded ones: trainers delete steps."""
        if not _PATTERN.search(text) or (self.root / model / text).exists():
            return [text]
        return sorted(self._on_disk(model, text) | self._recorded(f"{model.rstrip('/')}/", text), key=by_number)

    def _on_disk(self, model: str, text: str) -> set[str]:
        return set(matching(text, self.root / model))

    def _recorded(self, prefix: str, text: str) -> set[str]:
        """Return the beginnings of recorded checkpoints that match, folder by folder as a shell matches."""
        patterns = text.split("/")
        inside = (given.removeprefix(prefix).split("/") for given in self.recorded if given.startswith(prefix))
        return {
            "/".join(parts[: len(patterns)])
            for parts in inside
            if len(parts) >= len(patterns) and all(map(fnmatchcase, parts, patterns))
        }
