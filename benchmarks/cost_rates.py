"""Does `evalkit cost` time a forward pass as torch.utils.benchmark does? Both in one process, in turn.

    python benchmarks/cost_rates.py [--model demo] [--tokens 256] [--rounds 15]

Each round times prefill of the same random tokens by `evalkit.studies.cost.generate` and by `torch.utils.benchmark`, in
another order each time, after two passes that are not counted, as many as the latter makes. Printed is the ratio of the
two rates with its 95 % interval over rounds. The exit code is 1 if the interval is not within 0.95 to 1.05: the
rates differ, or the machine is too noisy for so few rounds.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
from torch.utils.benchmark import Timer

from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.studies.cost import generate, times_as_fast


def main() -> None:
    """Measure in turn and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    model = load(locate(options.model, say=print), device=options.device, dtype=options.dtype, say=print).model
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (options.batch, options.tokens), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        token: torch.Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        return token

    timer = Timer("forward()", globals={"forward": forward}, num_threads=torch.get_num_threads())
    ways = {
        "evalkit": lambda: [generate(model, ids, 1)[0] for _ in range(3)][-1],
        "torch": lambda: timer.timeit(1).mean,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):  # the first round warms up
        for name in np.roll([*ways], number).tolist():
            seconds[name].append(ways[name]())
    ours, theirs = (np.array(seconds[name][1:]) for name in ways)
    times = times_as_fast(ours, theirs)
    print(f"{options.batch} × {options.tokens} tokens, {options.rounds} rounds, {torch.get_num_threads()} threads")
    for name, of in (("evalkit", ours), ("torch.utils.benchmark", theirs)):
        print(f"{name}: median {ids.numel() / np.median(of):,.1f} tokens/s")
    print(f"evalkit / torch: {times['ratio']:.3f} ({times['low']:.3f} to {times['high']:.3f})")
    sys.exit(not 0.95 <= times["low"] <= times["high"] <= 1.05)


if __name__ == "__main__":
    main()
