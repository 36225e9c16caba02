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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evalkit.benchmarks.lm_eval.outcomes import (
    DocumentScore,
    compared_metric,
    document_scores,
    write_document_scores,
)
from evalkit.benchmarks.lm_eval.results import write_scores
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.data import Library
from evalkit.display import Say
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.exchange.imported_runs import (
    Import,
    LoggedPlaces,
    choice_row,
    manifest_of,
    save_logs,
    selection_hash,
    selection_specification,
    written_once,
)
from evalkit.exchange.log_files import LoggedTask, model_of, read_logs
from evalkit.exchange.log_lines import LoggedSample, MetricValue
from evalkit.exchange.pinned_runs import import_choices, match
from evalkit.runs.folder import LM_EVAL, Run
from evalkit.runs.score_table import ScoreRow
from evalkit.runs.writing import RunWriter

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


@dataclass(frozen=True)
class _RecomputedMetric:
    """A metric of a task under a filter of its answers."""

    filter: str
    metric: str
    value: float
    stderr: float | None
    """Of a mean, from the sample's standard deviation; None for other metrics."""


def check_results(log: LoggedTask) -> None:
    """Raise `DataError` if the results file beside a sample file has another value of a metric than its documents."""
    logged = _logged_values(log)
    for one in _recomputed(log):
        expected = logged.get((one.metric, one.filter), one.value)
        if not _is_close(one.value, expected):
            raise DataError(
                f"{log.results_path} has {printable(one.metric)[:60]} {expected:.6g} for {log.task}, but the documents "
                f"in {log.path.name} have {one.value:.6g}; a file was changed, so restore the original"
            )


def _recomputed(log: LoggedTask) -> list[_RecomputedMetric]:
    """Return the metrics whose values can be computed from those of the documents.

    Without a results file, these are the metrics whose values are shares; with one, a metric that it does not call a
    mean is one if its value is the mean.
    """
    values: dict[tuple[str, str], list[MetricValue]] = {}
    for sample in log.samples:
        for metric, value in sample.metrics.items():
            values.setdefault((metric, sample.filter), []).append(value)
    logged, metrics = _logged_values(log), []
    for (metric, rule), members in values.items():
        kind = _aggregation(log, metric)
        try:
            value = _AGGREGATIONS[kind or "mean"](members)
        except (KeyError, TypeError, ArithmeticError, ValueError):  # unknown, other values, or out of range
            continue
        numbers = [number for number in members if isinstance(number, float)] if kind in (None, "mean") else []
        if kind is None:
            expected = logged.get((metric, rule), value if all(0 <= number <= 1 for number in numbers) else None)
            if expected is None or not _is_close(value, expected):
                continue
        error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        metrics.append(_RecomputedMetric(rule, metric, value, error))
    return metrics


def _logged_values(log: LoggedTask) -> dict[tuple[str, str], float]:
    """Return (metric, filter) → value in the results file."""
    logged = log.results.results.get(log.task, {})
    parts = {key: key.rpartition(",") for key, value in logged.items() if isinstance(value, (int, float))}
    return {
        (metric, rule): float(logged[key])
        for key, (metric, comma, rule) in parts.items()
        if comma and not metric.endswith("_stderr")
    }


def _aggregation(log: LoggedTask, metric: str) -> str | None:
    """Return lm-eval's name of how a metric's values are combined; None if it is unknown."""
    for entry in log.config.metric_list or ():
        if entry.get("metric") == metric and isinstance(entry.get("aggregation"), str):
            return str(entry["aggregation"])
    return "mean" if metric.startswith(_MEANS) else _DEFAULTS.get(metric)


def _is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _per_weight(values: Sequence[Any]) -> float:
    return math.fsum(total for total, _ in values) / math.fsum(weight for _, weight in values)


_AGGREGATIONS: Mapping[str, Callable[[Sequence[Any]], float]] = {
    "mean": statistics.fmean,
    "perplexity": lambda values: math.exp(-statistics.fmean(values)),
    "weighted_perplexity": lambda values: math.exp(-_per_weight(values)),
    "bits_per_byte": lambda values: -_per_weight(values) / math.log(2),
}
"""lm-eval's name of an aggregation → its formula (`lm_eval.api.metrics`)."""


def import_metrics(logs: Sequence[LoggedTask], request: Import) -> list[Run]:
    """Write the runs of lm-eval's tasks; return the existing ones if the same log was imported before.

    Returns:
        The run of the tasks with choices, then that of the others, where there are any: the documents of one run are
        compared either by their choices or by lm-eval's metrics.

    Raises:
        UsageError: the files have different settings.
        RunError: a run cannot be written.
    """
    rows = {log.task: _choice_rows(log) for log in logs}
    parts = ([log for log in logs if rows[log.task]], [log for log in logs if not rows[log.task]])
    return [_import(members, rows, request) for members in parts if members]


def _import(logs: Sequence[LoggedTask], rows: Mapping[str, list[ScoreRow]], request: Import) -> Run:
    """Write the run of some tasks with their score rows."""

    def finish(writer: RunWriter) -> None:
        scores = {log.task: _document_scores(log) for log in logs}
        without_sizes = [log.task for log in logs if _delimiter(log) is None]
        all_rows = [row for log in logs for row in rows[log.task]]
        write_scores(writer, all_rows, {}, counted=False, without_sizes=without_sizes)
        write_document_scores(writer, [score for members in scores.values() for score in members])
        save_logs(writer, [(log, {one.doc_id: (log.task, one.doc_id) for one in log.samples}) for log in logs])
        tasks = [_entry(log, scores[log.task], request) for log in logs]
        writer.save_results({"tasks": tasks, "groups": [], "averages": [], "samples": True})

    shots = {log.shots for log in logs}
    tasks = {log.task: _about(log) for log in logs}
    specification = {
        "suite": LM_EVAL,
        **_selection(logs, tasks),
        "names": [*tasks],
        "tasks": tasks,
        "num_fewshot": shots.pop() if len(shots) == 1 else None,
    }
    about = {
        # Set to the rule of the multiple-choice tasks when their score table is written
        "rule": "acc",
        "groups": {},
        "group_sizes": {},
        "documents": {log.task: {"source": "log", "official": None, "count": _count(log)} for log in logs},
        "template": asdict(load_template("plain")),
    }
    manifest = manifest_of(LM_EVAL, logs, request.model, specification, about)
    return written_once(request, (LM_EVAL, "+".join(tasks)), manifest, finish)


def _about(log: LoggedTask) -> dict[str, Any]:
    """Return what the log says of a task; its definition is not known."""
    digest = hashlib.sha256()
    for sample in sorted(log.documents, key=lambda one: one.doc_id):
        digest.update(json.dumps(sample.doc, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    version = log.results.versions.get(log.task)
    return {"version": version, "num_fewshot": log.shots, "documents": digest.hexdigest()}


def _selection(logs: Sequence[LoggedTask], tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return which documents the log has; how many a task has, only the results file says."""
    if any(log.counts is None for log in logs):
        return selection_hash([(name, task["documents"]) for name, task in tasks.items()]) | {"complete": "unknown"}
    places = [
        LoggedPlaces(log.task, sorted(one.doc_id for one in log.documents), [log.task] * _count(log)) for log in logs
    ]
    return selection_specification(logs, places)


def _count(log: LoggedTask) -> int:
    """Return the number of a task's documents, as far as it is known."""
    return len(log.documents) if log.counts is None else max(log.counts.original, len(log.documents))


def _document_scores(log: LoggedTask) -> list[DocumentScore]:
    fields = (
        {"doc_id": sample.doc_id, "doc": sample.doc, "filter": sample.filter, "metrics": list(sample.metrics)}
        | {name: value if isinstance(value, float) else math.nan for name, value in sample.metrics.items()}
        for sample in sorted(log.samples, key=lambda one: one.doc_id)
    )
    return list(document_scores(log.task, fields))


def _entry(log: LoggedTask, scores: Sequence[DocumentScore], request: Import) -> dict[str, Any]:
    """Return a task's entry in results.json: the metrics that follow from its documents, whatever the log says."""
    recomputed, better = _recomputed(log), log.results.higher_is_better.get(log.task, {})
    if missing := sorted(_logged_values(log).keys() - {(one.metric, one.filter) for one in recomputed}):
        names = ", ".join(f"{metric},{rule}" for metric, rule in missing)
        request.say(f"{log.path}: {names} of {log.task} cannot be computed from the documents and is left out")
    return {
        "task": log.task,
        "alias": str(log.results.results.get(log.task, {}).get("alias", log.task)),
        "n": len(log.documents),
        "num_fewshot": log.shots,
        "version": log.results.versions.get(log.task),
        "metrics": [asdict(one) | {"higher_is_better": better.get(one.metric)} for one in recomputed],
        "documents": _count(log),
        "seconds": None,
        "compared": compared_metric(scores, better),
    }


def _choice_rows(log: LoggedTask) -> list[ScoreRow]:
    """Return the score rows of a task whose documents are choices with one gold answer; none of any other task.

    The options are the continuations without the delimiter. They are used only if lm-eval's own acc, acc_norm and
    acc_bytes of every document follow from them; where the delimiter is not known, only acc is checked, and the rows'
    lengths mean nothing.

    Raises:
        DataError: a document of a multiple-choice task has too few log-likelihoods, or another acc than they give.
    """
    rows: list[ScoreRow] = []
    for sample in log.documents:
        if not (choices := _choices(log, sample)):
            return []
        rows += choices
    return rows


def _choices(log: LoggedTask, sample: LoggedSample) -> list[ScoreRow]:
    likelihoods = sample.likelihoods or ()
    # For mutual information, lm-eval appends the choices without their context
    count = len(likelihoods) // (2 if "acc_mutual_info" in sample.metrics else 1)
    requests = sample.requests[:count]
    if len(likelihoods) != len(sample.requests) and (likelihoods or _is_plain_choice(log, sample.requests)):
        raise DataError(
            f"{log.at(sample)}: document {sample.doc_id} has {len(sample.requests)} requests, but {len(likelihoods)} "
            "log-likelihoods; the file was changed"
        )
    if count < 2 or "acc" not in sample.metrics or any(len(texts) < 2 for texts in requests):
        return []
    if (gold := sample.gold) is None or gold >= count or not np.isfinite(likelihoods).all():
        return []
    values, before = np.array(likelihoods[:count]), _delimiter(log)
    options = [texts[1].removeprefix(before or "") for texts in requests]
    sizes = {"acc": np.ones(count)}
    if before is not None:
        sizes["acc_norm"] = np.array([len(option) for option in options])
        sizes["acc_bytes"] = np.array([len(option.encode("utf-8", "surrogatepass")) for option in options])
    for metric, size in sizes.items():
        if not size.all():
            return []
        logged, expected = sample.metrics.get(metric), float(np.argmax(values / size) == gold)
        if logged not in (None, expected):
            # A target may also be the text of the gold option, such as "2", and not its number
            is_number = sample.target not in map(str.strip, options)
            if metric == "acc" and is_number and _is_plain_choice(log, requests):
                raise DataError(
                    f"{log.at(sample)}: document {sample.doc_id} has acc {logged}, but its log-likelihoods give "
                    f"{expected:g}; the file was changed"
                )
            return []
    return [
        choice_row(log.task, log.task, sample.doc_id, number, likelihoods[number], option, count, gold)
        for number, option in enumerate(options)
    ]


def _is_plain_choice(log: LoggedTask, requests: Sequence[tuple[str, ...]]) -> bool:
    """Return whether lm-eval's own code has computed acc, with the target as the number of a choice."""
    is_choice = log.config.output_type == "multiple_choice" and not log.config.process_results
    return is_choice and len({texts[0] for texts in requests}) == 1


def _delimiter(log: LoggedTask) -> str | None:
    """Return what stands between context and answer option in a task's requests; None if the log does not say it."""
    delimiter, prefix = log.config.target_delimiter, log.config.gen_prefix
    # As lm-eval's construct_requests: a chat template ends with its own separator, or with the answer's beginning
    replaced = log.results.chat_template and not (prefix and not prefix[-1].isspace())
    return delimiter if delimiter is None or not replaced else ""


def import_logs(paths: Sequence[Path], model: str | None, output: Path, library: Library, say: Say) -> list[Run]:
    """Import sample files of one model as finished runs.

    Args:
        paths: lm-eval's sample files; the results file beside each is read too, if there is one.
        model: name of the model; None: the one in the results files.
        output: parent folder of the run folders.
        library: source of the pinned documents.
        say: called with messages for the user.

    Returns:
        The run of the tasks with pinned documents, then those of the others, where there are any.

    Raises:
        UsageError: the files are of several models or settings, or have no name that says their task.
        DataError: a file is invalid, or contradicts the pinned documents; names file and line.
        RunError: a run cannot be written.
    """
    if not paths:
        raise UsageError("name one or more sample files: evalkit import samples_*.jsonl")
    logs = read_logs(paths)
    request = Import(model_of(logs, model), output, say)
    matched, others = match(logs, library, say)
    for log in logs:
        check_results(log)
    runs = [import_choices(matched, request, library)] if matched else []
    return [*runs, *import_metrics(others, request)]
