"""Cost of whole models of the four attentions at equal size: a training step, scoring, and memory.

    python benchmarks/variant_models.py [--length 1024] [--repeats 5]
    python benchmarks/variant_models.py --device cuda --dtype bfloat16 --size 1.2b --length 2048 --batch 4

The paper's Llama of 125 M or 1.2 B parameters with its attention in the upper half of the layers, random weights, one
thread. Each repetition takes the models in turn; ratios are of medians. On a CPU, times are seconds of the process, so
that other programs on the machine count little, and memory is the peak of a process that does one training step, less
that of an idle one with the model. On a GPU, times are of the clock, and memory is the peak allocated beyond the model.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
import torch
from tabulate import tabulate
from transformers import AutoConfig, AutoModelForCausalLM

import evalkit.models.auto  # noqa: F401
from evalkit.models.zoo.named import named_model

NAMES = {"vanilla": "vanilla", "integral": "intg", "cog": "cog", "differential": "diff"}
MIB = 2**20


def built(name: str, options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    # There is no model of cog of 1.2 B parameters: the attention is that of 125 M, the layers are those of integral
    config = named_model(f"llama-{'125m' if name == 'cog' else options.size}-{NAMES[name]}").config
    if name == "cog":
        sizes = named_model(f"llama-{options.size}-intg").config
        config |= {key: sizes[key] for key in config if key in sizes and key != "attention_variant"}
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(getattr(torch, options.dtype))


def train(model: Any, ids: torch.Tensor) -> None:
    """Forward and backward pass of [batch, length] tokens; the optimizer's step is the same for all models."""
    model.train()
    model(ids, labels=ids).loss.backward()
    model.zero_grad()


def score(model: Any, ids: torch.Tensor) -> None:
    model.eval()
    with torch.inference_mode():
        model(ids)


def seconds(work: Any, model: Any, ids: torch.Tensor) -> float:
    """Return the seconds of the process on a CPU, of the clock on a GPU."""
    if not ids.is_cuda:
        started = time.process_time()
        work(model, ids)
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work(model, ids)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def allocated_mib(model: Any, ids: torch.Tensor) -> float:
    """Return the peak of a GPU's allocated memory in a training step, beyond what is allocated before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(model, ids)
    return (torch.cuda.max_memory_allocated() - before) / MIB


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", choices=["125m", "1.2b"], default="125m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(0, 32_000, (options.batch, options.length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(options.device)
    if options.memory:
        model = built(options.memory, options)
        before = psutil.Process().memory_info().rss / MIB
        train(model, ids)
        print(peak_mib() - before)
        return
    models = {name: built(name, options) for name in NAMES}
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(options.repeats + 1):  # the first one is not counted
        for name, model in models.items():
            for what, work in (("training", train), ("scoring", score)):
                used = seconds(work, model, ids)
                if number:
                    times.setdefault((name, what), []).append(used)
    rows = []
    for name in NAMES:
        if ids.is_cuda:
            memory = allocated_mib(models[name], ids)
        else:
            command = [sys.executable, __file__, *sys.argv[1:], "--memory", name]
            memory = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row: list[Any] = [name, sum(weight.numel() for weight in models[name].parameters())]
        for what in ("training", "scoring"):
            used, reference = (statistics.median(times[key, what]) for key in (name, "vanilla"))
            ratios = [mine / theirs for mine, theirs in zip(times[name, what], times["vanilla", what], strict=True)]
            row += [ids.numel() / used, f"{reference / used:.2f}", f"{1 / max(ratios):.2f}–{1 / min(ratios):.2f}"]
        rows.append([*row, round(memory)])
    headers = ["attention", "parameters", "training, tokens/s", "× vanilla", "range", "scoring, tokens/s", "× vanilla",
               "range", "MiB of a step"]  # fmt: skip
    print(tabulate(rows, headers, floatfmt=".1f", intfmt=",", disable_numparse=[3, 4, 6, 7]))


if __name__ == "__main__":
    main()
