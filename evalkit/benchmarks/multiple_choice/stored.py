"""Tables in evalkit's cache that take long to compute: questions of tasks, and their tokens.

In: a kind, and a key of everything that a table depends on. Out: the table, computed once and then read from
evalkit's cache. Best effort: a file that is missing, damaged or cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion, EncodedQuestions
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, Suite, choose_tasks
from evalkit.benchmarks.multiple_choice.tasks import LeafTask, Question, load_questions
from evalkit.cache import folder_digest, read_cached_bytes, source_digest, write_cached_bytes
from evalkit.models.loading.fingerprint import hash_file
from evalkit.paths import resource

if TYPE_CHECKING:
    import pyarrow as pa

    from evalkit.data import Library
    from evalkit.data.sampling import DocumentSelection


class Stopped(Exception):
    """Nobody needs the tokens any more."""


def read_table(kind: str, key: str) -> pa.Table | None:
    """Return a stored table; None if there is none, or it is damaged."""
    import pyarrow as pa

    if (content := read_cached_bytes(kind, key)) is None:
        return None
    try:
        # Unlike Arrow's default one, the system's pool gives unpacked data back
        return pa.ipc.open_file(pa.py_buffer(content), memory_pool=pa.system_memory_pool()).read_all()
    except (OSError, pa.ArrowException):
        return None


def write_table(kind: str, key: str, table: pa.Table) -> None:
    """Store a table."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    write_cached_bytes(kind, key, memoryview(sink.getvalue()))


_QUESTIONS = "questions"


def pinned_questions(suite: Suite, library: Library, selection: DocumentSelection) -> dict[str, list[Question]]:
    """Return task → its questions, in the suite's order.

    Args:
        suite: all its tasks are pinned.
        library, selection: as of `load_questions`.

    Raises:
        DataError: documents or examples are missing or malformed.
    """
    keys = {task: _questions_key(suite, library, task, selection) for task in suite.tasks}
    tables = {task: read_table(_QUESTIONS, key) for task, key in keys.items()}
    found = {task: _questions(table) for task, table in tables.items() if table is not None}
    if missing := tuple(task for task in suite.tasks if task not in found):
        built = load_questions(choose_tasks(suite, missing), library, selection)
        for task, questions in built.items():
            if (table := _questions_table(questions)) is not None:
                write_table(_QUESTIONS, keys[task], table)
        found |= built
    return {task: found[task] for task in suite.tasks}


def _questions_key(suite: Suite, library: Library, task: str, selection: DocumentSelection) -> str:
    sets = [suite.documents.get(task, task)] + ([suite.fewshot[task].documents] if suite.num_fewshot else [])
    content = {
        "task": task,
        "documents": [_identity(library, name) for name in sets],
        "num_fewshot": suite.num_fewshot,
        **selection.specification,
        "versions": {name: version(name) for name in ("lm-eval", "datasets")},
        "code": _code(),
    }
    return json.dumps(content, sort_keys=True)


def _identity(library: Library, name: str) -> list[str]:
    """Return what identifies documents, with the fields that their content hash does not cover."""
    loaded, place = library.load(name), library.where(name)
    if place.source == "data-dir" and place.path is not None:
        return [loaded.content_hash, hash_file(place.path)]
    return [loaded.content_hash, loaded.source]


@cache
def _code() -> list[str]:
    return [source_digest(), folder_digest(resource(*TASK_DIR))]


def _questions_table(questions: Sequence[Question]) -> pa.Table | None:
    """Return questions as a table; None if they are not made of plain JSON values, or do not survive the way there."""
    import pyarrow as pa

    try:
        leaves = json.dumps({one.subtask: asdict(one.leaf) for one in questions})
        texts = [json.dumps(_plain(one), ensure_ascii=False) for one in questions]
        table = pa.table({"question": texts}).replace_schema_metadata({"leaves": leaves})
    except (TypeError, ValueError, pa.ArrowException):
        return None
    return table if _questions(table) == list(questions) else None


def _plain(question: Question) -> dict[str, Any]:
    is_shared = len(set(question.contexts)) == 1
    return vars(question) | {"contexts": question.contexts[:1] if is_shared else question.contexts, "leaf": None}


def _questions(table: pa.Table) -> list[Question]:
    leaves = {subtask: LeafTask(**leaf) for subtask, leaf in json.loads(table.schema.metadata[b"leaves"]).items()}
    found = []
    for text in table["question"]:
        row = json.loads(text.as_py())
        texts = {name: tuple(row[name]) for name in ("contexts", "continuations", "gaps", "choices")}
        if len(texts["contexts"]) == 1:
            texts["contexts"] *= len(texts["continuations"])
        found.append(Question(**row | texts | {"leaf": leaves[row["subtask"]]}))
    return found


_TOKENS = "tokens"
_LEAST = 2**14
"""Tokens of a task from which they are stored; fewer take about 30 ms."""
_ARRAYS = ("tokens", "starts", "first", "segments", "cuts")


def encoded_questions(
    prompter: Prompter,
    questions: Sequence[Question],
    unconditional: bool,
    stopped: threading.Event | None = None,
) -> EncodedQuestions:
    """Encode the questions of a task.

    Args:
        prompter: renders and tokenises.
        questions: of one task.
        unconditional: whether choices are encoded without their context too.
        stopped: once it is set, the tokens are not needed any more.

    Raises:
        ScoringError: as `Prompter.encode`.
        Stopped: `stopped` was set meanwhile.
    """
    key = _tokens_key(prompter, questions, unconditional)
    if key is not None and (table := read_table(_TOKENS, key)) is not None:
        return _from_table(questions, table)
    found = EncodedQuestions.of(questions, _until(stopped, prompter.encode(questions, unconditional)))
    if key is not None and len(found.segments) >= _LEAST:
        write_table(_TOKENS, key, _tokens_table(found))
    return found


def _until(stopped: threading.Event | None, encoded: Iterable[EncodedQuestion]) -> Iterator[EncodedQuestion]:
    for question in encoded:
        if stopped is not None and stopped.is_set():
            raise Stopped
        yield question


def _tokens_key(prompter: Prompter, questions: Sequence[Question], unconditional: bool) -> str | None:
    """Return what the tokens depend on; None if that is not known."""
    identity = prompter.identity
    if identity is None:
        return None
    texts = hashlib.sha256()
    for one in questions:
        parts = (one.contexts, one.continuations, one.delimiter, one.gaps)
        texts.update(repr(parts).encode("utf-8", "surrogatepass"))
    versions = {name: version(name) for name in ("tokenizers", "transformers")}
    return json.dumps([identity, texts.hexdigest(), unconditional, versions, source_digest()], sort_keys=True)


def _tokens_table(found: EncodedQuestions) -> pa.Table:
    """Return a table with one row, whose columns are arrays."""
    import pyarrow as pa

    columns = (found.tokens, found.starts, found.first, found.segments, found.cuts.ravel())
    whole = (pa.LargeListArray.from_arrays([0, len(column)], pa.array(column)) for column in columns)
    return pa.table(dict(zip(_ARRAYS, whole, strict=True)))


def _from_table(questions: Sequence[Question], table: pa.Table) -> EncodedQuestions:
    tokens, starts, first, segments, cuts = (table[name].chunk(0).values.to_numpy() for name in _ARRAYS)
    return EncodedQuestions(questions, tokens, starts, first, segments, cuts.reshape(-1, 2))
