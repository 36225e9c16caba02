"""Names of documents on the command line. In: a run and a name. Out: its task, subtask and document."""

from __future__ import annotations

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inspection.outcomes import TaskOutcomes
from evalkit.runs.folder import Run

_LISTED = 3
"""Documents that a message lists."""


def find_task(run: Run, name: str) -> tuple[str, str | None]:
    """Return the task with a name, or the task of a subtask with that name, and the subtask.

    Raises:
        UnknownNameError: the run has neither.
    """
    tasks = [entry["task"] for entry in run.stored["tasks"]]
    if name in tasks:
        return name, None
    if name in (subtasks := _subtasks(run)):
        return subtasks[name], name
    raise UnknownNameError(f"task of run {run.folder.name}", name, {*tasks, *subtasks})


def split_name(run: Run, name: str) -> tuple[str, str | None, str]:
    """Return task, subtask if it is named first, and the rest of a document's name, such as "17" of "arc_easy/17".

    Raises:
        UsageError: the name has no document, or the run no such task.
    """
    head, _, rest = name.partition("/")
    if not rest:
        raise UsageError(f"--document {name}: write TASK/DOCUMENT, such as arc_easy/17 or mmlu/mmlu_astronomy/3")
    return *find_task(run, head), rest


def find_document(found: TaskOutcomes, subtask: str | None, rest: str) -> int:
    """Return the index of a document.

    Args:
        found: its task.
        subtask: its subtask, if known.
        rest: its id, or subtask/id.

    Raises:
        UnknownNameError: the task has no such document.
        UsageError: several subtasks have one.
    """
    head, _, tail = rest.partition("/")
    if (place := found.places.get((head, tail))) is not None:
        return place
    ids = [(place, identity) for place, (own, identity) in enumerate(found.keys) if subtask in (None, own)]
    matches = [place for place, identity in ids if identity == rest]
    if not matches:
        known = dict.fromkeys(identity for _, identity in ids)
        raise UnknownNameError(f"document of {subtask or found.view.task}", rest, known)
    if len(matches) > 1:
        listed = ", ".join(found.name(place) for place in matches[:_LISTED])
        more = ", …" if len(matches) > _LISTED else ""
        raise UsageError(
            f"{len(matches)} subtasks of {found.view.task} have a document {rest}: {listed}{more}; name one"
        )
    return matches[0]


def _subtasks(run: Run) -> dict[str, str]:
    """Return subtask → task; empty if the run has no table of its documents."""
    try:
        documents = benchmark_of(run).comparable(run).documents
    except EvalkitError:
        return {}
    pairs = documents[["subtask", "task"]].drop_duplicates()
    return dict(zip(pairs["subtask"], pairs["task"], strict=True))
