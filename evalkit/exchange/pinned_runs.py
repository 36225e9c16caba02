"""Imported runs of the tasks of zeroshot8, whose documents are pinned: score tables in the form of evalkit's own runs.

In: `LoggedTask`s. Out: those that are of the pinned documents, matched by number and content, as `MatchedTask`s; and of
these a finished run. A log has no token counts, and no prompts but in its requests.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.lm_eval.outcomes import choice_rows
from evalkit.benchmarks.multiple_choice.suites import choose_tasks, label_of, load_suite, suite_of, with_fewshot
from evalkit.benchmarks.multiple_choice.tasks import Question, pinned_questions
from evalkit.benchmarks.multiple_choice.templates import load_template, template_names
from evalkit.benchmarks.request import DEFAULT_SUITE
from evalkit.data import SUBJECTS, TASKS, Library
from evalkit.data.sampling import ALL_DOCUMENTS
from evalkit.display import Say
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.exchange.imported_runs import (
    Import,
    LoggedPlaces,
    import_run,
    save_logs,
    selection_specification,
    shared_value,
)
from evalkit.exchange.logs import LoggedSample, LoggedTask
from evalkit.runs.accuracies import summarise_all
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.score_table import score_table, uncounted
from evalkit.runs.writing import RunWriter

_POOLED = "mmlu_pooled"
"""evalkit's leaf task with the documents of all subjects, of which it takes one in turn."""
_SHOWN = 60
_RULE, _LOGGED = "acc", "logged"
"""Rule of the run; name of the template where the prompts are none of evalkit's."""


class MatchedTask(NamedTuple):
    task: str
    log: LoggedTask
    documents: list[tuple[LoggedSample, Question]]
    """In the order of the questions."""
    places: list[int]
    """Place of each question in the task, from 0."""
    strata: Sequence[str]
    plain: bool
    """Whether the requests are those of template `plain`, with as many solved examples as the log says."""


def match(logs: Sequence[LoggedTask], library: Library, say: Say) -> tuple[list[MatchedTask], list[LoggedTask]]:
    """Return the pinned tasks, in the suite's order, and the other sample files.

    `say` is called about tasks that have only the name of a pinned task. A document that is not the pinned document of
    its number though its task has pinned documents, or a line that contradicts its pinned document, is a `DataError`.
    """
    of_mmlu = {_POOLED, *(f"mmlu_{subject}" for subject in SUBJECTS)}
    by_task: dict[str, list[LoggedTask]] = {task: [] for task in load_suite(DEFAULT_SUITE).tasks}
    others: list[LoggedTask] = []
    for log in logs:
        by_task.get("mmlu" if log.task in of_mmlu else log.task, others).append(log)
    matched: list[MatchedTask] = []
    for task, members in by_task.items():
        pinned = _PinnedTask(task, library) if members else None
        for log in members:
            assert pinned is not None
            if isinstance(result := pinned.match(log), MatchedTask):
                matched.append(result)
            else:
                say(f"{log.path}: {result}, so {log.task} is imported with lm-eval's own metrics")
                others.append(log)
    return matched, others


class _PinnedTask:
    def __init__(self, task: str, library: Library) -> None:
        self._task, self._library = task, library
        self._suite = suite_of("documents", [task])
        self._questions = pinned_questions(self._suite, library, ALL_DOCUMENTS)[task]
        self._data = TASKS[self._suite.documents.get(task, task)]
        self._contents = [self._content(question.doc) for question in self._questions]
        self._without_gold = {json.dumps(content[:-1]) for content in self._contents}

    def match(self, log: LoggedTask) -> MatchedTask | str:
        """Return a sample file with its questions; or, if it is of other documents or choices, why."""
        contents = [self._content(sample.doc) for sample in log.documents]
        if not any(json.dumps(content[:-1]) in self._without_gold for content in contents):
            return f"none of its documents is one of the pinned documents of {self._task}"
        numbered = self._numbered(log.task)
        samples: dict[int, LoggedSample] = {}
        for sample, content in zip(log.documents, contents, strict=True):
            number = numbered[sample.doc_id] if sample.doc_id < len(numbered) else None
            if number is None or content != self._contents[number]:
                texts = [value for value in sample.doc.values() if isinstance(value, str) and len(value) > 1]
                beginning = repr(printable(max(texts, key=len, default=""))[:_SHOWN])
                raise DataError(
                    f"{sample.where} ({beginning}) is not document {sample.doc_id} of the {len(numbered):,} "
                    f"pinned documents of {log.task}, by its content with the gold answer; the log is of another "
                    "dataset or version of it"
                )
            samples[number] = sample
        places = sorted(samples)
        pairs = [(samples[number], self._questions[number]) for number in places]
        if not all(_has_choices(sample, question) for sample, question in pairs):
            return f"its choices are not those of {self._task}"
        for sample, question in pairs:
            _check(sample, question)
        strata = [question.subtask for question in self._questions]
        return MatchedTask(self._task, log, pairs, places, strata, self._is_plain(log, samples))

    def _content(self, doc: dict[str, Any]) -> list[Any]:
        """Return what determines a document's evaluation, the gold answer last; [] for another kind of document."""
        try:
            return self._data.essence(self._data.canonical(doc))
        except DataError:
            return []

    def _numbered(self, leaf: str) -> list[int]:
        if leaf != _POOLED:
            return [number for number, question in enumerate(self._questions) if question.subtask == leaf]
        seen: Counter[str] = Counter()
        turns = []
        for question in self._questions:
            turns.append(seen[question.subtask])
            seen[question.subtask] += 1
        return sorted(range(len(turns)), key=turns.__getitem__)

    def _is_plain(self, log: LoggedTask, samples: dict[int, LoggedSample]) -> bool:
        questions = self._questions
        if log.shots:
            if self._task not in self._suite.fewshot or log.shots > self._suite.fewshot[self._task].most:
                return False
            suite = with_fewshot(self._suite, log.shots)
            questions = pinned_questions(suite, self._library, ALL_DOCUMENTS)[self._task]
        for number, sample in samples.items():
            question = questions[number]
            pairs = zip(question.contexts, question.continuations, strict=True)
            if sample.requests != tuple((context, question.delimiter + text) for context, text in pairs):
                return False
        return True


def _has_choices(sample: LoggedSample, question: Question) -> bool:
    requests, choices = len(sample.requests), len(question.continuations)
    if requests != choices:
        raise DataError(f"{sample.where} has {requests} requests, but its pinned document has {choices} choices")
    logged = [texts[-1].strip() for texts in sample.requests if len(texts) > 1]
    return logged == [continuation.strip() for continuation in question.continuations]


def _check(sample: LoggedSample, question: Question) -> None:
    likelihoods, sizes = np.array(sample.likelihoods), [len(choice) for choice in question.choices]
    if len(likelihoods) != len(sizes):
        raise DataError(f"{sample.where} must have a log-likelihood for each of its {len(sizes)} choices")
    if wrong := [value for value in sample.likelihoods if not np.isfinite(value)]:
        raise DataError(f"{sample.where} has the log-likelihood {wrong[0]}; it must be a finite number")
    if len(set(question.contexts)) == 1 and sample.target.isdigit() and sample.gold != question.gold:
        raise DataError(
            f"{sample.where} has the target {sample.target[:_SHOWN]}, but the gold answer of its pinned document is "
            f"{question.gold}"
        )
    for metric, scores in (("acc", likelihoods), ("acc_norm", likelihoods / sizes)):
        logged, expected = sample.metrics.get(metric), float(np.argmax(scores) == question.gold)
        if logged not in (None, expected):
            raise DataError(f"{sample.where} has {metric} {logged}, but its log-likelihoods give {expected:g}")


def import_choices(matched: Sequence[MatchedTask], request: Import, library: Library) -> Run:
    """Write the run of pinned tasks; return the existing run if the same log was imported before."""
    logs = [part.log for part in matched]
    by_task = {task: list(members) for task, members in groupby(matched, lambda part: part.task)}
    suite = choose_tasks(load_suite(DEFAULT_SUITE), tuple(by_task))
    documents = {task: library.load(suite.documents.get(task, task)) for task in suite.tasks}
    template, template_digest = _template(matched)
    shots = shared_value(logs, "solved examples", lambda log: log.shots)
    tasks = [
        LoggedPlaces(task, sorted(number for part in members for number in part.places), members[0].strata)
        for task, members in by_task.items()
    ]
    if twice := [task.task for task in tasks if len(set(task.places)) < len(task.places)]:
        raise UsageError(f"two of the files have the same documents of {twice[0]}; import them one by one")
    specification = {
        "suite": suite.name,
        "documents": {task: loaded.content_hash for task, loaded in documents.items()},
        "template": template_digest,
        "unconditional": False,
        # Requests that equal those without examples have none
        "num_fewshot": 0 if shots is None and all(part.plain for part in matched) else shots,
        **selection_specification(logs, tasks),
    }
    about = {
        "rule": _RULE,
        "groups": {group: list(members) for group, members in suite.groups.items()},
        "group_sizes": {group: suite.sizes[group] for group in suite.groups},
        "documents": {
            task: {"source": loaded.source, "official": loaded.official, "count": len(loaded.records)}
            for task, loaded in documents.items()
        },
        "template": template,
    }
    names = (suite.name, template if isinstance(template, str) else str(template["name"]))
    parts = [note for task, members in by_task.items() for note in _part(task, members)]
    return import_run(
        request, "multiple_choice", logs, names, specification, about, lambda writer: _write(writer, matched), parts
    )


def _write(writer: RunWriter, matched: Sequence[MatchedTask]) -> None:
    pairs = [pair for part in matched for pair in part.documents]
    rows = [
        row
        for sample, question in pairs
        for row in choice_rows(
            question.task, question.subtask, question.doc_id, question.gold, question.choices, sample.likelihoods
        )
    ]
    clusters = {(question.subtask, question.doc_id): question.cluster for _, question in pairs}
    scores = uncounted(score_table(rows, clusters))
    writer.save_table(SCORES, scores)
    numbers = [{sample.doc_id: (of.subtask, of.doc_id) for sample, of in part.documents} for part in matched]
    save_logs(writer, [(part.log, names) for part, names in zip(matched, numbers, strict=True)])
    by_rule = {rule: results.to_json() for rule, results in summarise_all(scores, writer.manifest).items()}
    tasks = [task | {"seconds": None} for task in by_rule[_RULE]["tasks"]]
    writer.save_results(by_rule[_RULE] | {"tasks": tasks, "rules": by_rule, "samples": True})


def _part(task: str, members: Sequence[MatchedTask]) -> list[str]:
    logged = {question.subtask for part in members for _, question in part.documents}
    if len(logged) == (count := len(set(members[0].strata))):
        return []
    few = f" ({', '.join(sorted(name.removeprefix(f'{task}_') for name in logged))})" * (len(logged) <= 3)
    return [f"{len(logged)} of {count} subjects of {label_of(task).full}{few}"]


def _template(matched: Sequence[MatchedTask]) -> tuple[Any, str]:
    """Return the template in the manifest, and its hash.

    evalkit's exports name their template, but show the prompts without its texts. Other logs have template `plain` if
    their requests are its, else a template without a name, whose hash is that of the requests.
    """
    logs = [part.log for part in matched]
    plain = all(part.plain for part in matched)
    named = shared_value(logs, "template", lambda log: log.results.template)
    if named is None and plain and not any(log.samples[0].by_evalkit for log in logs):
        named = "plain"
    if named == "plain" and not plain:
        named = None
    if named in template_names():
        template = load_template(str(named))
        return asdict(template), template.content_hash
    digest = hashlib.sha256()
    for part in matched:
        for sample, _ in part.documents:
            digest.update(repr(sample.requests).encode("utf-8", "surrogatepass") + b"\n")
    return printable(named or _LOGGED)[:50], digest.hexdigest()
