"""Selection of documents. In: one run, or two on the same documents, and criteria. Out: documents, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from evalkit.benchmarks.document_views import ChoiceView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.comparison.pairing import check_same_documents
from evalkit.display import Say
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inspection.outcomes import BEST, DocumentName, DocumentOutcome, TaskOutcomes, run_outcomes
from evalkit.runs.folder import Run

InRuns = tuple[TaskOutcomes, ...]
SelectedDocument = tuple[DocumentOutcome, ...]
"""In one run, or in two."""


@dataclass(frozen=True)
class Criteria:
    """What a document must be; all of them."""

    wrong: bool = False
    right: bool = False
    tie: bool = False
    truncated: bool = False
    won: bool = False
    """Right in the second run and wrong in the first."""
    lost: bool = False
    """Wrong in the second run and right in the first."""
    words: tuple[str, ...] = ()
    """Words that its text contains, in any case."""
    subtask: str | None = None


class Selection(NamedTuple):
    """The tasks that were searched, the documents that fulfil the criteria, and of how many."""

    tasks: list[InRuns]
    documents: list[SelectedDocument]
    searched: int


def show_list(runs: Sequence[Run], task: str | None, rule: str | None, criteria: Criteria, say: Say) -> Selection:
    """Select documents of one run or two, sorted by value, the lowest first; right or won ones the highest first.

    `task` is a task or a subtask, by default all; `rule` the rule that chooses, by default the first run's own. Runs of
    other documents, and criteria that do not apply, raise `UsageError`.
    """
    if len(runs) == 1 and (criteria.won or criteria.lost):
        raise UsageError("--won and --lost compare two runs; name both: evalkit show RUN_A RUN_B --won")
    if len(runs) > 1 and (criteria.wrong or criteria.right or criteria.tie or criteria.truncated):
        raise UsageError("--wrong, --right, --tie and --truncated are for one run; of two runs, give --won or --lost")
    name, subtask = (None, None) if task is None else _find_task(runs[0], task)
    tasks = _outcomes(runs, name, rule, say)
    criteria = replace(criteria, subtask=subtask)
    searched = sum(subtask in (None, key[0]) for outcomes in tasks for key in outcomes[0].keys)
    selected = [document for outcomes in tasks for document in _selected(outcomes, criteria)]
    sign = -1 if criteria.right or criteria.won else 1
    # Documents without a value come last; the sort keeps the order of equal ones
    selected.sort(key=lambda document: (np.isnan(_value(document)), sign * _value(document)))
    return Selection(tasks, selected, searched)


def show_document(runs: Sequence[Run], name: str, rule: str | None, say: Say) -> SelectedDocument:
    """Return one document in each run, such as "arc_easy/17", "mmlu/mmlu_astronomy/3" or "mmlu_astronomy/3"."""
    head, _, rest = name.partition("/")
    if not rest:
        raise UsageError(f"--document {name}: write TASK/DOCUMENT, such as arc_easy/17 or mmlu/mmlu_astronomy/3")
    task, subtask = _find_task(runs[0], head)
    [outcomes] = _outcomes(runs, task, rule, say)
    document = _find_document(outcomes[0], subtask, rest)
    if (selected := _in_each(outcomes, document.key)) is None:
        raise UsageError(f"run {runs[-1].folder.name} has no document {document.name}; show the other run alone")
    return selected


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
    if (index := task.indices.get((head, tail))) is not None:
        return DocumentOutcome(task, index)
    of_subtask = [index for index, (of, _) in enumerate(task.keys) if subtask in (None, of)]
    matches = [DocumentOutcome(task, index) for index in of_subtask if task.keys[index][1] == rest]
    if not matches:
        known = dict.fromkeys(task.keys[index][1] for index in of_subtask)
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
    if with_documents := [outcomes for outcomes in tasks if all(of_run.keys for of_run in outcomes)]:
        return with_documents
    problems = dict.fromkeys(of_run.view.problem for outcomes in tasks for of_run in outcomes if of_run.view.problem)
    why = "; ".join(problems) or f"benchmark {runs[0].kind} stores no documents to look at"
    raise UsageError(f"run {runs[0].folder.name}: {why}")


def _in_each(outcomes: InRuns, key: DocumentName) -> SelectedDocument | None:
    if any(key not in of_run.indices for of_run in outcomes):
        return None
    return tuple(DocumentOutcome(of_run, of_run.indices[key]) for of_run in outcomes)


def _value(document: SelectedDocument) -> float:
    """Return the margin or score in the only run; the second run's less the first's."""
    first, *second = (of_run.value for of_run in document)
    if not second:
        return first
    return 0.0 if second[0] == first else second[0] - first


def _selected(outcomes: InRuns, criteria: Criteria) -> Iterator[SelectedDocument]:
    first, last = outcomes[0], outcomes[-1]
    if criteria.words and isinstance(first.view, ChoiceView) and not first.view.texts:
        raise UsageError(f"--text searches texts, which task {first.view.task} does not have: {first.view.problem}")
    if criteria.wrong or criteria.right or criteria.won or criteria.lost:
        for of_run in outcomes:
            if of_run.decided is None and ((of_run.value < 0) | (of_run.value > BEST)).any():
                raise UsageError(
                    f"task {of_run.view.task}: its metric is not between 0 and 1, so that no document is right or "
                    "wrong; leave out --wrong, --right, --won and --lost"
                )
    tie = np.zeros(len(first.keys), bool) if first.decided is None else first.decided.tie
    for key in first.keys:
        if (selected := _in_each(outcomes, key)) is None:
            continue
        number, other = selected[0].number, selected[-1].number
        checks = (
            (criteria.wrong, first.wrong[number]),
            (criteria.right, first.right[number]),
            (criteria.tie, tie[number]),
            (criteria.truncated, first.truncated[number]),
            (criteria.won, first.wrong[number] and last.right[other]),
            (criteria.lost, first.right[number] and last.wrong[other]),
            (criteria.subtask is not None, key[0] == criteria.subtask),
        )
        if all(holds for is_asked, holds in checks if is_asked) and _has_words(selected[0], criteria.words):
            yield selected


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
