"""Speed of evalkit and of lm-eval's Hugging Face model by the kind of model: `versus_lm_eval.py --kinds`.

In: kinds of models (`kinds_of_models.py`), tasks, protocols and dtypes. Out: kinds.md, a table with a line for each
kind, dtype and protocol, and kinds.json. Both score the same token sequences with the same weights in one process.

evalkit checks each model anew, then scores all tasks once, which may check further lengths. After this pass both score
the tasks in turn, several times; ratios are medians. Tokens are those of all sequences, without sharing, for both.
Memory is the most in use beyond that before the checks or a pass. Seconds are of the clock; `--cpu-seconds` counts
those of the processor with one thread, which other processes on the machine change little; what evalkit prepares beside
its passes counts then, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import versus_lm_eval
from kinds_of_models import ModelOfKind, model_of
from suite_documents import score, sequences_of
from versus_lm_eval import (
    best_peer,
    documents_of,
    largest_difference,
    likelihood,
    machine,
    memory_now,
    note,
    timed,
    watching,
)

from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import return_freed_memory


@dataclass
class TaskTimes:
    """Seconds of one task, and what was scored in them."""

    task: str
    documents: int
    tokens: int
    """Of all sequences."""
    first: float
    """evalkit's first pass, with checks of lengths that had not occurred before."""
    ours: list[float] = field(default_factory=list)
    """Of each later pass; `theirs` have the same order."""
    theirs: list[float] = field(default_factory=list)
    difference: float = 0.0
    """Largest relative difference of a log-likelihood."""


@dataclass
class KindResult:
    """Measurements of one kind of model under one protocol and dtype."""

    kind: str
    dtype: str
    protocol: str
    parameters: int = 0
    way: str = ""
    """How evalkit scores it."""
    said: list[str] = field(default_factory=list)
    """evalkit's messages."""
    checks: float = 0.0
    """Seconds of the start-up checks."""
    batch_size: int = 0
    """Of lm-eval."""
    memory: int = 0
    """Most bytes in use by evalkit's checks or a pass, beyond those before."""
    their_memory: int = 0
    tasks: list[TaskTimes] = field(default_factory=list)
    failure: str = ""


def compare_kinds(arguments: argparse.Namespace) -> None:
    """Compare by models of several kinds; one that fails is reported, and the next begins."""
    if arguments.cpu_seconds:
        torch.set_num_threads(1)
        versus_lm_eval.CLOCK = time.process_time
    tokenizer = load(locate(arguments.model, say=note), device="cpu", say=note).tokenizer
    about = {"limit": arguments.limit, "size": arguments.size, "repeats": arguments.repeats}
    about |= machine(arguments) | {"clock": "the processor" if arguments.cpu_seconds else "the clock"}
    results: list[KindResult] = []
    for dtype in arguments.dtypes or ("float32",):
        for kind in arguments.kinds:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / f"{kind}-{arguments.size}"
                model: ModelOfKind | None = None
                for protocol in arguments.protocols:
                    result = KindResult(kind, dtype, protocol)
                    results.append(result)
                    try:
                        model = model or model_of(kind, arguments.size, tokenizer, place, dtype, arguments.device)
                        measure_kind(result, model, arguments)
                    except Exception as error:  # of any part of evalkit or lm-eval
                        traceback.print_exc()
                        result.failure = f"{type(error).__name__}: {error}"
                    write_kinds(arguments.out, results, about)


def measure_kind(result: KindResult, model: ModelOfKind, arguments: argparse.Namespace) -> None:
    """Fill in a result."""
    result.parameters = model.ours.parameters

    def say(line: str) -> None:
        note(line)
        result.said.append(line)

    documents = documents_of(model.ours, result.protocol, arguments)
    device = model.theirs.model.device
    engine = Engine(model.ours.model, model.budget(), say)
    candidates = [member for members in documents.values() for member in members[:2]]
    scored: dict[str, list[float]] = {}
    with watching_growth(device) as growth:
        result.checks, _ = timed(lambda: engine.check(sequences_of(candidates)))
        for task, members in documents.items():
            first, (rows, _) = timed(lambda members=members: score(engine, members))
            tokens = sum(len(sequence.tokens) for member in members for sequence in member.scores)
            result.tasks.append(TaskTimes(task, len(members), tokens, first))
            scored[task] = [likelihood(row, result.protocol) for of_document in rows for row in of_document]
    result.memory = growth[0]
    result.way = way_of(engine)
    peer = best_peer(model.theirs, next(iter(documents.values())), result.protocol, arguments.batch_sizes)
    result.batch_size = peer.batch_size
    for _ in range(arguments.repeats):
        for times in result.tasks:
            members = documents[times.task]
            with watching_growth(device) as growth:
                seconds, _ = timed(lambda members=members: score(engine, members))
            times.ours.append(seconds)
            result.memory = max(result.memory, growth[0])
            with watching_growth(device) as growth:
                seconds, theirs = timed(lambda members=members: peer(members))
            times.theirs.append(seconds)
            result.their_memory = max(result.their_memory, growth[0])
            times.difference = largest_difference(scored[times.task], theirs)
    ratios = [ratio_of([times]) for times in result.tasks]
    note(f"{result.kind} {result.dtype} {result.protocol}, {result.way}: {', '.join(f'{r:.2f}x' for r in ratios)}")


def way_of(engine: Any) -> str:
    """Return how an engine scores: its way, and the kernel of trees or the tokens of a pass."""
    if engine.way == "tree":
        return f"tree ({engine.kernel})"
    return f"{engine.way} ({engine.pass_tokens:,})"


def ratio_of(tasks: Sequence[TaskTimes]) -> float:
    """Return lm-eval's time over evalkit's, of all tasks: the median over passes."""
    ours = map(sum, zip(*(times.ours for times in tasks), strict=True))
    theirs = map(sum, zip(*(times.theirs for times in tasks), strict=True))
    return median(slow / fast for slow, fast in zip(theirs, ours, strict=True))


@contextmanager
def watching_growth(device: Any) -> Iterator[list[int]]:
    """Measure by how many bytes the peak in the block is above the memory in use before it, as a list of one."""
    gc.collect()
    return_freed_memory()
    before, growth = memory_now(device), [0]
    with watching(device) as peak:
        yield growth
    growth[0] = peak[0] - before


def write_kinds(out: Path, results: list[KindResult], about: dict[str, Any]) -> None:
    """Write the results so far."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "results": [asdict(result) for result in results]}
    (out / "kinds.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "kinds.md").write_text(kinds_table(results, about))


def kinds_table(results: list[KindResult], about: dict[str, Any]) -> str:
    """Return a table with a line for each kind, dtype and protocol."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    names = list(dict.fromkeys(times.task for result in results for times in result.tasks))
    head = ["model", "parameters", "dtype", "protocol", "way", *names, "all", "evalkit tokens/s", "lm-eval tokens/s"]
    head += ["lm-eval batch", "MiB", "lm-eval MiB", "checks s", "first pass s", "later pass s", "difference"]
    lines = [
        f"{about['machine']}, {about['threads']} threads; {versions}; at most {about['limit']} documents of each task; "
        f"medians of {about['repeats']} passes; seconds of {about['clock']}.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    lines += [f"| {' | '.join(kind_cells(result))} |" for result in results if result.tasks or result.failure]
    return "\n".join(lines) + "\n"


def kind_cells(result: KindResult) -> list[str]:
    """Return the cells of a line: ratios of each task and of all, speeds, memory and seconds."""
    name = [result.kind, f"{result.parameters / 1e6:.0f} M", result.dtype, result.protocol]
    if result.failure:
        return [*name, f"failed: {result.failure.splitlines()[0]}".replace("|", "/")]
    tokens = sum(times.tokens for times in result.tasks)
    ours = sum(median(times.ours) for times in result.tasks)
    theirs = sum(median(times.theirs) for times in result.tasks)
    first = sum(times.first for times in result.tasks)
    ratios = [*(ratio_of([times]) for times in result.tasks), ratio_of(result.tasks)]
    speeds = [f"{tokens / ours:.0f}", f"{tokens / theirs:.0f}", str(result.batch_size)]
    memory = [f"{size / 2**20:.0f}" for size in (result.memory, result.their_memory)]
    seconds = [f"{value:.1f}" for value in (result.checks, first, ours)]
    difference = max(times.difference for times in result.tasks)
    return [*name, result.way, *(f"{ratio:.2f}×" for ratio in ratios), *speeds, *memory, *seconds, f"{difference:.1e}"]
