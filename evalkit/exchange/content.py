"""Content of an export, independent of its format: the tasks' scores, their datasets, and the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.registry import benchmark_of
from evalkit.data import HubSplit
from evalkit.runs.folder import Run
from evalkit.runs.traits import caveats, is_imported, origin, traits


@dataclass(frozen=True)
class ExportedScore:
    """One task under one rule."""

    metric: Metric
    dataset: HubSplit | None
    """The dataset in which its documents are published, where known."""
    documents: int
    """Number of documents in the task."""
    caveats: tuple[str, ...]
    """Why this is not a score of all published documents; shown with the task's name where a format has one."""
    source: str
    """Provenance of the documents."""
    distinct: str = ""
    """Metric and layer, where this is not the task's first metric."""

    @property
    def named(self) -> str:
        """Return the task's name with its caveats."""
        return f"{self.metric.task} ({'; '.join(self.caveats)})" if self.caveats else self.metric.task

    @property
    def score(self) -> float:
        """Return the value: from 0 to 1 where it is a share, else in its own unit."""
        return float(self.metric.value or 0.0) / (self.metric.whole or 1.0)

    @property
    def stderr(self) -> float | None:
        """Return the standard error of the score."""
        return None if self.metric.stderr is None else self.metric.stderr / (self.metric.whole or 1.0)


@dataclass(frozen=True)
class Content:
    """Content of a run's export."""

    run: Run
    rule: str
    scores: tuple[ExportedScore, ...]
    protocol: dict[str, str]
    """Settings that determine the scores, as text: rule, template, examples, limit, dtype, context extension, suite."""

    @property
    def model(self) -> str:
        """Return the model's name as given: a folder, a file, or a hub name without its revision."""
        model = str(self.run.manifest["model"])
        return model if self.run.manifest.get("path") is not None else model.partition("@")[0]

    @property
    def created(self) -> datetime:
        """Return when the run was started."""
        return datetime.fromisoformat(self.run.manifest["created"])


def content_of(run: Run, rule: str | None) -> Content:
    """Collect what is exported.

    Raises:
        UsageError: its benchmark does not support this export.
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
        **({"origin": origin(run.manifest)} if is_imported(run.manifest) else {}),
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
