"""The run folder: specification, scores and results of a run.

    results/runs/<model>-<suite>-<template>-<dtype>-<id>/
        manifest.json     the specification, its hash, fingerprints, versions, hardware, devices
        journal.jsonl     every finished batch; an interrupted run resumes from it
        scores.parquet    the score table
        results.json      accuracies under every rule
        lm_eval/          the results in lm-eval's format

The folder's id is a hash of everything that determines the numbers, and results.json, written last, makes it complete.
Every file that is read back is bound to the run by a digest, and is read by this module only.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from evalkit.errors import RunError, UsageError, first_line
from evalkit.escape import brief, counted
from evalkit.inputs import values
from evalkit.inputs.reading import MOST_BYTES, parse_json, read_bytes
from evalkit.inputs.validated import Stored, validated
from evalkit.inputs.values import text_digest

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.accuracies import Results

LM_EVAL = "lm_eval"
"""Suite name of runs of lm-eval's own tasks, with lm-eval's metrics."""

MANIFEST, JOURNAL, SCORES, RESULTS = "manifest.json", "journal.jsonl", "scores.parquet", "results.json"
CHECKPOINT = "config.json"
"""File of a checkpoint and of no run; a checkpoint's folder may hold other programs' files with the names above."""
WITHOUT_JOURNAL = "move the folder away and run its command again, which scores everything again"
"""Advice for a run whose journal is missing. A folder that may be another program's is not to be deleted."""
DIGEST = "sha256"
"""Key of a JSON file's digest of its other keys."""
RUN = "evalkit.run"
"""Key of the run's id in a table's metadata."""
_ID_AT_END = re.compile(r"-(?=\d*[a-f])([0-9a-f]{12})")
"""An id at the end of a folder's name. Digits alone are not matched: they may be a date and time that a user added."""


class StoredTask(Stored):
    """A task in results.json; benchmarks add keys."""

    task: str


class StoredValue(Stored):
    """A number in results.json, and what it measures."""

    metric: str
    unit: str | None
    higher_is_better: bool | None
    value: float
    stderr: float | None


class StoredAverage(StoredValue):
    name: str


class StoredResults(Stored):
    """Keys of every results.json; a benchmark defines its further ones (`Benchmark.results_form`)."""

    tasks: list[StoredTask]
    averages: list[StoredAverage]


class _Specification(Stored):
    suite: str
    dtype: str
    limit: int | None
    checkpoint: dict[str, Any]
    documents: dict[str, Any] = Field(default_factory=dict)
    num_fewshot: int | None = None
    context_extension: dict[str, Any] | None = None


class _Source(Stored):
    source: str
    official: bool | None
    count: int
    """Documents that the run scores."""
    total: int | None
    """Documents that the task has; None: a log does not say it."""


class _Device(Stored):
    device: str
    hardware: str
    kernel: str
    host: str
    threads: int
    batches: dict[str, str]


class _Manifest(Stored):
    """What determines a number or a mark in a table; other keys are checked by their readers."""

    id: str
    kind: str
    specification: _Specification
    rule: str
    groups: dict[str, list[str]]
    group_sizes: dict[str, int]
    documents: dict[str, _Source]
    examples: dict[str, _Source] = Field(default_factory=dict)
    template: str | dict[str, Any]
    created: str
    model: str
    path: str | None = None
    revision: str | None
    versions: dict[str, str]
    loaded: dict[str, Any] = Field(default_factory=dict)
    devices: list[_Device] = Field(default_factory=list)
    imported: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _groups_have_sizes(self) -> Self:
        if self.groups.keys() != self.group_sizes.keys():
            raise ValueError("'groups' and 'group_sizes' have different keys")
        return self


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def json_bytes(content: Any, **options: Any) -> bytes:
    """Encode as JSON in UTF-8; a lone surrogate, which a path can contain, is written as its JSON escape."""
    return json.dumps(content, ensure_ascii=False, **options).encode("utf-8", "backslashreplace")


def content_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON file's content, independent of key order and white space."""
    return digest(json_bytes(content, sort_keys=True, separators=(",", ":")))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with its digest as the last key."""
    plain: dict[str, Any] = json.loads(json_bytes(content))
    return plain | {DIGEST: content_digest(plain)}


def _unsealed(path: Path) -> dict[str, Any]:
    content = parse_json(read_bytes(path, MOST_BYTES))
    if not isinstance(content, dict) or DIGEST not in content:
        raise ValueError(f"it has no '{DIGEST}' of its content: truncated, or written by an earlier version of evalkit")
    if content.pop(DIGEST) != content_digest(content):
        raise ValueError(f"its content does not match its '{DIGEST}'")
    return content


def specification_id(specification: Mapping[str, Any]) -> str:
    """Return the id of a specification: twelve hexadecimal digits of its hash."""
    text = json.dumps(specification, sort_keys=True, ensure_ascii=False)
    return text_digest(text)[:12]


@dataclass(frozen=True)
class Run:
    """A run folder, opened for reading."""

    folder: Path
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        tasks = counted(len(self.manifest["documents"]), "task")
        state = "finished" if self.complete else "not finished"
        return brief(self, self.suite, self.model, tasks, state, self.folder)

    @property
    def complete(self) -> bool:
        """Whether all documents are scored and the results are written."""
        scored = (self.folder / SCORES).is_file() or not self.manifest["groups"]
        return (self.folder / RESULTS).is_file() and scored

    @property
    def model(self) -> str:
        """Name of the checkpoint: the one that was given for it, or its folder or hub name."""
        return str(self.manifest.get("name") or self.manifest["model"])

    @property
    def kind(self) -> str:
        """Name of the run's benchmark."""
        return str(self.manifest["kind"])

    @property
    def rule(self) -> str | None:
        """The rule that chooses the answers; None without choices, as of generated texts and of attention maps."""
        rule = str(self.manifest["rule"])
        return None if rule == self.kind else rule

    def other_rule(self, rule: str | None) -> str | None:
        """Return a requested rule; None if it is the run's own, which is what readers take None for.

        A run without choices has its own alone.
        """
        return None if self.rule is None or rule == self.rule else rule

    @property
    def suite(self) -> str:
        """Name of the run's suite; runs of one suite have the same tasks and prompts."""
        return str(self.manifest["specification"]["suite"])

    @property
    def template(self) -> str:
        """Name of the prompt template."""
        template = self.manifest["template"]
        return str(template["name"] if isinstance(template, dict) else template)

    @property
    def has_samples(self) -> bool:
        """Whether all of lm-eval's per-document files are written."""
        return bool(self.stored.get("samples"))

    def require_finished(self) -> None:
        """Raise `RunError` if the run is not finished."""
        if not self.complete:
            raise RunError(f"run {self.folder} is not finished; wait for it, or run its command again")

    def require_choices(self) -> None:
        """Raise `UsageError` if the run has no choices that a rule could decide between."""
        if self.rule is None:
            raise UsageError(f"run {self.folder} has no choices for a rule; benchmark {self.kind} has its own metrics")

    def serves(self, samples: bool) -> bool:
        """Return whether the run has everything that is requested, `samples` being lm-eval's per-document files."""
        return self.complete and (self.has_samples or not samples)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The score table under the run's own prompt, one row for each (task, document, choice).

        Its columns are those of `ScoreRow`, then the cluster.
        """
        from evalkit.runs.score_table import COLUMNS, OPTIONAL, PROMPT

        self.require_choices()
        table = self.table(SCORES, [column for column in COLUMNS if column not in OPTIONAL])
        if PROMPT in table:
            table = table[table[PROMPT] == table[PROMPT].iloc[0]].reset_index(drop=True)
        return table.assign(**{name: value for name, value in OPTIONAL.items() if name not in table})[list(COLUMNS)]

    def results(self, rule: str | None = None) -> Results:
        """Return accuracies under a rule; None: the run's own rule."""
        from evalkit.runs.accuracies import summarise

        return summarise(self.scores, self.manifest, rule or self.manifest["rule"])

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each task: accuracies under the run's own rule, or what its benchmark stores of tasks."""
        import pandas as pd

        return self.results().to_frame() if self.rule else pd.DataFrame(self.stored["tasks"]).set_index("task")

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html()) if self.complete else escape(repr(self))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent on each task, where known."""
        return {task["task"]: task["seconds"] for task in self.stored["tasks"] if task.get("seconds") is not None}

    @property
    def stored(self) -> dict[str, Any]:
        """Content of results.json: results under the run's own rule, seconds, and "rules" with all others."""
        return self._results[1]

    @property
    def files(self) -> dict[str, str]:
        """File name → digest, for every file of the finished run that is read back."""
        return self._results[0]

    @cached_property
    def _results(self) -> tuple[dict[str, str], dict[str, Any]]:
        with _reading(self.folder, RESULTS):
            content = _unsealed(self.folder / RESULTS)
            identity, files = content.pop("run", None), content.pop("files", None)
            if identity != self.manifest["id"]:
                raise ValueError(f"it belongs to run {identity}")
            if not isinstance(files, dict) or files.get(MANIFEST) != content_digest(self.manifest):
                raise ValueError(f"{MANIFEST} is not the one that it was written with")
        _check_form(self.folder / RESULTS, content, StoredResults)
        return files, content

    def require_form(self, form: type[Stored]) -> None:
        """Raise `RunError` if results.json is not valid in a benchmark's form."""
        _check_form(self.folder / RESULTS, self.stored, form)

    def read(self, name: str) -> bytes:
        """Return a file of the finished run, verified by its digest."""
        path = self.folder / name
        self.require_finished()
        if name not in self.files and not path.is_file():
            raise RunError(f"{self.folder}: a run of {self.kind} has no {name}; it has {', '.join(sorted(self.files))}")
        with _reading(self.folder, name):
            content = path.read_bytes()
            if self.files.get(name) != digest(content):
                if name.endswith(".parquet"):
                    from pyarrow.parquet import read_schema

                    owner = (read_schema(io.BytesIO(content)).metadata or {}).get(RUN.encode())
                    if owner not in (None, self.manifest["id"].encode()):
                        raise ValueError(f"it belongs to run {owner.decode()}")
                raise ValueError(f"its digest is not the one in {RESULTS}")
        return content

    def table(self, name: str, columns: Collection[str] = ()) -> pd.DataFrame:
        """Return a table of the finished run that has at least these columns."""
        import pandas as pd

        content = self.read(name)
        with _reading(self.folder, name):
            table = pd.read_parquet(io.BytesIO(content))
            if absent := [column for column in columns if column not in table]:
                raise _of_earlier_version(self.folder / name, f"it has no column {absent[0]}")
        return table


def load_run(folder: Path | str) -> Run:
    """Open a run folder."""
    folder = values.path("run folder", folder)
    if is_file(folder / CHECKPOINT):
        raise RunError(f"{folder} is not a run folder: it has {CHECKPOINT}, so it is a checkpoint")
    if not is_file(folder / MANIFEST):
        raise RunError(f"{folder} is not a run folder: it has no {MANIFEST}")
    with _reading(folder, MANIFEST):
        manifest = _unsealed(folder / MANIFEST)
        if manifest.get("id") != specification_id(manifest.get("specification", {})):
            raise ValueError("its id does not match its specification")
    _check_form(folder / MANIFEST, manifest, _Manifest)
    named = _ID_AT_END.fullmatch(folder.resolve().name[-13:])
    if named and named[1] != manifest["id"]:
        raise RunError(f"{folder} contains run {manifest['id']}, but its name is that of run {named[1]}; rename it")
    return Run(folder, manifest)


def _check_form(path: Path, content: dict[str, Any], form: type[Stored]) -> None:
    """Raise `RunError` if a file's content, whose digest is right, is not in the form that is written today."""
    try:
        validated(content, form, ValueError, path.name)
    except (ValueError, RecursionError) as error:
        raise _of_earlier_version(path, first_line(error)) from error


def _of_earlier_version(path: Path, reason: str) -> RunError:
    return RunError(
        f"{path} was written by an earlier version of evalkit ({reason}); run its command again with another --output"
    )


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError, OSError, NotImplementedError) as error:  # pyarrow's among them
        rebuilt = MANIFEST if name == MANIFEST else RESULTS
        advice = f"delete {rebuilt} and run its command again, which resumes from the journal"
        if not is_file(folder / JOURNAL):
            advice = f"restore the original file, or {WITHOUT_JOURNAL}"
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{folder / name} is damaged ({reason}); {advice}") from error


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder has files of a run, finished or not, and is not a checkpoint."""
    if is_file(folder / CHECKPOINT):
        return False
    return any(is_file(folder / name) for name in (MANIFEST, RESULTS, JOURNAL))


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False for a path that the file system rejects."""
    try:
        return path.is_file()
    except OSError:
        return False
