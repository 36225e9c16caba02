"""Plan of a perplexity run: a request → documents and a manifest, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evalkit.benchmarks.perplexity import PERPLEXITY
from evalkit.benchmarks.request import DocumentRequest, numerics, plain_manifest
from evalkit.data.files import read
from evalkit.data.sampling import DocumentSelection
from evalkit.display import Say
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.inputs.reading import MOST_TEXT_BYTES, decoded, read_as
from evalkit.inputs.settings import setting
from evalkit.inputs.values import by_number, check_text
from evalkit.models.locate import Checkpoint
from evalkit.runs.finding import run_folder

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
        hashes = (hashlib.sha256(document.content).digest() for document in self.documents)
        return hashlib.sha256(b"".join(hashes)).hexdigest()


def read_texts(given: Sequence[Path], key: str) -> dict[str, TextTask]:
    """Read the files and folders of `--text`, with the text of .jsonl files' objects under a key.

    A task is named after its file or folder, without the ending.

    Raises:
        UsageError: nothing is given, a folder has no text, or two tasks have the same name.
        DataError: a file cannot be read, is not UTF-8, a document is empty, or a line has no such key.
        ScoringError: a document is too long for a tokenizer.
    """
    if not given:
        raise UsageError(
            "name a text: --text FILE, a .txt file (one document), a .jsonl file (one on each line), or a folder"
        )
    tasks: dict[str, TextTask] = {}
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
        tasks[name] = TextTask(path, tuple(documents))
    return tasks


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
        text = record[key]
        if not isinstance(text, str):
            raise DataError(f"{where}: '{key}' is {text!r:.40}; expected a text")
        if not text:
            raise DataError(f"{where}: '{key}' is empty, so there is nothing to score; remove the line")
        yield text, f"{path}, {line}"


VERSION = 1
"""Increased with every change of evalkit that changes a number of this benchmark."""


@dataclass(frozen=True)
class PerplexityRequest(DocumentRequest):
    """Settings of a perplexity run."""

    text: tuple[Path, ...] = setting(
        (),
        "A .txt file (one document), a .jsonl file (one on each line), or a folder of them; repeat for several tasks.",
        metavar="FILE",
        has_variable=False,
    )
    key: str = setting("text", "Key of the text in .jsonl files.", has_variable=False)
    stride: int | None = setting(
        None,
        "Tokens that each window after the first scores; fewer give each token more context, and take longer.",
        "the window",
        metavar="TOKENS",
    )


@dataclass(frozen=True)
class PerplexityPlan:
    """A validated request with its documents and manifest."""

    request: PerplexityRequest
    checkpoint: Checkpoint
    tasks: dict[str, TextTask]
    manifest: dict[str, Any]

    @cached_property
    def documents(self) -> dict[str, tuple[TextDocument, ...]]:
        """Task → the documents that are scored."""
        return selected(self.tasks, self.request.selection)

    @property
    def window(self) -> int | None:
        """Requested tokens of a window; None: the model's."""
        window: int | None = self.manifest["specification"]["windows"]["tokens"]
        return window

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        return run_folder(self.request.output, self.checkpoint, PERPLEXITY, "text", self.manifest)


def plan_perplexity(request: PerplexityRequest, say: Say) -> PerplexityPlan:
    """Validate a request and make the plan of its run."""
    tasks = read_texts(request.text, request.key)
    checkpoint = request.model.locate(say)
    # Windows may be shorter than the model's, which no extension shortens
    context = request.model.context
    specification = {
        **numerics(request.model, checkpoint, request.limit, say),
        **request.selection.specification,
        "suite": PERPLEXITY,
        "documents": {name: task.digest for name, task in tasks.items()},
        "windows": {"tokens": None if context in (None, "none") else int(context), "stride": request.stride},
        "version": VERSION,
    }
    documents = {
        name: {"source": str(tasks[name].source), "official": None, "count": len(members)}
        for name, members in selected(tasks, request.selection).items()
    }
    manifest = plain_manifest(
        PERPLEXITY, request.model, checkpoint, specification, template={"name": "text"}, documents=documents
    )
    return PerplexityPlan(request, checkpoint, tasks, manifest)
