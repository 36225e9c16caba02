"""Imported runs of other tasks than the pinned ones, with lm-eval's own metrics.

In: `LoggedTask`s. Out: finished runs of lm-eval's tasks: every metric of every document, paired by content with those
of other runs; and a score table of the tasks whose documents are choices with one gold answer, which are a run of their
own.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from evalkit.display import Say
from evalkit.errors import DataError
from evalkit.escape import printable
from evalkit.exchange.choice_runs import choice_row
from evalkit.exchange.log_files import LoggedTask
from evalkit.exchange.log_lines import LoggedSample, MetricValue
from evalkit.exchange.manifests import (
    PARTLY_UNKNOWN,
    Import,
    LoggedPlaces,
    logged_sample,
    manifest_of,
    save_logs,
    selection_hash,
    selection_specification,
    written_once,
)
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
class RecomputedMetric:
    """A metric of a task under a filter of its answers."""

    filter: str
    metric: str
    value: float
    stderr: float | None
    """Of a mean, from the sample's standard deviation; None for other metrics."""


def check_results(log: LoggedTask) -> None:
    """Raise `DataError` if the results file beside a sample file has another value of a metric than its documents."""
    logged = logged_values(log)
    for one in means(log):
        expected = logged.get((one.metric, one.filter), one.value)
        if log.summary is not None and not _is_close(one.value, expected):
            raise DataError(
                f"{log.summary.path} has {printable(one.metric)[:60]} {expected:.6g} for {log.task}, but the documents "
                f"in {log.path.name} have {one.value:.6g}; a file was changed, so restore the original"
            )


def means(log: LoggedTask) -> list[RecomputedMetric]:
    """Return the metrics whose values can be computed from those of the documents.

    Without a results file, these are the metrics whose values are shares; with one, a metric that it does not call a
    mean is one if its value is the mean.
    """
    values: dict[tuple[str, str], list[MetricValue]] = {}
    for sample in log.samples:
        for metric, value in sample.metrics.items():
            values.setdefault((metric, sample.filter), []).append(value)
    logged, found = logged_values(log), []
    for (metric, rule), members in values.items():
        kind = _aggregation(log, metric)
        try:
            value = _AGGREGATIONS[kind or "mean"](members)
        except (KeyError, TypeError, ArithmeticError, ValueError):  # unknown, other values, or out of range
            continue
        numbers = [one for one in members if isinstance(one, float)] if kind in (None, "mean") else []
        if kind is None:
            shares = all(0 <= one <= 1 for one in numbers)
            expected = logged.get((metric, rule), value if shares else None)
            if expected is None or not _is_close(value, expected):
                continue
        error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        found.append(RecomputedMetric(rule, metric, value, error))
    return found


def logged_values(log: LoggedTask) -> dict[tuple[str, str], float]:
    """Return (metric, filter) → value in the results file."""
    found = {} if log.results is None else log.results.results.get(log.task, {})
    parts = {key: key.rpartition(",") for key, value in found.items() if isinstance(value, (int, float))}
    return {
        (metric, rule): float(found[key])
        for key, (metric, comma, rule) in parts.items()
        if comma and not metric.endswith("_stderr")
    }


def _aggregation(log: LoggedTask, metric: str) -> str | None:
    """Return lm-eval's name of how a metric's values are combined; None if it is unknown."""
    listed = None if log.results is None else log.results.configs.get(log.task, {}).get("metric_list")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and entry.get("metric") == metric and isinstance(entry.get("aggregation"), str):
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


def import_metrics(logs: Sequence[LoggedTask], request: Import, say: Say) -> list[Run]:
    """Write the runs of lm-eval's tasks; return the existing ones if the same log was imported before.

    Returns:
        The run of the tasks with choices, then that of the others, where there are any: the documents of one run are
        compared either by their choices or by lm-eval's metrics.

    Raises:
        UsageError: the files have different settings.
        RunError: a run cannot be written.
    """
    rows = {log.task: choice_rows(log) for log in logs}
    parts = ([log for log in logs if rows[log.task]], [log for log in logs if not rows[log.task]])
    return [_import(members, rows, request, say) for members in parts if members]


def _import(logs: Sequence[LoggedTask], rows: Mapping[str, list[ScoreRow]], request: Import, say: Say) -> Run:
    """Write the run of some tasks with their score rows."""

    def finish(writer: RunWriter) -> None:
        scores = {log.task: list(_document_scores(log)) for log in logs}
        without_sizes = [log.task for log in logs if delimiter(log) is None]
        own = [row for log in logs for row in rows[log.task]]
        write_scores(writer, own, {}, counted=False, without_sizes=without_sizes)
        write_document_scores(writer, [one for members in scores.values() for one in members])
        save_logs(writer, [(log, {one.doc_id: (log.task, one.doc_id) for one in log.samples}) for log in logs])
        tasks = [_entry(log, scores[log.task], say) for log in logs]
        writer.save_results({"tasks": tasks, "groups": [], "averages": [], "samples": True})

    names = (LM_EVAL, "+".join(log.task for log in logs))
    return written_once(request, names, _manifest(logs, request.model), finish, say)


def _manifest(logs: Sequence[LoggedTask], model: str) -> dict[str, Any]:
    shots = {log.shots for log in logs}
    tasks = {log.task: _about(log) for log in logs}
    specification = {
        "suite": LM_EVAL,
        **_selection(logs, {task: about["documents"] for task, about in tasks.items()}),
        "names": [*tasks],
        "tasks": tasks,
        "num_fewshot": shots.pop() if len(shots) == 1 else None,
    }
    about = {
        # Set to the rule of the multiple-choice tasks when their score table is written
        "rule": "acc",
        "groups": {},
        "group_sizes": {},
        "documents": {log.task: _source(log) for log in logs},
        "template": asdict(load_template("plain")),
    }
    return manifest_of(LM_EVAL, logs, model, specification, about)


def _about(log: LoggedTask) -> dict[str, Any]:
    """Return what the log says of a task; its definition is not known."""
    digest = hashlib.sha256()
    for sample in sorted(log.documents, key=lambda one: one.doc_id):
        digest.update(json.dumps(sample.doc, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    version = None if log.results is None else log.results.versions.get(log.task)
    return {"version": version, "num_fewshot": log.shots, "documents": digest.hexdigest()}


def _selection(logs: Sequence[LoggedTask], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return which documents the log has; how many a task has, only the results file says."""
    counts = {log.task: log.counts for log in logs}
    if None in counts.values():
        return selection_hash([*digests.items()]) | PARTLY_UNKNOWN
    places = []
    for log in logs:
        numbers = sorted(one.doc_id for one in log.documents)
        places.append(LoggedPlaces(log.task, numbers, [log.task] * _source(log)["count"]))
    return selection_specification(places, logged_sample(logs))


def _source(log: LoggedTask) -> dict[str, Any]:
    count = len(log.documents) if log.counts is None else log.counts.original
    return {"source": "log", "official": None, "count": max(count, len(log.documents))}


def _document_scores(log: LoggedTask) -> Iterator[DocumentScore]:
    samples = sorted(log.samples, key=lambda one: one.doc_id)
    fields = ({"doc_id": one.doc_id, "doc": one.doc, "filter": one.filter, "metrics": list(one.metrics),
               **{name: value if isinstance(value, float) else math.nan for name, value in one.metrics.items()}}
              for one in samples)  # fmt: skip
    return document_scores(log.task, fields)


def _entry(log: LoggedTask, scores: Sequence[DocumentScore], say: Say) -> dict[str, Any]:
    """Return a task's entry in results.json: the metrics that follow from its documents, whatever the log says."""
    results = log.results
    found = {} if results is None else results.results.get(log.task, {})
    better: dict[str, bool | None] = {} if results is None else results.higher_is_better.get(log.task, {})
    recomputed = means(log)
    if missing := sorted(logged_values(log).keys() - {(one.metric, one.filter) for one in recomputed}):
        names = ", ".join(f"{metric},{rule}" for metric, rule in missing)
        say(f"{log.path}: {names} of {log.task} cannot be computed from the documents and is left out")
    return {
        "task": log.task,
        "alias": str(found.get("alias", log.task)),
        "n": len(log.documents),
        "num_fewshot": log.shots,
        "version": None if results is None else results.versions.get(log.task),
        "metrics": [asdict(one) | {"higher_is_better": better.get(one.metric)} for one in recomputed],
        "documents": _source(log)["count"],
        "seconds": None,
        "compared": compared_metric(scores, better),
    }


def choice_rows(log: LoggedTask) -> list[ScoreRow]:
    """Return the score rows of a task whose documents are choices with one gold answer; none of any other task.

    The options are the continuations without the delimiter. They are used only if lm-eval's own acc, acc_norm and
    acc_bytes of every document follow from them; where the delimiter is not known, only acc is checked, and the rows'
    lengths mean nothing.

    Raises:
        DataError: a document of a multiple-choice task has too few log-likelihoods, or another acc than they give.
    """
    rows: list[ScoreRow] = []
    for sample in log.documents:
        if not (found := _choices(log, sample)):
            return []
        rows += found
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
    values, before = np.array(likelihoods[:count]), delimiter(log)
    options = [texts[1].removeprefix(before or "") for texts in requests]
    sizes = {"acc": np.ones(count)}
    if before is not None:
        sizes["acc_norm"] = np.array([len(option) for option in options])
        sizes["acc_bytes"] = np.array([len(option.encode("utf-8", "surrogatepass")) for option in options])
    for metric, size in sizes.items():
        logged = sample.metrics.get(metric)
        if not size.all():
            return []
        if logged not in (None, expected := float(np.argmax(values / size) == gold)):
            # A target may also be the text of the gold option, such as "2", and not its number
            is_number = sample.target not in map(str.strip, options)
            if metric == "acc" and is_number and _is_plain_choice(log, requests):
                raise DataError(
                    f"{log.at(sample)}: document {sample.doc_id} has acc {logged}, but its log-likelihoods give "
                    f"{expected:g}; the file was changed"
                )
            return []
    return [
        choice_row(log.task, log.task, sample.doc_id, number, likelihoods[number], option)._replace(
            choices=count, gold=gold
        )
        for number, option in enumerate(options)
    ]


def _is_plain_choice(log: LoggedTask, requests: Sequence[tuple[str, ...]]) -> bool:
    """Return whether lm-eval's own code has computed acc, with the target as the number of a choice."""
    config = {} if log.results is None else log.results.configs.get(log.task, {})
    own = config.get("output_type") == "multiple_choice" and not config.get("process_results")
    return own and len({texts[0] for texts in requests}) == 1


def delimiter(log: LoggedTask) -> str | None:
    """Return what stands between context and answer option in a task's requests; None if the log does not say it."""
    config = {} if log.results is None else log.results.configs.get(log.task, {})
    found, prefix = config.get("target_delimiter"), config.get("gen_prefix")
    if not isinstance(found, str):
        return None
    # As lm-eval's construct_requests: a chat template ends with its own separator, or with the answer's beginning
    in_chat = log.results is not None and bool(log.results.chat_template)
    return "" if in_chat and not (isinstance(prefix, str) and prefix and not prefix[-1].isspace()) else found
