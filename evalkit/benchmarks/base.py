"""The benchmark protocol: `session.py` runs it, and each kind of run implements it.

plan        the validated request, with its documents and what is asked of the model; made without torch
rows        computed by the request layer (`evalkit.requests`), or by the kind's own computer; stored in the journal
results     tables and results.json, computed from all rows of the journal
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import StoredResults

if TYPE_CHECKING:
    from evalkit.benchmarks.results import FinishedResults
    from evalkit.models.loading.locate import Checkpoint
    from evalkit.requests.requests import RunRequests
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter


class Plan(ABC):
    """A validated run that is not computed yet: base class of the kinds' plans, which are dataclasses."""

    request: Any
    checkpoint: Checkpoint
    manifest: dict[str, Any]
    """The run's manifest, without the keys that need the loaded model."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""

    def shown_prompts(self, count: int, say: Say) -> Iterator[str]:
        """Yield the first prompts of each task as the model reads them, formatted for a terminal."""
        raise UsageError(f"--show-prompts: benchmark {self.manifest['kind']} does not support it; leave it out")


class RequestPlan(Plan):
    """A plan whose run the request layer computes."""

    @property
    @abstractmethod
    def requests(self) -> RunRequests:
        """What is asked of the model."""

    @abstractmethod
    def sampled(self, sample: int) -> RunRequests:
        """Return the requests of `sample` documents of each task, with the sizes of the tasks, for estimates."""


class ListedSuite(NamedTuple):
    """What is listed of a suite."""

    description: str = ""
    """In one line."""
    averages: Callable[[], dict[str, tuple[str, ...]]] | None = None
    """Returns average → its tasks, for tables; the last average is "Average", over all tasks. None: no averages."""


class lazy:
    """A member of a `Benchmark`, "package.module:name", imported on first use: a function, or a type."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else resolve_name(self._name)


class Benchmark(ABC):
    """One kind of run. It has no state: everything about a run is in its plan, and `read` reads a finished one.

    What a kind must have comes first; any of it can be `lazy`. What it may have follows, with the default of those
    that lack it. Every method may raise an `EvalkitError`: for an invalid request, checkpoint or document, or a damaged
    run.
    """

    kind: ClassVar[str]
    """Name in manifests and in the registry."""
    request: Any
    """The request type, whose fields are the settings; see `request.request_of`."""
    computation: Any = lazy("evalkit.requests.computation:REQUESTS")
    """How its rows are computed: by the request layer, so that its plans have `requests`; or by a computer of its own.
    """
    read: ClassVar[type[FinishedResults]]
    """Results of a finished run."""

    @abstractmethod
    def plan(self, request: Any, say: Say) -> Plan:
        """Validate a request and make the plan of its run."""

    @abstractmethod
    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        """Write tables from `FinishedRows.rows`, `table` or `batches`; call `RunWriter.save_results` last."""

    results_form: ClassVar[type[Stored]] = StoredResults
    """Schema of its results.json, beyond the keys that every benchmark has."""
    files: ClassVar[tuple[str, ...]] = ()
    """Files of a finished run, beside those that every run has; a run that lacks one is computed or written again."""

    def suites(self) -> Mapping[str, ListedSuite]:
        """Return the suites by their names, as in `evalkit run --suite`."""
        return {self.kind: ListedSuite()}

    def options_outside_id(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of a run's options, which include its suite, that never change its id; others may."""
        return frozenset({"token_budget", "device_map", "name"})
