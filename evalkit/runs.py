"""The run folder: what was asked, what was scored, what came out.

    results/runs/<model>-<suite>-<template>-<id>/
        manifest.json     the specification, its hash, fingerprints, versions, hardware
        journal.jsonl     every finished batch; what an interrupted run resumes from
        scores.parquet    the score table
        results.json      accuracies under every rule
        lm_eval/          the same in lm-eval's form

A run is its specification: the folder's id is a hash of what determines the numbers, so the same command finds the
same folder again and two specifications never share a row. A folder is complete when results.json is there, which
is written last.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.errors import RunError, UnknownNameError, UsageError, first_line
from evalkit.reading import Unreadable, parse_json

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.results import Results

_BEGIN_ANEW = "delete the folder and run its command again"
_MAKE_ANEW = "delete it and run its command again, which makes it anew from the journal"

LM_EVAL = "lm_eval"
"""The suite of runs of lm-eval's own tasks: any of its catalogue, measured by its own metrics."""

LONGBENCH = "longbench"
"""What stands for a rule in runs of LongBench, whose tasks each have a metric of their own."""
GENERATED = (LONGBENCH, "needle")
"""The same of all runs whose texts are generated: also the commands that made them."""

MANIFEST, JOURNAL, SCORES, RESULTS = "manifest.json", "journal.jsonl", "scores.parquet", "results.json"


def specification_id(specification: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that stand for a specification."""
    text = json.dumps(specification, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def folder_name(model: str, suite: str, template: str, identity: str) -> str:
    """Readable and unique: `<model>-<suite>-<template>-<id>`."""
    safe = re.sub(r"[^\w.-]+", "_", f"{model}-{suite}-{template}", flags=re.ASCII).strip("._-")
    return f"{safe[:100]}-{identity}"


@dataclass(frozen=True)
class Run:
    """A run folder, opened to be read."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every document has been scored and the results are written."""
        scored = (self.folder / SCORES).is_file() or not self.manifest["groups"]
        return (self.folder / RESULTS).is_file() and scored

    @property
    def of_lm_eval(self) -> bool:
        """Whether it is a run of lm-eval's tasks; its own results are in `stored`, its score table may be absent."""
        return bool(self.manifest["specification"]["suite"] == LM_EVAL)

    @property
    def of_longbench(self) -> bool:
        """Whether it is a run of LongBench: generated answers with a score each, no score table and no rules."""
        return bool(self.manifest["rule"] == LONGBENCH)

    @property
    def template(self) -> str:
        """The name of how its prompts are written."""
        template = self.manifest["template"]
        return str(template.get("name", "?") if isinstance(template, dict) else template)

    @property
    def has_samples(self) -> bool:
        """Whether lm-eval's per-document files are all written."""
        return bool(self.stored.get("samples"))

    def refuse_generated(self) -> None:
        """Raise a `UsageError` where the run's texts are generated, so that there is nothing to choose between."""
        if self.manifest["rule"] in GENERATED:
            raise UsageError(
                f"run {self.folder} holds generated texts, which are no choices between answers; "
                f"see evalkit {self.manifest['rule']} --help"
            )

    def serves(self, samples: bool) -> bool:
        """Whether nothing is left to do for a request that wants lm-eval's per-document files or does not."""
        return self.complete and (self.has_samples or not samples)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The score table, one row for each (task, document, choice); columns as in `ScoreRow`, then `CLUSTER`."""
        import pandas as pd

        from evalkit.scoring.table import CLUSTER, ScoreRow

        path = self.folder / SCORES
        if not self.complete:
            raise RunError(f"run {self.folder} is not finished; give its command again")
        self.refuse_generated()
        if not self.manifest["groups"]:
            raise UsageError(f"run {self.folder} has no multiple-choice task with one gold answer, so no rule applies")
        try:
            table = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise RunError(f"{path} is damaged ({first_line(error)}); {_MAKE_ANEW}") from error
        # Nothing but statistics needs the clusters, which tables written by earlier versions lack
        if absent := [column for column in ScoreRow._fields if column not in table]:
            raise RunError(f"{path} is damaged (it has no column {absent[0]}); {_MAKE_ANEW}")
        return table[[column for column in (*ScoreRow._fields, CLUSTER) if column in table]]

    def results(self, rule: str | None = None) -> Results:
        """Accuracies under a rule (the run's own if none is named)."""
        from evalkit.results import summarise

        return summarise(self.scores, self.manifest, rule or self.manifest["rule"])

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds spent on each task."""
        return {task["task"]: task["seconds"] for task in self.stored["tasks"]}

    @cached_property
    def stored(self) -> dict[str, Any]:
        """What results.json holds: the results under the run's own rule, seconds, and "rules" with all others."""
        path = self.folder / RESULTS
        stored = _read_json(path, _MAKE_ANEW)
        if not isinstance(stored, dict) or not {"tasks", "averages"} <= stored.keys():
            raise RunError(f"{path} is damaged (it holds no results); {_MAKE_ANEW}")
        return stored


def stored_under(run: Run, rule: str | None) -> dict[str, Any]:
    """What results.json holds under a rule (the run's own if none is named).

    Raises:
        UnknownNameError: the run was not scored for that rule.
        RunError: the file is damaged.
    """
    name = rule or run.manifest["rule"]
    by_rule = {LONGBENCH: run.stored} if run.of_longbench else run.stored.get("rules")
    if not by_rule:
        raise RunError(f"{run.folder / RESULTS} is damaged (it holds no results by rule); {_MAKE_ANEW}")
    if name not in by_rule:
        raise UnknownNameError(f"rule of run {run.folder}", name, by_rule)
    found: dict[str, Any] = by_rule[name]
    return found


def load_run(folder: Path | str) -> Run:
    """Open a run folder.

    Raises:
        RunError: it is no run folder, or its manifest is damaged.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise RunError(f"{folder} is not a run folder: it has no {MANIFEST}")
    manifest = _read_json(folder / MANIFEST, _BEGIN_ANEW)
    if not isinstance(manifest, dict) or manifest.get("id") != specification_id(manifest.get("specification", {})):
        raise RunError(f"{folder / MANIFEST} is damaged (its id does not match its specification); {_BEGIN_ANEW}")
    if missing := [
        key for key in ("rule", "groups", "group_sizes", "documents", "template", "created") if key not in manifest
    ]:
        raise RunError(f"{folder / MANIFEST} is damaged (it lacks '{missing[0]}'); {_BEGIN_ANEW}")
    return Run(folder, manifest)


def load_finished(folder: Path | str) -> Run:
    """Open a run folder whose results are to be read.

    Raises:
        RunError: it is no run folder, it is damaged, or the run is still in progress.
    """
    run = load_run(folder)
    if not run.complete:
        raise RunError(f"run {run.folder} is not finished; wait for it, or give its command again")
    return run


def list_runs(root: Path) -> list[Run]:
    """All readable runs under a folder, by name."""
    found = []
    for manifest in sorted(root.glob(f"*/{MANIFEST}")):
        try:
            found.append(load_run(manifest.parent))
        except RunError:
            continue
    return found


def _read_json(path: Path, advice: str) -> Any:
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except Unreadable as error:
        raise RunError(f"{path} is damaged ({error}); {advice}") from error
