"""Round a checkpoint's weights to a few bits each: a second checkpoint to compare with the first.

    python examples/round_weights.py demo rounded-4-bit --bits 4 --group 64

Each row of a linear layer is cut into groups; a group's weights are rounded to 2^bits values at equal distances from
its smallest to its largest (round to nearest, asymmetric). Embeddings, norms and the output head are not changed. The
output folder has the rounded values in float32, so it loads like any other checkpoint. Without a folder,
`evalkit run CKPT --quantise w4g64` computes with the same values.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evalkit.models.loading.spec import model_spec
from evalkit.models.quantisation import Rounding


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
    layers = Rounding(asked.checkpoint, loaded.model, f"w{asked.bits}g{asked.group}").layers
    loaded.model.save_pretrained(asked.output)
    loaded.tokenizer.save_pretrained(asked.output)
    count = sum(layer.weight.numel() for layer in layers)
    print(f"{asked.output}: {count:,} weights of {len(layers)} layers, {asked.bits} bits in groups of {asked.group}")


if __name__ == "__main__":
    main()
