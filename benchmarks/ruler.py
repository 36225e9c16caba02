"""Prefill of RULER's prompts under the machine's limits, and what their common haystacks save.

    python benchmarks/ruler.py --lengths 4096 --samples 5
    python benchmarks/ruler.py --model CKPT --lengths 2048,8192 --tasks niah_single_2,vt --device cuda

For each task and length: tokens of all prompts, and the distinct ones that are computed, since samples share the
beginning of their haystack in whole chunks; the arithmetic of these (2 × the parameters of the layers' matrices a
token, 4 × hidden size × layers for each pair of a query and an earlier key, the head for one position); its floor at
the rate of the model's own matrices on a chunk, measured anew before each task; the measured seconds, and the share of
the rate. The last column is the rest: likelihoods of eight answers a sample, and generation. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from versus_lm_eval import matrices, matrix_rate, note

from evalkit.benchmarks.request import request_of
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import CHUNK, Prompt, capacity_of, end_tokens
from evalkit.longcontext.ruler.benchmark import Ruler, RulerRequest
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate


def main() -> None:
    """Measure every task and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", default="4096")
    parser.add_argument("--tasks", default=None)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--new", type=int, default=None, help="generate at most so many tokens")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("lengths", "tasks", "samples", "dtype", "device")}
    plan = Ruler().plan(request_of(RulerRequest, options.model, settings), note)
    loaded = load(locate(options.model, say=note), dtype=options.dtype, device=options.device, say=note)
    generator = Generator(loaded.model, tokenizer=loaded.tokenizer)
    room = capacity_of(generator, None, loaded.window)
    ends = end_tokens(loaded.model, loaded.tokenizer)
    print("| task | prompts | tokens | distinct | saved | TFLOP | floor, s | prefill, s | of rate | rest, s |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    totals = [0.0] * 7
    for task in plan.tasks:
        prompts = [request.prompt for request in Ruler().generation_requests(plan, task, ends, loaded.tokenizer)]
        if options.new:
            prompts = [limited(prompt, options.new) for prompt in prompts]
        rate, started = matrix_rate(loaded.model, CHUNK), time.perf_counter()
        made = [row for batch in room.batches(prompts) for row in generator.generate(batch)]
        seconds = time.perf_counter() - started
        tokens, reused = sum(len(row.prompt.tokens) for row in made), sum(row.reused for row in made)
        flop = sum(arithmetic(loaded.model, len(row.prompt.tokens), row.reused) for row in made)
        prefill = sum(row.prompt_seconds for row in made)
        numbers = (len(made), tokens, tokens - reused, flop, flop / rate, prefill, seconds - prefill)
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        print_row(task, numbers)
    print_row("all", totals)


def limited(prompt: Prompt, new: int) -> Prompt:
    """Return a prompt of which fewer tokens are generated."""
    return replace(prompt, max_new_tokens=min(new, prompt.max_new_tokens))


def arithmetic(model: Any, tokens: int, reused: int) -> float:
    """Return the floating-point operations of a prompt whose first tokens are copied."""
    layers, head = matrices(model)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    pairs = tokens * (tokens + 1) / 2 - reused * (reused + 1) / 2
    return 2.0 * layers * (tokens - reused) + 2.0 * head + 4.0 * width * config.num_hidden_layers * pairs


def print_row(task: str, numbers: Any) -> None:
    """Print a row of the table."""
    prompts, tokens, distinct, flop, floor, prefill, rest = numbers
    cells = (task, f"{prompts:.0f}", f"{tokens:,.0f}", f"{distinct:,.0f}", f"{1 - distinct / tokens:.0%}")
    cells += (f"{flop / 1e12:.2f}", f"{floor:.1f}", f"{prefill:.1f}", f"{floor / prefill:.0%}", f"{rest:.1f}")
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
