"""The process of a worker: it holds one checkpoint and computes planned batches of any benchmark.

In: recipes of runs, and batches. Out: an `Answer` to each call, which may be a `WorkerFailure`. No method raises, so
that a lost worker cannot be mistaken for an error of a document. Nothing here depends on Ray. Machines that share no
file system with the driver get copies of small checkpoints, whose fingerprint is checked as any other's.
"""

from __future__ import annotations

import gc
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from evalkit import __version__
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.session import Prepared, load_checked
from evalkit.errors import CheckpointError, EvalkitError, OutOfMemoryError
from evalkit.models.loading.files import GENERATION_CONFIG, weight_indexes
from evalkit.models.loading.fingerprint import check_identity
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.loading.spec import ModelSpec
from evalkit.paths import temporary_folder
from evalkit.requests.batches import Batch, BatchKey, Budget, Computer
from evalkit.runs.traits import BatchDevice
from evalkit.studies.running import why_failed

LIBRARIES = ("lm-eval", "torch", "transformers", "tokenizers")
"""Libraries whose version must be the driver's, beside evalkit's own."""
_LARGEST = 4 << 30
"""Most bytes of a checkpoint that is sent to workers: every machine holds a copy in memory."""


def versions() -> dict[str, str]:
    """Return the versions that all processes of a run must share; torch without its build ("+cpu")."""
    known = {"evalkit": __version__} | dict.fromkeys(LIBRARIES, "not installed")
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            known[name] = version(name).partition("+")[0]
    return known


@dataclass(frozen=True)
class Recipe:
    """What a worker needs to prepare a run."""

    kind: str
    """The benchmark's name."""
    checkpoint: str
    """Name of the loaded model among those of the driver; runs with the same name share it."""
    model: ModelSpec
    specification: dict[str, Any]
    candidates: Any
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


def packed(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return path → content of a checkpoint's files, in "model" and, of another tokenizer, "tokenizer"."""
    folder = checkpoint.folder
    inside = Path("model") if checkpoint.gguf else Path("model", folder.resolve().name)
    paths = [*checkpoint.weights(), *checkpoint.trusted_code()]
    if checkpoint.gguf is None:
        settings = folder / "config.json", folder / GENERATION_CONFIG, *weight_indexes(folder)
        paths += [path for path in settings if path.is_file()]
    targets = {inside / path.relative_to(folder): path for path in paths}
    root, target = (folder, inside) if checkpoint.tokenizer is None else (checkpoint.tokenizer, Path("tokenizer"))
    targets |= {target / path.relative_to(root): path for path in checkpoint.tokenizer_files()}
    if (size := sum(path.stat().st_size for path in targets.values())) > _LARGEST:
        raise CheckpointError(
            f"{checkpoint.given}: has {size / 2**30:.1f} GiB, and --ship-checkpoints sends at most {_LARGEST >> 30}; "
            "put it on a file system that all machines share, or on the hub"
        )
    return {target.as_posix(): path.read_bytes() for target, path in targets.items()}


@contextmanager
def _unpacked(model: ModelSpec, files: Mapping[str, bytes]) -> Iterator[ModelSpec]:
    """Write the files of `packed` to a temporary folder; yield a specification that loads them from there."""
    with temporary_folder() as root:
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        [checkpoint] = (root / "model").iterdir()
        tokenizer = str(root / "tokenizer") if (root / "tokenizer").is_dir() else model.tokenizer
        yield replace(model, model=str(checkpoint), revision=None, tokenizer=tokenizer)


@dataclass(frozen=True)
class WorkerDescription:
    """Where a worker runs, and with what."""

    host: str
    process: int
    versions: dict[str, str]
    log: str
    """File of its standard error."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that a worker can compute."""

    prepared: Prepared
    seconds: float


@dataclass(frozen=True)
class ComputedBatch:
    """Rows of a batch."""

    key: BatchKey
    rows: bytes
    """See `runs.columns.to_bytes`, whose compression has a checksum."""
    seconds: float
    place: BatchDevice


@dataclass(frozen=True)
class WorkerFailure:
    """Why a worker did not do what it was asked to."""

    reason: Literal["memory", "refused", "crashed"]
    """memory: another worker may have more of it; refused: an error, which another worker would have too; crashed: an
    error of the accelerator, after which the process cannot use it."""
    message: str
    trace: str = ""
    """Of an exception that is not an `EvalkitError`."""


class Answer(NamedTuple):
    """Answer of a worker to `prepare` or `compute`."""

    content: Any
    said: tuple[str, ...] = ()


class BatchWorker:
    """A worker, with threads of the CPU (0: torch's default) and its share of the device's memory.

    Two calls of `compute` may run at once: what needs no model of one batch, while another is computed.
    """

    def __init__(self, threads: int = 0, memory_share: float = 1.0) -> None:
        self._threads, self._memory_share = threads, memory_share
        self._checkpoint = ""
        self._loaded: Any = None
        self._computers: dict[str, Computer] = {}
        self._said: list[str] = []
        self._using_model = Lock()

    def describe(self) -> WorkerDescription:
        """Return where this worker runs, and with what; imports nothing heavy, since other versions may not run."""
        log = ""
        with suppress(OSError):
            log = str(Path("/proc/self/fd/2").readlink())
        return WorkerDescription(platform.node(), os.getpid(), versions(), log)

    def prepare(self, job: str, recipe: Recipe, shipped: Mapping[str, bytes] | None = None) -> Answer:
        """Load the checkpoint of a run, unless it is loaded, and prepare it; `job` names it in calls of `compute`."""
        return self._answer(lambda: self._prepare(job, recipe, shipped))

    def compute(self, job: str, batch: Batch, split: bool) -> Answer:
        """Compute a batch of a prepared run; where memory runs out, split it or answer with a failure."""
        with suppress(Exception):  # what fails here fails again below
            batch.warm()
        with self._using_model:
            return self._answer(lambda: self._compute(job, batch, split))

    def _prepare(self, job: str, recipe: Recipe, shipped: Mapping[str, bytes] | None) -> PreparedRun:
        import torch

        from evalkit.models.memory import use_memory_share

        started = time.perf_counter()
        if self._threads:
            torch.set_num_threads(self._threads)
        use_memory_share(self._memory_share)
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
        computation = benchmark(recipe.kind).computation
        computer = computation.computer(recipe.candidates, self._loaded, recipe.budget, say)
        self._computers[job] = computer
        prepared = Prepared(computer.facts, computer.about, computer.place(), self._loaded.tokenizer)
        return PreparedRun(prepared, time.perf_counter() - started)

    def _compute(self, job: str, batch: Batch, split: bool) -> ComputedBatch:
        from evalkit.models.memory import whole_batches
        from evalkit.runs.columns import record_batch, to_bytes

        computer = self._computers[job]
        started = time.perf_counter()
        with nullcontext() if split else whole_batches():
            rows = computer.compute(batch)
        seconds = time.perf_counter() - started
        return ComputedBatch(batch.key, to_bytes(record_batch(rows, batch.row)), seconds, computer.place(batch))

    def _answer(self, work: Callable[[], Any]) -> Answer:
        try:
            content = work()
        except Exception as error:
            content = _failure(error)
        if isinstance(content, WorkerFailure):
            # Outside the handler, whose traceback references the tensors
            import torch

            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        said = tuple(self._said)
        self._said.clear()
        return Answer(content, said)


def _failure(error: Exception) -> WorkerFailure:
    if isinstance(error, EvalkitError):
        return WorkerFailure("memory" if isinstance(error, OutOfMemoryError) else "refused", str(error))
    import torch

    # After an error of the accelerator, its calls fail from then on
    is_lost = isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA" in str(error)
    return WorkerFailure("crashed" if is_lost else "refused", why_failed(error), traceback.format_exc(limit=-20))
