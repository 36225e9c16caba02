"""Results of a run of lm-eval's tasks: lm-eval's evaluation of the answers in the journal, and the files of the run.

In: the plan's tasks and the finished rows. Out: results.json, lm-eval's own files, the documents' scores, and the score
table of the multiple-choice tasks with one gold answer, so that evalkit's rules and statistics apply to them as to a
suite's. Imported logs are written with the same parts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.lm_eval.requests import (
    AnswerRow,
    AnswersFromRows,
    Rows,
    likelihood_of,
    requests_of,
    rows_of,
    stored_rows,
)
from evalkit.benchmarks.lm_eval_files import Evaluated, write_lm_eval
from evalkit.benchmarks.lm_eval_tables import (
    choice_rows,
    compared_metric,
    document_scores,
    metric_entries,
    write_tables,
)
from evalkit.compatibility.lm_eval import as_texts, gold_index, hash_of, json_value
from evalkit.data.sampling import clusters_of
from evalkit.errors import DataError, reading_as
from evalkit.requests.rows import ScoredRow
from evalkit.runs.score_table import CONTEXT, CONTINUATION, ScoreRow, score_table
from evalkit.suites.lm_eval_tasks import quiet_lm_eval
from evalkit.suites.task_checks import listed_metrics, logged_caveats

if TYPE_CHECKING:
    import logging

    from evalkit.benchmarks.lm_eval.plan import TaskPlan
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter


class StoredAnswers(AnswersFromRows):
    """The answers in the journal, as the model of lm-eval's `evaluate`."""

    rank, world_size = 0, 1

    def __init__(self, stored: Rows) -> None:
        self._stored = stored

    def rows(self, instances: list[Any]) -> list[list[AnswerRow]]:
        return [rows_of(request, self._stored) for request in requests_of(instances)]


def finish(plan: TaskPlan, finished: FinishedRows, writer: RunWriter) -> None:
    """Let lm-eval evaluate the answers, and write every result file of a run, results.json last."""
    tasks, with_samples = plan.tasks.tasks, plan.request.log_samples
    answers = StoredAnswers(stored_rows(finished, plan.model_requests))
    results, warnings = _evaluated(plan, answers, writer)
    samples = results.pop("samples")
    scores = {name: list(document_scores(name, members)) for name, members in samples.items()}
    rows: list[ScoreRow] = []
    clusters: dict[tuple[str, int], int] = {}
    for name, task in tasks.items():
        rows += _task_rows(name, task, answers, clusters)
    # pmi needs an unconditional pass for every row; lm-eval makes it only for tasks that measure mutual information
    if any(row.ll_unconditional is None for row in rows):
        rows = [row._replace(ll_unconditional=None) for row in rows]
    table = score_table(rows, clusters) if rows else None
    write_tables(writer, table, [score for members in scores.values() for score in members])
    seconds: dict[str, float] = defaultdict(float)
    for journal, spent in finished.seconds.items():
        seconds[journal.partition(" ")[2]] += spent
    # lm-eval's hash of a task's documents, prompts and targets
    parts = ("doc_hash", "prompt_hash", "target_hash")
    hashes = {
        name: hash_of("".join(sample[part] for sample in members for part in parts))
        for name, members in samples.items()
    }
    entries = {name: _entry(name, results) for name in results["results"]}
    # Before files in lm-eval's format, which have them too
    writer.save_caveats(_caveats(plan, entries, warnings))
    lines = {name: map(_sample, members) for name, members in samples.items()} if with_samples else {}
    specification = writer.manifest["specification"]
    settings = {
        "batch_size": "auto",
        "device": writer.manifest.get("loaded", {}).get("device"),
        "limit": specification["limit"],
        "bootstrap_iters": 100000,
        **{f"{name}_seed": seed for name, seed in specification["seeds"].items()},
    }
    write_lm_eval(writer, Evaluated(results, settings, sum(seconds.values(), 0.0), lines, hashes=hashes))
    for name, task in tasks.items():
        entries[name] |= {
            "output_type": task.OUTPUT_TYPE,
            "documents": results["n-samples"][name]["original"],
            "seconds": round(seconds[name], 3),
            "compared": compared_metric(scores.get(name, []), results["higher_is_better"].get(name, {})),
        }
    groups = [entries[name] | {"tasks": results["group_subtasks"].get(name, [])} for name in results.get("groups", {})]
    # Only suites have "averages"; lm-eval's groups define their own aggregation
    content: dict[str, Any] = {"tasks": [entries[name] for name in tasks], "groups": groups, "averages": []}
    content |= {"samples": with_samples, "task_hashes": hashes}
    writer.save_results(json.loads(json.dumps(content, default=json_value)))


def _evaluated(
    plan: TaskPlan, answers: StoredAnswers, writer: RunWriter
) -> tuple[dict[str, Any], list[logging.LogRecord]]:
    """Return the results of lm-eval's `evaluate`, and the warnings that it has logged."""
    import lm_eval.evaluator
    import numpy as np

    tasks = plan.tasks
    warnings: list[logging.LogRecord] = []
    for name, task in tasks.tasks.items():
        # The plan has built the requests; `evaluate` would build them again
        task.build_all_requests = lambda **_: None
        task.process_results = reading_as(f"task {name}", "answers to measure", DataError)(task.process_results)
    loaded = {"tasks": tasks.tasks, "groups": tasks.groups}
    reading = reading_as(f"tasks {', '.join(tasks.names)}", "answers to evaluate", DataError)
    # acc_norm divides by the length of an empty choice, which is a caveat
    with quiet_lm_eval(writer.say, warnings), reading, np.errstate(divide="ignore", invalid="ignore"):
        evaluated = lm_eval.evaluator.evaluate(answers, loaded, limit=plan.request.limit, log_samples=True)
        return dict(evaluated), warnings


def _caveats(
    plan: TaskPlan, entries: Mapping[str, Mapping[str, Any]], warnings: Iterable[logging.LogRecord]
) -> dict[str, list[str]]:
    """Return task or group → what makes its metrics doubtful; of lm-eval's other warnings the name is "lm-eval"."""
    caveats = {name: texts.copy() for name, texts in plan.caveats.items()}
    for name, entry in entries.items():
        for metric in entry["metrics"]:
            if metric["value"] is None:
                caveats.setdefault(name, []).append(f"{metric['metric']} is not a finite number")
    for name, task in plan.tasks.tasks.items():
        measured = {metric["metric"] for metric in entries[name]["metrics"]}
        for metric in listed_metrics(task):
            if metric not in measured:
                caveats.setdefault(name, []).append(f"{metric} is in the task file, and lm-eval has not measured it")
    for name, text in logged_caveats(warnings):
        caveats.setdefault(name, []).append(text)
    return caveats


def _task_rows(name: str, task: Any, answers: StoredAnswers, clusters: dict[tuple[str, int], int]) -> list[ScoreRow]:
    """Return the score rows of a multiple-choice task with one gold answer each, and add its documents' clusters.

    Of another task, and of one with its own metrics, there are none.
    """
    custom = getattr(task.config, "process_results", None)
    if task.OUTPUT_TYPE != "multiple_choice" or callable(custom) or getattr(task, "multiple_target", 0):
        return []
    by_document: dict[int, list[Any]] = defaultdict(list)
    for instance in sorted(task.instances, key=lambda instance: instance.idx):
        by_document[instance.doc_id].append(instance)
    rows: list[ScoreRow] = []
    ids = list(by_document)
    of_documents = clusters_of([by_document[doc_id][0].doc for doc_id in ids], task.config.metadata or {})
    for doc_id, cluster in zip(ids, of_documents, strict=True):
        instances = by_document[doc_id]
        doc = instances[0].doc
        choices = task.doc_to_choice(doc)
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        index = gold_index(gold, choices)
        if task.multiple_input:
            # The options are in the contexts and one continuation repeats, whose length counts, as in a suite
            delimiter = task.config.target_delimiter
            choices = [instance.args[1].removeprefix(delimiter) for instance in instances[: len(choices)]]
        if index is None or len(instances) not in (len(choices), 2 * len(choices)):
            return []
        rows += _document_rows(name, index, choices, [row for [row] in answers.rows(instances)])
        clusters[name, doc_id] = ids[cluster]
    return rows


def _document_rows(name: str, gold: int, choices: Sequence[str], answers: Sequence[AnswerRow]) -> Iterator[ScoreRow]:
    # For mutual information, lm-eval appends the choices without context
    conditional, unconditional = answers[: len(choices)], answers[len(choices) :]
    likelihoods = list(map(likelihood_of, conditional))
    rows = choice_rows(name, name, int(answers[0].document), gold, choices, likelihoods)
    for row, answer in zip(rows, conditional, strict=True):
        assert isinstance(answer, ScoredRow)
        yield row._replace(
            n_context=answer.of(CONTEXT)[0],
            n_continuation=answer.of(CONTINUATION)[0],
            ll_unconditional=likelihood_of(unconditional[row.choice]) if unconditional else None,
            truncated=answer.truncated,
        )


def _entry(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    values = results["results"][name]
    return {
        "task": name,
        "alias": values["alias"],
        "n": values["sample_len"],
        "num_fewshot": results["n-shot"].get(name),
        "version": results["versions"].get(name),
        "metrics": metric_entries(values, results["higher_is_better"].get(name, {})),
    }


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {
        f"gen_args_{number}": {f"arg_{index}": part for index, part in enumerate(request)}
        for number, request in enumerate(sample["arguments"])
    }
    return {
        **sample,
        "arguments": arguments,
        "resps": as_texts(sample["resps"]),
        "filtered_resps": as_texts(sample["filtered_resps"]),
        "target": str(sample["target"]),
    }
