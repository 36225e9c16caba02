"""Logged tasks whose documents are evalkit's pinned ones, and their run of the default suite.

In: `LoggedTask`s and a `Library`. Out: each line's `Question`, by its number and verified by its content; and a
finished run with a score table. A task is pinned if its name is that of one of the default suite, its documents are the
pinned ones, and the choices that were scored are the suite's. A log has no token counts, so these are NaN, and rules
that need them are not available.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from evalkit.benchmarks.multiple_choice.stored import pinned_questions
from evalkit.benchmarks.multiple_choice.suites import choose_tasks, label, load_suite, suite_of, with_fewshot
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.multiple_choice.templates import load_template, template_names
from evalkit.benchmarks.request import DEFAULT_SUITE
from evalkit.data import TASKS, Library, subjects
from evalkit.data.sampling import ALL_DOCUMENTS
from evalkit.display import Say
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.exchange.imported_runs import (
    Import,
    LoggedPlaces,
    choice_row,
    manifest_of,
    save_logs,
    selection_specification,
    shared_result,
    shared_value,
    written_once,
)
from evalkit.exchange.log_files import LoggedTask
from evalkit.exchange.log_lines import LoggedSample
from evalkit.runs.accuracies import summarise_all
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.score_table import score_table, uncounted
from evalkit.runs.writing import RunWriter

_POOLED = "mmlu_pooled"
"""evalkit's leaf task with the documents of all subjects, of which it takes one in turn."""
_SHOWN = 60
"""Most characters of a document in a message."""
_RULE, _LOGGED = "acc", "logged"
"""Rule of the run; name of the template where the prompts are none of evalkit's."""
_NAMED = 3
"""Most subjects that a note names."""


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


def match(logs: Sequence[LoggedTask], library: Library, say: Say) -> tuple[list[MatchedTask], list[LoggedTask]]:
    """Return the pinned tasks, in the suite's order, and the other sample files.

    `say` is called about tasks that have a pinned task's name only.

    Raises:
        DataError: a document is not the pinned one of its number though its task has pinned documents, or a line
            contradicts its pinned document.
    """
    by_task: dict[str, list[LoggedTask]] = {task: [] for task in load_suite(DEFAULT_SUITE).tasks}
    others: list[LoggedTask] = []
    for log in logs:
        of_mmlu = log.task == _POOLED or log.task in [f"mmlu_{subject}" for subject in subjects()]
        by_task.get("mmlu" if of_mmlu else log.task, others).append(log)
    matched: list[MatchedTask] = []
    for task, members in by_task.items():
        pinned = _PinnedTask(task, library) if members else None
        for log in members:
            assert pinned is not None
            if isinstance(found := pinned.match(log), MatchedTask):
                matched.append(found)
            else:
                say(f"{log.path}: {found}, so {log.task} is imported with lm-eval's own metrics")
                others.append(log)
    return matched, others


class _PinnedTask:
    """The pinned questions of a task, with the content of each."""

    def __init__(self, task: str, library: Library) -> None:
        self._task, self._library = task, library
        self._suite = suite_of("documents", [task])
        self._questions = pinned_questions(self._suite, library, ALL_DOCUMENTS)[task]
        self._data = TASKS[self._suite.documents.get(task, task)]
        self._contents = [self._content(question.doc) for question in self._questions]
        self._without_gold = {json.dumps(content[:-1]) for content in self._contents}

    def match(self, log: LoggedTask) -> MatchedTask | str:
        """Return a sample file with its questions; or, if it is of other documents or choices, why.

        Raises:
            DataError: see `match` above.
        """
        contents = [(sample, self._content(sample.doc)) for sample in log.documents]
        if not any(json.dumps(content[:-1]) in self._without_gold for _, content in contents):
            return f"none of its documents is one of the pinned documents of {self._task}"
        numbered = self._numbered(log.task)
        samples: dict[int, LoggedSample] = {}
        for sample, content in contents:
            place = numbered[sample.doc_id] if sample.doc_id < len(numbered) else None
            if place is None or content != self._contents[place]:
                raise DataError(
                    f"{log.at(sample)}: document {sample.doc_id} ({_beginning(sample)}) is not document "
                    f"{sample.doc_id} of the {len(numbered):,} pinned documents of {log.task}, by its content with the "
                    "gold answer; the log is of another dataset or version of it"
                )
            samples[place] = sample
        pairs = tuple((samples[place], self._questions[place]) for place in sorted(samples))
        if any(not _same_choices(log, sample, question) for sample, question in pairs):
            return f"its choices are not those of {self._task}"
        for sample, question in pairs:
            _check(log, sample, question)
        strata = [question.subtask for question in self._questions]
        return MatchedTask(self._task, log, pairs, tuple(sorted(samples)), strata, self._is_plain(log, samples))

    def _content(self, doc: dict[str, Any]) -> list[Any]:
        """Return what determines a document's evaluation, the gold answer last; [] for another kind of document."""
        try:
            return self._data.essence(self._data.canonical(doc))
        except DataError:
            return []

    def _numbered(self, leaf: str) -> list[int]:
        """Return the place of each document of a leaf task, in lm-eval's order."""
        if leaf != _POOLED:
            return [place for place, question in enumerate(self._questions) if question.subtask == leaf]
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
        return all(sample.requests == _requests(questions[place]) for place, sample in samples.items())


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
    return logged == [continuation.strip() for continuation in question.continuations]


def _check(log: LoggedTask, sample: LoggedSample, question: Question) -> None:
    """Raise `DataError` if a line's scores are invalid, or contradict its pinned document or its own metrics."""
    where, likelihoods = f"{log.at(sample)}: document {sample.doc_id}", sample.likelihoods
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
    for metric, scores in (("acc", np.array(likelihoods)), ("acc_norm", np.array(likelihoods) / sizes)):
        logged, expected = sample.metrics.get(metric), float(np.argmax(scores) == question.gold)
        if logged is not None and logged != expected:
            raise DataError(
                f"{where} has {metric} {logged}, but its log-likelihoods give {expected:g}; the file was changed"
            )


def _beginning(sample: LoggedSample) -> str:
    texts = [value for value in sample.doc.values() if isinstance(value, str) and len(value) > 1]
    return repr(printable(max(texts, key=len, default=""))[:_SHOWN])


def import_choices(matched: Sequence[MatchedTask], request: Import, library: Library) -> Run:
    """Write the run of pinned tasks; return the existing one if the same log was imported before.

    Raises:
        UsageError: the files have different settings, or two have the same documents.
        RunError: the run cannot be written.
    """
    manifest = _manifest(matched, request.model, library)

    def finish(writer: RunWriter) -> None:
        pairs = [pair for one in matched for pair in one.documents]
        rows = [
            choice_row(q.task, q.subtask, q.doc_id, number, likelihood, choice, len(q.choices), q.gold)
            for sample, q in pairs
            for number, (likelihood, choice) in enumerate(zip(sample.likelihoods or (), q.choices, strict=True))
        ]
        scores = uncounted(score_table(rows, {(q.subtask, q.doc_id): q.cluster for _, q in pairs}))
        writer.save_table(SCORES, scores)
        save_logs(writer, [(one.log, _names(one)) for one in matched])
        by_rule = summarise_all(scores, manifest)
        content = by_rule[_RULE].to_json()
        for task in content["tasks"]:
            task["seconds"] = None
        content["rules"] = {rule: results.to_json() for rule, results in by_rule.items()}
        writer.save_results(content | {"samples": True})

    template = manifest["template"]
    name = template if isinstance(template, str) else str(template["name"])
    return written_once(request, (load_suite(DEFAULT_SUITE).name, name), manifest, finish)


def _names(matched: MatchedTask) -> dict[int, tuple[str, int]]:
    """Return number of each document in the log → its subtask, and its number there."""
    return {sample.doc_id: (question.subtask, question.doc_id) for sample, question in matched.documents}


def _manifest(matched: Sequence[MatchedTask], model: str, library: Library) -> dict[str, Any]:
    logs = [one.log for one in matched]
    by_task = {task: list(members) for task, members in groupby(matched, lambda one: one.task)}
    suite = choose_tasks(load_suite(DEFAULT_SUITE), tuple(by_task))
    documents = {task: library.load(suite.documents.get(task, task)) for task in suite.tasks}
    template, digest = _template(matched)
    shots = shared_value(logs, "solved examples", lambda log: log.shots)
    places = [
        LoggedPlaces(task, sorted(place for one in members for place in one.places), members[0].strata)
        for task, members in by_task.items()
    ]
    if twice := [one.task for one in places if len(set(one.places)) < len(one.places)]:
        raise UsageError(f"two of the files have the same documents of {twice[0]}; import them one by one")
    specification = {
        "suite": suite.name,
        "documents": {task: loaded.content_hash for task, loaded in documents.items()},
        "template": digest,
        "unconditional": False,
        # Requests that equal those without examples have none
        "num_fewshot": 0 if shots is None and all(one.plain for one in matched) else shots,
        **selection_specification(logs, places),
    }
    about = {
        "rule": _RULE,
        "groups": {group: list(tasks) for group, tasks in suite.groups.items()},
        "group_sizes": {group: suite.sizes[group] for group in suite.groups},
        "documents": {
            task: {"source": loaded.source, "official": loaded.official, "count": len(loaded.records)}
            for task, loaded in documents.items()
        },
        "template": template,
    }
    manifest = manifest_of("multiple_choice", logs, model, specification, about)
    manifest["imported"]["parts"] = [note for task, members in by_task.items() for note in _part(task, members)]
    return manifest


def _part(task: str, members: Sequence[MatchedTask]) -> list[str]:
    """Return a note if the log has only some subjects of a task."""
    logged = {question.subtask for one in members for _, question in one.documents}
    if len(logged) == (count := len(set(members[0].strata))):
        return []
    few = f" ({', '.join(sorted(name.removeprefix(f'{task}_') for name in logged))})" * (len(logged) <= _NAMED)
    return [f"{len(logged)} of {count} subjects of {label(task)}{few}"]


def _template(matched: Sequence[MatchedTask]) -> tuple[Any, str]:
    """Return the template in the manifest, and its hash.

    evalkit's exports name their template, but show the prompts without its texts. Other logs have template `plain` if
    their requests are its, else a template without a name, whose hash is that of the requests.
    """
    logs = [one.log for one in matched]
    plain = all(one.plain for one in matched)
    named = shared_result(logs, "template", lambda one: None if one.evalkit is None else one.evalkit.template)
    if named is None and plain and not any(log.samples[0].by_evalkit for log in logs):
        named = "plain"
    if named == "plain" and not plain:
        named = None
    if named in template_names():
        template = load_template(str(named))
        return asdict(template), template.content_hash
    digest = hashlib.sha256()
    for one in matched:
        for sample, _ in one.documents:
            digest.update(repr(sample.requests).encode("utf-8", "surrogatepass") + b"\n")
    return printable(named or _LOGGED)[:50], digest.hexdigest()
