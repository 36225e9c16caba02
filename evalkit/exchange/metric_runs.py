"""Import of lm-eval's logs, and the imported runs of other tasks than the pinned ones, with lm-eval's own metrics.

In: `LoggedTask`s. Out: finished runs of lm-eval's tasks: every metric of every document, paired by content with those
of other runs; and a score table of the tasks whose documents are choices with one gold answer, which are a run of their
own.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from evalkit.benchmarks.lm_eval_tables import (
    DocumentScore,
    choice_rows,
    compared_metric,
    document_scores,
    metric_entries,
    write_tables,
)
from evalkit.data import Library
from evalkit.display import Say
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.exchange.imported_runs import (
    Import,
    LoggedPlaces,
    import_run,
    log_caveats,
    model_of,
    save_logs,
    selection_hash,
    selection_specification,
)
from evalkit.exchange.logs import LoggedSample, LoggedTask, MetricValue, read_logs
from evalkit.exchange.pinned_runs import import_choices, match
from evalkit.inputs.values import utf8_length
from evalkit.runs.folder import LM_EVAL, Run
from evalkit.runs.score_table import ScoreRow, score_table, uncounted, unsized
from evalkit.runs.writing import RunWriter
from evalkit.suites.templates import load_template

_TOLERANCE = 1e-6
"""Relative difference of two computations of a metric."""
_MEANS = ("acc", "exact_match")
"""Beginnings of the names of metrics that are means, where the log does not say it."""
_DEFAULTS = {
    "perplexity": "perplexity",
    "word_perplexity": "weighted_perplexity",
    "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
}
"""Metric → its aggregation in lm-eval where the log does not say it, as in all logs of wikitext."""


def import_logs(paths: Sequence[Path], model: str | None, output: Path, library: Library, say: Say) -> list[Run]:
    """Import sample files of one model as finished runs.

    `paths` are lm-eval's sample files; the results file beside each is read too, if there is one, and has the model's
    name if `model` is None. Return the run of the tasks with pinned documents, then those of the others. Choices and
    other tasks are runs of their own: the documents of a run are compared either by their choices or by lm-eval's
    metrics.

    Raises:
        UsageError: the files are of several models or settings, or have no name that says their task.
        DataError: a file is invalid, or contradicts the pinned documents; names file and line.
        RunError: a run cannot be written.
    """
    if not paths:
        raise UsageError("name one or more sample files: evalkit import samples_*.jsonl")
    logs = read_logs(paths)
    request = Import(model_of(logs, model), output, say)
    matched, others = match(logs, library)
    metrics = {log.task: _recomputed(log) for log in logs}
    rows = {log.task: _choice_rows(log) for log in others}
    runs = [import_choices(matched, request, library)] if matched else []
    kinds = [log for log in others if rows[log.task]], [log for log in others if not rows[log.task]]
    return [*runs, *(_import(members, rows, metrics, request) for members in kinds if members)]


def _recomputed(log: LoggedTask) -> dict[str, Any]:
    """Return the metrics that can be computed from those of the documents, in the form of lm-eval's results.

    Without a results file, these are the metrics whose values are shares; with one, a metric that it does not call a
    mean is one if its value is the mean. Raises `DataError` if the results file has another value.
    """
    by_metric: dict[tuple[str, str], list[MetricValue]] = {}
    for sample in log.samples:
        for metric, value in sample.metrics.items():
            by_metric.setdefault((metric, sample.filter), []).append(value)
    logged, values = log.results.results.get(log.task, {}), dict[str, Any]()
    for (metric, rule), members in by_metric.items():
        # lm-eval's name of how the values are combined; None if it is unknown
        entries = [entry.get("aggregation") for entry in log.config.metric_list or () if entry.get("metric") == metric]
        default = "mean" if metric.startswith(_MEANS) else _DEFAULTS.get(metric)
        kind = next((name for name in entries if isinstance(name, str)), default)
        try:
            value = _AGGREGATIONS[kind or "mean"](members)
        except (KeyError, TypeError, ArithmeticError, ValueError):  # unknown, other values, or out of range
            continue
        numbers = [number for number in members if isinstance(number, float)] if kind in (None, "mean") else []
        are_shares = kind is not None or all(0 <= number <= 1 for number in numbers)
        expected = logged.get(f"{metric},{rule}")
        if not isinstance(expected, int | float):
            expected = value if are_shares else math.nan
        if math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
            values |= {f"{metric},{rule}": value, f"{metric}_stderr,{rule}": error}
        elif kind is not None:
            raise DataError(
                f"{log.results_path} has {printable(metric)[:60]} {expected:.6g} for {log.task}, but the documents in "
                f"{log.path.name} have {value:.6g}; a file was changed, so restore the original"
            )
    return values


def _per_weight(values: Sequence[Any]) -> float:
    return math.fsum(total for total, _ in values) / math.fsum(weight for _, weight in values)


_AGGREGATIONS: Mapping[str, Callable[[Sequence[Any]], float]] = {
    "mean": statistics.fmean,
    "perplexity": lambda values: math.exp(-statistics.fmean(values)),
    "weighted_perplexity": lambda values: math.exp(-_per_weight(values)),
    "bits_per_byte": lambda values: -_per_weight(values) / math.log(2),
}
"""lm-eval's name of an aggregation → its formula (`lm_eval.api.metrics`)."""


def _import(
    logs: Sequence[LoggedTask],
    rows: Mapping[str, list[ScoreRow]],
    metrics: Mapping[str, Mapping[str, Any]],
    request: Import,
) -> Run:
    def finish(writer: RunWriter) -> None:
        choices = [row for log in logs for row in rows[log.task]]
        without_sizes = [log.task for log in logs if log.delimiter is None]
        table = unsized(uncounted(score_table(choices, {})), without_sizes) if choices else None
        documents: list[DocumentScore] = []
        entries = []
        for log in logs:
            samples = sorted(log.samples, key=lambda sample: sample.doc_id)
            scores = list(document_scores(log.task, (dict(sample) | sample.metrics for sample in samples)))
            documents += scores
            logged, better = log.results.results.get(log.task, {}), log.results.higher_is_better.get(log.task, {})
            if missing := [
                key for key in logged if "," in key and "_stderr," not in key and key not in metrics[log.task]
            ]:
                names = "; ".join(sorted(missing))
                request.say(f"{log.path}: {names} of {log.task} cannot be computed from the documents and is left out")
            entries.append(
                {
                    "task": log.task,
                    "alias": str(logged.get("alias", log.task)),
                    "n": len(log.documents),
                    "num_fewshot": log.shots,
                    "version": log.results.versions.get(log.task),
                    "metrics": metric_entries(metrics[log.task], better),
                    "documents": _count(log),
                    "seconds": None,
                    "compared": compared_metric(scores, better),
                }
            )
        write_tables(writer, table, documents)
        save_logs(writer, [(log, {sample.doc_id: (log.task, sample.doc_id) for sample in log.samples}) for log in logs])
        writer.save_results({"tasks": entries, "groups": [], "averages": [], "samples": True})

    tasks: dict[str, dict[str, Any]] = {}
    for log in logs:
        digest = hashlib.sha256()
        for sample in sorted(log.documents, key=lambda sample: sample.doc_id):
            digest.update(json.dumps(sample.doc, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        version = log.results.versions.get(log.task)
        tasks[log.task] = {"version": version, "num_fewshot": log.shots, "documents": digest.hexdigest()}
    # How many documents a task has, only the results file says
    if any(log.count is None for log in logs):
        contents = [(name, task["documents"]) for name, task in tasks.items()]
        selection = selection_hash(contents) | {"complete": "unknown"}
    else:
        numbers = {log.task: sorted(sample.doc_id for sample in log.documents) for log in logs}
        places = [LoggedPlaces(log.task, numbers[log.task], [log.task] * _count(log)) for log in logs]
        selection = selection_specification(logs, places)
    shots = {log.shots for log in logs}
    specification = {
        "suite": LM_EVAL,
        **selection,
        "names": [*tasks],
        "tasks": tasks,
        "num_fewshot": shots.pop() if len(shots) == 1 else None,
    }
    about = {
        "kind": LM_EVAL,
        # Set to the rule of the multiple-choice tasks when their score table is written
        "rule": "acc",
        "groups": {},
        "group_sizes": {},
        "documents": {
            log.task: {
                "source": "log",
                "official": None,
                "count": len(log.documents),
                "total": None if log.count is None else _count(log),
            }
            for log in logs
        },
        "template": asdict(load_template("plain")),
        **log_caveats({log.task: [log] for log in logs}),
    }
    return import_run(request, logs, (LM_EVAL, "+".join(tasks)), specification, about, finish)


def _count(log: LoggedTask) -> int:
    return max(log.count or 0, len(log.documents))


def _choice_rows(log: LoggedTask) -> list[ScoreRow]:
    """Return the score rows of a task whose documents are choices with one gold answer; of any other task none.

    The options are the continuations without the delimiter. They are used only if lm-eval's own acc, acc_norm and
    acc_bytes of every document follow from them; if the delimiter is not known, only acc is checked, and the rows'
    lengths mean nothing. Raises `DataError` if a document of a multiple-choice task has too few log-likelihoods, or
    another acc than they give.
    """
    rows: list[ScoreRow] = []
    for sample in log.documents:
        if not (choices := _choices(log, sample)):
            return []
        rows += choices
    return rows


def _choices(log: LoggedTask, sample: LoggedSample) -> list[ScoreRow]:
    likelihoods = sample.likelihoods
    # For mutual information, lm-eval appends the choices without their context
    count = len(likelihoods) // (2 if "acc_mutual_info" in sample.metrics else 1)
    requests = sample.requests[:count]
    if len(likelihoods) != len(sample.requests) and (likelihoods or log.are_plain_choices(sample.requests)):
        raise DataError(f"{sample.where} has {len(sample.requests)} requests and {len(likelihoods)} log-likelihoods")
    is_index = sample.target in map(str, range(count))
    if count < 2 or not is_index or "acc" not in sample.metrics or any(len(texts) < 2 for texts in requests):
        return []
    gold, values, delimiter = int(sample.target), np.array(likelihoods[:count]), log.delimiter
    options = [texts[1].removeprefix(delimiter or "") for texts in requests]
    sizes = {"acc": np.ones(count)}
    if delimiter is not None:
        sizes["acc_norm"] = np.array([len(option) for option in options])
        sizes["acc_bytes"] = np.array([utf8_length(option) for option in options])
    if any(not size.all() for size in sizes.values()):
        return []
    for metric, size in sizes.items():
        logged, expected = sample.metrics.get(metric), float(np.argmax(values / size) == gold)
        if logged not in (None, expected):
            # A target may also be the text of the gold option, such as "2", and not its number
            is_number = sample.target not in map(str.strip, options)
            if metric == "acc" and is_number and log.are_plain_choices(requests):
                raise DataError(f"{sample.where} has acc {logged}, but its log-likelihoods give {expected:g}")
            return []
    return choice_rows(log.task, log.task, sample.doc_id, gold, options, likelihoods[:count])
