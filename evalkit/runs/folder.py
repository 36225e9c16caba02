"""The run folder: what was asked, what was scored, what came out.

    results/runs/<model>-<suite>-<template>-<dtype>-<id>/
        manifest.json     the specification, its hash, fingerprints, versions, hardware, devices
        journal.jsonl     every finished batch; what an interrupted run resumes from
        scores.parquet    the score table
        results.json      accuracies under every rule
        lm_eval/          the same in lm-eval's form

A run is its specification: the folder's id is a hash of what determines the numbers, so the same command finds the
same folder again and two specifications never share a row. A folder is complete when results.json is there, which
is written last. Every file that is read back is bound to the run (`seal.py`), and is read here alone: what is not the
file that was written is refused. A finished run may be kept without its journal, but its tables cannot be made again.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.brief import brief, counted
from evalkit.errors import RunError, UsageError, first_line
from evalkit.inputs import values
from evalkit.inputs.reading import MOST_BYTES, Unreadable, parse_json, read_bytes
from evalkit.inputs.validated import Stored, misfit
from evalkit.runs.forms import StoredManifest, StoredResults, TimedResults
from evalkit.runs.seal import content_digest, digest, unsealed, whose_file

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.scores.results import Results

LM_EVAL = "lm_eval"
"""The suite of runs of lm-eval's own tasks: any of its catalogue, measured by its own metrics."""

LONGBENCH = "longbench"
"""LongBench's runs. Where answers are generated, the kind stands for a rule too."""

MANIFEST, JOURNAL, SCORES, RESULTS = "manifest.json", "journal.jsonl", "scores.parquet", "results.json"

WITHOUT_JOURNAL = "delete the folder and run its command again, which scores everything anew"
"""What to do about a run whose journal is gone."""
_ID_AT_END = re.compile(r"-(?=\d*[a-f])([0-9a-f]{12})")
"""An id that a folder's name ends with; digits alone may as well be a date and time that a user put there."""


def specification_id(specification: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that stand for a specification."""
    text = json.dumps(specification, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def folder_name(model: str, suite: str, template: str, dtype: str, identity: str) -> str:
    """Readable and unique: `<model>-<suite>-<template>-<dtype>-<id>`, of 128 characters at most."""
    # A long name is cut where it says least: a model's at its beginning, since a step stands at its end
    protocol = f"{suite}-{template}"[:50]
    safe = re.sub(r"[^\w.-]+", "_", f"{model[-50:]}-{protocol}-{dtype}", flags=re.ASCII).strip("._-")
    return f"{safe}-{identity}"


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Name of the benchmark that made a run; the first version's manifests do not say."""
    if "kind" in manifest:
        return str(manifest["kind"])
    if manifest["rule"] in (LONGBENCH, "needle"):
        return str(manifest["rule"])
    return LM_EVAL if manifest["specification"]["suite"] == LM_EVAL else "multiple_choice"


@dataclass(frozen=True)
class Run:
    """A run folder, opened to be read."""

    folder: Path
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        tasks = counted(len(self.manifest["documents"]), "task")
        state = "finished" if self.complete else "not finished"
        return brief(self, self.suite, self.manifest["model"], tasks, state, self.folder)

    @property
    def complete(self) -> bool:
        """Whether every document has been scored and the results are written."""
        scored = (self.folder / SCORES).is_file() or not self.manifest["groups"]
        return (self.folder / RESULTS).is_file() and scored

    @property
    def kind(self) -> str:
        """Name of the benchmark that made it."""
        return kind_of(self.manifest)

    @property
    def rule(self) -> str | None:
        """The rule by which its answers are chosen; None where they are generated, so that there is none to choose."""
        rule = str(self.manifest["rule"])
        return None if rule == self.kind else rule

    @property
    def suite(self) -> str:
        """Whose tasks it asked; runs of one suite ask in one way."""
        return str(self.manifest["specification"]["suite"])

    @property
    def template(self) -> str:
        """The name of how its prompts are written."""
        template = self.manifest["template"]
        return str(template["name"] if isinstance(template, dict) else template)

    @property
    def has_samples(self) -> bool:
        """Whether lm-eval's per-document files are all written."""
        return bool(self.stored.get("samples"))

    def refuse_unfinished(self) -> None:
        """Raise a `RunError` where results are still to be made."""
        if not self.complete:
            raise RunError(f"run {self.folder} is not finished; wait for it, or give its command again")

    def refuse_generated(self) -> None:
        """Raise a `UsageError` where the run's texts are generated, so that there is nothing to choose between."""
        if self.rule is None:
            raise UsageError(
                f"run {self.folder} holds generated texts, which are no choices between answers; benchmark {self.kind} "
                "scores them by metrics of its own"
            )

    def serves(self, samples: bool) -> bool:
        """Whether nothing is left to do for a request with or without lm-eval's per-document files."""
        return self.complete and (self.has_samples or not samples)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The score table, one row for each (task, document, choice); columns as in `ScoreRow`, then `CLUSTER`."""
        from evalkit.scores.table import CLUSTER, ScoreRow

        self.refuse_generated()
        if self.complete and not self.manifest["groups"]:
            raise UsageError(f"run {self.folder} has no multiple-choice task with one gold answer, so no rule applies")
        columns = [*ScoreRow._fields, CLUSTER]
        return self.table(SCORES, columns)[columns]

    def results(self, rule: str | None = None) -> Results:
        """Accuracies under a rule (the run's own if none is named)."""
        from evalkit.scores.results import summarise

        return summarise(self.scores, self.manifest, rule or self.manifest["rule"])

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds spent on each task, where they are kept."""
        self.refuse_other_form(TimedResults)
        return {task["task"]: task["seconds"] for task in self.stored["tasks"]}

    @property
    def stored(self) -> dict[str, Any]:
        """What results.json holds: the results under the run's own rule, seconds, and "rules" with all others.

        Raises:
            RunError: it is damaged, or another run's.
        """
        return self._results[1]

    @property
    def files(self) -> dict[str, str]:
        """Name of each file of the finished run that is read back → its digest."""
        return self._results[0]

    def refuse_other_form(self, form: type[Stored]) -> None:
        """Raise a `RunError` where results.json is not of a form."""
        if trouble := misfit(self.stored, form):
            raise RunError(f"{self.folder / RESULTS} is damaged ({trouble}); {self._remedy}")

    def read(self, name: str) -> bytes:
        """A file of the finished run, as it was written.

        Raises:
            RunError: the run is not finished, or the file is not there or not the one that was written.
        """
        path = self.folder / name
        self.refuse_unfinished()
        if not path.is_file():
            raise RunError(f"{path} is missing; {self._remedy}")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        if self.files.get(name) != digest(content):
            raise RunError(f"{path} is damaged ({whose_file(name, content, self.manifest)}); {self._remedy}")
        return content

    def table(self, name: str, columns: Collection[str] = ()) -> pd.DataFrame:
        """A table of the finished run, which has these columns.

        Raises:
            RunError: as `read`, or a column is missing.
        """
        import pandas as pd

        content = self.read(name)
        try:
            table = pd.read_parquet(io.BytesIO(content))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.folder / name} is damaged ({first_line(error)}); {self._remedy}") from error
        if absent := [column for column in columns if column not in table]:
            raise RunError(f"{self.folder / name} is damaged (it has no column {absent[0]}); {self._remedy}")
        return table

    @cached_property
    def _results(self) -> tuple[dict[str, str], dict[str, Any]]:
        path = self.folder / RESULTS
        try:
            content = unsealed(_read_json(path, self._remedy))
            identity, files = content.pop("run", None), content.pop("files", None)
            if identity != self.manifest["id"]:
                raise ValueError(f"it is of run {identity}")
            if not isinstance(files, dict) or files.get(MANIFEST) != content_digest(self.manifest):
                raise ValueError(f"{MANIFEST} is not the one that it was written with")
            if trouble := misfit(content, StoredResults):
                raise ValueError(trouble)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is damaged ({error}); {self._remedy}") from error
        return files, content

    @property
    def _remedy(self) -> str:
        return _remedy(self.folder, f"delete {RESULTS} and run its command again, which makes it anew from the journal")


def load_run(folder: Path | str) -> Run:
    """Open a run folder.

    Raises:
        UsageError: that is no path.
        RunError: it is no run folder, its manifest is damaged, or its name ends in the id of another run.
    """
    folder = values.path("run folder", folder)
    path = folder / MANIFEST
    if not is_file(path):
        raise RunError(f"{folder} is not a run folder: it has no {MANIFEST}")
    remedy = _remedy(folder, "delete it and run its command again, which goes on from the journal")
    try:
        manifest = unsealed(_read_json(path, remedy))
        if manifest.get("id") != specification_id(manifest.get("specification", {})):
            raise ValueError("its id does not match its specification")
        if trouble := misfit(manifest, StoredManifest):
            raise ValueError(trouble)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); {remedy}") from error
    named = _ID_AT_END.fullmatch(folder.resolve().name[-13:])
    if named and named[1] != manifest["id"]:
        raise RunError(
            f"{folder} holds run {manifest['id']}, and its name is that of run {named[1]}; put its own files back, or "
            "rename the folder"
        )
    return Run(folder, manifest)


def _remedy(folder: Path, from_journal: str) -> str:
    """What to do about a file of a run: another thing where there is no journal to make it from."""
    if is_file(folder / JOURNAL):
        return from_journal
    return f"put the file back that was written, or {WITHOUT_JOURNAL}"


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    """The keys and values of a JSON file.

    Raises:
        RunError: it cannot be read, or is something else; ends with the advice.
    """
    try:
        content = parse_json(read_bytes(path, MOST_BYTES))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except Unreadable as error:
        raise RunError(f"{path} is damaged ({error}); {advice}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged (it holds no keys and values); {advice}")
    return content


def is_file(path: Path) -> bool:
    """Whether a path is one of a file; one that no file system takes is not."""
    try:
        return path.is_file()
    except OSError:
        return False
