"""An imported run of pinned tasks.

In: `MatchedTask`s. Out: a finished run of the default suite with a score table. The log has no token counts, so these
are NaN, and rules that need them are not available.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from evalkit.benchmarks.multiple_choice.suites import choose_tasks, label, load_suite
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.multiple_choice.templates import load_template, template_names
from evalkit.benchmarks.request import DEFAULT_SUITE
from evalkit.data import Library
from evalkit.display import Say
from evalkit.escape import printable
from evalkit.exchange.log_lines import LoggedSample
from evalkit.exchange.manifests import (
    Import,
    LoggedPlaces,
    logged_sample,
    manifest_of,
    save_logs,
    selection_specification,
    shared_result,
    shared_value,
    written_once,
)
from evalkit.exchange.pinned import MatchedTask
from evalkit.runs.accuracies import summarise_all
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.score_table import ScoreRow, score_table, uncounted
from evalkit.runs.writing import RunWriter

_RULE, _LOGGED = "acc", "logged"
"""Rule of the run; name of the template where the prompts are none of evalkit's."""
_NAMED = 3
"""Most subjects that a note names."""


def import_choices(matched: Sequence[MatchedTask], request: Import, library: Library, say: Say) -> Run:
    """Write the run of pinned tasks; return the existing one if the same log was imported before.

    Args:
        matched: the tasks, in the suite's order.
        request: the import.
        library: source of the pinned documents.
        say: called with messages for the user.

    Raises:
        UsageError: the files have different settings.
        RunError: the run cannot be written.
    """
    manifest = _manifest(matched, request.model, library)

    def finish(writer: RunWriter) -> None:
        rows = [row for one in matched for row in _rows(one)]
        clusters = {
            (question.subtask, question.doc_id): question.cluster for one in matched for _, question in one.documents
        }
        scores = uncounted(score_table(rows, clusters))
        writer.save_table(SCORES, scores)
        save_logs(writer, [(one.log, _names(one)) for one in matched])
        found = summarise_all(scores, manifest)
        content = found[_RULE].to_json()
        for task in content["tasks"]:
            task["seconds"] = None
        content["rules"] = {rule: results.to_json() for rule, results in found.items()}
        writer.save_results(content | {"samples": True})

    names = (load_suite(DEFAULT_SUITE).name, _template_name(manifest))
    return written_once(request, names, manifest, finish, say)


def _template_name(manifest: dict[str, Any]) -> str:
    template = manifest["template"]
    return template if isinstance(template, str) else str(template["name"])


def _names(one: MatchedTask) -> dict[int, tuple[str, int]]:
    """Return number of each document in the log → its subtask, and its number there."""
    return {sample.doc_id: (question.subtask, question.doc_id) for sample, question in one.documents}


def _manifest(matched: Sequence[MatchedTask], model: str, library: Library) -> dict[str, Any]:
    logs = [one.log for one in matched]
    suite = choose_tasks(load_suite(DEFAULT_SUITE), tuple(dict.fromkeys(one.task for one in matched)))
    documents = {task: library.load(suite.documents.get(task, task)) for task in suite.tasks}
    template, digest = _template(matched)
    shots = shared_value(logs, "solved examples", lambda log: log.shots)
    specification = {
        "suite": suite.name,
        "documents": {task: found.content_hash for task, found in documents.items()},
        "template": digest,
        "unconditional": False,
        # Requests that equal those without examples have none
        "num_fewshot": 0 if shots is None and all(one.plain for one in matched) else shots,
        **selection_specification(_places(matched), logged_sample(logs)),
    }
    about = {
        "rule": _RULE,
        "groups": {group: list(tasks) for group, tasks in suite.groups.items()},
        "group_sizes": {group: suite.sizes[group] for group in suite.groups},
        "documents": {
            task: {
                "source": found.source,
                "official": found.official,
                "count": len(found.records),
            }
            for task, found in documents.items()
        },
        "template": template,
    }
    manifest = manifest_of("multiple_choice", logs, model, specification, about)
    manifest["imported"]["parts"] = _parts(matched)
    return manifest


def _parts(matched: Sequence[MatchedTask]) -> list[str]:
    """Return a note for each task of which the log has only some subjects."""
    notes = []
    for task, members in groupby(matched, lambda one: one.task):
        logs = list(members)
        found = {question.subtask for one in logs for _, question in one.documents}
        if len(found) < (count := len(set(logs[0].strata))):
            few = f" ({', '.join(sorted(name.removeprefix(f'{task}_') for name in found))})" * (len(found) <= _NAMED)
            notes.append(f"{len(found)} of {count} subjects of {label(task)}{few}")
    return notes


def _template(matched: Sequence[MatchedTask]) -> tuple[Any, str]:
    """Return the template in the manifest, and its hash.

    evalkit's exports name their template, but show the prompts without its texts. Other logs have template `plain` if
    their requests are its, else a template without a name, whose hash is that of the requests.
    """
    logs = [one.log for one in matched]
    named = shared_result(logs, "template", lambda found: None if found.evalkit is None else found.evalkit.template)
    if named is None and all(one.plain and not one.log.samples[0].by_evalkit for one in matched):
        named = "plain"
    if named == "plain" and not all(one.plain for one in matched):
        named = None
    if named in template_names():
        template = load_template(str(named))
        return asdict(template), template.content_hash
    digest = hashlib.sha256()
    for one in matched:
        for sample, _ in one.documents:
            digest.update(repr(sample.requests).encode("utf-8", "surrogatepass") + b"\n")
    return printable(named or _LOGGED)[:50], digest.hexdigest()


def _places(matched: Sequence[MatchedTask]) -> list[LoggedPlaces]:
    """Return the places of each task's documents; those of several subjects are in several files."""
    by_task = {task: list(members) for task, members in groupby(matched, lambda one: one.task)}
    return [
        LoggedPlaces(task, sorted(place for one in members for place in one.places), members[0].strata)
        for task, members in by_task.items()
    ]


def _rows(one: MatchedTask) -> Iterator[ScoreRow]:
    for sample, question in one.documents:
        yield from _document_rows(sample, question)


def _document_rows(sample: LoggedSample, question: Question) -> Iterator[ScoreRow]:
    likelihoods = sample.likelihoods
    assert likelihoods is not None
    for number, (likelihood, choice) in enumerate(zip(likelihoods, question.choices, strict=True)):
        yield choice_row(question.task, question.subtask, question.doc_id, number, likelihood, choice)._replace(
            choices=len(question.choices), gold=question.gold
        )


def choice_row(task: str, subtask: str, doc_id: int, number: int, likelihood: float, choice: str) -> ScoreRow:
    """Return the row of a choice; its token counts are to be removed by `uncounted`."""
    place = (task, subtask, doc_id, number, 0, 0)
    return ScoreRow._make(
        (*place, None, None, None, likelihood, None, *(0,) * 5, None, len(choice), len(choice.encode("utf-8")), 0, 0)
    )
