"""Documents of `--text`. In: files and folders. Out: tasks with their documents, validated.

A file is a task: a .jsonl file has a document on each line, any other file is one document. The .txt files of a folder
are one task, a document each, so that errors over them can be estimated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from evalkit.data.files import read
from evalkit.data.sampling import DocumentSelection
from evalkit.errors import DataError, UsageError
from evalkit.inputs.numbered import by_number
from evalkit.inputs.reading import MOST_TEXT_BYTES, decoded, read_as
from evalkit.inputs.texts import check_text
from evalkit.reporting.escape import printable

_LINES, _TEXT = ".jsonl", ".txt"
_OTHER = (".json", ".parquet", ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz", ".bz2", ".pdf", ".docx")
"""Endings of files that are no plain text, though some of them could be read as one."""


@dataclass(frozen=True)
class TextDocument:
    """A document to score."""

    task: str
    number: int
    """From 0, within its task."""
    text: str
    place: str
    """Where it is, for messages: "wiki.jsonl, line 3"."""

    @cached_property
    def content(self) -> bytes:
        """The text in UTF-8, whose bytes are counted."""
        return self.text.encode()


@dataclass(frozen=True)
class TextTask:
    """The documents of a file, or of the .txt files of a folder."""

    source: Path
    documents: tuple[TextDocument, ...]

    @cached_property
    def digest(self) -> str:
        """Hash of all documents, in order."""
        hashes = (hashlib.sha256(one.content).digest() for one in self.documents)
        return hashlib.sha256(b"".join(hashes)).hexdigest()


def read_texts(given: Sequence[Path], key: str) -> dict[str, TextTask]:
    """Read the files and folders of `--text`.

    Args:
        given: paths.
        key: key of the text in the objects of .jsonl files.

    Returns:
        Task → its documents. A task is named after its file or folder, without the ending.

    Raises:
        UsageError: nothing is given, a folder has no text, or two tasks have the same name.
        DataError: a file cannot be read, is not UTF-8, a document is empty, or a line has no such key.
        ScoringError: a document is too long for a tokenizer.
    """
    if not given:
        raise UsageError(
            "name a text: --text FILE, a .txt file (one document), a .jsonl file (one on each line), or a folder"
        )
    found: dict[str, TextTask] = {}
    for path, files in _sources([one.expanduser() for one in given]):
        name = printable(path.name if path.is_dir() else path.stem)
        if name in found:
            raise UsageError(f"--text {path} and {found[name].source} would both be task {name}; rename one")
        texts = _lines(path, name, key) if path.suffix == _LINES else _whole(files)
        documents = tuple(_document(name, number, *one) for number, one in enumerate(texts))
        if not documents:
            raise DataError(f"--text {path}: has no documents; give a file with one JSON object on each line")
        found[name] = TextTask(path, documents)
    return found


def _document(task: str, number: int, text: str, place: str) -> TextDocument:
    check_text(text, f"--text {place}")
    return TextDocument(task, number, text, place)


def selected(tasks: Mapping[str, TextTask], selection: DocumentSelection) -> dict[str, tuple[TextDocument, ...]]:
    """Return task → its selected documents."""
    return {
        name: tuple(task.documents[place] for place in selection.places(name, [name] * len(task.documents)))
        for name, task in tasks.items()
    }


def _sources(given: Sequence[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Yield (the source of a task, its files)."""
    for path in given:
        if not path.is_dir():
            if path.suffix.lower() in _OTHER:
                raise UsageError(f"--text {path}: {path.suffix} files are not read; give .txt or .jsonl")
            yield path, [path]
            continue
        inside = sorted(path.iterdir(), key=lambda one: by_number(one.name))
        if texts := [one for one in inside if one.suffix == _TEXT]:
            yield path.resolve(), texts
        lines = [one for one in inside if one.suffix == _LINES]
        yield from ((one, [one]) for one in lines)
        if not texts and not lines:
            raise UsageError(f"--text {path}: the folder has no .txt or .jsonl files")


def _whole(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (text, place) of files with one document each; a byte order mark is not a part of it."""
    for path in files:
        text: str = read_as(path, DataError, "--text", MOST_TEXT_BYTES, decoded).removeprefix("\ufeff")
        if not text:
            raise DataError(f"--text {path}: the file is empty; give a file with a text")
        yield text, str(path)


def _lines(path: Path, task: str, key: str) -> Iterator[tuple[str, str]]:
    """Yield (text, place) of the lines of a .jsonl file; blank lines are skipped."""
    for line, record in read(path, task):
        where = f"--text {path}, {line}"
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected a JSON object with the text under '{key}', found {record!r:.40}")
        if key not in record:
            named = ", ".join(f"'{one}'" for one in list(record)[:8]) or "no keys"
            raise DataError(f"{where}: has no key '{key}', but {named}; name the key of the text with --key")
        text = record[key]
        if not isinstance(text, str):
            raise DataError(f"{where}: '{key}' is {text!r:.40}; expected a text")
        if not text:
            raise DataError(f"{where}: '{key}' is empty, so there is nothing to score; remove the line")
        yield text, f"{path}, {line}"
