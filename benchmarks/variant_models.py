"""Cost of whole models of the four attentions at equal size: a training step, scoring, and memory.

    python benchmarks/variant_models.py [--length 1024] [--repeats 5]

The paper's 125M Llama with its attention in the upper half of the layers, random weights, float32, one thread. Each
repetition takes the models in turn; times are seconds of the process, so that other programs on the machine count
little; ratios are of medians. Memory is the peak of a process that does one training step, less that of an idle one
with the model.
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

NAMES = {"vanilla": "llama-125m-vanilla", "integral": "llama-125m-intg", "cog": "llama-125m-cog",
         "differential": "llama-125m-diff"}  # fmt: skip
MIB = 2**20


def built(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**named_model(NAMES[name]).config))


def train(model: Any, ids: torch.Tensor) -> None:
    """Forward and backward pass of [1, length] tokens; the optimizer's step is the same for all models."""
    model.train()
    model(ids, labels=ids).loss.backward()
    model.zero_grad()


def score(model: Any, ids: torch.Tensor) -> None:
    model.eval()
    with torch.inference_mode():
        model(ids)


def seconds(work: Any, *arguments: Any) -> float:
    started = time.process_time()
    work(*arguments)
    return time.process_time() - started


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(0, 32_000, (1, options.length), generator=torch.Generator().manual_seed(0))
    if options.memory:
        model = built(options.memory)
        before = psutil.Process().memory_info().rss / MIB
        train(model, ids)
        print(peak_mib() - before)
        return
    models = {name: built(name) for name in NAMES}
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(options.repeats + 1):  # the first one is not counted
        for name, model in models.items():
            for what, work in (("training", train), ("scoring", score)):
                used = seconds(work, model, ids)
                if number:
                    times.setdefault((name, what), []).append(used)
    rows = []
    for name in NAMES:
        command = [sys.executable, __file__, "--length", str(options.length), "--memory", name]
        memory = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row: list[Any] = [name, sum(weight.numel() for weight in models[name].parameters())]
        for what in ("training", "scoring"):
            used, reference = (statistics.median(times[key, what]) for key in (name, "vanilla"))
            ratios = [mine / theirs for mine, theirs in zip(times[name, what], times["vanilla", what], strict=True)]
            row += [options.length / used, f"{reference / used:.2f}", f"{1 / max(ratios):.2f}–{1 / min(ratios):.2f}"]
        rows.append([*row, round(memory)])
    headers = ["attention", "parameters", "training, tokens/s", "× vanilla", "range", "scoring, tokens/s", "× vanilla",
               "range", "MiB of a step"]  # fmt: skip
    print(tabulate(rows, headers, floatfmt=".1f", intfmt=",", disable_numparse=[3, 4, 6, 7]))


if __name__ == "__main__":
    main()
