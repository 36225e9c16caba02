"""What is exported of a run, whatever the form: its tasks' accuracies with their data sets, and how they were made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from evalkit.benchmarks.multiple_choice.suites import load_suite
from evalkit.data.schema import TASKS, HubSplit
from evalkit.errors import UsageError
from evalkit.runs.folder import Run, stored_under
from evalkit.runs.traits import caveats, traits


@dataclass(frozen=True)
class TaskScore:
    """One task under one rule."""

    task: str
    dataset: HubSplit
    """Where its documents are published."""
    documents: int
    """How many it has."""
    caveats: tuple[str, ...]
    """Why this is no score of the published documents, all of them; beside its name wherever a form has one."""
    official: bool
    """Whether the documents are the published ones."""
    source: str
    """Where they came from."""
    n: int
    accuracy: float
    """A fraction."""
    stderr: float | None
    chance: float

    @property
    def named(self) -> str:
        """The task with what sets its documents apart from the published ones."""
        return f"{self.task} ({'; '.join(self.caveats)})" if self.caveats else self.task


@dataclass(frozen=True)
class Content:
    """A run as others are told of it."""

    run: Run
    rule: str
    scores: tuple[TaskScore, ...]
    protocol: dict[str, str]
    """What a number depends on, in words: rule, template, examples, limit, dtype, context extension, suite."""

    @property
    def model(self) -> str:
        """As it was named: a folder, a file, or a hub name, whose revision stands apart."""
        model = str(self.run.manifest["model"])
        return model if self.run.manifest.get("path") is not None else model.partition("@")[0]

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
    own = traits(run, rule)
    protocol = {
        "rule": own["rule"].value,
        "template": own["template"].value,
        "num_fewshot": own["solved examples"].value,
        "limit": own["limit"].words,
        "dtype": own["dtype"].value,
        "context_extension": own["context extension"].value,
        "suite": str(run.manifest["specification"]["suite"]),
    }
    documents = load_suite(protocol["suite"]).documents
    scores = tuple(_score(run, task, documents.get(task["task"], task["task"])) for task in found["tasks"])
    return Content(run, own["rule"].value, scores, protocol)


def _score(run: Run, found: dict[str, Any], documents: str) -> TaskScore:
    source = run.manifest["documents"][found["task"]]
    some = [f"{found['n']:,} of {source['count']:,} documents"] if found["n"] < source["count"] else []
    return TaskScore(
        task=found["task"],
        dataset=TASKS[documents].hub,
        documents=source["count"],
        caveats=(*caveats(run.manifest, found["task"]), *some),
        official=source["official"],
        source=source["source"],
        n=found["n"],
        accuracy=found["accuracy"],
        stderr=found["stderr"],
        chance=found["chance"],
    )
