"""Prefill and decoding of evalkit's generator under the machine's limits, measured in the same run.

    python benchmarks/generation_rates.py --tokens 7500 --rows 1,8
    python benchmarks/generation_rates.py --model CKPT --device cuda --dtype bfloat16

Random tokens, without end tokens, so that every row runs to its length. The necessary arithmetic, and the limit of a
step of decoding, are those of `evalkit cost` (`evalkit.studies.cost.floors`). "Of rate" is that arithmetic over the
time, as a share of the rate at which the model's own matrices multiply a batch of 2,048 tokens. Prints Markdown.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from versus_lm_eval import bandwidth, matrix_rate, note

from evalkit.generation.generator import Generator
from evalkit.generation.prompts import Prompt, Stops
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.studies.cost import floors


def main() -> None:
    """Measure every batch and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=7500, help="length of each prompt")
    parser.add_argument("--rows", default="1,8", help="prompts of each batch")
    parser.add_argument("--new", type=int, default=32, help="generated tokens")
    options = parser.parse_args()
    loaded = load(locate(options.model, say=note), dtype=options.dtype, device=options.device, say=note)
    model = loaded.model
    generator = Generator(model, tokenizer=loaded.tokenizer)
    rate, speed = matrix_rate(model, 2048), bandwidth(model.device)
    print(f"{loaded.name}, {options.dtype}: {rate / 1e9:,.0f} GFLOP/s, {speed / 1e9:,.0f} GB/s\n")
    head = "rows | prompt tokens | s per prompt | arithmetic (TFLOP) | of rate | ms per step | limit, ms | share"
    print(f"| {head} |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for rows in map(int, options.rows.split(",")):
        measure(generator, model, rows, options.tokens, options.new, rate, speed)


def measure(generator: Generator, model: Any, rows: int, tokens: int, new: int, rate: float, speed: float) -> None:
    """Generate one batch and print its row of the table."""
    rng = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # The rows differ from the first token on, so that none is copied from another
    starts = rng.permutation(vocabulary)[:rows]
    ids = [np.append(start, rng.integers(0, vocabulary, tokens - 1)).astype(np.int64) for start in starts]
    prompts = [Prompt(i, one, new, Stops(frozenset())) for i, one in enumerate(ids)]
    generator.generate([Prompt(0, ids[0][:64], 2, Stops(frozenset()))])
    found = generator.generate(prompts)
    assert all(len(one.tokens) == new for one in found)
    prefill = sum(one.prompt_seconds for one in found) / rows
    step = sum(one.seconds - one.prompt_seconds for one in found) / (new - 1)
    cache = rows * tokens * generator.token_bytes
    prompts_least, limit = floors(model, rows, tokens, new, cache, (rate, speed))
    least = prompts_least / rows
    sizes = f"{least * rate / 1e12:.2f}", f"{least / prefill:.0%}"
    steps = f"{1e3 * step:.1f}", f"{1e3 * limit:.1f}", f"{limit / step:.0%}"
    cells = (rows, f"{tokens:,}", f"{prefill:.2f}", *sizes, *steps)
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
