"""Selection of documents. In: one run, or two on the same documents, and criteria. Out: documents, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from evalkit.benchmarks.document_views import ChoiceView
from evalkit.benchmarks.registry import benchmark_of, document_difference
from evalkit.display import Say
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.inspection.outcomes import DocumentName, TaskOutcomes, check_scores, run_outcomes
from evalkit.runs.folder import Run

_LISTED = 3
"""Documents that a message lists."""

InRuns = tuple[TaskOutcomes, ...]
"""A task's outcomes in one run, or in two."""


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

    @property
    def judges(self) -> bool:
        """Whether a criterion needs to know which documents are right."""
        return self.wrong or self.right or self.won or self.lost


class SelectedDocument(NamedTuple):
    """A document in each run."""

    outcomes: InRuns
    places: tuple[int, ...]
    """Its index in the task, in each run."""

    @property
    def value(self) -> float:
        """Its margin or score in the only run; the second run's less the first's."""
        first, *second = (float(task.value[place]) for task, place in zip(self.outcomes, self.places, strict=True))
        if not second:
            return first
        return 0.0 if second[0] == first else second[0] - first

    @property
    def name(self) -> str:
        return self.outcomes[0].name(self.places[0])

    @property
    def key(self) -> DocumentName:
        return self.outcomes[0].keys[self.places[0]]


def show_list(
    runs: Sequence[Run], task: str | None, rule: str | None, criteria: Criteria, say: Say
) -> tuple[list[InRuns], list[SelectedDocument], int]:
    """Return the searched tasks, the selected documents, and the number of documents that were searched.

    The documents are sorted by value, the lowest first; right or won ones the highest first.

    Args:
        runs: one finished run, or two.
        task: a task or a subtask; None: all.
        rule: the rule that chooses; None: the first run's own.
        criteria: what a document must be.
        say: called with messages for the user.

    Raises:
        EvalkitError: an unknown name, a damaged run, runs of other documents, or a criterion that does not apply.
    """
    if len(runs) == 1 and (criteria.won or criteria.lost):
        raise UsageError("--won and --lost compare two runs; name both: evalkit show RUN_A RUN_B --won")
    if len(runs) > 1 and (criteria.wrong or criteria.right or criteria.tie or criteria.truncated):
        raise UsageError("--wrong, --right, --tie and --truncated are for one run; of two runs, give --won or --lost")
    name, subtask = (None, None) if task is None else _find_task(runs[0], task)
    tasks = _outcomes(runs, name, rule, say)
    searched = sum(subtask in (None, key[0]) for outcomes in tasks for key in outcomes[0].keys)
    criteria = replace(criteria, subtask=subtask)
    selected = [document for outcomes in tasks for document in _of_task(outcomes, criteria)]
    sign = -1 if criteria.right or criteria.won else 1
    # Documents without a value come last; the sort keeps the order of equal ones
    return tasks, sorted(selected, key=lambda document: (np.isnan(document.value), sign * document.value)), searched


def show_document(runs: Sequence[Run], name: str, rule: str | None, say: Say) -> SelectedDocument:
    """Return one document in each run, such as "arc_easy/17", "mmlu/mmlu_astronomy/3" or "mmlu_astronomy/3".

    Other arguments and errors: see `show_list`.
    """
    head, _, rest = name.partition("/")
    if not rest:
        raise UsageError(f"--document {name}: write TASK/DOCUMENT, such as arc_easy/17 or mmlu/mmlu_astronomy/3")
    task, subtask = _find_task(runs[0], head)
    [outcomes] = _outcomes(runs, task, rule, say)
    place = _find_document(outcomes[0], subtask, rest)
    selected = _in_each(outcomes, outcomes[0].keys[place])
    if selected is None:
        raise UsageError(
            f"run {runs[-1].folder.name} has no document {outcomes[0].name(place)}; show the other run alone"
        )
    return selected


def check_same_documents(a: Run, b: Run, task: str) -> None:
    """Raise a `UsageError` if the documents of a task differ between two runs."""
    if difference := document_difference(a, b, task):
        what, mine, theirs = difference
        raise UsageError(
            f"task {task}: the {what} of run {b.folder.name} ({theirs[:12]}) is not that of run {a.folder.name} "
            f"({mine[:12]}), so these are other documents; show each run alone"
        )


def _find_task(run: Run, name: str) -> tuple[str, str | None]:
    """Return the task with a name, or the task of a subtask with that name, and the subtask."""
    tasks = _tasks(run)
    if name in tasks:
        return name, None
    if name in (subtasks := _subtasks(run)):
        return subtasks[name], name
    raise UnknownNameError(f"task of run {run.folder.name}", name, {*tasks, *subtasks})


def _tasks(run: Run) -> list[str]:
    return [entry["task"] for entry in run.stored["tasks"]]


def _subtasks(run: Run) -> dict[str, str]:
    """Return subtask → task; empty if the run has no table of its documents."""
    try:
        documents = benchmark_of(run).comparable(run).documents
    except EvalkitError:
        return {}
    pairs = documents[["subtask", "task"]].drop_duplicates()
    return dict(zip(pairs["subtask"], pairs["task"], strict=True))


def _find_document(task: TaskOutcomes, subtask: str | None, rest: str) -> int:
    """Return the index of the document with an id, or subtask/id, in a subtask if it is known."""
    head, _, tail = rest.partition("/")
    if (place := task.places.get((head, tail))) is not None:
        return place
    ids = [(place, identity) for place, (of, identity) in enumerate(task.keys) if subtask in (None, of)]
    matches = [place for place, identity in ids if identity == rest]
    if not matches:
        known = dict.fromkeys(identity for _, identity in ids)
        raise UnknownNameError(f"document of {subtask or task.view.task}", rest, known)
    if len(matches) > 1:
        listed = ", ".join(task.name(place) for place in matches[:_LISTED])
        more = ", …" if len(matches) > _LISTED else ""
        raise UsageError(
            f"{len(matches)} subtasks of {task.view.task} have a document {rest}: {listed}{more}; name one"
        )
    return matches[0]


def _outcomes(runs: Sequence[Run], task: str | None, rule: str | None, say: Say) -> list[InRuns]:
    """Return the outcomes of each task that all runs have."""
    shared = [name for name in _tasks(runs[0]) if all(name in _tasks(run) for run in runs[1:])]
    chosen = [name for name in shared if task in (None, name)]
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
    places = tuple(of_run.places[key] for of_run in outcomes if key in of_run.places)
    return SelectedDocument(outcomes, places) if len(places) == len(outcomes) else None


def _of_task(outcomes: InRuns, criteria: Criteria) -> Iterator[SelectedDocument]:
    first, last = outcomes[0], outcomes[-1]
    if criteria.words and isinstance(first.view, ChoiceView) and not first.view.texts:
        raise UsageError(f"--text searches texts, which task {first.view.task} does not have: {first.view.problem}")
    for of_run in outcomes if criteria.judges else ():
        check_scores(of_run)
    for place, key in enumerate(first.keys):
        if (selected := _in_each(outcomes, key)) is None:
            continue
        right, wrong = first.right[place], first.wrong[place]
        wins, fails = last.right[selected.places[-1]], last.wrong[selected.places[-1]]
        checks = (
            (criteria.wrong, wrong),
            (criteria.right, right),
            (criteria.tie, first.tie[place]),
            (criteria.truncated, first.truncated[place]),
            (criteria.won, wrong and wins),
            (criteria.lost, right and fails),
            (criteria.subtask is not None, key[0] == criteria.subtask),
        )
        if all(holds for is_asked, holds in checks if is_asked) and _has_words(first, place, criteria.words):
            yield selected


def _has_words(task: TaskOutcomes, place: int, words: Sequence[str]) -> bool:
    if not words:
        return True
    if answer := task.answer(place):
        texts = [*(piece.text for piece in answer.prompt), "\n", "\n".join((answer.answer, *answer.references))]
    elif text := task.choice_text(place):
        pieces = ("".join(piece.text for piece in part) for part in (text.common, *text.choices))
        texts = ["\n".join((*pieces, *text.options))]
    else:
        texts = []
    whole = "".join(texts).casefold()
    return all(word.casefold() in whole for word in words)
