"""The process of a worker: it holds one checkpoint and computes planned batches of any benchmark.

In: recipes of runs, and batches. Out: their rows as bytes with a checksum, or a `WorkerFailure`. No method raises, so
that a lost worker cannot be mistaken for an error of a document. Nothing here depends on Ray. Machines that share no
file system with the driver get copies of small checkpoints, whose fingerprint is checked as any other's.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Condition
from typing import Any, Literal

from evalkit import __version__
from evalkit.benchmarks.base import Batch, Benchmark, Budget, Computer
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.session import Prepared, load_checked
from evalkit.errors import CheckpointError, EvalkitError, OutOfMemoryError
from evalkit.models.loading.files import GENERATION_CONFIG, weight_indexes
from evalkit.models.loading.fingerprint import check_identity
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.loading.spec import ModelSpec
from evalkit.paths import temporary_folder
from evalkit.runs.batch_devices import BatchDevice
from evalkit.studies.running import why_failed

LIBRARIES = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version must be the driver's, beside evalkit's own."""
_LARGEST = 4 << 30
"""Most bytes of a checkpoint that is sent to workers: every machine holds a copy in memory."""


def versions() -> dict[str, str]:
    """Return the versions that all processes of a run must share; torch without its build ("+cpu")."""
    return {"evalkit": __version__} | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True)
class Recipe:
    """What a worker needs to prepare a run."""

    kind: str
    """The benchmark's name."""
    checkpoint: str
    """Name of the loaded model among those of the driver; runs with the same name share it."""
    model: ModelSpec
    specification: dict[str, Any]
    setup: Any
    """See `Benchmark.setup`."""
    budget: Budget


def portable(model: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return a specification that means the same on another machine: absolute paths, the commit of a hub model."""
    if checkpoint.kind in ("folder", "gguf"):
        model = replace(model, model=str((checkpoint.gguf or checkpoint.folder).resolve()))
    elif checkpoint.kind == "hub":
        model = replace(model, revision=checkpoint.revision or model.revision)
    if checkpoint.tokenizer is not None:
        model = replace(model, tokenizer=str(checkpoint.tokenizer.resolve()))
    if model.context_config and (path := Path(model.context_config).expanduser()).is_file():
        model = replace(model, context_config=str(path.resolve()))
    return model


@dataclass(frozen=True)
class ShippedCheckpoint:
    """Files of a checkpoint."""

    name: str
    """Name of its folder, or of its .gguf file."""
    files: dict[str, bytes]
    """Path in the folder → content."""
    tokenizer: dict[str, bytes]
    """The same for a tokenizer in another folder."""


def packed(checkpoint: Checkpoint) -> ShippedCheckpoint:
    """Read the files of a checkpoint.

    Raises:
        CheckpointError: a file cannot be read, or the checkpoint is too large.
    """
    folder = checkpoint.folder
    paths = [*checkpoint.weights(), *checkpoint.trusted_code()]
    if checkpoint.gguf is None:
        settings = folder / "config.json", folder / GENERATION_CONFIG, *weight_indexes(folder)
        paths += [path for path in settings if path.is_file()]
    elsewhere = [] if checkpoint.tokenizer is None else checkpoint.tokenizer_files()
    if checkpoint.tokenizer is None:
        paths += checkpoint.tokenizer_files()
    size = sum(path.stat().st_size for path in {*paths, *elsewhere})
    if size > _LARGEST:
        raise CheckpointError(
            f"{checkpoint.given}: has {size / 2**30:.1f} GiB, and --ship-checkpoints sends at most {_LARGEST >> 30}; "
            "put it on a file system that all machines share, or on the hub"
        )
    name = folder.resolve().name if checkpoint.gguf is None else checkpoint.gguf.name
    try:
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        inside = checkpoint.tokenizer or folder
        tokenizer = {path.relative_to(inside).as_posix(): path.read_bytes() for path in elsewhere}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return ShippedCheckpoint(name, files, tokenizer)


@contextmanager
def _unpacked(model: ModelSpec, shipped: ShippedCheckpoint) -> Iterator[ModelSpec]:
    """Write a shipped checkpoint to a temporary folder; yield a specification that loads it from there."""
    with temporary_folder() as root:
        folder = root if shipped.name.endswith(".gguf") else root / shipped.name
        contents = {folder / name: content for name, content in shipped.files.items()}
        contents |= {root / "tokenizer" / name: content for name, content in shipped.tokenizer.items()}
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        tokenizer = str(root / "tokenizer") if shipped.tokenizer else model.tokenizer
        yield replace(model, model=str(root / shipped.name), revision=None, tokenizer=tokenizer)


@dataclass(frozen=True)
class WorkerDescription:
    """Where a worker runs, and with what."""

    host: str
    process: int
    versions: dict[str, str]
    log: str
    """File of its standard error."""
    actor: str = ""
    """Ray's id of it."""


@dataclass(frozen=True)
class ComputedBatch:
    """Rows of a batch."""

    task: str
    """The journal's task of the batch, to recognise it by."""
    number: int
    """Number of the batch."""
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
    seconds: float
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerFailure:
    """Why a worker did not do what it was asked to."""

    reason: Literal["memory", "refused", "crashed"]
    """memory: another worker may have more of it; refused: an error, which another worker would have too; crashed: an
    error of the accelerator, after which the process cannot use it."""
    message: str
    trace: str = ""
    """Of an exception that is not an `EvalkitError`."""
    said: tuple[str, ...] = ()


@dataclass
class BatchWorker:
    """A worker. Two calls of `compute` may run at once: what needs no model of one batch, while another is computed.

    They may also arrive in another order than they were sent in, so they are numbered.

    Args:
        threads: threads of the CPU; 0: torch's default.
        memory_share: share of the device's memory that it may use.
    """

    threads: int = 0
    memory_share: float = 1.0
    _checkpoint: str = ""
    """Name of the loaded model."""
    _loaded: Any = None
    _computers: dict[str, tuple[Benchmark, Computer]] = field(default_factory=dict)
    _said: list[str] = field(default_factory=list)
    _turn: int = 0
    """Number of the call of `compute` whose turn it is."""
    _turns: Condition = field(default_factory=Condition)

    def describe(self) -> WorkerDescription:
        """Return where this worker runs, and with what; imports nothing heavy, since other versions may not run."""
        log = ""
        with suppress(OSError):
            log = str(Path("/proc/self/fd/2").readlink())
        actor = ""
        if (ray := sys.modules.get("ray")) and ray.is_initialized():
            actor = ray.get_runtime_context().get_actor_id() or ""
        return WorkerDescription(platform.node(), os.getpid(), versions(), log, actor)

    def sign_of_life(self) -> None:
        """Return at once: a process that is stopped does not."""

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

    def compute(self, job: str, number: int, batch: Batch, split: bool) -> ComputedBatch | WorkerFailure:
        """Compute a batch of a prepared run.

        Args:
            job: see `prepare`.
            number: of this call among all calls of `compute`, from 0.
            batch: the batch.
            split: whether to split it where memory runs out; else that is a failure.
        """
        with suppress(Exception):  # what fails here fails again in its turn
            batch.warm()
        with self._turns:
            self._turns.wait_for(lambda: self._turn == number)
            try:
                found: ComputedBatch | WorkerFailure = self._reported(lambda: self._compute(job, batch, split))
            finally:
                self._turn += 1
                self._turns.notify_all()
        return found

    def _prepare(self, job: str, recipe: Recipe, shipped: ShippedCheckpoint | None) -> PreparedRun:
        import torch

        from evalkit.models.memory import use_memory_share

        started = time.perf_counter()
        if self.threads:
            torch.set_num_threads(self.threads)
        use_memory_share(self.memory_share)
        say = self._said.append
        if recipe.checkpoint != self._checkpoint:
            # Computers keep the former model in memory
            self._computers.clear()
            self._loaded, self._checkpoint = None, ""
            gc.collect()
            with nullcontext(recipe.model) if shipped is None else _unpacked(recipe.model, shipped) as model:
                self._loaded = load_checked(model, model.locate(say), recipe.specification, say)
            self._checkpoint = recipe.checkpoint
        else:
            check_identity(recipe.model.model, recipe.specification, self._loaded)
        loaded, kind = self._loaded, benchmark(recipe.kind)
        computer = kind.computer(recipe.setup, loaded, recipe.budget, say)
        self._computers[job] = kind, computer
        prepared = Prepared(computer.facts, computer.about, computer.place(), loaded.tokenizer)
        return PreparedRun(prepared, time.perf_counter() - started, self._take_said())

    def _compute(self, job: str, batch: Batch, split: bool) -> ComputedBatch:
        from evalkit.models.memory import whole_batches
        from evalkit.runs.columns import record_batch, to_bytes

        kind, computer = self._computers[job]
        started = time.perf_counter()
        with nullcontext() if split else whole_batches():
            rows = computer.compute(batch)
        seconds = time.perf_counter() - started
        content = to_bytes(record_batch(rows, kind.row))
        place = computer.place(batch)
        return ComputedBatch(*batch.key, content, zlib.crc32(content), seconds, place, self._take_said())

    def _reported(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns, or its failure."""
        try:
            return work()
        except OutOfMemoryError as error:
            failure = WorkerFailure("memory", str(error), said=self._take_said())
        except EvalkitError as error:
            failure = WorkerFailure("refused", str(error), said=self._take_said())
        except Exception as error:
            reason: Literal["refused", "crashed"] = "crashed" if _is_of_accelerator(error) else "refused"
            failure = WorkerFailure(reason, why_failed(error), traceback.format_exc(limit=-20), self._take_said())
        # Outside the handlers, whose traceback references the tensors
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return failure

    def _take_said(self) -> tuple[str, ...]:
        said, self._said[:] = tuple(self._said), []
        return said


def _is_of_accelerator(error: Exception) -> bool:
    """Return whether an error is CUDA's or another accelerator's; their calls fail from then on."""
    import torch

    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA" in str(error)
