"""Speed of evalkit's generation and of transformers' own `generate` on the same LongBench prompts, in one run.

    python benchmarks/longbench_generation.py --data-dir DOCUMENTS --tasks trec,lcc --rows 6 --max-prompt-tokens 3500

Both get the same token ids, greedily. transformers runs as in the official code, one prompt at a time to
the task's full length; evalkit in batches, until the scored part is complete. Prints Markdown: seconds of each, the
ratio, evalkit's milliseconds per 1,000 prompt tokens and per generated token, the number of rows with equal scores
and with equal tokens up to the end of evalkit's; and the prefill's share of the matrix rate, without attention.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from versus_lm_eval import matrices, matrix_rate

from evalkit.data.sampling import FirstDocuments
from evalkit.generation.generator import Generator
from evalkit.generation.prompts import CHUNK, Prompt, capacity_of, end_tokens
from evalkit.generation.rows import Generation
from evalkit.longcontext.longbench.data import LongBenchDocument, load_rows
from evalkit.longcontext.longbench.official import generation_requests, score_prediction
from evalkit.longcontext.longbench.protocol import Task, find_task
from evalkit.models.loading.load import LoadedModel, load
from evalkit.models.loading.locate import locate

SHORT = "multifieldqa_en,hotpotqa,trec,triviaqa,passage_count,lcc"


def main() -> None:
    """Time every task and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tasks", default=SHORT)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--max-prompt-tokens", type=int, default=7500)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    loaded = load(locate(options.model), dtype=options.dtype, device=options.device)
    generator = Generator(loaded.model, tokenizer=loaded.tokenizer)
    print(
        "| task | rows | prompt tokens | transformers, s | evalkit, s | ratio | ms / 1,000 prompt | ms / new | alike |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    totals, arithmetic, prefills = [0.0, 0.0], 0.0, 0.0
    for name in options.tasks.split(","):
        task = find_task(name)
        rows = load_rows(task, options.data_dir, FirstDocuments(options.rows)).documents
        ends = end_tokens(loaded.model, loaded.tokenizer)
        asked = generation_requests(task, rows, loaded.tokenizer, ends, options.max_prompt_tokens, loaded.window)
        prompts = [one.prompt for one in asked]
        theirs, slow = transformers_generations(task, prompts, loaded)
        ours, fast, prefill, steps = evalkit_generations(prompts, loaded, generator)
        totals = [totals[0] + slow, totals[1] + fast]
        prefills += prefill
        tokens, new = sum(len(p.tokens) for p in prompts), sum(len(g.tokens) for g in ours)
        arithmetic += 2.0 * tokens * matrices(loaded.model)[0]
        alike = sum(same(task, row, a, b, loaded) for row, a, b in zip(rows, ours, theirs, strict=True))
        speeds = f"{1e6 * prefill / tokens:.0f}", f"{1e3 * steps / max(1, new):.0f}"
        times = f"{slow:.1f}", f"{fast:.1f}", f"{slow / fast:.2f}"
        cells = (name, len(rows), f"{tokens:,}", *times, *speeds, f"{alike} of {len(rows)}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"| all | | | {totals[0]:.1f} | {totals[1]:.1f} | {totals[0] / totals[1]:.2f} | | | |")
    rate = matrix_rate(loaded.model, CHUNK)
    print(
        f"\nprefill: {arithmetic / prefills / rate:.0%} of the matrix rate, {rate / 1e12:.2f} TFLOP/s at {CHUNK} tokens"
    )


def transformers_generations(task: Task, prompts: list[Prompt], loaded: LoadedModel) -> tuple[list[list[int]], float]:
    """Return the token ids of each row by `generate`, one at a time, and seconds."""
    found = []
    started = time.perf_counter()
    for one in prompts:
        ids = torch.from_numpy(one.tokens[None]).to(loaded.model.device)
        settings: dict[str, Any] = {"max_new_tokens": one.max_new_tokens, "do_sample": False, "pad_token_id": 0}
        if task.newline_ends:
            settings |= {"eos_token_id": sorted(one.stops.ends), "min_new_tokens": 1}
        with torch.inference_mode():
            out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        found.append(out[0, len(one.tokens) :].tolist())
    return found, time.perf_counter() - started


def evalkit_generations(
    prompts: list[Prompt], loaded: LoadedModel, generator: Generator
) -> tuple[list[Generation], float, float, float]:
    """Return generations in the rows' order, and seconds: total, prompts, generated tokens."""
    room = capacity_of(generator, None, loaded.window)
    found: dict[int, Generation] = {}
    started = time.perf_counter()
    for batch in room.batches(prompts):
        found |= {one.index: made for one, made in zip(batch, generator.generate(batch), strict=True)}
    seconds = time.perf_counter() - started
    prefill = sum(made.prompt_seconds for made in found.values())
    return [found[one.index] for one in prompts], seconds, prefill, seconds - prefill


def same(task: Task, row: LongBenchDocument, ours: Generation, theirs: list[int], loaded: LoadedModel) -> bool:
    """Return whether the tokens agree up to the end of ours, and whether the scores agree."""
    texts = [loaded.tokenizer.decode(ids, skip_special_tokens=True) for ids in (ours.tokens, theirs)]
    one, other = (score_prediction(task, text, row.answers, row.all_classes) for text in texts)
    return ours.tokens == theirs[: len(ours.tokens)] and one == other


if __name__ == "__main__":
    main()
