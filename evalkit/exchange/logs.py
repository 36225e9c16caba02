"""lm-eval's log of one evaluation, which is untrusted, in the form that lm-eval 0.4.13 writes.

In: sample files `samples_<task>_<time>.jsonl`, and `results_<time>.json` beside each. Out: a validated `LoggedTask` for
each sample file. Only the file name has the task's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, DocumentSelection
from evalkit.errors import DataError, UsageError, reading_as
from evalkit.inputs.reading import MOST_BYTES, MOST_DOCUMENT_BYTES, parse_json, read_bytes
from evalkit.inputs.validated import Stored

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
_GOLD = re.compile("[0-9]{1,9}", re.ASCII)

MetricValue = float | tuple[float, float] | None
"""A document's value of a metric: a number, or a pair (sum, weight) of numbers; None if it is anything else."""


class _Line(Stored):
    doc_id: int = Field(ge=0, lt=2**63)
    doc: dict[str, Any]
    target: str
    arguments: dict[str, dict[str, Any]] = Field(min_length=1)
    resps: list[list[Any]]
    filtered_resps: list[Any]
    filter: str
    metrics: list[str]
    doc_hash: str
    prompt_hash: str
    target_hash: str


class LoggedSample(NamedTuple):
    """One line: a document, its requests, and its answers under one filter."""

    where: str
    """Beginning of a message about it."""
    doc_id: int
    doc: dict[str, Any]
    target: str
    requests: tuple[tuple[str, ...], ...]
    """Texts of each request: context and continuation, or a prompt alone."""
    likelihoods: tuple[float, ...]
    """Log-likelihood of each request, a natural logarithm; empty if an answer is not (log-likelihood, greedy)."""
    by_evalkit: bool
    """Whether evalkit answered: it does not compute greediness, and writes it as None."""
    filter: str
    metrics: dict[str, MetricValue]
    hashes: tuple[str, str, str]
    """lm-eval's hashes of document, prompt and target."""

    @property
    def gold(self) -> int | None:
        """Number of the gold answer; None if the target is no number."""
        return int(self.target) if _GOLD.fullmatch(self.target) else None


class _LogConfig(Stored):
    model_dtype: str | None = None
    model_num_parameters: Any = None


class _TaskConfig(Stored):
    output_type: str | None = None
    process_results: Any = None
    target_delimiter: str | None = None
    gen_prefix: str | None = None
    metric_list: list[dict[str, Any]] | None = None


class _EvalkitEntry(Stored):
    template: str | None = None
    sample: int | None = Field(None, gt=0)
    seed: int = Field(0, ge=0)


class _SampleCounts(Stored):
    """Number of a task's documents: all, and those evaluated."""

    original: int = Field(ge=0, le=_MOST_DOCUMENTS)
    effective: int


class ResultsFile(Stored):
    """Keys of lm-eval's results file that are read, with _ for -; without a file, the defaults."""

    results: dict[str, dict[str, Any]]
    config: _LogConfig = Field(default_factory=_LogConfig)
    configs: dict[str, _TaskConfig] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    n_shot: dict[str, Annotated[int, Field(ge=0, le=_MOST_SHOTS)] | None] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool | None]] = Field(default_factory=dict)
    n_samples: dict[str, _SampleCounts] = Field(default_factory=dict)
    task_hashes: dict[str, str] = Field(default_factory=dict)
    lm_eval_version: str | None = None
    transformers_version: str | None = None
    model_name: str | None = None
    date: Annotated[float, Field(ge=0, le=1e11)] | None = None
    max_length: Any = None
    chat_template: Any = None
    evalkit: _EvalkitEntry | None = None
    """Only in evalkit's exports."""

    @property
    def template(self) -> str | None:
        """Name of the template, which only evalkit's exports have."""
        return None if self.evalkit is None else self.evalkit.template

    @property
    def selection(self) -> DocumentSelection | None:
        """Which documents were read, as far as evalkit's exports say it."""
        if self.evalkit is None or self.evalkit.sample is None:
            return None if self.evalkit is None else ALL_DOCUMENTS
        return DocumentSample(self.evalkit.sample, self.evalkit.seed)


@dataclass(frozen=True)
class LoggedTask:
    """A task's sample file."""

    task: str
    """lm-eval's leaf task, from the file's name, as is the time."""
    time: str
    path: Path
    digest: str
    """SHA-256 of the file."""
    samples: tuple[LoggedSample, ...]
    """All lines; a document has one for each filter."""
    results: ResultsFile
    results_data: bytes | None
    """Content of the results file; None if there is none."""

    @property
    def documents(self) -> tuple[LoggedSample, ...]:
        """The lines of the first filter: one for each document."""
        return tuple(sample for sample in self.samples if sample.filter == self.samples[0].filter)

    @property
    def results_path(self) -> Path:
        """Where the results file would be."""
        return self.path.with_name(f"results_{self.time}.json")

    @property
    def config(self) -> _TaskConfig:
        return self.results.configs.get(self.task, _TaskConfig())

    @property
    def shots(self) -> int | None:
        """Number of solved examples before each question; None if it is unknown."""
        return self.results.n_shot.get(self.task)

    @property
    def count(self) -> int | None:
        """Number of the task's documents, also those that were not evaluated; None if it is unknown."""
        counts = self.results.n_samples.get(self.task)
        return None if counts is None else counts.original

    @property
    def created(self) -> str:
        """When it was evaluated; ISO 8601, in the local time of its machine if there is no results file."""
        if self.results.date is None:
            return datetime.strptime(self.time[:19], _TIME).isoformat()
        return datetime.fromtimestamp(self.results.date, UTC).isoformat(timespec="seconds")


def read_logs(paths: Sequence[Path]) -> list[LoggedTask]:
    """Read sample files, and the results file beside each; sort them by task.

    A file whose name has no task, or a second file of a task, is a `UsageError`; an invalid file, or one that does not
    belong to the results file beside it, a `DataError` that names file and line.
    """
    logs: dict[str, LoggedTask] = {}
    for path in paths:
        if (name := _NAME.fullmatch(path.name)) is None:
            raise UsageError(
                f"{path}: only the name samples_<task>_<time>.jsonl says which task was evaluated; "
                "give lm-eval's sample files under their own names"
            )
        task = name["task"]
        if task in logs:
            raise UsageError(f"{path} and {logs[task].path} are both of task {task}; import them one by one")
        logs[task] = _read(path, task, name["time"])
    return [logs[task] for task in sorted(logs)]


def _read(path: Path, task: str, time: str) -> LoggedTask:
    with reading_as(path, "a sample file", DataError):
        datetime.strptime(time[:19], _TIME)
        data = read_bytes(path, MOST_DOCUMENT_BYTES)
    samples = []
    for number, text in enumerate(data.removesuffix(b"\n").split(b"\n") if data else (), start=1):
        where = f"{path}, line {number}"
        with reading_as(where, "a document that lm-eval has logged", DataError):
            content = parse_json(text)
            line = _Line.model_validate(content)
            samples.append(_sample(content, line, f"{where}: document {line.doc_id}"))
    if not samples:
        raise DataError(f"{path} has no document; was the evaluation interrupted?")
    _check_complete(samples, path)
    digest = hashlib.sha256(data).hexdigest()
    log = LoggedTask(task, time, path, digest, tuple(samples), ResultsFile(results={}), None)
    if log.results_path.is_file():
        with reading_as(log.results_path, "a results file of lm-eval", DataError):
            beside = read_bytes(log.results_path, MOST_BYTES)
            keys = {key.replace("-", "_"): value for key, value in parse_json(beside).items()}
            log = replace(log, results=ResultsFile.model_validate(keys), results_data=beside)
        _check_results_file(log)
    return log


def _sample(content: Mapping[str, Any], line: _Line, where: str) -> LoggedSample:
    requests = _requests(line.arguments, where)
    # As in lm-eval's `evaluate`
    texts = json.dumps(line.doc, indent=2, ensure_ascii=False), requests[0][0], line.target
    hashes = line.doc_hash, line.prompt_hash, line.target_hash
    for name, text, logged in zip(("doc_hash", "prompt_hash", "target_hash"), texts, hashes, strict=True):
        if hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() != logged:
            raise DataError(f"{where} has another content than its {name} says; the file was changed")
    likelihoods = _likelihoods(line.filtered_resps)
    least, most = _POSSIBLE
    if wrong := [value for value in likelihoods if math.isfinite(value) and not least <= value <= most]:
        raise DataError(f"{where} has the log-likelihood {wrong[0]:g}, which no text has; the file was changed")
    # A filter changes none. As texts, since NaN differs from itself
    if likelihoods and str(_likelihoods([responses[0] for responses in line.resps])) != str(likelihoods):
        raise DataError(f"{where} has other log-likelihoods in filtered_resps than in resps; the file was changed")
    by_evalkit = any(isinstance(answer, list) and answer[-1:] == ["None"] for answer in line.filtered_resps)
    metrics = {name: _metric(name, content[name], where) for name in line.metrics}
    about = (where, line.doc_id, line.doc, line.target)
    return LoggedSample(*about, requests, likelihoods, by_evalkit, line.filter, metrics, hashes)


def _requests(arguments: Mapping[str, Mapping[str, Any]], where: str) -> tuple[tuple[str, ...], ...]:
    shared: dict[str, str] = {}
    requests = []
    for number in range(len(arguments)):
        parts = map(part_of_request, arguments[f"gen_args_{number}"].values())
        requests.append(tuple(shared.setdefault(text, text) for text in parts if isinstance(text, str)))
    if not all(requests):
        raise DataError(f"{where}: a request in 'arguments' has no text")
    return tuple(requests)


def part_of_request(part: Any) -> Any:
    """Return a part of a request; lm-eval writes a chat for an API as a list of its only text."""
    return part[0] if isinstance(part, list) and len(part) == 1 else part


def _metric(name: str, value: Any, where: str) -> MetricValue:
    numbers = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return None
    if wrong := [number for number in numbers if not abs(number) < _LARGEST_METRIC]:
        raise DataError(f"{where}: metric '{name}' is {wrong[0]:.6g}; it must be a finite number")
    return (float(value[0]), float(value[1])) if isinstance(value, list) else float(value)


def _likelihoods(answers: Sequence[Any]) -> tuple[float, ...]:
    """Log-likelihood of each answer; none if an answer is not (log-likelihood, greedy), both as texts."""
    values = []
    for answer in answers:
        match answer:
            case [str(value), "True" | "False" | "None"] if _NUMBER.fullmatch(value):
                values.append(float(value))
            case _:
                return ()
    return tuple(values)


def _check_complete(samples: Sequence[LoggedSample], path: Path) -> None:
    lines: dict[tuple[str, int], int] = {}
    documents: dict[str, set[tuple[int, str]]] = {}
    for number, sample in enumerate(samples, start=1):
        if (first := lines.setdefault((sample.filter, sample.doc_id), number)) < number:
            raise DataError(f"{sample.where} is in line {first} already; keep the lines of one evaluation")
        if list(sample.metrics) != list(samples[0].metrics):
            names, others = (", ".join(of.metrics) for of in (sample, samples[0]))
            raise DataError(f"{sample.where} has metrics {names}, but line 1 has {others}")
        documents.setdefault(sample.filter, set()).add((sample.doc_id, sample.hashes[0]))
    first_filter = samples[0].filter
    for name, members in documents.items():
        if members != documents[first_filter]:
            raise DataError(
                f"{path}: filter {name} has other documents than filter {first_filter}; the file is incomplete, or "
                "has lines of two evaluations"
            )


def _check_results_file(log: LoggedTask) -> None:
    remedy = f"move {log.results_path} away, or restore the file"
    if counts := log.results.n_samples.get(log.task):
        if counts.effective != (count := len(log.documents)):
            raise DataError(
                f"{log.path} has {count:,} documents, but its results file says {counts.effective:,}; {remedy}"
            )
        for sample in log.documents:
            if sample.doc_id >= counts.original:
                raise DataError(f"{sample.where} is not one of the {counts.original:,} of {log.task}; {remedy}")
    hashes = "".join("".join(sample.hashes) for sample in log.samples)
    logged = log.results.task_hashes.get(log.task)
    if logged and hashlib.sha256(hashes.encode()).hexdigest() != logged:
        raise DataError(f"{log.path} does not have the hash of {log.task} in {log.results_path}; {remedy}")
