"""lm-eval's log of one evaluation: sample files, and the results file beside each.

In: paths. Out: a `LoggedTask` for each file. lm-eval names the files of one evaluation `results_<time>.json` and
`samples_<task>_<time>.jsonl`, with the same time. Only the file name has the task's name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from evalkit.benchmarks.lm_eval.outcomes import content_hash
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSample, DocumentSelection
from evalkit.errors import DataError, UsageError
from evalkit.escape import printable
from evalkit.exchange.log_lines import LoggedSample, read_samples
from evalkit.inputs.reading import MOST_BYTES, parse_json, read_as
from evalkit.inputs.validated import Stored, validated

_NAME = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT[\d.:-]+)\.jsonl")
_LONGEST_MODEL = 500
"""Characters of a model's name."""
_MOST_DOCUMENTS, _MOST_SHOTS = 2**21, 10**4
"""Documents of a task, and solved examples before each."""


class _LogConfig(Stored):
    model_dtype: str | None = None
    model_num_parameters: Any = None


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
    """Keys of lm-eval's results file that are read, with _ for -."""

    results: dict[str, dict[str, Any]]
    config: _LogConfig = Field(default_factory=_LogConfig)
    configs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    n_shot: dict[str, Annotated[int, Field(ge=0, le=_MOST_SHOTS)] | None] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool | None]] = Field(default_factory=dict)
    n_samples: dict[str, SampleCounts] = Field(default_factory=dict)
    task_hashes: dict[str, str] = Field(default_factory=dict)
    lm_eval_version: str | None = None
    transformers_version: str | None = None
    model_name: str | None = None
    date: float | None = None
    max_length: Any = None
    chat_template: Any = None
    evalkit: _EvalkitEntry | None = None
    """Only in evalkit's exports."""


@dataclass(frozen=True)
class LogSummary:
    """The results file of an evaluation."""

    path: Path
    data: bytes
    content: ResultsFile

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class LoggedTask:
    """A task's sample file."""

    task: str
    """lm-eval's leaf task, from the file's name."""
    path: Path
    digest: str
    """SHA-256 of the file."""
    time: str
    """Time in the file's name."""
    samples: tuple[LoggedSample, ...]
    """All lines; a document has one for each filter."""
    summary: LogSummary | None
    """None if there is no results file beside it."""

    @property
    def documents(self) -> tuple[LoggedSample, ...]:
        """The lines of the first filter: one for each document."""
        first = self.samples[0].filter
        return tuple(one for one in self.samples if one.filter == first)

    @property
    def results(self) -> ResultsFile | None:
        """Content of the results file, if there is one."""
        return None if self.summary is None else self.summary.content

    @property
    def shots(self) -> int | None:
        """Number of solved examples before each question; None if it is unknown."""
        return None if self.results is None else self.results.n_shot.get(self.task)

    @property
    def counts(self) -> SampleCounts | None:
        """Number of the task's documents; None if it is unknown."""
        return None if self.results is None else self.results.n_samples.get(self.task)

    @property
    def created(self) -> str:
        """When it was evaluated; ISO 8601, in the local time of its machine if there is no results file."""
        if self.results is not None and self.results.date is not None:
            try:
                return datetime.fromtimestamp(self.results.date, UTC).isoformat(timespec="seconds")
            except (OverflowError, ValueError, OSError):
                pass
        day, _, clock = self.time.partition("T")
        try:
            return datetime.fromisoformat(f"{day}T{clock[:8].replace('-', ':')}").isoformat()
        except ValueError:
            return f"{day}T00:00:00"

    def at(self, sample: LoggedSample) -> str:
        """Return the beginning of a message about a line."""
        return f"{self.path}, line {sample.line}"


def read_logs(paths: Sequence[Path]) -> list[LoggedTask]:
    """Read sample files, and the results file beside each; sort them by task.

    Raises:
        UsageError: a file's name has no task, or two files are of one task.
        DataError: a file is invalid, or does not belong to the results file beside it; names file and line.
    """
    names = [_NAME.fullmatch(path.name) for path in paths]
    for path, name in zip(paths, names, strict=True):
        if name is None:
            raise UsageError(
                f"{path}: only the name samples_<task>_<time>.jsonl says which task was evaluated; "
                "give lm-eval's sample files under their own names"
            )
    found: dict[str, LoggedTask] = {}
    summaries: dict[Path, LogSummary | None] = {}
    for path, name in zip(paths, names, strict=True):
        assert name is not None
        task, time = name["task"], name["time"]
        if task in found:
            raise UsageError(f"{path} and {found[task].path} are both of task {task}; import them one by one")
        beside = path.with_name(f"results_{time}.json")
        if beside not in summaries:
            summaries[beside] = _summary(beside)
        found[task] = _read(path, task, time, summaries[beside])
    return [found[task] for task in sorted(found)]


def model_of(logs: Sequence[LoggedTask], given: str | None) -> str:
    """Return the name of the model that was evaluated.

    Args:
        logs: the files of one import.
        given: the user's name for it; None: the one in the results files.

    Raises:
        UsageError: the results files have several, or none.
    """
    logged: dict[str | None, LoggedTask] = {}
    for one in logs:
        logged.setdefault((None if one.results is None else one.results.model_name) or None, one)
    named = [(name, one) for name, one in logged.items() if name]
    if len(named) > 1:
        (first, one), (second, other) = named[:2]
        raise UsageError(
            f"{one.path} is of model {first} and {other.path} of {second}; import the files of one model at a time"
        )
    if given is None and (unnamed := logged.get(None)):
        raise UsageError(
            f"{unnamed.path}: no results file beside it names its model; put results_{unnamed.time}.json there, or "
            "give --model NAME"
        )
    return (given or named[0][0] or "")[:_LONGEST_MODEL]


def lines_of(log: LoggedTask) -> Iterator[tuple[LoggedSample, bytes]]:
    """Read a file again, which must be the same.

    Raises:
        DataError: it was changed since it was read.
    """
    digest = hashlib.sha256()
    for sample, data in read_samples(log.path):
        digest.update(data)
        yield sample, data
    if digest.hexdigest() != log.digest:
        raise DataError(f"{log.path} was changed while it was imported; import it again")


def _read(path: Path, task: str, time: str, summary: LogSummary | None) -> LoggedTask:
    digest, samples = hashlib.sha256(), []
    seen: dict[tuple[int, str], int] = {}
    for sample, data in read_samples(path):
        digest.update(data)
        earlier = seen.setdefault((sample.doc_id, sample.filter), sample.line)
        if earlier != sample.line:
            raise DataError(
                f"{path}, line {sample.line}: document {sample.doc_id} is in line {earlier} already; lm-eval appends "
                "to an existing file, so keep the lines of one evaluation"
            )
        samples.append(sample)
    if not samples:
        raise DataError(f"{path} has no document; was the evaluation interrupted?")
    log = LoggedTask(task, path, digest.hexdigest(), time, tuple(samples), summary)
    _check_complete(log)
    _check_summary(log)
    return log


def _check_complete(log: LoggedTask) -> None:
    """Raise `DataError` if two filters have other documents or other metrics."""
    by_filter: dict[str, dict[int, LoggedSample]] = {}
    for one in log.samples:
        by_filter.setdefault(one.filter, {})[one.doc_id] = one
    (name, expected), *others = by_filter.items()
    for other, found in others:
        if alone := sorted(expected.keys() ^ found.keys()):
            has, lacks = (name, other) if alone[0] in expected else (other, name)
            raise DataError(
                f"{log.path}: document {alone[0]} has a line of filter {printable(has)} and none of "
                f"{printable(lacks)}; the file is incomplete"
            )
        for doc_id, one in found.items():
            if content_hash(one.doc) != content_hash(expected[doc_id].doc):
                raise DataError(
                    f"{log.at(one)}: document {doc_id} of filter {printable(other)} has another content than in line "
                    f"{expected[doc_id].line}, of filter {printable(name)}; keep the lines of one evaluation"
                )
    first = log.samples[0]
    for one in log.samples:
        if list(one.metrics) != list(first.metrics):
            raise DataError(
                f"{log.at(one)}: has metrics {', '.join(one.metrics)}, but line {first.line} has "
                f"{', '.join(first.metrics)}; all documents of a task have the same ones"
            )


def _check_summary(log: LoggedTask) -> None:
    """Raise `DataError` if the results file beside a sample file is not of the same evaluation."""
    if log.summary is None:
        return
    results, beside = log.summary.content, log.summary.path
    remedy = f"move {beside.name} away, or restore the file"
    if log.counts and log.counts.effective != len(log.documents):
        raise DataError(
            f"{log.path} has {len(log.documents):,} documents, but {beside} says {log.counts.effective:,}; {remedy}"
        )
    if log.counts and (outside := [one for one in log.documents if one.doc_id >= log.counts.original]):
        raise DataError(
            f"{log.at(outside[0])}: has document {outside[0].doc_id}, but {beside} says that {log.task} has "
            f"{log.counts.original:,} documents, counted from 0; {remedy}"
        )
    logged = results.task_hashes.get(log.task)
    if logged and hashlib.sha256("".join(one.hashes for one in log.samples).encode()).hexdigest() != logged:
        raise DataError(f"{log.path} does not have the hash of {log.task} in {beside}; {remedy}")


def _summary(path: Path) -> LogSummary | None:
    if not path.is_file():
        return None
    data, content = read_as(path, DataError, "results file", MOST_BYTES, lambda data: (data, parse_json(data)))
    if isinstance(content, dict):
        content = {key.replace("-", "_"): value for key, value in content.items()}
    content = validated(content, ResultsFile, DataError, f"results file {path}")
    return LogSummary(path, data, content)
