"""What is exported of a run, whatever the form: its tasks' accuracies with their data sets, and how they were made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.registry import benchmark_of
from evalkit.data import HubSplit
from evalkit.runs.folder import Run
from evalkit.runs.traits import caveats, traits


@dataclass(frozen=True)
class ExportedScore:
    """One task under one rule."""

    metric: Metric
    dataset: HubSplit | None
    """Where its documents are published, where that is known."""
    documents: int
    """How many it has."""
    caveats: tuple[str, ...]
    """Why this is no score of the published documents, all of them; beside its name wherever a form has one."""
    source: str
    """Where they came from."""
    distinct: str = ""
    """Metric and layer, where its task's first metric is another."""

    @property
    def named(self) -> str:
        """The task with what sets its documents apart from the published ones."""
        return f"{self.metric.task} ({'; '.join(self.caveats)})" if self.caveats else self.metric.task

    @property
    def score(self) -> float:
        """The value: from 0 to 1 where it is a share, else in its own unit."""
        return float(self.metric.value or 0.0) / (self.metric.whole or 1.0)

    @property
    def stderr(self) -> float | None:
        """Of the score."""
        return None if self.metric.stderr is None else self.metric.stderr / (self.metric.whole or 1.0)


@dataclass(frozen=True)
class Content:
    """A run as others are told of it."""

    run: Run
    rule: str
    scores: tuple[ExportedScore, ...]
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
        UsageError: its benchmark has another form for exports.
        UnknownNameError: the run was not scored for that rule.
    """
    benchmark = benchmark_of(run)
    datasets = {task: benchmark.dataset(run, task) for task in run.manifest["documents"]}
    own = traits(run, rule)
    protocol = {
        **({"rule": own["rule"].value} if run.rule else {"benchmark": run.kind}),
        "template": own["template"].value,
        **({"num_fewshot": own["solved examples"].value} if run.rule else {}),
        "limit": own["limit"].words,
        "dtype": own["dtype"].value,
        "context_extension": own["context extension"].value,
        "suite": run.suite,
    }
    metrics = benchmark.metrics(run, rule)
    first = {metric.task: metric for metric in reversed(metrics)}
    scores = tuple(
        _score(run, metric, datasets[metric.task], first[metric.task] is metric)
        for metric in metrics
        if metric.value is not None
    )
    return Content(run, protocol.get("rule", run.kind), scores, protocol)


def _score(run: Run, metric: Metric, dataset: HubSplit | None, first: bool) -> ExportedScore:
    source = run.manifest["documents"][metric.task]
    some = [f"{metric.n:,} of {source['count']:,} documents"] if metric.n < source["count"] else []
    distinct = "" if first else metric.name + ("" if metric.layer is None else f"/layer {metric.layer}")
    about = (*caveats(run.manifest, metric.task), *some)
    return ExportedScore(metric, dataset, source["count"], about, source["source"], distinct)
