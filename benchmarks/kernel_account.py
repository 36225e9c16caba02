"""Account of a batch: the time of each kernel beside its own limit, and the share of the time that is accounted for.

    python benchmarks/kernel_account.py --tasks arc_easy hellaswag boolq --protocols plain inst --dtype bfloat16

One batch of real documents of each task is scored on a CPU, first alone, then with a clock around every operation of
torch. Seconds are CPU seconds of one thread (`--threads 1`, the default), which other programs on the machine disturb
little; with more threads they are wall time. Each operation's limit is measured in the same run:

- matrix products, also attention's: their FLOPs over the rate of the model's own matrices at the batch's length;
- all others: the bytes that they read and write over the rate of an addition of hidden states, which stay in the cache.

"Page faults" are those of one batch alone: memory that the system maps anew, which slows the kernel that uses it first.
Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from suite_documents import choice_requests, encoded, sequences_of
from torch.utils._python_dispatch import TorchDispatchMode
from versus_lm_eval import matrices, note

from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.forward import Forward
from evalkit.scoring.pack import TreeBatch, plan

VIEWS = ("slice", "transpose", "view", "reshape", "select", "unsqueeze", "expand")
"""Operations that move no data. `reshape` may copy, but in these batches it does not."""
LISTED = 0.005
"""Share of the time from which a kernel has a line of its own."""


@dataclass
class Kernel:
    """Sums over the calls of one kernel in one batch."""

    seconds: float = 0.0
    calls: int = 0
    flops: float = 0.0
    """Of matrix products and attention."""
    traffic: float = 0.0
    """Bytes read and written by all others."""


class Account(TorchDispatchMode):
    """Time of each operation inside the context, by kernel."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.kernels: dict[str, Kernel] = defaultdict(Kernel)
        self._clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run and time one operation."""
        started = self._clock()
        result = func(*args, **(kwargs or {}))
        seconds = self._clock() - started
        name = func.overloadpacket.__name__
        inputs = [one for one in tensors_of(args) if one.ndim]
        kernel = self.kernels[label(name, inputs)]
        kernel.seconds += seconds
        kernel.calls += 1
        if name in ("linear", "scaled_dot_product_attention"):
            kernel.flops += flops(name, inputs)
        elif isinstance(result, torch.Tensor) and moves_data(name, result, inputs):
            kernel.traffic += sum(one.numel() * one.element_size() for one in (*inputs, result))
        return result


def tensors_of(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments and in their lists."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from tensors_of(one)


def moves_data(name: str, result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether an operation reads and writes data; a conversion to a tensor's own dtype does not."""
    if name in VIEWS:
        return False
    return name.endswith("_") or all(result.data_ptr() != one.data_ptr() for one in inputs)


def label(name: str, inputs: Sequence[torch.Tensor]) -> str:
    """Return a kernel's name in the table, with the dtype and the last dimension of its first input."""
    if name == "linear":
        return "matrix products of the layers" if inputs[0].ndim == 3 else "matrix products of the output head"
    if name == "scaled_dot_product_attention":
        return "attention of the tiles"
    if not inputs or name in VIEWS:
        return "views, empty and constant tensors"
    return f"{name}, {str(inputs[0].dtype).removeprefix('torch.')} [… {inputs[0].shape[-1]}]"


def flops(name: str, inputs: Sequence[torch.Tensor]) -> float:
    """Return the FLOPs of `linear` (input, weight) or of attention (query, key, value)."""
    first, second = inputs[:2]
    if name == "linear":
        return 2.0 * first.numel() * second.shape[0]
    return 4.0 * first.numel() * second.shape[2]


def main() -> None:
    """Print the account of a batch of each task and protocol."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tasks", nargs="+", default=("arc_easy", "hellaswag", "boolq"))
    parser.add_argument("--protocols", nargs="+", default=("plain", "inst"), choices=("plain", "inst"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=100, help="documents of each task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    loaded = load(locate(arguments.model, say=note), dtype=arguments.dtype, device="cpu", say=note)
    budget = auto_budget(loaded.model)
    Engine(loaded.model, budget, note)  # prepares the process as a run does
    forward = Forward(loaded.model, "tiles")
    for protocol in arguments.protocols:
        for task, batch in first_batches(loaded, protocol, arguments, budget):
            print(f"\n### {task}, `{protocol}`, {arguments.dtype}\n")
            print("\n".join(account(forward, loaded.model, batch, clock, arguments.repeats)), flush=True)


def first_batches(
    loaded: Any, protocol: str, arguments: argparse.Namespace, budget: int
) -> Iterator[tuple[str, TreeBatch]]:
    """Yield each task's first batch."""
    for task, requests in choice_requests(protocol, arguments.tasks, arguments.limit).items():
        sequences = sequences_of(encoded(requests, loaded.tokenizer, loaded.window))
        yield task, plan(sequences, budget)[0].of(sequences)


def account(forward: Forward, model: Any, batch: TreeBatch, clock: Callable[[], float], repeats: int) -> Iterator[str]:
    """Score a batch; yield the lines of its account."""
    tree, trunk = batch.tree, forward.trunk(batch.trunk)

    def score() -> float:
        started = clock()
        forward.score(tree, trunk)
        return clock() - started

    score()
    faults = page_faults()
    alone = [score() for _ in range(repeats)]
    faults = (page_faults() - faults) // repeats
    accounts = [Account(clock) for _ in range(repeats)]
    for one in accounts:
        with one:
            score()
    # The repetition of median time, so that its parts add up
    middle = sorted(accounts, key=lambda one: sum(kernel.seconds for kernel in one.kernels.values()))[repeats // 2]
    rate, bandwidth = matrix_rate(model, len(tree.tokens), clock), cache_bandwidth(model, len(tree.tokens), clock)
    total = statistics.median(alone)
    products = sum(kernel.flops for name, kernel in middle.kernels.items() if name.startswith("matrix products"))
    yield (
        f"{len(tree.tokens)} tokens after a trunk of {len(batch.trunk)}, {torch.get_num_threads()} threads: "
        f"{total:.2f} s ({min(alone):.2f} to {max(alone):.2f}), {faults:,} page faults. Matrix rate "
        f"{rate / 1e9:.0f} GFLOP/s, of which {products / rate / total:.0%} is used; cache bandwidth "
        f"{bandwidth / 1e9:.0f} GB/s.\n"
    )
    yield "| kernel | calls | ms | of the time | of its limit |\n|---|---|---|---|---|"
    yield from lines(middle.kernels, total, rate, bandwidth)


def lines(kernels: dict[str, Kernel], total: float, rate: float, bandwidth: float) -> Iterator[str]:
    """Yield a line for each large kernel, one for the small ones, and one for the rest of the time."""
    ordered = sorted(kernels.items(), key=lambda pair: -pair[1].seconds)
    small = Kernel()
    for name, kernel in ordered:
        if kernel.seconds >= LISTED * total:
            yield line(name, kernel, total, rate, bandwidth)
        else:
            small.seconds, small.calls = small.seconds + kernel.seconds, small.calls + kernel.calls
            small.flops, small.traffic = small.flops + kernel.flops, small.traffic + kernel.traffic
    yield line("smaller ones", small, total, rate, bandwidth)
    known = sum(kernel.seconds for kernel in kernels.values())
    yield f"| accounted for | | {known * 1e3:.0f} | {known / total:.0%} | |"


def line(name: str, kernel: Kernel, total: float, rate: float, bandwidth: float) -> str:
    """Return a kernel's line; its limit is the time that its FLOPs and bytes need at the measured rates."""
    limit = kernel.flops / rate + kernel.traffic / bandwidth
    share = f"{limit / kernel.seconds:.0%}" if limit else "no data moved"
    return f"| {name} | {kernel.calls} | {kernel.seconds * 1e3:.0f} | {kernel.seconds / total:.1%} | {share} |"


def page_faults() -> int:
    """Return the page faults of this process so far that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def matrix_rate(model: Any, tokens: int, clock: Callable[[], float]) -> float:
    """Measure FLOP/s of the layers' matrices at a number of tokens, in the order of a forward pass, best of three."""
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    weights = [one for one in model.parameters() if one.ndim == 2 and all(one is not end for end in ends)]
    inputs = {one.shape[1]: torch.randn(tokens, one.shape[1], dtype=one.dtype) for one in weights}

    def multiply() -> None:
        for one in weights:
            torch.nn.functional.linear(inputs[one.shape[1]], one)

    return 2.0 * tokens * matrices(model)[0] / best(multiply, clock)


def cache_bandwidth(model: Any, tokens: int, clock: Callable[[], float]) -> float:
    """Measure bytes/s of an addition of two tensors like the hidden states, which stay in the cache, best of three."""
    left, right, out = torch.zeros(3, tokens, model.config.get_text_config().hidden_size, dtype=model.dtype)
    calls = 50

    def add() -> None:
        for _ in range(calls):
            torch.add(left, right, out=out)

    return calls * 3.0 * out.numel() * out.element_size() / best(add, clock)


@torch.inference_mode()
def best(work: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the shortest of three times, after one that is not counted."""
    work()
    times = []
    for _ in range(3):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


if __name__ == "__main__":
    main()
