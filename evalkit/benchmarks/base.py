"""The benchmark protocol: `session.py` runs it, and each kind of run implements it.

plan        the validated request, with its documents and what is asked of the model; made without torch
rows        computed by the request layer (`evalkit.requests`), or by the kind's own computer; stored in the journal
results     tables and results.json, computed from all rows of the journal
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from evalkit.benchmarks.outcomes import average_metric, metrics_report
from evalkit.display import Say
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import StoredResults
from evalkit.suites.suites import Label

if TYPE_CHECKING:
    from evalkit.benchmarks.document_views import TaskView
    from evalkit.benchmarks.outcomes import Comparable, Metric
    from evalkit.data import HubSplit
    from evalkit.models.loading.locate import Checkpoint
    from evalkit.reporting.figures import RunFigure
    from evalkit.reporting.report import Report
    from evalkit.requests.requests import RunRequests
    from evalkit.runs.folder import Run
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter


class Plan:
    """A validated run that is not computed yet: base class of the kinds' plans, which are dataclasses."""

    request: Any
    checkpoint: Checkpoint
    manifest: dict[str, Any]
    """The run's manifest, without the keys that need the loaded model."""

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        raise NotImplementedError

    @property
    def requests(self) -> RunRequests:
        """What is asked of the model, where the request layer computes the run."""
        raise NotImplementedError

    def sampled(self, sample: int) -> RunRequests:
        """Return the requests of `sample` documents of each task, with the sizes of the tasks, for estimates."""
        raise NotImplementedError

    def shown_prompts(self, count: int, say: Say) -> Iterator[str]:
        """Yield the first prompts of each task as the model reads them, formatted for a terminal."""
        raise UsageError(f"--show-prompts: benchmark {self.manifest['kind']} does not support it; leave it out")


class lazy:
    """A member of a `Benchmark`, "package.module:name", imported on first use: a function, or a type."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else resolve_name(self._name)


class Benchmark(ABC):
    """One kind of run. It has no state: everything about a run is in its plan.

    What a kind must have comes first; any of it can be `lazy`. What it may have follows, with the default of those
    that lack it. Every method may raise an `EvalkitError`: for an invalid request, checkpoint or document, or a damaged
    run. Wherever a `rule` is an argument, None is the run's own; a run without scores for a rule raises
    `UnknownNameError`.
    """

    kind: ClassVar[str]
    """Name in manifests and in the registry."""
    request: Any
    """The request type, whose fields are the settings; see `request.request_of`."""
    computation: Any = lazy("evalkit.requests.computation:REQUESTS")
    """How its rows are computed: by the request layer, so that its plans have `requests`; or by a computer of its own.
    """

    @abstractmethod
    def plan(self, request: Any, say: Say) -> Plan:
        """Validate a request and make the plan of its run."""

    @abstractmethod
    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        """Write tables from `FinishedRows.rows`, `table` or `batches`; call `RunWriter.save_results` last."""

    @abstractmethod
    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Return the metrics of a finished run; the most important metric of a task comes first."""

    @abstractmethod
    def comparable(self, run: Run) -> Comparable:
        """Return the documents of a finished run with their scores, if it has scores of single documents."""

    results_form: ClassVar[type[Stored]] = StoredResults
    """Schema of its results.json, beyond the keys that every benchmark has."""
    files: ClassVar[tuple[str, ...]] = ()
    """Files of a finished run, beside those that every run has; a run that lacks one is computed or written again."""
    has_default_outcome: ClassVar[bool] = True
    """Whether finished runs can be compared without naming an outcome."""

    def refuse_rule(self, run: Run, rule: str | None) -> None:
        if rule not in (None, self.kind):
            raise UnknownNameError(f"rule of run {run.folder}", rule, (self.kind,))

    def suites(self) -> Mapping[str, str]:
        """Return suite name, as in `evalkit run --suite` → description in one line."""
        return dict.fromkeys(self.averages() or (self.kind,), "")

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return suite → average → its tasks, for tables; the last average is "Average", over all tasks."""
        return {}

    def options_outside_id(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of a run's options, which include its suite, that never change its id; others may."""
        return frozenset({"token_budget", "device_map", "name"})

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """Return the printed report of a finished run; `detail`: with all that a first look does not need."""
        return metrics_report(run, self.metrics(run, rule))

    def rescored(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """Return the report of a finished run's choices under a rule; arguments as of `report`."""
        from evalkit.benchmarks.choices_report import choices_report

        return choices_report(run, rule, detail)

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        """Yield the documents of a finished run as people read them, by task; no `tasks`: of all."""
        return iter(())

    def figures(self, runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
        """Return the figures, with unique names, of finished runs; `models` are equal for seeds of one model."""
        return []

    def stored_averages(self, run: Run, rule: str | None = None) -> list[dict[str, Any]]:
        """Return the averages of a finished run, as in results.json."""
        return list(run.stored["averages"])

    def headline(self, run: Run, rule: str | None = None) -> tuple[Metric | None, str]:
        """Return the number that stands for a finished run in lists, and its printed form: the last average."""
        if not (averages := self.stored_averages(run, rule)):
            return None, "finished"
        average = average_metric(averages[-1])
        name = "" if average.task == "Average" else f"{average.task.lower()} "
        number = name + average.format.with_error(average.value, average.stderr)
        if average.whole is None:
            return average, f"{number} {average.name}"
        return average, f"{number} ({rule or run.rule})" if run.rule else number

    def label(self, run: Run, task: str) -> Label:
        return Label(task, task)

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        """Return the published dataset of a task's documents; None if it is unknown."""
        return None
