"""What is exported of a run, whatever the form: its tasks' accuracies with their data sets, and how they were made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evalkit.data.schema import TASKS, HubSplit
from evalkit.errors import UsageError
from evalkit.runs import Run, stored_under
from evalkit.suites import load_suite


@dataclass(frozen=True)
class TaskScore:
    """One task under one rule."""

    task: str
    dataset: HubSplit
    """Where its documents are published."""
    documents: int
    """How many it has."""
    official: bool
    """Whether those scored are the published ones."""
    source: str
    """Where they came from."""
    n: int
    accuracy: float
    """A fraction."""
    stderr: float | None
    chance: float


@dataclass(frozen=True)
class Content:
    """A run as others are told of it."""

    run: Run
    rule: str
    scores: tuple[TaskScore, ...]
    protocol: dict[str, str]
    """What a number depends on, in words: rule, template, examples, limit, dtype, suite."""

    @property
    def model(self) -> str:
        """As it was named: a hub name, a folder, a file."""
        return str(self.run.manifest["model"])

    @property
    def created(self) -> datetime:
        """When the run was begun."""
        return datetime.fromisoformat(self.run.manifest["created"])


def content_of(run: Run, rule: str | None) -> Content:
    """Collect what is exported.

    Raises:
        UsageError: it is a run of lm-eval's own tasks, whose data sets evalkit does not know.
        UnknownNameError: the run was not scored for that rule.
    """
    if run.of_lm_eval:
        raise UsageError(f"run {run.folder} is of lm-eval's own tasks; export it with --to lm_eval, which has them all")
    found = stored_under(run, rule)
    name = rule or str(run.manifest["rule"])
    specification = run.manifest["specification"]
    limit = specification["limit"]
    protocol = {
        "rule": name,
        "template": str(run.manifest["template"]["name"]),
        "num_fewshot": str(specification.get("num_fewshot", 0)),
        "limit": f"first {limit} documents of each task" if limit else "all documents",
        "dtype": str(run.manifest.get("loaded", {}).get("dtype", specification["dtype"])),
        "suite": str(specification["suite"]),
    }
    documents = load_suite(protocol["suite"]).documents
    scores = tuple(_score(run, task, documents.get(task["task"], task["task"])) for task in found["tasks"])
    return Content(run, name, scores, protocol)


def _score(run: Run, found: dict[str, Any], documents: str) -> TaskScore:
    source = run.manifest["documents"][found["task"]]
    return TaskScore(
        task=found["task"],
        dataset=TASKS[documents].hub,
        documents=source["count"],
        official=source["official"],
        source=source["source"],
        n=found["n"],
        accuracy=found["accuracy"],
        stderr=found["stderr"],
        chance=found["chance"],
    )
