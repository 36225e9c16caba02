"""Logged tasks whose documents are evalkit's pinned ones.

In: `LoggedTask`s and a `Library`. Out: each line's `Question`, found by the content of its document and never by its
number. A task is pinned if its name is that of one of the default suite, its documents are pinned ones, and the choices
that were scored are the suite's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalkit.benchmarks.multiple_choice.stored import pinned_questions
from evalkit.benchmarks.multiple_choice.suites import Suite, load_suite, suite_of, with_fewshot
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.request import DEFAULT_SUITE
from evalkit.data import TASKS, Library, subjects
from evalkit.data.sampling import ALL_DOCUMENTS
from evalkit.data.schema import TaskData
from evalkit.display import Say
from evalkit.errors import DataError
from evalkit.escape import printable
from evalkit.exchange.log_files import LoggedTask
from evalkit.exchange.log_lines import LoggedSample

_POOLED = "mmlu_pooled"
"""evalkit's leaf task with the documents of all subjects."""
_SHOWN = 60
"""Most characters of a document in a message."""


@dataclass(frozen=True)
class MatchedTask:
    """A sample file with the pinned question of each document."""

    task: str
    """Task of the suite, e.g. "mmlu"."""
    log: LoggedTask
    documents: tuple[tuple[LoggedSample, Question], ...]
    """In the order of the questions."""
    places: tuple[int, ...]
    """Place of each question in the task, from 0."""
    strata: Sequence[str]
    """Leaf task of each pinned question of the task."""
    plain: bool
    """Whether the requests are those of template `plain`, with as many solved examples as the log says."""


def suite_task(name: str) -> str | None:
    """Return the task of the default suite that has a leaf task of lm-eval, by its name; None if there is none."""
    if name in load_suite(DEFAULT_SUITE).tasks:
        return name
    of_mmlu = name == _POOLED or (name.startswith("mmlu_") and name.removeprefix("mmlu_") in subjects())
    return "mmlu" if of_mmlu else None


def match(logs: Sequence[LoggedTask], library: Library, say: Say) -> tuple[list[MatchedTask], list[LoggedTask]]:
    """Match documents with pinned ones.

    Args:
        logs: sample files.
        library: source of the pinned documents.
        say: called about tasks that have a pinned task's name only.

    Returns:
        The pinned tasks, in the suite's order, and the other sample files.

    Raises:
        DataError: some documents of a task are pinned and others are not, or a line contradicts its pinned document.
    """
    by_task: dict[str, list[LoggedTask]] = defaultdict(list)
    others = []
    for log in logs:
        if (task := suite_task(log.task)) is None:
            others.append(log)
        else:
            by_task[task].append(log)
    matched: list[MatchedTask] = []
    for task in load_suite(DEFAULT_SUITE).tasks:
        if not by_task[task]:
            continue
        questions = _Questions(task, library)
        for log in by_task[task]:
            found = questions.match(log)
            if isinstance(found, str):
                say(f"{log.path}: {found}, so {log.task} is imported with lm-eval's own metrics")
                others.append(log)
            else:
                matched.append(found)
    return matched, others


class _Questions:
    """The pinned questions of a task, by their content."""

    def __init__(self, task: str, library: Library) -> None:
        self._task, self._library = task, library
        self._suite = suite_of("documents", [task])
        self._all = pinned_questions(self._suite, library, ALL_DOCUMENTS)[task]
        self._data: TaskData = TASKS[self._suite.documents.get(task, task)]
        self._places: dict[str, list[int]] = defaultdict(list)
        self._golds: dict[str, Any] = {}
        self._strata = [question.subtask for question in self._all]
        for place, question in enumerate(self._all):
            essence = self._essence(question.doc)
            assert essence is not None
            self._places[_text(essence)].append(place)
            self._golds[_text(essence[:-1])] = essence[-1]

    def match(self, log: LoggedTask) -> MatchedTask | str:
        """Return a sample file with its questions; or, if it is of other documents or choices, why.

        Raises:
            DataError: see `match` above.
        """
        free = {key: list(places) for key, places in self._places.items()}
        found = [(sample, self._place(log, sample, free)) for sample in log.documents]
        unknown = [sample for sample, place in found if place is None]
        if len(unknown) == len(found):
            return f"none of its documents is one of the pinned documents of {self._task}"
        if unknown:
            raise DataError(
                f"{log.at(unknown[0])}: document {unknown[0].doc_id} ({_beginning(unknown[0])}) is not one of the "
                f"{len(self._all):,} pinned documents of {self._task}, though others of the file are "
                f"({len(unknown):,} are not); import logs of one dataset"
            )
        placed = sorted(((place, sample) for sample, place in found if place is not None), key=lambda one: one[0])
        pairs = tuple((sample, self._all[place]) for place, sample in placed)
        if any(not _same_choices(log, sample, question) for sample, question in pairs):
            return f"its choices are not those of {self._task}"
        for sample, question in pairs:
            _check(log, sample, question)
        plain = self._is_plain(log, [(sample, place) for place, sample in placed])
        return MatchedTask(self._task, log, pairs, tuple(place for place, _ in placed), self._strata, plain)

    def _place(self, log: LoggedTask, sample: LoggedSample, free: Mapping[str, list[int]]) -> int | None:
        """Return the place of a document's question, and remove it from `free`; None if it is not pinned.

        Of pinned documents with the same content, the one of the same number is taken first.
        """
        if (essence := self._essence(sample.doc)) is None:
            return None
        key = _text(essence)
        if key not in self._places:
            if (gold := self._golds.get(_text(essence[:-1]), essence[-1])) != essence[-1]:
                raise DataError(
                    f"{log.at(sample)}: document {sample.doc_id} has the gold answer {essence[-1]}, but its pinned "
                    f"document has {gold}; the log is of another version of the dataset"
                )
            return None
        named = [place for place in free[key] if self._names(log, place)]
        if not named:
            raise DataError(
                f"{log.at(sample)}: document {sample.doc_id} ({_beginning(sample)}) has the content of an earlier "
                f"line; {log.task} has it {len([one for one in self._places[key] if self._names(log, one)])} times"
            )
        place = next((one for one in named if self._all[one].doc_id == sample.doc_id), named[0])
        free[key].remove(place)
        return place

    def _names(self, log: LoggedTask, place: int) -> bool:
        return log.task in (self._all[place].subtask, _POOLED)

    def _essence(self, doc: dict[str, Any]) -> list[Any] | None:
        try:
            return self._data.essence(self._data.canonical(doc))
        except DataError:
            return None

    def _is_plain(self, log: LoggedTask, placed: Sequence[tuple[LoggedSample, int]]) -> bool:
        questions = self._all
        if log.shots:
            if (suite := _with_examples(self._suite, log.shots)) is None:
                return False
            questions = pinned_questions(suite, self._library, ALL_DOCUMENTS)[self._task]
        return all(sample.requests == _requests(questions[place]) for sample, place in placed)


def _with_examples(suite: Suite, shots: int) -> Suite | None:
    """Return the suite with solved examples; None if they are not pinned."""
    [task] = suite.tasks
    if task not in suite.fewshot or shots > suite.fewshot[task].most:
        return None
    return with_fewshot(suite, shots)


def _requests(question: Question) -> tuple[tuple[str, str], ...]:
    """Return a question's requests as lm-eval logs them."""
    pairs = zip(question.contexts, question.continuations, strict=True)
    return tuple((context, question.delimiter + continuation) for context, continuation in pairs)


def _same_choices(log: LoggedTask, sample: LoggedSample, question: Question) -> bool:
    """Return whether the continuations are the question's, whatever separates them from the context."""
    if len(sample.requests) != len(question.continuations):
        raise DataError(
            f"{log.at(sample)}: document {sample.doc_id} has {len(sample.requests)} requests, but its pinned document "
            f"has {len(question.continuations)} choices"
        )
    logged = [texts[-1].strip() for texts in sample.requests if len(texts) > 1]
    return logged == [one.strip() for one in question.continuations]


def _check(log: LoggedTask, sample: LoggedSample, question: Question) -> None:
    """Raise `DataError` if a line's scores are invalid, or contradict its pinned document or its own metrics."""
    where = f"{log.at(sample)}: document {sample.doc_id}"
    likelihoods = sample.likelihoods
    if likelihoods is None or len(likelihoods) != len(question.choices):
        raise DataError(f"{where} must have a log-likelihood for each of its {len(question.choices)} choices")
    if wrong := [value for value in likelihoods if not np.isfinite(value)]:
        raise DataError(f"{where} has the log-likelihood {wrong[0]}; it must be a finite number")
    if len(set(question.contexts)) == 1 and sample.target.isdigit() and sample.gold != question.gold:
        raise DataError(
            f"{where} has the target {sample.target[:_SHOWN]}, but the gold answer of its pinned document is "
            f"{question.gold}"
        )
    sizes = [len(choice) for choice in question.choices]
    expected = {"acc": np.array(likelihoods), "acc_norm": np.array(likelihoods) / sizes}
    for metric, scores in expected.items():
        logged = sample.metrics.get(metric)
        expected_value = float(np.argmax(scores) == question.gold)
        if logged is not None and logged != expected_value:
            raise DataError(
                f"{where} has {metric} {logged}, but its log-likelihoods give {expected_value:g}; the file was changed"
            )


def _text(essence: Any) -> str:
    return json.dumps(essence)


def _beginning(sample: LoggedSample) -> str:
    texts = [value for value in sample.doc.values() if isinstance(value, str) and len(value) > 1]
    return repr(printable(max(texts, key=len, default=""))[:_SHOWN])
