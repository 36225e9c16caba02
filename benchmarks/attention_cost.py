"""Cost of an analysis of attention: measures beside one forward pass over the same tokens, in one process.

    python benchmarks/attention_cost.py --sample 200 --dtype bfloat16

Each sequence is computed three times in turn: by the base model alone, with all measures but the ranks, and with the
ranks of the last four layers alone. Printed: seconds of wall time and their ratios, tokens, and the peak resident
memory beyond that of the loaded model.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sample", type=int, default=25, help="documents of each task, or windows of a text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", help="context window, for a text")
    parser.add_argument("--text", type=Path, help="text file in place of the tasks' documents")
    parser.add_argument("--layers", default="", help="layers, separated by commas; default: all")
    parser.add_argument("--without-rank", action="store_true")
    measure(parser.parse_args())


def measure(arguments: argparse.Namespace) -> None:
    """Compute each sequence in turn in each way."""
    import numpy as np
    import torch

    from evalkit.attention.documents import AttentionRequest, batches_of, plan_attention
    from evalkit.attention.groups import GROUPS, RANK, AttentionRow
    from evalkit.attention.measures import Analysis
    from evalkit.benchmarks.request import request_of
    from evalkit.benchmarks.session import ModelHolder
    from evalkit.requests.batches import Batch, Budget

    names = ("sample", "dtype", "device", "context", "text")
    options = {name: getattr(arguments, name) for name in names} | {"layers": arguments.layers or None}
    plan = plan_attention(request_of(AttentionRequest, arguments.model, options), print)
    loaded = ModelHolder().model_of(plan, print)
    layers = tuple(plan.manifest["specification"]["layers"])
    rest = tuple(group for group in GROUPS if group != RANK)
    ways: dict[str, Any] = {"forward pass": None, "all measures but the rank": rest}
    if not arguments.without_rank:
        ways["rank, last four layers" if not layers else "rank"] = (RANK,)
    computers = {
        name: Analysis({"measures": groups, "layers": layers}, loaded, Budget(), print)
        for name, groups in ways.items()
        if groups
    }
    batches = list(batches_of(plan, loaded.window, loaded.tokenizer, set(), print))  # type: ignore[arg-type]
    sequences = [one for batch in batches for one in batch.content]
    seconds = dict.fromkeys(ways, 0.0)
    with torch.no_grad():
        loaded.model.base_model(torch.tensor(sequences[0].tokens[None].astype(np.int64)).to(loaded.device))
        before = peak()
        for one in sequences:
            for name in ways:
                started = time.perf_counter()
                if name in computers:
                    computers[name].compute(Batch("", 0, (one,), AttentionRow, 1.0, 1))
                else:
                    ids = torch.tensor(one.tokens[None].astype(np.int64)).to(loaded.device)
                    loaded.model.base_model(input_ids=ids, use_cache=False)
                    if ids.is_cuda:
                        torch.cuda.synchronize()
                seconds[name] += time.perf_counter() - started
    lengths = [len(one.tokens) for one in sequences]
    print(f"\n{len(sequences)} sequences, {sum(lengths):,} tokens, the longest {max(lengths):,}; {loaded.dtype}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    print("| | seconds | ratio |\n|---|---|---|")
    for name, spent in seconds.items():
        print(f"| {name} | {spent:.1f} | {spent / seconds['forward pass']:.2f} |")
    print(f"peak resident memory beyond the loaded model: {peak() - before:,.0f} MiB")


def peak() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
