"""Selection of documents. In: one run, or two on the same documents, and criteria. Out: documents, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from evalkit.benchmarks.document_views import ChoiceView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.comparison.pairing import check_same_documents
from evalkit.display import Say
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inspection.outcomes import BEST, DocumentOutcome, TaskOutcomes, run_outcomes
from evalkit.runs.folder import Run

InRuns = tuple[TaskOutcomes, ...]
SelectedDocument = tuple[DocumentOutcome, ...]
"""In one run, or in two."""


CRITERIA: dict[str, Callable[[DocumentOutcome, DocumentOutcome], bool]] = {
    "wrong": lambda a, _: a.right is False,
    "right": lambda a, _: a.right is True,
    "tie": lambda a, _: a.tie,
    "truncated": lambda a, _: a.truncated,
    "won": lambda a, b: a.right is False and b.right is True,
    "lost": lambda a, b: a.right is True and b.right is False,
}
"""What a document can be selected for, by its outcomes in the first and in the last run."""
_OF_TWO, _OF_RIGHT = {"won", "lost"}, {"wrong", "right", "won", "lost"}


class Selection(NamedTuple):
    """The tasks that were searched, the documents that fulfil the criteria, and of how many."""

    tasks: list[InRuns]
    documents: list[SelectedDocument]
    searched: int


def show_list(
    runs: Sequence[Run], task: str | None, rule: str | None, criteria: Collection[str], words: Sequence[str], say: Say
) -> Selection:
    """Select documents of one run or two, sorted by value, the lowest first; right or won ones the highest first.

    `task` is a task or a subtask, by default all; `rule` the rule that chooses, by default the first run's own. A
    selected document fulfils all `criteria`, and its text contains all `words`, in any case. Runs of other documents,
    and criteria that do not apply, raise `UsageError`.
    """
    if len(runs) == 1 and _OF_TWO.intersection(criteria):
        raise UsageError("--won and --lost compare two runs; name both: evalkit show RUN_A RUN_B --won")
    if len(runs) > 1 and not _OF_TWO.issuperset(criteria):
        raise UsageError("--wrong, --right, --tie and --truncated are for one run; of two runs, give --won or --lost")
    name, subtask = (None, None) if task is None else _find_task(runs[0], task)
    tasks = _outcomes(runs, name, rule, say)
    selected, searched = [], 0
    for outcomes in tasks:
        _check_criteria(outcomes, criteria, words)
        for key in outcomes[0].documents:
            if subtask in (None, key[0]):
                searched += 1
                documents = tuple(of_run.documents[key] for of_run in outcomes if key in of_run.documents)
                fulfilled = (CRITERIA[name](documents[0], documents[-1]) for name in criteria)
                if len(documents) == len(runs) and all(fulfilled) and _has_words(documents[0], words):
                    selected.append(documents)
    sign = -1 if {"right", "won"}.intersection(criteria) else 1
    # Documents without a value come last; the sort keeps the order of equal ones
    selected.sort(key=lambda documents: (math.isnan(_value(documents)), sign * _value(documents)))
    return Selection(tasks, selected, searched)


def _check_criteria(outcomes: InRuns, criteria: Collection[str], words: Sequence[str]) -> None:
    view = outcomes[0].view
    if words and isinstance(view, ChoiceView) and not view.texts:
        raise UsageError(f"--text searches texts, which task {view.task} does not have: {view.problem}")
    values = [document.value for of_run in outcomes if not of_run.decided for document in of_run.documents.values()]
    if _OF_RIGHT.intersection(criteria) and any(value < 0 or value > BEST for value in values):
        raise UsageError(
            f"task {view.task}: its metric is not between 0 and 1, so no document is right or wrong; "
            "leave out --wrong, --right, --won and --lost"
        )


def show_document(runs: Sequence[Run], name: str, rule: str | None, say: Say) -> SelectedDocument:
    """Return one document in each run, such as "arc_easy/17", "mmlu/mmlu_astronomy/3" or "mmlu_astronomy/3"."""
    head, _, rest = name.partition("/")
    if not rest:
        raise UsageError(f"--document {name}: write TASK/DOCUMENT, such as arc_easy/17 or mmlu/mmlu_astronomy/3")
    task, subtask = _find_task(runs[0], head)
    [outcomes] = _outcomes(runs, task, rule, say)
    document = _find_document(outcomes[0], subtask, rest)
    if document.key not in outcomes[-1].documents:
        raise UsageError(f"run {runs[-1].folder.name} has no document {document.name}; show the other run alone")
    return tuple(of_run.documents[document.key] for of_run in outcomes)


def _find_task(run: Run, name: str) -> tuple[str, str | None]:
    """Return the task with a name, or the task of a subtask with that name, and the subtask."""
    if name in (tasks := _tasks(run)):
        return name, None
    try:
        documents = benchmark_of(run).comparable(run).documents
        subtasks = dict(zip(documents["subtask"], documents["task"], strict=True))
    except EvalkitError:  # the run has no table of its documents
        subtasks = {}
    if name in subtasks:
        return subtasks[name], name
    raise UnknownNameError(f"task of run {run.folder.name}", name, {*tasks, *subtasks})


def _tasks(run: Run) -> list[str]:
    return [entry["task"] for entry in run.stored["tasks"]]


def _find_document(task: TaskOutcomes, subtask: str | None, rest: str) -> DocumentOutcome:
    """Return the document with an id, or subtask/id, in a subtask if it is known."""
    head, _, tail = rest.partition("/")
    if (head, tail) in task.documents:
        return task.documents[head, tail]
    of_subtask = [document for document in task.documents.values() if subtask in (None, document.key[0])]
    matches = [document for document in of_subtask if document.key[1] == rest]
    if not matches:
        known = {document.key[1] for document in of_subtask}
        raise UnknownNameError(f"document of {subtask or task.view.task}", rest, known)
    if len(matches) > 1:
        listed = ", ".join(document.name for document in matches[:3]) + ", …" * (len(matches) > 3)
        raise UsageError(f"{len(matches)} subtasks of {task.view.task} have a document {rest}: {listed}; name one")
    return matches[0]


def _outcomes(runs: Sequence[Run], task: str | None, rule: str | None, say: Say) -> list[InRuns]:
    """Return the outcomes of each task that all runs have."""
    chosen = [name for name in _tasks(runs[0]) if task in (None, name) and all(name in _tasks(run) for run in runs)]
    if not chosen:
        raise UsageError(
            f"run {runs[-1].folder.name} has no {task or 'task of the other run'}; compare runs with a common task"
        )
    for name in chosen if len(runs) > 1 else ():
        check_same_documents(runs[0], runs[1], name)
    rule = rule or (runs[0].rule if len(runs) > 1 else None)
    by_run = [{outcomes.view.task: outcomes for outcomes in run_outcomes(run, chosen, rule, say)} for run in runs]
    tasks = [tuple(of_run[name] for of_run in by_run) for name in chosen if all(name in of_run for of_run in by_run)]
    if with_documents := [outcomes for outcomes in tasks if all(of_run.documents for of_run in outcomes)]:
        return with_documents
    problems = dict.fromkeys(of_run.view.problem for outcomes in tasks for of_run in outcomes if of_run.view.problem)
    why = "; ".join(problems) or f"benchmark {runs[0].kind} stores no documents to look at"
    raise UsageError(f"run {runs[0].folder.name}: {why}")


def _value(documents: SelectedDocument) -> float:
    """Return the margin or score in the only run; the second run's less the first's."""
    first, *second = (document.value for document in documents)
    if not second:
        return first
    return 0.0 if second[0] == first else second[0] - first


def _has_words(document: DocumentOutcome, words: Sequence[str]) -> bool:
    if not words:
        return True
    prompts, texts = [], []
    if answer := document.answer:
        prompts, texts = [answer.prompt], [answer.answer, *answer.references]
    elif text := document.text:
        prompts, texts = [text.common, *text.choices], [*text.options]
    whole = "\n".join(["".join(piece.text for piece in prompt) for prompt in prompts] + texts).casefold()
    return all(word.casefold() in whole for word in words)
