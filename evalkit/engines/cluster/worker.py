"""The process of a worker: it holds one checkpoint and computes planned batches of any benchmark.

In: recipes of runs, and batches. Out: their rows as bytes with a checksum, or a `WorkerFailure`. No method raises, so
that a lost worker cannot be mistaken for an error of a document. Nothing here depends on Ray.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from evalkit import __version__
from evalkit.benchmarks.base import Batch, Benchmark, Budget, Computer
from evalkit.benchmarks.loading import ModelHolder, model_key
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.session import Prepared
from evalkit.engines.cluster.shipping import ShippedCheckpoint, unpacked
from evalkit.errors import EvalkitError, OutOfMemoryError, first_line
from evalkit.models.spec import ModelSpec
from evalkit.runs.batch_devices import BatchDevice

LIBRARIES = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version must be the driver's, beside evalkit's own."""


def versions() -> dict[str, str]:
    """Return the versions that all processes of a run must share; torch without its build ("+cpu")."""
    return {"evalkit": __version__} | {name: version(name).partition("+")[0] for name in LIBRARIES}


@dataclass(frozen=True)
class Recipe:
    """What a worker needs to prepare a run."""

    label: str
    kind: str
    """The benchmark's name."""
    model: ModelSpec
    specification: dict[str, Any]
    setup: Any
    """See `Benchmark.setup`."""
    budget: Budget


@dataclass(frozen=True)
class WorkerDescription:
    """Where a worker runs, and with what."""

    host: str
    process: int
    versions: dict[str, str]
    threads: int
    log: str
    """File of its standard error."""
    actor: str = ""
    """Ray's id of it."""


@dataclass(frozen=True)
class ComputedBatch:
    """Rows of a batch."""

    rows: bytes
    """See `runs.columns.to_bytes`."""
    checksum: int
    """CRC-32 of `rows`."""
    seconds: float
    place: BatchDevice
    said: tuple[str, ...] = ()
    """Messages for the user."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that a worker can compute."""

    prepared: Prepared
    parameters: int
    seconds: float
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerFailure:
    """Why a worker did not do what it was asked to."""

    reason: Literal["memory", "refused", "crashed"]
    """memory: another worker may have more of it; refused: an `EvalkitError`; crashed: any other exception, after which
    the state of the worker is unknown."""
    message: str
    trace: str = ""
    said: tuple[str, ...] = ()


@dataclass
class BatchWorker:
    """A worker. Two calls of `compute` may run at once: what needs no model of one batch, while another is computed.

    Args:
        threads: threads of the CPU; 0: torch's default.
        memory_share: share of the device's memory that it may use.
    """

    threads: int = 0
    memory_share: float = 1.0
    _holder: ModelHolder = field(default_factory=ModelHolder)
    _model: tuple[Any, ...] = ()
    _computers: dict[str, tuple[Benchmark, Computer]] = field(default_factory=dict)
    _said: list[str] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def describe(self) -> WorkerDescription:
        """Return where this worker runs, and with what; imports nothing heavy, since other versions may not run."""
        log = ""
        with suppress(OSError):
            log = str(Path("/proc/self/fd/2").readlink())
        actor = ""
        if ray := sys.modules.get("ray"):
            actor = ray.get_runtime_context().get_actor_id() or ""
        return WorkerDescription(platform.node(), os.getpid(), versions(), self.threads, log, actor)

    def prepare(
        self, job: str, recipe: Recipe, shipped: ShippedCheckpoint | None = None
    ) -> PreparedRun | WorkerFailure:
        """Load the checkpoint of a run, unless it is loaded, and prepare it for the run's batches.

        Args:
            job: names the run in later calls of `compute`.
            recipe: what the run needs.
            shipped: the checkpoint's files; None: this machine has them.
        """
        found: PreparedRun | WorkerFailure = self._reported(lambda: self._prepare(job, recipe, shipped))
        return found

    def compute(self, job: str, batch: Batch, split: bool) -> ComputedBatch | WorkerFailure:
        """Compute a batch of a prepared run.

        Args:
            job: see `prepare`.
            batch: the batch.
            split: whether to split it where memory runs out; else that is a failure.
        """
        found: ComputedBatch | WorkerFailure = self._reported(lambda: self._compute(job, batch, split))
        return found

    def _prepare(self, job: str, recipe: Recipe, shipped: ShippedCheckpoint | None) -> PreparedRun:
        import torch

        from evalkit.scoring.memory import use_memory_share

        started = time.perf_counter()
        if self.threads:
            torch.set_num_threads(self.threads)
        use_memory_share(self.memory_share)
        key = (recipe.model, model_key(recipe.specification))
        if key != self._model:
            # Computers keep the former model in memory
            self._computers.clear()
            self._holder, self._model = ModelHolder(), key
            gc.collect()
        say = self._said.append
        with nullcontext(recipe.model) if shipped is None else unpacked(recipe.model, shipped) as model:
            loaded = self._holder.load(model, model.locate(say), recipe.specification, say)
        kind = benchmark(recipe.kind)
        computer = kind.computer(recipe.setup, loaded, recipe.budget, say)
        self._computers[job] = kind, computer
        prepared = Prepared(computer.facts, computer.about, computer.place(), loaded.tokenizer)
        return PreparedRun(prepared, loaded.parameters, time.perf_counter() - started, self._take_said())

    def _compute(self, job: str, batch: Batch, split: bool) -> ComputedBatch:
        from evalkit.runs.columns import record_batch, to_bytes
        from evalkit.scoring.memory import whole_batches

        batch.warm()
        with self._lock:
            kind, computer = self._computers[job]
            started = time.perf_counter()
            with nullcontext() if split else whole_batches():
                rows = computer.compute(batch)
            seconds = time.perf_counter() - started
        content = to_bytes(record_batch(rows, kind.row))
        return ComputedBatch(content, zlib.crc32(content), seconds, computer.place(batch), self._take_said())

    def _reported(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, or its failure."""
        try:
            return work()
        except OutOfMemoryError as error:
            failure = WorkerFailure("memory", str(error), said=self._take_said())
        except EvalkitError as error:
            failure = WorkerFailure("refused", str(error), said=self._take_said())
        except Exception as error:
            message = f"{type(error).__name__}: {first_line(error)}"
            failure = WorkerFailure("crashed", message, traceback.format_exc(limit=-20), self._take_said())
        # Outside the handlers, whose traceback references the tensors
        self._free()
        return failure

    def _free(self) -> None:
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _take_said(self) -> tuple[str, ...]:
        said, self._said[:] = tuple(self._said), []
        return said
