"""Execution of a run's plan: open the folder, read the journal, compute the missing batches, write the results.

In: a plan of any benchmark. Out: a finished run. Each batch is in the journal before the next one starts, so a killed
process loses only its current batch. The next batch is prepared while one is computed. `run_plan` computes in this
process; `OpenRun` has the steps for those that compute elsewhere, too (`studies/cluster/`, `studies/loop.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from evalkit.benchmarks.base import Plan
from evalkit.benchmarks.registry import benchmark
from evalkit.data.sampling import selection_of
from evalkit.display import Progress, Say, doing, imports
from evalkit.errors import RunError, UsageError
from evalkit.inputs.validated import restored
from evalkit.models.loading.fingerprint import check_identity
from evalkit.requests.batches import Batch, Budget, Planned
from evalkit.runs.finding import runs_of_other_documents
from evalkit.runs.folder import JOURNAL, Run, load_run
from evalkit.runs.journal import Entry, FinishedRows, Journal
from evalkit.runs.traits import BatchDevice, kinds, place_of
from evalkit.runs.writing import RunWriter, find_finished, open_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evalkit.models.loading.load import LoadedModel
    from evalkit.models.loading.locate import Checkpoint
    from evalkit.models.loading.spec import ModelSpec
    from evalkit.runs.columns import Rows
    from evalkit.runs.journal import Key

Prefetched = TypeVar("Prefetched")
_ABOUT = ("sharing", "loaded")
"""Entries of a manifest about the loaded model (`Computer.about`) that do not change how a run goes on."""
_PLANNED = ("token_budget", "facts")
"""Entries that determine the batches."""


def prefetched(
    batches: Iterator[Prefetched], warm: Callable[[Prefetched], None], stop: Callable[[], None] = lambda: None
) -> Generator[Prefetched, None, None]:
    """Yield batches, while a thread takes the next one from the iterator and makes it ready by `warm`.

    `stop` is called where no more batches are needed; it makes the iterator raise an exception soon.
    """

    def following() -> Prefetched | None:
        if (batch := next(batches, None)) is not None:
            warm(batch)
        return batch

    with ThreadPoolExecutor(1, "evalkit-prefetch") as thread:
        future = thread.submit(following)
        try:
            while (batch := future.result()) is not None:
                future = thread.submit(following)
                yield batch
        except BaseException:
            # Before the thread is waited for
            stop()
            raise


LoadingKey = tuple["ModelSpec", str]


def loading_key(model: ModelSpec, specification: Mapping[str, Any]) -> LoadingKey:
    """Return what determines the loaded model, whose context and dtype count as they are in the specification."""
    names = ("checkpoint", "dtype", "attention", "context_extension")
    about = json.dumps({name: specification[name] for name in names}, sort_keys=True)
    plain = replace(model, dtype="auto", context=None, context_method=None, context_original=None, context_config=None)
    return plain, about


class ModelHolder:
    """Loads models, one at a time, and keeps the last one: runs of one checkpoint load it once."""

    def __init__(self) -> None:
        self._key: LoadingKey | None = None
        self._loaded: LoadedModel | None = None

    def model_of(self, plan: Plan, say: Say) -> LoadedModel:
        """Return the loaded model of a run; raises as `load_checked`."""
        specification = plan.manifest["specification"]
        key = loading_key(plan.request.model, specification)
        if self._loaded is None or self._key != key:
            # Freed first, since two models may not fit into memory
            self._loaded = None
            self._loaded = load_checked(plan.request.model, plan.checkpoint, specification, say)
            self._key = key
        else:
            check_identity(plan.checkpoint.given, specification, self._loaded)
        return self._loaded


def load_checked(model: ModelSpec, checkpoint: Checkpoint, specification: Mapping[str, Any], say: Say) -> LoadedModel:
    """Load the model of a run and report it. Raises a `CheckpointError` also if its files have changed meanwhile."""
    loaded = model.load(checkpoint, say)
    check_identity(checkpoint.given, specification, loaded)
    for line in loaded.describe().split("\n"):
        say(line)
    return loaded


class Prepared(NamedTuple):
    """What planning and the manifest need of a model that is ready to compute; see `Computer`."""

    facts: Any
    about: dict[str, Any]
    device: BatchDevice
    """Of most batches."""
    tokenizer: Any


class OpenRun:
    """A run whose folder this process writes: its journal, missing batches and results. Use `opened`."""

    def __init__(self, plan: Plan, writer: RunWriter, say: Say) -> None:
        self.plan, self._writer, self._say = plan, writer, say
        self._kind = benchmark(plan.manifest["kind"])
        self._computation = computation = self._kind.computation
        self.is_missing = False
        # Another process may have finished the run before this one had the lock
        self._run = finished(plan, say)
        if self._run is None:
            with doing("reading the journal"):
                self.finished = writer.finished(computation.rows, computation.key)
                self._take_rows()
                self.is_missing = computation.is_missing(plan, self.finished)

    def _take_rows(self) -> None:
        """Copy the rows that runs of other samples have and that this run would compute.

        In float32 those are all rows of the same texts: other batches change them by rounding only. The rest is planned
        without them, so they are taken before the first batch is computed, and after a kill the rest of them. In other
        formats only the same batch has the same rows: those of the steps that both samples have are taken, if the other
        run was computed on the same kind of device.
        """
        if self._is_precise and self.finished.has_batches:
            return
        parts = self._computation.shared_rows(self.plan)
        keys = {key for _, of_part in parts for key in of_part}
        missing = {key for key in keys if key not in self.finished}
        for run in runs_of_other_documents(self.plan.folder, self.plan.manifest) if missing else ():
            steps = 0 if self._is_precise else self._common_steps(run)
            if not (steps or self._is_precise):
                continue
            types = self._computation.rows
            journal = Journal(run.folder / JOURNAL, run.manifest["id"], types, self._say, is_ours=False)
            try:
                rows = FinishedRows(journal, self._computation.key)
            except RunError:  # damaged, or of an earlier version
                continue
            whole = [of_part for step, of_part in parts if step < steps and all(key in rows for key in of_part)]
            same = keys if self._is_precise else set().union(*whole)
            if taken := {key for key in missing & same if key in rows}:
                share = f"{_documents(taken):,} of {_documents(keys):,} documents"
                self._say(f"{share} have scores in {run.folder.name}, which are reused")
                self._take(run, rows, taken)
            missing -= taken

    @property
    def _is_precise(self) -> bool:
        """Whether the documents of a batch change each other's scores by rounding in float32 only."""
        specification = self.plan.manifest["specification"]
        is_float32 = specification["dtype"] == "float32" and "quantise" not in specification
        torch = sys.modules.get("torch")  # imported by a caller, who may have chosen a faster format for products
        return is_float32 and (torch is None or torch.get_float32_matmul_precision() == "highest")

    def _common_steps(self, run: Run) -> int:
        """Return how many steps of the sample another run has in the same batches, computed as on this machine."""
        if set(kinds(run.manifest)) != {self._kind_of_device}:
            return 0
        budget = self._stored("token_budget") or self.plan.request.token_budget
        if budget not in (None, run.manifest.get("token_budget")):
            return 0
        own, other = (selection_of(of.manifest["specification"]).steps for of in (self.plan, run))
        equal = (step == same for step, same in zip(own, other, strict=False))
        return sum(1 for _ in takewhile(bool, equal))

    @cached_property
    def _kind_of_device(self) -> str:
        """The kind of device that this machine computes on, as in a manifest; empty if the requested one is missing."""
        with suppress(UsageError), doing("looking for the device", slow=imports("torch")):
            from evalkit.models.parts import resolve_device

            device = resolve_device(self.plan.request.model.device)
            return " ".join(place_of(device, "").kind)
        return ""

    def _take(self, run: Run, rows: FinishedRows, keys: set[Key]) -> None:
        # Before the rows: without a batch to compute no model is loaded, and with one the batches are planned alike
        names = _ABOUT if self._is_precise else (*_ABOUT, *_PLANNED)
        about = {} if self.finished else {name: run.manifest[name] for name in names if name in run.manifest}
        sources = {*self._writer.manifest.get("taken_from", ()), run.manifest["id"]}
        self._writer.save_manifest(**about, taken_from=sorted(sources))
        self.finished.take(rows, keys, in_batches=not self._is_precise)

    def budget(self) -> Budget:
        """Return the token budget; a resumed run keeps the one it was started with, and so its batches."""
        requested = self.plan.request.token_budget
        stored: int | None = self._stored("token_budget")
        if stored and requested not in (None, stored):
            self._say(f"resuming with the token budget that the run was started with, {stored}")
        # For runs that only generate, the token budget is that of keys and values
        return Budget(stored or requested, self._stored("kept_tokens") or stored or requested)

    def _stored(self, name: str) -> Any:
        """Return an entry of the manifest of a run that has rows; None if it has none."""
        return self._writer.manifest.get(name) if self.finished else None

    def facts(self) -> Any:
        """Return the facts that the run was started with; None if there are none, or an earlier version's."""
        stored = self._stored("facts")
        return None if stored is None else restored(stored, self._computation.facts)

    def start(self, prepared: Prepared) -> Any:
        """Store the model's facts in the manifest, and return those to plan with: of a resumed run, its first ones.

        Warns if earlier batches were computed on another kind of device.
        """
        self._writer.compute_on(prepared.device)
        recorded = self.facts()
        facts = prepared.facts if recorded is None else recorded
        budgets = () if recorded is None else ("token_budget", "kept_tokens")
        about = {name: value for name, value in prepared.about.items() if name not in budgets}
        self._writer.save_manifest(**about, facts=asdict(facts))
        return facts

    def batches(self, facts: Any, tokenizer: Any) -> Planned:
        planned: Planned = self._computation.batches(self.plan, facts, tokenizer, self.finished, self._say)
        if planned.message:
            self._say(planned.message)
        return planned

    def store(self, batch: Batch, rows: Rows, seconds: float, place: BatchDevice, packed: bytes | None = None) -> None:
        """Add a computed batch to the journal. Raises `RunError` if that fails; earlier batches are unaffected."""
        self.finished.append(Entry(*batch.key, round(seconds, 4), place), rows, batch.row, packed)

    def report(self, done: float, seconds_left: float | None) -> None:
        """Publish the progress to other processes; see `Lock.report`."""
        self._writer.lock.report(done, seconds_left)

    def finish(self) -> Run:
        """Write the tables and the results, and open the run before another process can open its folder."""
        if self._run is None:
            self._kind.finish(self.plan, self.finished, self._writer)
            self._run = load_run(self.plan.folder)
            self._run.require_form(self._kind.results_form)
        return self._run


def _documents(keys: Iterable[Key]) -> int:
    """Return of how many documents the rows with these keys are."""
    return len({key[:2] for key in keys})


def finished(plan: Plan, say: Say) -> Run | None:
    """Return the run of a plan if it has everything that is requested, else None."""
    kind = benchmark(plan.manifest["kind"])
    samples = getattr(plan.request, "log_samples", False)

    def has_all(run: Run) -> bool:
        return run.serves(samples) and all((run.folder / name).is_file() for name in kind.files)

    if (run := find_finished(plan.folder, plan.manifest, has_all, say, plan.request.model.device)) is not None:
        run.require_form(kind.results_form)
    return run


@contextmanager
def opened(plan: Plan, say: Say) -> Iterator[OpenRun]:
    """Open the folder of a run for writing. Raises a `RunInUseError` if another process has it open, or `RunError`."""
    folder = plan.folder  # which is searched for until it exists
    with open_run(folder.parent, folder.name, plan.manifest, say) as writer:
        yield OpenRun(plan, writer, say)


def run_plan(plan: Plan, progress: Progress, holder: ModelHolder | None = None) -> Run:
    """Compute the missing batches of a run in this process, write its results and open it.

    The holder keeps the model for further runs. Raises an `EvalkitError`.
    """
    if (run := finished(plan, progress.say)) is not None:
        return run
    plan.request.model.check_device()
    with opened(plan, progress.say) as current:
        if current.is_missing:
            _compute(current, progress, holder or ModelHolder())
        return current.finish()


def _compute(current: OpenRun, progress: Progress, holder: ModelHolder) -> None:
    plan = current.plan
    computation = benchmark(plan.manifest["kind"]).computation
    loaded = holder.model_of(plan, progress.say)
    with doing("preparing prompts and batches"):
        candidates = computation.candidates(plan)
        computer = computation.computer(candidates, loaded, current.budget(), progress.say)
        facts = current.start(Prepared(computer.facts, computer.about, computer.place(), loaded.tokenizer))
        planned = current.batches(facts, loaded.tokenizer)
    if planned.done:
        progress.say(f"{planned.done / planned.total:.0%} of the run is done")
    progress.start(planned.total, planned.done)
    task = None
    with closing(planned.batches) as batches:
        for batch in prefetched(batches, Batch.warm, planned.stop):
            if batch.task != task:
                progress.task(task := batch.task)
            started = time.perf_counter()
            rows = computer.compute(batch)
            current.store(batch, rows, time.perf_counter() - started, computer.place(batch))
            progress.advance(batch.work, batch.documents)
            current.report(progress.share(), progress.seconds_left())
