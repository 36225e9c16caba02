"""Documents of a perplexity run: files and folders of `--text` → tasks of texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.data.sources import read
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.inputs.reading import MOST_TEXT_BYTES, decoded, read_as
from evalkit.inputs.values import by_number, check_text

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


def read_texts(given: Sequence[Path], key: str) -> dict[str, TaskDocuments]:
    """Read the files and folders of `--text`, with the text of .jsonl files' objects under a key.

    A task is named after its file or folder, without the ending; its digest is of all documents, in order.
    """
    if not given:
        raise UsageError(
            "name a text: --text FILE, a .txt file (one document), a .jsonl file (one on each line), or a folder"
        )
    tasks: dict[str, TaskDocuments] = {}
    for path, files in _sources([path.expanduser() for path in given]):
        name = printable(path.name if path.is_dir() else path.stem)
        if name in tasks:
            raise UsageError(f"--text {path} and {tasks[name].source} would both be task {name}; rename one")
        texts = _lines(path, name, key) if path.suffix == _LINES else _whole(files)
        documents = []
        for number, (text, place) in enumerate(texts):
            check_text(text, f"--text {place}")
            documents.append(TextDocument(name, number, text, place))
        if not documents:
            raise DataError(f"--text {path}: has no documents; give a file with one JSON object on each line")
        digest = hashlib.sha256(b"".join(hashlib.sha256(document.content).digest() for document in documents))
        tasks[name] = TaskDocuments(documents, str(path), digest.hexdigest())
    return tasks


def _sources(given: Sequence[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Yield (the source of a task, its files)."""
    for path in given:
        if not path.is_dir():
            if path.suffix.lower() in _OTHER:
                raise UsageError(f"--text {path}: {path.suffix} files are not read; give .txt or .jsonl")
            yield path, [path]
            continue
        inside = sorted(path.iterdir(), key=lambda file: by_number(file.name))
        if texts := [file for file in inside if file.suffix == _TEXT]:
            yield path.resolve(), texts
        lines = [file for file in inside if file.suffix == _LINES]
        yield from ((file, [file]) for file in lines)
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
            named = ", ".join(f"'{name}'" for name in list(record)[:8]) or "no keys"
            raise DataError(f"{where}: has no key '{key}', but {named}; name the key of the text with --key")
        if not isinstance(text := record[key], str):
            raise DataError(f"{where}: '{key}' is {text!r:.40}; expected a text")
        if not text:
            raise DataError(f"{where}: '{key}' is empty, so there is nothing to score; remove the line")
        yield text, f"{path}, {line}"
