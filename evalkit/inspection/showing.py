"""Documents of one run, or of two on the same documents. In: runs and criteria. Out: selected documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evalkit.benchmarks.registry import benchmark_of
from evalkit.display import Say
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inspection.outcomes import TaskOutcomes, run_outcomes
from evalkit.inspection.selection import Criteria, SelectedDocument, check_criteria, check_same_documents, select
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


def show_list(
    runs: Sequence[Run], task: str | None, rule: str | None, criteria: Criteria, say: Say
) -> tuple[list[tuple[TaskOutcomes, ...]], list[SelectedDocument], int]:
    """Return the searched tasks, the selected documents, and the number of documents that were searched.

    Args:
        runs: one finished run, or two.
        task: a task or a subtask; None: all.
        rule: the rule that chooses; None: the first run's own.
        criteria: what a document must be.
        say: called with messages for the user.

    Raises:
        EvalkitError: an unknown name, a run that is damaged, or runs of other documents.
    """
    check_criteria(criteria, len(runs))
    name, subtask = (None, None) if task is None else find_task(runs[0], task)
    tasks = _outcomes(runs, name, rule, say)
    searched = sum(subtask in (None, key[0]) for outcomes in tasks for key in outcomes[0].keys)
    return tasks, select(tasks, replace(criteria, subtask=subtask)), searched


def show_document(runs: Sequence[Run], name: str, rule: str | None, say: Say) -> SelectedDocument:
    """Return one document in each run. Arguments and errors: see `show_list`.

    Args:
        runs: see `show_list`, as the others.
        name: name of the document: "arc_easy/17", "mmlu/mmlu_astronomy/3" or "mmlu_astronomy/3".
        rule: the rule that chooses.
        say: called with messages for the user.
    """
    task, subtask, rest = split_name(runs[0], name)
    [outcomes] = _outcomes(runs, task, rule, say)
    place = find_document(outcomes[0], subtask, rest)
    key = outcomes[0].keys[place]
    places = [one.places.get(key) for one in outcomes]
    if None in places:
        raise UsageError(
            f"run {runs[-1].folder.name} has no document {outcomes[0].name(place)}; show the other run alone"
        )
    return SelectedDocument(outcomes, tuple(one for one in places if one is not None))


def _outcomes(runs: Sequence[Run], task: str | None, rule: str | None, say: Say) -> list[tuple[TaskOutcomes, ...]]:
    """Return the outcomes of each task that all runs have."""
    shared = [entry["task"] for entry in runs[0].stored["tasks"]]
    for run in runs[1:]:
        there = [entry["task"] for entry in run.stored["tasks"]]
        shared = [one for one in shared if one in there]
    chosen = [one for one in shared if task in (None, one)]
    if not chosen:
        raise UsageError(
            f"run {runs[-1].folder.name} has no {task or 'task of the other run'}; compare runs with a common task"
        )
    for name in chosen if len(runs) > 1 else ():
        check_same_documents(runs[0], runs[1], name)
    rule = rule or (runs[0].rule if len(runs) > 1 else None)
    by_run = [{one.view.task: one for one in run_outcomes(run, chosen, rule, say)} for run in runs]
    tasks = [tuple(found[name] for found in by_run) for name in chosen if all(name in found for found in by_run)]
    tasks = [of for of in tasks if all(one.keys for one in of)] or _without_documents(runs[0], tasks)
    return tasks


def _without_documents(run: Run, tasks: Sequence[tuple[TaskOutcomes, ...]]) -> list[tuple[TaskOutcomes, ...]]:
    """Raise a `UsageError` that says why a run has no documents."""
    problems = dict.fromkeys(one.view.problem for of in tasks for one in of if one.view.problem)
    why = "; ".join(problems) or f"benchmark {run.kind} stores no documents to look at"
    raise UsageError(f"run {run.folder.name}: {why}")
