"""Round a checkpoint's weights to a few bits each: a second checkpoint to compare with the first.

    python examples/round_weights.py demo rounded-4-bit --bits 4 --group 64

Each row of a linear layer is cut into groups; a group's weights are rounded to 2^bits values at equal distances from
its smallest to its largest (round to nearest, asymmetric). Embeddings, norms and the output head are not changed. The
output folder has the rounded values in float32, so it loads like any other checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from evalkit.models.loading.spec import model_spec


def rounded(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Round each group of a row to 2^bits values.

    Args:
        weight: [rows, columns]; `group` must divide the columns.
        bits: per weight, without the group's two parameters (smallest value, step).
        group: number of neighbouring weights of a row that share these.

    Returns:
        [rows, columns], in the dtype of `weight`.
    """
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(weight.dtype).tiny)
    return (low + ((groups - low) / step).round() * step).flatten(1)


def main() -> None:
    """Load a checkpoint, round its weights, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="checkpoint, as for evalkit run --model")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    asked = parser.parse_args()
    spec = model_spec(asked.checkpoint, device="cpu", dtype="float32")
    loaded = spec.load(spec.locate(print), print)
    layers = [layer for layer in loaded.model.base_model.modules() if isinstance(layer, torch.nn.Linear)]
    for layer in layers:
        layer.weight.data = rounded(layer.weight.data, asked.bits, asked.group)
    loaded.model.save_pretrained(asked.output)
    loaded.tokenizer.save_pretrained(asked.output)
    count = sum(layer.weight.numel() for layer in layers)
    print(f"{asked.output}: {count:,} weights of {len(layers)} layers, {asked.bits} bits in groups of {asked.group}")


if __name__ == "__main__":
    main()
