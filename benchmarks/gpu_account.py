"""Account of scoring on a GPU: seconds of each kind of kernel, and what the CPU does while the GPU runs none.

    python benchmarks/gpu_account.py --tasks hellaswag boolq
    python benchmarks/gpu_account.py --device cpu --tiny          # the same code on a tiny model, to test this script

A random model of 1.3 B parameters in bfloat16 (`whole_suite.py`'s) scores 1,000 documents of each task, after the
start-up check and once unmeasured: three times by the clock, and once under torch's profiler, with a thread that reads
every millisecond what the main thread executes. Seconds of the account add up to those under the profiler. "Head" is
all that runs between the final hidden states and the log-probabilities. On a CPU operations take the place of kernels.
Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from suite_documents import choice_requests, encoded, score, sequences_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from versus_lm_eval import Row, count, matrix_rate, note, timed
from whole_suite import random_model

import evalkit
from evalkit.compatibility.torch import compilations
from evalkit.requests.requests import ScoreDocument
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import OutputHead
from evalkit.scoring.pack import TreeBatch

MARKER = "spin_kernel"
"""Kernel of `torch.cuda._sleep`, launched where the head starts and ends."""
KINDS = (
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|cublas|xmma|aten::linear", re.IGNORECASE)),
    ("attention", re.compile(r"flex_attention|scaled_dot_product")),
    ("transfers", re.compile(r"Memcpy (HtoD|DtoH)")),
)
OTHER = "other kernels"
LISTED = 24
"""Kernels with a line of their own."""
Span = tuple[float, float]


def main() -> None:
    """Print the account of each task."""
    arguments = parse()
    started = time.perf_counter()
    model, tokenizer = random_model(arguments)
    engine = Engine(model.eval(), 2048 if arguments.tiny else auto_budget(model), note)
    requests = choice_requests("inst", arguments.tasks, arguments.limit, arguments.data_dir)
    documents = {task: encoded(of_task, tokenizer, 2048) for task, of_task in requests.items()}
    note(f"model and documents after {time.perf_counter() - started:.1f} s")
    seconds, _ = timed(lambda: engine.check(sequences_of(next(iter(documents.values()))[:2])))
    rate = matrix_rate(model, engine.budget)
    print(
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}, torch {torch.__version__}, "
        f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters, {arguments.dtype}; "
        f"{engine.budget} tokens a batch, attention by {engine.kernel}; start-up check {seconds:.1f} s, "
        f"{compilations()} compilations; matrix rate {rate / 1e12:.2f} TFLOP/s",
        flush=True,
    )
    for task, members in documents.items():
        print("\n".join(account(engine, model, task, members, rate, arguments)), flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=("hellaswag", "boolq"))
    parser.add_argument("--limit", type=int, default=1000, help="documents of each task")
    parser.add_argument("--tokenizer", default="demo", help="checkpoint to take the tokenizer from")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for the profiler's traces")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and 20 documents")
    arguments = parser.parse_args()
    sizes = (2, 64, 96, 4) if arguments.tiny else (22, 2048, 5632, 32)
    arguments.layers, arguments.hidden, arguments.inner, arguments.heads = sizes
    arguments.limit = min(arguments.limit, 20) if arguments.tiny else arguments.limit
    return arguments


def account(
    engine: Engine, model: Any, task: str, members: list[ScoreDocument], rate: float, arguments: argparse.Namespace
) -> Iterator[str]:
    """Score a task several times; yield the lines of its account."""

    def run() -> list[TreeBatch]:
        return score(engine, members)[1]

    first, batches = timed(run)
    row = Row("inst", arguments.dtype, task, len(members), 0, 0, 0, 0, 0, rate, 0, 0, (0, 0))
    count(row, batches, model)
    times = [timed(run)[0] for _ in range(3)]
    events, samples, span = profiled(run, arguments, task)
    total = (span[1] - span[0]) / 1e9
    products = row.flops / rate
    yield f"\n### {task}, `inst`, {len(members)} documents\n"
    yield (
        f"{row.tokens} tokens in {row.batches} batches: {min(times):.2f} to {max(times):.2f} s, {first:.2f} s the "
        f"first time, {total:.2f} s under the profiler. The necessary products take {products:.2f} s at the matrix "
        f"rate: {products / min(times):.0%}.\n"
    )
    by_part, by_kernel, counts, busy = Counter[str](), Counter[str](), Counter[str](), list[Span]()
    in_head = False
    for name, start, end in events:
        if MARKER in name:
            in_head = not in_head
            continue
        kind = next((kind for kind, pattern in KINDS if pattern.search(name)), OTHER)
        part = f"{kind}, {'head' if in_head else 'layers'}"
        by_part[part] += end - start
        by_kernel[f"{part}: {short(name)}"] += end - start
        counts[f"{part}: {short(name)}"] += 1
        busy.append((start, end))
    gaps = list(gaps_of(sorted(busy), span))
    idle = sum(end - start for start, end in gaps)
    yield "| | s | of the time |\n|---|---|---|"
    for part, spent in [*by_part.most_common(), ("no kernel", idle)]:
        yield f"| {part} | {spent / 1e9:.3f} | {spent / 1e9 / total:.1%} |"
    yield "\n| kernel | calls | ms |\n|---|---|---|"
    for name, spent in by_kernel.most_common(LISTED):
        yield f"| {name} | {counts[name]} | {spent / 1e6:.1f} |"
    idle_samples = [place for moment, place in samples if any(start <= moment < end for start, end in gaps)]
    yield "\n| main thread, while no kernel runs | s | all its time, s |\n|---|---|---|"
    everywhere = Counter(place for _, place in samples)
    for place, times_seen in Counter(idle_samples).most_common(14):
        yield (
            f"| {place} | {times_seen / max(1, len(idle_samples)) * idle / 1e9:.3f} "
            f"| {everywhere[place] / len(samples) * total:.3f} |"
        )


def profiled(run: Any, arguments: argparse.Namespace, task: str) -> tuple[list[Any], list[tuple[float, str]], Span]:
    """Return kernels (name, start, end) in order, samples of the main thread, and the span of the run, in ns."""
    cuda = torch.cuda.is_available()
    with marked_head(cuda), profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        # The profiler's clock is set by a kernel that starts when it is launched
        mark(cuda)
        origin = time.perf_counter_ns()
        with sampled() as samples:
            begin = time.perf_counter_ns()
            run()
            if cuda:
                torch.cuda.synchronize()
            end = time.perf_counter_ns()
        mark(cuda)
    if arguments.traces:
        arguments.traces.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(arguments.traces / f"{task}.json.gz"))
    of_device = DeviceType.CUDA if cuda else DeviceType.CPU
    kernels = sorted(
        (event.time_range.start * 1e3, event.time_range.end * 1e3, event.name)
        for event in trace.events() or ()
        if event.device_type == of_device and (cuda or event.cpu_parent is None)
    )
    shift = origin - kernels[0][0]
    events = [(name, start + shift, stop + shift) for start, stop, name in kernels]
    # Without the two of `mark` around the run
    return [event for event in events if begin <= event[1] < end], samples, (begin, end)


def mark(cuda: bool) -> None:
    """Launch the marker, and wait for it."""
    if cuda:
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()


@contextmanager
def marked_head(cuda: bool) -> Iterator[None]:
    """Launch the marker where the head starts and ends."""
    original = OutputHead.scores

    def scores(*inputs: Any) -> Any:
        if cuda:
            torch.cuda._sleep(1)
        try:
            return original(*inputs)
        finally:
            if cuda:
                torch.cuda._sleep(1)

    OutputHead.scores = scores  # type: ignore[method-assign]
    try:
        yield
    finally:
        OutputHead.scores = original  # type: ignore[method-assign]


@contextmanager
def sampled() -> Iterator[list[tuple[float, str]]]:
    """Collect (time, the innermost function of evalkit) of this thread every millisecond inside the block."""
    samples: list[tuple[float, str]] = []
    own, done, interval = threading.get_ident(), threading.Event(), sys.getswitchinterval()

    def watch() -> None:
        while not done.wait(0.001):
            samples.append((time.perf_counter_ns(), place_of(sys._current_frames()[own])))

    watcher = threading.Thread(target=watch)
    # A thread otherwise waits up to 5 ms for one that executes Python
    sys.setswitchinterval(1e-4)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(interval)


def place_of(frame: Any) -> str:
    """Return the innermost function of evalkit, with the line, or of this script."""
    package = str(Path(evalkit.__file__).parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(package) or frame.f_back is None:
            return f"{Path(file).stem}.{frame.f_code.co_qualname}:{frame.f_lineno}"
        frame = frame.f_back
    return "nothing"


def gaps_of(busy: Sequence[Span], span: Span) -> Iterator[Span]:
    """Yield the parts of a span that no interval covers; intervals are sorted by their starts."""
    reached = span[0]
    for start, end in busy:
        if start > reached:
            yield reached, start
        reached = max(reached, end)
    if reached < span[1]:
        yield reached, span[1]


def short(name: str) -> str:
    """Return a kernel's name without the templates that all of PyTorch's share."""
    inner = re.findall(r"at::native::(?:\(anonymous namespace\)::)?(\w+)", name)
    parts = [part for part in dict.fromkeys(inner) if not re.search(r"elementwise_kernel|gpu_kernel_impl|memory", part)]
    dtypes = sorted(set(re.findall(r"BFloat16|float|double|long", name)))
    return f"{' '.join(parts[:3])} ({', '.join(dtypes)})" if parts else name[:90]


if __name__ == "__main__":
    main()
