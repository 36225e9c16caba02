"""Questions of pinned tasks, built by lm-eval once and then read from evalkit's cache.

In: a suite and a `Library`. Out: task → its questions, as `load_questions` builds them, without importing lm-eval where
all are stored. A stored task belongs to its documents, the versions of lm-eval and datasets, and evalkit's own code and
task files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, Suite, choose_tasks
from evalkit.benchmarks.multiple_choice.tasks import LeafTask, Question, load_questions
from evalkit.benchmarks.stored_tables import read_table, write_table
from evalkit.models.hashes import hash_file
from evalkit.resources import folder_digest, resource, source_digest

if TYPE_CHECKING:
    import pyarrow as pa

    from evalkit.data import Library
    from evalkit.data.sampling import DocumentSelection

_KIND = "questions"

_PART = 256
"""Questions read at a time."""


def pinned_questions(suite: Suite, library: Library, selection: DocumentSelection) -> dict[str, list[Question]]:
    """Return task → its questions, in the suite's order.

    Args:
        suite: all its tasks are pinned.
        library, selection: as of `load_questions`.

    Raises:
        DataError: documents or examples are missing or malformed.
    """
    keys = {task: _key(suite, library, task, selection) for task in suite.tasks}
    found = {task: _stored(task, key) for task, key in keys.items()}
    if missing := tuple(task for task, questions in found.items() if questions is None):
        built = load_questions(choose_tasks(suite, missing), library, selection)
        for task, questions in built.items():
            if (table := _table(questions)) is not None:
                write_table(_KIND, keys[task], table)
        found |= built
    return {task: questions for task, questions in found.items() if questions is not None}


def _key(suite: Suite, library: Library, task: str, selection: DocumentSelection) -> str:
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


def _table(questions: Sequence[Question]) -> pa.Table | None:
    """Return questions as a table; None if they are not made of plain JSON values, or do not survive the way there."""
    import pyarrow as pa

    try:
        leaves = json.dumps({one.subtask: asdict(one.leaf) for one in questions})
        rows = [_row(one) for one in questions]
        table = pa.Table.from_pylist(rows).replace_schema_metadata({"task": questions[0].task, "leaves": leaves})
    except (TypeError, ValueError, pa.ArrowException):
        return None
    return table if _questions(table) == list(questions) else None


def _row(question: Question) -> dict[str, Any]:
    same = len(set(question.contexts)) == 1
    return {
        "subtask": question.subtask,
        "doc_id": question.doc_id,
        "contexts": question.contexts[:1] if same else question.contexts,
        "continuations": question.continuations,
        "delimiter": question.delimiter,
        "gaps": question.gaps,
        "choices": None if question.choices == question.continuations else question.choices,
        "gold": question.gold,
        "cluster": question.cluster,
        "doc": json.dumps(question.doc, ensure_ascii=False),
    }


def _stored(task: str, key: str) -> list[Question] | None:
    """Return the stored questions of a task; None if there are none."""
    table = read_table(_KIND, key)
    if table is None or (table.schema.metadata or {}).get(b"task") != task.encode():
        return None
    return _questions(table)


def _questions(table: pa.Table) -> list[Question]:
    metadata = table.schema.metadata
    task, leaves = metadata[b"task"].decode(), json.loads(metadata[b"leaves"])
    about = {subtask: LeafTask(**leaf) for subtask, leaf in leaves.items()}
    # In parts, so that few values are in memory twice
    parts = table.to_batches(max_chunksize=_PART)
    return [_question(task, about, row) for part in parts for row in part.to_pylist()]


def _question(task: str, about: dict[str, LeafTask], row: dict[str, Any]) -> Question:
    contexts, continuations = tuple(row["contexts"]), tuple(row["continuations"])
    return Question(
        task=task,
        subtask=row["subtask"],
        doc_id=row["doc_id"],
        contexts=contexts if len(contexts) > 1 else contexts * len(continuations),
        continuations=continuations,
        delimiter=row["delimiter"],
        gaps=tuple(row["gaps"]),
        choices=continuations if row["choices"] is None else tuple(row["choices"]),
        gold=row["gold"],
        cluster=row["cluster"],
        doc=json.loads(row["doc"]),
        leaf=about[row["subtask"]],
    )
