"""Execution of a run's plan: open the folder, read the journal, compute the missing batches, write the results.

In: a plan of any benchmark. Out: a finished run. Each batch is in the journal before the next one starts, so a killed
process loses only its current batch.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict

from evalkit.activity import doing
from evalkit.benchmarks.base import Benchmark, Budget, Plan
from evalkit.benchmarks.loading import load_model
from evalkit.benchmarks.registry import benchmark
from evalkit.progress import Progress
from evalkit.runs.finished_rows import FinishedRows
from evalkit.runs.folder import Run
from evalkit.runs.journal import Entry
from evalkit.runs.writing import RunWriter, finished_run


def run_plan(plan: Plan, progress: Progress) -> Run:
    """Compute the missing batches of a run, write its results and open it.

    Raises:
        EvalkitError: the run cannot be computed or saved; the message is one line.
    """
    chosen = benchmark(plan.manifest["kind"])
    run = finished_run(
        plan.folder,
        plan.manifest,
        lambda run: chosen.serves(plan, run),
        lambda writer: _complete(chosen, plan, writer, progress),
        progress.say,
        plan.request.model.device,
    )
    run.require_form(chosen.results_form)
    return run


def _complete(kind: Benchmark, plan: Plan, writer: RunWriter, progress: Progress) -> None:
    with doing("reading the journal"):
        finished = writer.finished(kind.row, kind.key)
        missing = kind.is_missing(plan, finished)
    if missing:
        _compute(kind, plan, finished, writer, progress)
    kind.finish(plan, finished, writer)


def _compute(kind: Benchmark, plan: Plan, finished: FinishedRows, writer: RunWriter, progress: Progress) -> None:
    loaded = load_model(plan, progress.say)
    with doing("preparing prompts and batches"):
        computer = kind.computer(plan, loaded, _budget(plan, finished, writer, progress), progress.say)
        writer.compute_on(computer.place())
        writer.save_manifest(**computer.about, facts=asdict(computer.facts))
        planned = kind.batches(plan, computer.facts, loaded.tokenizer, finished, progress.say)
    if planned.message:
        progress.say(planned.message)
    progress.start(planned.total, planned.done)
    task = None
    with closing(planned.batches) as batches:
        for batch in batches:
            if batch.task != task:
                progress.task(task := batch.task)
            started = time.perf_counter()
            rows = computer.compute(batch)
            seconds = round(time.perf_counter() - started, 4)
            finished.append(Entry(batch.journal or batch.task, batch.number, seconds, computer.place(batch)), rows)
            progress.advance(batch.work, batch.documents)


def _budget(plan: Plan, finished: FinishedRows, writer: RunWriter, progress: Progress) -> Budget:
    """Return the token budget; a resumed run keeps the one it was started with, so that its batches are the same."""
    requested = plan.request.token_budget
    manifest = writer.manifest if finished else {}
    stored: int | None = manifest.get("token_budget")
    if stored and requested not in (None, stored):
        progress.say(f"resuming with the token budget that the run was started with, {stored}")
    # For runs that only generate, the token budget is that of keys and values
    return Budget(stored or requested, manifest.get("kept_tokens") or stored or requested)
