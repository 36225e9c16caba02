"""lm-eval's log of one evaluation, which is untrusted, in the form that lm-eval 0.4.13 writes.

In: sample files `samples_<task>_<time>.jsonl`, and `results_<time>.json` beside each. Out: a validated `LoggedTask` for
each sample file. Only the file name has the task's name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from evalkit.benchmarks.lm_eval_files import texts_of_requests
from evalkit.errors import DataError, UsageError, reading_as
from evalkit.inputs.reading import MOST_BYTES, MOST_DOCUMENT_BYTES, parse_json, read_bytes
from evalkit.inputs.validated import Stored
from evalkit.inputs.values import text_digest, utf8_length

_NAME = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")
_TIME = "%Y-%m-%dT%H-%M-%S"
_MOST_DOCUMENTS, _MOST_SHOTS = 2**21, 10**4
"""Documents of a task, and solved examples before each."""
_POSSIBLE = -1e9, 1e-3
"""Range of log-likelihoods in nats; the upper bound allows for rounding."""
_LARGEST_METRIC = 1e100
"""Sums over documents must not overflow."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)", re.ASCII)
"""Numbers as lm-eval writes them; `float` would also read "1_0" and other scripts' digits."""

MetricValue = float | tuple[float, float] | None
"""A document's value of a metric: a number, or a pair (sum, weight) of numbers; None if it is anything else."""


class LoggedSample(Stored):
    """One line: a document, its requests, and its answers under one filter."""

    where: str
    """Beginning of a message about it."""
    doc_id: int = Field(ge=0, lt=2**63)
    doc: dict[str, Any]
    target: str
    requests: tuple[tuple[str, ...], ...] = Field(min_length=1, alias="arguments")
    """Texts of each request: context and continuation, or a prompt alone."""
    likelihoods: tuple[float, ...]
    """Log-likelihood of each request, a natural logarithm; empty if an answer is not (log-likelihood, greedy)."""
    by_evalkit: bool
    """Whether evalkit answered: it does not compute greediness, and writes it as None."""
    filter: str
    metrics: dict[str, MetricValue]
    doc_hash: str
    prompt_hash: str
    target_hash: str


def _if_positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


_Count = Annotated[int | None, BeforeValidator(_if_positive)]
"""None if it is unknown."""


class _LogConfig(Stored):
    model_dtype: str | None = None
    model_num_parameters: _Count = None


class _TaskConfig(Stored):
    output_type: str | None = None
    process_results: Any = None
    target_delimiter: str | None = None
    gen_prefix: str | None = None
    metric_list: list[dict[str, Any]] | None = None
    fewshot_delimiter: str | None = None
    fewshot_config: dict[str, Any] | None = None


class _EvalkitEntry(Stored):
    template: str | None = None
    sample: int | None = Field(None, gt=0)
    seed: int = Field(0, ge=0)


class _SampleCounts(Stored):
    """Number of a task's documents: all, and those evaluated."""

    original: int = Field(ge=0, le=_MOST_DOCUMENTS)
    effective: int


class ResultsFile(Stored):
    """Keys of lm-eval's results file that are read; without a file, the defaults."""

    results: dict[str, dict[str, Any]]
    config: _LogConfig = Field(default_factory=_LogConfig)
    configs: dict[str, _TaskConfig] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    shots: dict[str, Annotated[int, Field(ge=0, le=_MOST_SHOTS)] | None] = Field(default_factory=dict, alias="n-shot")
    higher_is_better: dict[str, dict[str, bool | None]] = Field(default_factory=dict)
    counts: dict[str, _SampleCounts] = Field(default_factory=dict, alias="n-samples")
    task_hashes: dict[str, str] = Field(default_factory=dict)
    lm_eval_version: str | None = None
    transformers_version: str | None = None
    model_name: str | None = None
    date: Annotated[float, Field(ge=0, le=1e11)] | None = None
    max_length: _Count = None
    chat_template: Any = None
    evalkit: _EvalkitEntry | None = None
    """Only in evalkit's exports."""


@dataclass(frozen=True)
class LoggedTask:
    """A task's sample file."""

    task: str
    """lm-eval's leaf task, from the file's name, as is the time."""
    time: str
    path: Path
    digests: list[str]
    """SHA-256 of the file, and of the results file if there is one."""
    samples: tuple[LoggedSample, ...]
    """All lines; a document has one for each filter."""
    results: ResultsFile
    results_path: Path
    """Where the results file would be."""
    results_data: bytes | None
    """Content of the results file; None if there is none."""
    mixed: int = 0
    """Number of lines with the metrics of another document than the one that was answered; see
    `_with_answered_documents`."""

    @property
    def documents(self) -> tuple[LoggedSample, ...]:
        """The lines of the first filter: one for each document."""
        return tuple(sample for sample in self.samples if sample.filter == self.samples[0].filter)

    @property
    def config(self) -> _TaskConfig:
        return self.results.configs.get(self.task, _TaskConfig())

    @property
    def shots(self) -> int | None:
        """Number of solved examples before each question; None if it is unknown. A text alone has none."""
        shots = self.results.shots.get(self.task)
        return 0 if shots and self.config.output_type == "loglikelihood_rolling" else shots

    @property
    def delimiter(self) -> str | None:
        """Text between context and answer option in a task's requests; None if the log does not say it."""
        delimiter, prefix = self.config.target_delimiter, self.config.gen_prefix
        # As lm-eval's construct_requests: a chat template ends with its own separator, or with the answer's beginning
        replaced = self.results.chat_template and not (prefix and not prefix[-1].isspace())
        return delimiter if delimiter is None or not replaced else ""

    def are_plain_choices(self, requests: Sequence[tuple[str, ...]]) -> bool:
        """Whether requests are the options of a document in one context, which lm-eval itself measures."""
        is_choice = self.config.output_type == "multiple_choice" and not self.config.process_results
        return is_choice and len({texts[0] for texts in requests}) == 1

    def has_no_gold(self, sample: LoggedSample) -> bool:
        """Whether the target of a document with choices is neither the number nor the text of one of them."""
        if not self.are_plain_choices(sample.requests) or sample.target.startswith("["):
            return False
        options = [texts[-1].removeprefix(self.delimiter or "") for texts in sample.requests]
        return sample.target not in (*options, *map(str, range(len(options))))

    @property
    def count(self) -> int | None:
        """Number of the task's documents, also those that were not evaluated; None if it is unknown."""
        counts = self.results.counts.get(self.task)
        return None if counts is None else counts.original

    @property
    def created(self) -> str:
        """When it was evaluated; ISO 8601, in the local time of its machine if there is no results file."""
        if self.results.date is None:
            return datetime.strptime(self.time[:19], _TIME).isoformat()
        return datetime.fromtimestamp(self.results.date, UTC).isoformat(timespec="seconds")


def read_logs(paths: Sequence[Path]) -> list[LoggedTask]:
    """Read sample files, or those in folders, and the results file beside each; sort them by task.

    A folder without any, a file whose name has no task, or a second file of a task, is a `UsageError`; an invalid file,
    or one that does not belong to the results file beside it, a `DataError` that names file and line.
    """
    logs: dict[str, LoggedTask] = {}
    for path in chain.from_iterable(map(_files, paths)):
        if (name := _NAME.fullmatch(path.name)) is None:
            raise UsageError(f"{path}: give lm-eval's sample files under their own names, samples_<task>_<time>.jsonl")
        task = name["task"]
        if task in logs:
            raise UsageError(f"{path} and {logs[task].path} are both of task {task}; import them one by one")
        logs[task] = _read(path, task, name["time"])
    return [logs[task] for task in sorted(logs)]


def _files(path: Path) -> Sequence[Path]:
    """Return a file, or the sample files in a folder and its subfolders."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; give the log that lm_eval --log_samples has written")
    files = sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path}: no samples_*.jsonl in this folder; lm_eval --log_samples writes them")
    return files


def _read(path: Path, task: str, time: str) -> LoggedTask:
    with reading_as(path, "a sample file", DataError):
        datetime.strptime(time[:19], _TIME)
        data = read_bytes(path, MOST_DOCUMENT_BYTES)
    samples = []
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        where = f"{path}, line {number}"
        with reading_as(where, "a document that lm-eval has logged", DataError):
            samples.append(_sample(parse_json(line), where))
    _check_complete(samples, path)
    beside, data_beside, results = path.with_name(f"results_{time}.json"), None, ResultsFile(results={})
    if beside.is_file():
        with reading_as(beside, "a results file of lm-eval", DataError):
            data_beside = read_bytes(beside, MOST_BYTES)
            results = ResultsFile.model_validate(parse_json(data_beside))
    digests = [hashlib.sha256(content).hexdigest() for content in (data, data_beside) if content is not None]
    log = LoggedTask(task, time, path, digests, tuple(samples), results, beside, data_beside)
    _check_results_file(log)
    return _with_answered_documents(log)


def _sample(line: dict[str, Any], where: str) -> LoggedSample:
    """Return the validated content of a line; any error says how it is invalid."""
    answers = line["filtered_resps"]
    derived = {
        "where": f"{where}: document {line['doc_id']}",
        "arguments": tuple(texts_of_requests(line["arguments"])),
        "likelihoods": _likelihoods(answers),
        "by_evalkit": any(isinstance(answer, list) and answer[-1:] == ["None"] for answer in answers),
        "metrics": {name: _metric(name, line[name]) for name in line["metrics"]},
    }
    sample = LoggedSample.model_validate(line | derived)
    if () in sample.requests:
        raise ValueError("a request in 'arguments' has no text")
    for name, text in (("prompt_hash", sample.requests[0][0]), ("target_hash", sample.target)):
        if text_digest(text) != line[name]:
            raise ValueError(f"it has another content than its {name} says; the file was changed")
    # A filter changes none
    if sample.likelihoods and _likelihoods([responses[0] for responses in line["resps"]]) != sample.likelihoods:
        raise ValueError("it has other log-likelihoods in filtered_resps than in resps; the file was changed")
    return sample


def _document_hash(sample: LoggedSample) -> str:
    return text_digest(json.dumps(sample.doc, indent=2, ensure_ascii=False))


def _with_answered_documents(log: LoggedTask) -> LoggedTask:
    """Return a log in which each line has the document that was answered, and its metrics.

    lm-eval calls a task's `process_docs` again to measure the answers. If that shuffles without a seed, a line has the
    hash of the document that was answered, and another document with its target and metrics. The answered document is
    then in another line, and accuracies are computed from the log-likelihoods. Raises a `DataError` if no line has it,
    or if the metrics are others.
    """
    by_hash = {_document_hash(sample): sample for sample in log.samples}
    mixed = [sample for sample in log.samples if sample.doc_hash != _document_hash(sample)]
    if not mixed:
        return log
    remedy = "restore the file, or evaluate again with a seed for the shuffle"
    if lost := [sample for sample in mixed if sample.doc_hash not in by_hash]:
        raise DataError(
            f"{lost[0].where} has another content than its doc_hash says: the file was changed, or the task's "
            "process_docs shuffles at each call, so that lm-eval measured the answer to one document against "
            f"another; {remedy}"
        )
    answered = [by_hash[sample.doc_hash] for sample in log.samples]
    pairs = list(zip(log.samples, answered, strict=True))
    if not all(_has_accuracies(log, sample, other.target) for sample, other in pairs):
        raise DataError(
            f"{mixed[0].where} has the metrics of another document than the one that was answered, by its doc_hash, "
            f"and they cannot be computed again; {remedy}"
        )
    samples = tuple(_measured(log, *pair) for pair in pairs)
    # Its metrics are those of the mixed documents
    results = log.results.model_copy(update={"results": {}})
    return replace(log, samples=samples, results=results, mixed=len(mixed))


def _has_accuracies(log: LoggedTask, sample: LoggedSample, target: str) -> bool:
    """Whether the accuracies of a document with some target follow from its log-likelihoods."""
    count = len(sample.requests)
    has_all = len(sample.likelihoods) == count and all(len(texts) == 2 for texts in sample.requests)
    return has_all and log.are_plain_choices(sample.requests) and target in map(str, range(count))


def _measured(log: LoggedTask, sample: LoggedSample, answered: LoggedSample) -> LoggedSample:
    options = [texts[1].removeprefix(log.delimiter or "") for texts in sample.requests]
    sizes = {
        "acc": [1] * len(options),
        "acc_norm": [len(option) for option in options],
        "acc_bytes": [utf8_length(option) for option in options],
    }
    metrics: dict[str, MetricValue] = {}
    for name in sample.metrics:
        if all(sizes.get(name, [0])):
            scores = [value / size for value, size in zip(sample.likelihoods, sizes[name], strict=True)]
            metrics[name] = float(scores.index(max(scores)) == int(answered.target))
    about = {"doc": answered.doc, "target": answered.target, "target_hash": answered.target_hash, "metrics": metrics}
    return sample.model_copy(update=about)


def _metric(name: str, value: Any) -> MetricValue:
    numbers = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return None
    if wrong := [number for number in numbers if not abs(number) < _LARGEST_METRIC]:
        raise ValueError(f"metric '{name}' is {wrong[0]:.6g}; it must be a finite number")
    return (float(value[0]), float(value[1])) if isinstance(value, list) else float(value)


def _likelihoods(answers: Sequence[Any]) -> tuple[float, ...]:
    """Log-likelihood of each answer; none if an answer is not (log-likelihood, greedy), both as texts."""
    values = []
    least, most = _POSSIBLE
    for answer in answers:
        match answer:
            case [str(text), "True" | "False" | "None"] if _NUMBER.fullmatch(text):
                if not least <= (value := float(text)) <= most:
                    raise ValueError(f"it has the log-likelihood {value:g}, which no text has")
                values.append(value)
            case _:
                return ()
    return tuple(values)


def _check_complete(samples: Sequence[LoggedSample], path: Path) -> None:
    first = samples[0]
    lines: dict[tuple[str, int], int] = {}
    documents: dict[str, set[tuple[int, str]]] = {}
    for number, sample in enumerate(samples, start=1):
        if (before := lines.setdefault((sample.filter, sample.doc_id), number)) < number:
            raise DataError(f"{sample.where} is in line {before} already; keep the lines of one evaluation")
        if list(sample.metrics) != list(first.metrics):
            raise DataError(f"{sample.where} has metrics {', '.join(sample.metrics)}, unlike the document in line 1")
        documents.setdefault(sample.filter, set()).add((sample.doc_id, sample.doc_hash))
    if others := [name for name, members in documents.items() if members != documents[first.filter]]:
        raise DataError(
            f"{path}: filter {others[0]} has other documents than filter {first.filter}; the file is incomplete, or "
            "has lines of two evaluations"
        )


def _check_results_file(log: LoggedTask) -> None:
    remedy = f"move {log.results_path} away, or restore the file"
    count, last = len(log.documents), max(sample.doc_id for sample in log.documents)
    counts = log.results.counts.get(log.task)
    if counts and (counts.effective != count or last >= counts.original):
        raise DataError(
            f"{log.path} has {count:,} documents up to number {last}, but its results file says {counts.effective:,} "
            f"of {counts.original:,} of {log.task}; {remedy}"
        )
    delimiter = (log.config.fewshot_config or {}).get("fewshot_delimiter") or log.config.fewshot_delimiter
    if log.shots and delimiter and not log.results.chat_template:
        for sample in log.documents:
            # One follows each example
            if sample.requests[0][0].count(delimiter) < log.shots:
                raise DataError(
                    f"{sample.where} has fewer solved examples in its prompt than the results file says, "
                    f"{log.shots} of {log.task}; {remedy}"
                )
    hashes = "".join(sample.doc_hash + sample.prompt_hash + sample.target_hash for sample in log.samples)
    logged = log.results.task_hashes.get(log.task)
    if logged and text_digest(hashes) != logged:
        raise DataError(f"{log.path} does not have the hash of {log.task} in {log.results_path}; {remedy}")
