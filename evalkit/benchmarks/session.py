"""The life of a run, whatever its benchmark: open the folder, read the journal, compute what is missing, finish.

Each batch is in the journal before the next begins, so a process that is killed loses the one that it was at.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Benchmark, Budget, Held, Plan
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import Request, context_extension
from evalkit.progress import Progress
from evalkit.runs.folder import Run
from evalkit.runs.journal import Entry
from evalkit.runs.writing import RunWriter, finished_run

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel
    from evalkit.models.locate import Checkpoint


def run_plan(plan: Plan, progress: Progress) -> Run:
    """Compute what is missing of a run, write its results and open it.

    Raises:
        EvalkitError: whatever is wrong, in one line.
    """
    served_by = benchmark(plan.manifest["kind"])
    return finished_run(
        plan.folder,
        plan.manifest,
        lambda run: served_by.serves(plan, run),
        lambda writer: _complete(served_by, plan, writer, progress),
        progress.say,
        plan.common.device,
    )


def load_model(
    checkpoint: Checkpoint, request: Request, specification: Mapping[str, Any], progress: Progress
) -> LoadedModel:
    """Load the checkpoint of a request and say what was loaded.

    Args:
        checkpoint: of the request.
        request: says how it is loaded.
        specification: of the run, whose id was made of the checkpoint's files as they were then.
        progress: shows what is being done.

    Raises:
        CheckpointError: it cannot be loaded, or its files have changed since.
    """
    from evalkit.models.identity import check_identity
    from evalkit.models.load import load

    loaded = load(
        checkpoint,
        device=request.device,
        dtype=request.dtype,
        attention=request.attention,
        extension=context_extension(request, checkpoint),
        say=progress.say,
    )
    check_identity(checkpoint.given, specification, loaded)
    for line in loaded.describe().split("\n"):
        progress.say(line)
    return loaded


def _complete(kind: Benchmark, plan: Plan, writer: RunWriter, progress: Progress) -> None:
    held = Held(kind.key)
    for entry in writer.entries(kind.row):
        held.keep(entry.task, entry.seconds, [kind.row(*row) for row in entry.rows])
    if kind.is_missing(plan, held):
        _compute(kind, plan, held, writer, progress)
    kind.finish(plan, held, writer)


def _compute(kind: Benchmark, plan: Plan, held: Held, writer: RunWriter, progress: Progress) -> None:
    loaded = load_model(plan.checkpoint, plan.common, plan.manifest["specification"], progress)
    computer = kind.computer(plan, loaded, _budget(plan, held, writer, progress), progress.say)
    writer.compute_on(computer.place())
    writer.save_manifest(**computer.about, facts=asdict(computer.facts))
    planned = kind.batches(plan, computer.facts, loaded.tokenizer, held, progress.say)
    if planned.news:
        progress.say(planned.news)
    progress.start(planned.total, planned.done)
    task = None
    with closing(planned.batches) as batches:
        for batch in batches:
            if batch.task != task:
                progress.task(task := batch.task)
            started = time.perf_counter()
            rows = computer.compute(batch)
            seconds = round(time.perf_counter() - started, 4)
            name = batch.journal or batch.task
            writer.append(Entry(name, batch.number, seconds, [list(row) for row in rows], computer.place(batch)))
            held.keep(name, seconds, rows)
            progress.advance(batch.work, batch.documents)


def _budget(plan: Plan, held: Held, writer: RunWriter, progress: Progress) -> Budget:
    """Most tokens at a time: of a run that goes on, those that it was begun with, so that its batches are the same."""
    asked = plan.common.token_budget
    begun = writer.manifest if held else {}
    stored: int | None = begun.get("token_budget")
    if stored and asked not in (None, stored):
        progress.say(f"resuming with the token budget that the run was begun with, {stored}")
    # Of runs that only generate, the budget is that of keys and values
    return Budget(stored or asked, begun.get("kept_tokens") or stored or asked)
