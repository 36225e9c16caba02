"""lm-eval's log of one evaluation: sample files, and the results file beside each.

In: paths. Out: a `LoggedTask` for each file. lm-eval names the files of one evaluation `results_<time>.json` and
`samples_<task>_<time>.jsonl`, with the same time. Only the file name has the task's name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, DocumentSelection
from evalkit.errors import DataError, UsageError, reading_as
from evalkit.exchange.log_lines import LoggedSample, read_samples
from evalkit.inputs.reading import MOST_BYTES, MOST_DOCUMENT_BYTES, parse_json, read_bytes
from evalkit.inputs.validated import Stored

_NAME = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")
_LONGEST_MODEL = 500
"""Characters of a model's name."""
_MOST_DOCUMENTS, _MOST_SHOTS = 2**21, 10**4
"""Documents of a task, and solved examples before each."""


class _LogConfig(Stored):
    model_dtype: str | None = None
    model_num_parameters: Any = None


class TaskConfig(Stored):
    """What is read of a task's definition."""

    output_type: str | None = None
    process_results: Any = None
    target_delimiter: str | None = None
    gen_prefix: str | None = None
    metric_list: list[dict[str, Any]] | None = None


class _EvalkitEntry(Stored):
    template: str | None = None
    sample: int | None = Field(None, gt=0)
    seed: int = Field(0, ge=0)

    @property
    def selection(self) -> DocumentSelection:
        """Which documents were read, as far as the entry says."""
        return ALL_DOCUMENTS if self.sample is None else DocumentSample(self.sample, self.seed)


class SampleCounts(Stored):
    """Number of a task's documents."""

    original: int = Field(ge=0, le=_MOST_DOCUMENTS)
    """All."""
    effective: int
    """Evaluated."""


class ResultsFile(Stored):
    """Keys of lm-eval's results file that are read, with _ for -; without a file, the defaults."""

    results: dict[str, dict[str, Any]]
    config: _LogConfig = Field(default_factory=_LogConfig)
    configs: dict[str, TaskConfig] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    n_shot: dict[str, Annotated[int, Field(ge=0, le=_MOST_SHOTS)] | None] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool | None]] = Field(default_factory=dict)
    n_samples: dict[str, SampleCounts] = Field(default_factory=dict)
    task_hashes: dict[str, str] = Field(default_factory=dict)
    lm_eval_version: str | None = None
    transformers_version: str | None = None
    model_name: str | None = None
    date: Annotated[float, Field(ge=0, le=1e11)] | None = None
    max_length: Any = None
    chat_template: Any = None
    evalkit: _EvalkitEntry | None = None
    """Only in evalkit's exports."""


@dataclass(frozen=True)
class LoggedTask:
    """A task's sample file."""

    task: str
    """lm-eval's leaf task, from the file's name."""
    time: str
    """Time in the file's name."""
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
        first = self.samples[0].filter
        return tuple(sample for sample in self.samples if sample.filter == first)

    @property
    def results_path(self) -> Path:
        """The results file, which need not exist."""
        return self.path.with_name(f"results_{self.time}.json")

    @property
    def config(self) -> TaskConfig:
        """The task's definition."""
        return self.results.configs.get(self.task, TaskConfig())

    @property
    def shots(self) -> int | None:
        """Number of solved examples before each question; None if it is unknown."""
        return self.results.n_shot.get(self.task)

    @property
    def counts(self) -> SampleCounts | None:
        """Number of the task's documents; None if it is unknown."""
        return self.results.n_samples.get(self.task)

    @property
    def created(self) -> str:
        """When it was evaluated; ISO 8601, in the local time of its machine if there is no results file."""
        if self.results.date is not None:
            return datetime.fromtimestamp(self.results.date, UTC).isoformat(timespec="seconds")
        return _local_time(self.time).isoformat()

    def at(self, sample: LoggedSample) -> str:
        """Return the beginning of a message about a line."""
        return f"{self.path}, line {sample.line}"


def read_logs(paths: Sequence[Path]) -> list[LoggedTask]:
    """Read sample files, and the results file beside each; sort them by task.

    Raises:
        UsageError: a file's name has no task, or two files are of one task.
        DataError: a file is invalid, or does not belong to the results file beside it; names file and line.
    """
    logs: dict[str, LoggedTask] = {}
    for path in paths:
        if (name := _NAME.fullmatch(path.name)) is None:
            raise UsageError(
                f"{path}: only the name samples_<task>_<time>.jsonl says which task was evaluated; "
                "give lm-eval's sample files under their own names"
            )
        if name["task"] in logs:
            raise UsageError(
                f"{path} and {logs[name['task']].path} are both of task {name['task']}; import them one by one"
            )
        logs[name["task"]] = _read(path, name["task"], name["time"])
    return [logs[task] for task in sorted(logs)]


def model_of(logs: Sequence[LoggedTask], given: str | None) -> str:
    """Return the name of the model that was evaluated: the user's for it, else the one in the results files.

    Raises:
        UsageError: the results files have several, or none.
    """
    logged: dict[str | None, LoggedTask] = {}
    for log in logs:
        logged.setdefault(log.results.model_name or None, log)
    unnamed = logged.pop(None, None)
    if len(logged) > 1:
        (first, log), (second, other) = [*logged.items()][:2]
        raise UsageError(
            f"{log.path} is of model {first} and {other.path} of {second}; import the files of one model at a time"
        )
    if given is None and unnamed:
        raise UsageError(
            f"{unnamed.path}: no results file beside it names its model; put {unnamed.results_path.name} there, or "
            "give --model NAME"
        )
    return str(given or next(iter(logged)))[:_LONGEST_MODEL]


def _local_time(time: str) -> datetime:
    return datetime.strptime(time[:19], "%Y-%m-%dT%H-%M-%S")


def _read(path: Path, task: str, time: str) -> LoggedTask:
    with reading_as(path, "a sample file", DataError):
        _local_time(time)
        data = read_bytes(path, MOST_DOCUMENT_BYTES)
    digest, samples = hashlib.sha256(data).hexdigest(), tuple(read_samples(data, path))
    if not samples:
        raise DataError(f"{path} has no document; was the evaluation interrupted?")
    log = LoggedTask(task, time, path, digest, samples, ResultsFile(results={}), None)
    _check_complete(log)
    if not log.results_path.is_file():
        return log
    with reading_as(log.results_path, "a results file of lm-eval", DataError):
        beside = read_bytes(log.results_path, MOST_BYTES)
        named = {key.replace("-", "_"): value for key, value in parse_json(beside).items()}
        log = LoggedTask(task, time, path, digest, samples, ResultsFile.model_validate(named), beside)
    _check_results_file(log)
    return log


def _check_complete(log: LoggedTask) -> None:
    """Raise `DataError` if a document occurs twice, or two filters have other documents or other metrics."""
    by_filter: dict[str, dict[int, LoggedSample]] = {}
    first = log.samples[0]
    for sample in log.samples:
        earlier = by_filter.setdefault(sample.filter, {}).setdefault(sample.doc_id, sample)
        if earlier is not sample:
            raise DataError(
                f"{log.at(sample)}: document {sample.doc_id} is in line {earlier.line} already; lm-eval appends to an "
                "existing file, so keep the lines of one evaluation"
            )
        if list(sample.metrics) != list(first.metrics):
            raise DataError(
                f"{log.at(sample)}: has metrics {', '.join(sample.metrics)}, but line {first.line} has "
                f"{', '.join(first.metrics)}; all documents of a task have the same ones"
            )
    contents = {name: {doc_id: one.hashes[0] for doc_id, one in lines.items()} for name, lines in by_filter.items()}
    expected = contents[first.filter]
    for name, found in contents.items():
        if differing := sorted(doc_id for doc_id, _ in expected.items() ^ found.items()):
            raise DataError(
                f"{log.path}: document {differing[0]} of filter {name} is not that of filter "
                f"{first.filter}; the file is incomplete, or has lines of two evaluations"
            )


def _check_results_file(log: LoggedTask) -> None:
    """Raise `DataError` if the results file beside a sample file is not of the same evaluation."""
    beside, documents, counts = log.results_path, log.documents, log.counts
    remedy = f"move {beside.name} away, or restore the file"
    if counts and counts.effective != len(documents):
        raise DataError(
            f"{log.path} has {len(documents):,} documents, but {beside} says {counts.effective:,}; {remedy}"
        )
    if counts and (outside := [sample for sample in documents if sample.doc_id >= counts.original]):
        raise DataError(
            f"{log.at(outside[0])}: has document {outside[0].doc_id}, but {beside} says that {log.task} has "
            f"{counts.original:,} documents, counted from 0; {remedy}"
        )
    hashes = "".join("".join(sample.hashes) for sample in log.samples)
    logged = log.results.task_hashes.get(log.task)
    if logged and hashlib.sha256(hashes.encode()).hexdigest() != logged:
        raise DataError(f"{log.path} does not have the hash of {log.task} in {beside}; {remedy}")
