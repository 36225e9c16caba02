"""Imported runs of the tasks of zeroshot8, whose documents are pinned: score tables in the form of evalkit's own runs.

In: `LoggedTask`s. Out: those of pinned tasks, matched by number and content, as `MatchedTask`s; and of these a finished
run. A log has no token counts, and no prompts but in its requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.lm_eval_tables import choice_rows
from evalkit.data import SUBJECTS, TASKS, Library
from evalkit.data.sampling import ALL_DOCUMENTS
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.exchange.imported_runs import (
    Import,
    LoggedPlaces,
    import_run,
    log_caveats,
    save_logs,
    selection_specification,
    shared_value,
)
from evalkit.exchange.logs import LoggedSample, LoggedTask
from evalkit.runs.accuracies import summarise_all
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.score_table import score_table, uncounted
from evalkit.runs.writing import RunWriter
from evalkit.suites.question_loading import pinned_questions
from evalkit.suites.questions import Question
from evalkit.suites.suites import DEFAULT_SUITE, choose_tasks, label_of, load_suite, suite_of, with_fewshot
from evalkit.suites.templates import load_template, template_names

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


def match(logs: Sequence[LoggedTask], library: Library) -> tuple[list[MatchedTask], list[LoggedTask]]:
    """Return the pinned tasks, in the suite's order, and the other sample files.

    A document that is not the pinned document of its number, or a line that contradicts it, is a `DataError`.
    """
    of_mmlu = {_POOLED, *(f"mmlu_{subject}" for subject in SUBJECTS)}
    by_task: dict[str, list[LoggedTask]] = {task: [] for task in load_suite(DEFAULT_SUITE).tasks}
    others: list[LoggedTask] = []
    for log in logs:
        by_task.get("mmlu" if log.task in of_mmlu else log.task, others).append(log)
    return [part for task, members in by_task.items() if members for part in _matched(task, members, library)], others


def _matched(task: str, logs: Sequence[LoggedTask], library: Library) -> list[MatchedTask]:
    suite = suite_of("documents", [task])
    questions = pinned_questions(suite, library, ALL_DOCUMENTS)[task]
    data, strata = TASKS[suite.documents.get(task, task)], [question.subtask for question in questions]

    def content_of(doc: dict[str, Any]) -> str:
        """Return what determines a document's evaluation; the empty text for another kind of document."""
        try:
            return json.dumps(data.essence(data.canonical(doc)))
        except DataError:
            return ""

    matched = []
    for log in logs:
        numbers = _numbers(log.task, questions)
        # Of documents with the same content, each line has its own
        left: dict[str, list[int]] = {}
        for number in numbers:
            left.setdefault(content_of(questions[number].doc), []).append(number)
        samples: dict[int, LoggedSample] = {}
        for sample in log.documents:
            alike = left.get(content_of(sample.doc))
            if not alike:
                raise DataError(
                    f"{sample.where} is not document {sample.doc_id} of the {len(numbers):,} pinned documents of "
                    f"{log.task}, by its content with the gold answer, or it is there twice; the log is of another "
                    "dataset or version of it"
                )
            of_its_number = numbers[sample.doc_id] if sample.doc_id < len(numbers) else None
            number = of_its_number if of_its_number in alike else alike[0]
            alike.remove(number)
            _check(sample, questions[number])
            samples[number] = sample
        shown = questions
        has_examples = any(sample.requests != _plain(questions[number]) for number, sample in samples.items())
        if log.shots and not has_examples:
            raise DataError(
                f"{log.results_path} says {log.shots} solved examples before each question of {log.task}, but its "
                "requests have none; restore the file"
            )
        if log.shots:
            most = suite.fewshot[task].most if task in suite.fewshot else 0
            few = with_fewshot(suite, log.shots) if log.shots <= most else None
            shown = pinned_questions(few, library, ALL_DOCUMENTS)[task] if few else []
        plain = bool(shown) and all(sample.requests == _plain(shown[number]) for number, sample in samples.items())
        places = sorted(samples)
        pairs = [(samples[number], questions[number]) for number in places]
        matched.append(MatchedTask(task, log, pairs, places, strata, plain))
    return matched


def _numbers(leaf: str, questions: Sequence[Question]) -> list[int]:
    """Return the place among the questions of each document of a leaf task."""
    if leaf != _POOLED:
        return [number for number, question in enumerate(questions) if question.subtask == leaf]
    return sorted(range(len(questions)), key=lambda number: questions[number].doc_id)


def _plain(question: Question) -> tuple[tuple[str, str], ...]:
    pairs = zip(question.contexts, question.continuations, strict=True)
    return tuple((context, question.delimiter + continuation) for context, continuation in pairs)


def _check(sample: LoggedSample, question: Question) -> None:
    """Raise a `DataError` if a line has other choices, or another result, than its pinned document."""
    choices = [continuation.strip() for continuation in question.continuations]
    if [texts[-1].strip() for texts in sample.requests] != choices:
        raise DataError(
            f"{sample.where} has {len(sample.requests)} requests, but its pinned document has the {len(choices)} "
            f"choices {', '.join(choices)[:_SHOWN]}"
        )
    likelihoods, sizes = np.array(sample.likelihoods), [len(choice) for choice in question.choices]
    if len(likelihoods) != len(sizes):
        raise DataError(f"{sample.where} must have a log-likelihood for each of its {len(sizes)} choices")
    is_number = len(set(question.contexts)) == 1 and sample.target.isdigit()
    if is_number and sample.target != str(question.gold):
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
        "kind": "multiple_choice",
        "rule": _RULE,
        "groups": {group: list(members) for group, members in suite.groups.items()},
        "group_sizes": {group: suite.sizes[group] for group in suite.groups},
        "documents": {
            given.task: {
                "source": documents[given.task].source,
                "official": documents[given.task].official,
                "count": len(given.places),
                "total": len(documents[given.task].records),
            }
            for given in tasks
        },
        "template": template,
        **log_caveats({task: [part.log for part in members] for task, members in by_task.items()}),
        "imported": {"parts": [note for task, members in by_task.items() for note in _part(task, members)]},
    }
    names = (suite.name, template if isinstance(template, str) else str(template["name"]))
    return import_run(request, logs, names, specification, about, lambda writer: _write(writer, matched))


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
    named = shared_value(logs, "template", lambda log: log.results.evalkit and log.results.evalkit.template)
    if named is None and plain and not any(log.samples[0].by_evalkit for log in logs):
        named = "plain"
    if named in template_names() and (plain or named != "plain"):
        template = load_template(str(named))
        return asdict(template), template.content_hash
    digest = hashlib.sha256()
    for part in matched:
        for sample, _ in part.documents:
            digest.update(repr(sample.requests).encode("utf-8", "surrogatepass") + b"\n")
    return _LOGGED if named in (None, "plain") else printable(str(named))[:50], digest.hexdigest()
