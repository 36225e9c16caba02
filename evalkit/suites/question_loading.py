"""Loading of a suite's questions, from evalkit's cache where it has them.

In: a suite, a `Library` of documents, the requests of its tasks, which documents are read. Out: task → `Question`s.
Questions that need no task of lm-eval's catalogue are kept in evalkit's cache: it is a second of each run that lm-eval
and datasets are not imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from evalkit.cache import folder_digest, read_cached_bytes, source_digest, write_cached_bytes
from evalkit.data.requests import request_tasks
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSelection
from evalkit.errors import UsageError
from evalkit.models.loading.fingerprint import hash_file
from evalkit.paths import resource
from evalkit.suites.questions import LeafTask, Question, chosen
from evalkit.suites.suites import TASK_DIR, Suite, choose_tasks

if TYPE_CHECKING:
    from evalkit.data import Library
    from evalkit.suites.lm_eval_tasks import TaskSet
    from evalkit.suites.request_files import Requests

_CACHED = "questions"


def pinned_questions(
    suite: Suite,
    library: Library,
    selection: DocumentSelection,
    requests: Mapping[str, Requests] | None = None,
    control: str | None = None,
) -> dict[str, list[Question]]:
    """Return the questions of a suite as `load_questions`, without other tasks of lm-eval; from the cache if there."""
    code = [source_digest(), folder_digest(resource(*TASK_DIR)), control or ""]
    known = request_tasks()
    hashes = {task: f"{given.content_hash} {known.get(task)}" for task, given in (requests or {}).items()}
    keys = {task: _cache_key(suite, library, task, selection, code, hashes.get(task)) for task in suite.tasks}
    contents = {task: read_cached_bytes(_CACHED, key) for task, key in keys.items()}
    questions = {task: _unpacked(bytes(content)) for task, content in contents.items() if content is not None}
    if missing := tuple(task for task in suite.tasks if task not in questions):
        built = load_questions(choose_tasks(suite, missing), library, selection, None, None, requests, control)
        for task, members in built.items():
            if (packed := _packed(members)) is not None:
                write_cached_bytes(_CACHED, keys[task], packed)
        questions |= built
    return {task: questions[task] for task in suite.tasks}


def _cache_key(
    suite: Suite, library: Library, task: str, selection: DocumentSelection, code: list[str], requests: str | None
) -> str:
    names = [suite.documents.get(task, task)] + ([suite.fewshot[task].documents] if suite.num_fewshot else [])
    identities = [] if requests is None else [[requests, "requests"]]
    for name in names if requests is None else ():
        loaded, location = library.load(name), library.where(name)
        # A user's file may have fields that the content hash does not cover
        own_file = location.path if location.source == "data-dir" else None
        identities.append([loaded.content_hash, hash_file(own_file) if own_file else loaded.source])
    content = {
        "task": task,
        "documents": identities,
        "num_fewshot": suite.num_fewshot,
        **selection.specification,
        "versions": {name: version(name) for name in ("lm-eval", "datasets")},
        "code": code,
    }
    return json.dumps(content, sort_keys=True)


def _packed(questions: Sequence[Question]) -> bytes | None:
    """Return questions as JSON; None if they have other values than JSON has."""
    rows = []
    for question in questions:
        is_shared = len(set(question.contexts)) == 1
        contexts = question.contexts[:1] if is_shared else question.contexts
        alone = question.alone[:1] if len(set(question.alone)) == 1 else question.alone
        rows.append(vars(question) | {"contexts": contexts, "alone": alone, "leaf": None})
    try:
        packed = json.dumps([{question.subtask: asdict(question.leaf) for question in questions}, rows]).encode()
    except (TypeError, ValueError):
        return None
    return packed if _unpacked(packed) == list(questions) else None


def _unpacked(packed: bytes) -> list[Question]:
    leaves, rows = json.loads(packed)
    leaf_tasks = {subtask: LeafTask(**leaf) for subtask, leaf in leaves.items()}
    questions = []
    for row in rows:
        texts = {name: tuple(row[name]) for name in ("contexts", "alone", "continuations", "gaps", "choices")}
        for name in ("contexts", "alone"):
            if len(texts[name]) == 1:
                texts[name] *= len(texts["continuations"])
        questions.append(Question(**row | texts | {"leaf": leaf_tasks[row["subtask"]]}))
    return questions


def load_questions(
    suite: Suite,
    library: Library,
    selection: DocumentSelection = ALL_DOCUMENTS,
    others: Mapping[str, TaskSet] | None = None,
    estimate: int | None = None,
    requests: Mapping[str, Requests] | None = None,
    control: str | None = None,
) -> dict[str, list[Question]]:
    """Return task → its questions, in the suite's order.

    Args:
        suite: its `num_fewshot` examples become part of each context.
        library: source of the pinned tasks' documents.
        selection: which documents of each task; a subject is a stratum.
        others: the suite's other tasks, loaded by lm-eval.
        estimate: about how many of these to return, for estimates; at least a few of each subject.
        requests: the suite's tasks that are requests.
        control: "swap": each document has the context of another one (`requests.swapped`).

    Raises:
        DataError: documents or examples are missing or malformed.
        UsageError: a document belongs to two tasks.
    """
    if control:
        from evalkit.suites.request_files import swapped

        every = load_questions(suite, library, ALL_DOCUMENTS, others, requests=requests)
        return {task: chosen(task, swapped(members), selection, estimate) for task, members in every.items()}
    questions: dict[str, list[Question]] = {}
    of_lm_eval = [task for task in suite.tasks if task not in (requests or {})]
    if of_lm_eval:
        from evalkit.suites.task_questions import questions_of_lm_eval

        questions = questions_of_lm_eval(suite, of_lm_eval, library, selection, others or {}, estimate)
    for task, of_task in (requests or {}).items():
        if task in suite.tasks:
            questions[task] = chosen(task, of_task.questions(), selection, estimate)
    owner: dict[str, str] = {}
    for task, members in questions.items():
        for subtask in dict.fromkeys(question.subtask for question in members):
            if owner.setdefault(subtask, task) != task:
                raise UsageError(
                    f"{subtask} is part of task {owner[subtask]} and of task {task}, so its documents would count "
                    "twice; leave one task out, or run them separately"
                )
    return {task: questions[task] for task in suite.tasks}
