"""evalkit beside lm-eval's Hugging Face model: one process, one model, the same documents, task by task in turn.

    python benchmarks/versus_lm_eval.py --limit 100 --template plain --dtype float32

Both score the same token sequences: under `plain` lm-eval's own requests, under `inst` the paper's sequences, which
lm-eval is handed whole. lm-eval runs at the best of its batch sizes, found on the first task. The machine's matrix rate
is measured in the same run, on the model's own layer shapes at the batch that evalkit uses; "of machine" is distinct
tokens × FLOPs a token over wall time, as a share of that rate; under `plain` the head runs on few of them, so it
overstates. Prints Markdown.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from evalkit.data import Library
from evalkit.models.load import load
from evalkit.models.locate import locate
from evalkit.prompts import CONTINUATION, EncodedQuestion, Prompter
from evalkit.scoring.budget import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import plan
from evalkit.suites import load_suite
from evalkit.tasks import load_questions
from evalkit.templates import SEGMENTS, load_template


def main() -> None:
    """Run the comparison and print its table."""
    arguments = parse()
    template = load_template(arguments.template)
    loaded = load(locate(arguments.model, say=note), dtype=arguments.dtype, device=arguments.device, say=note)
    prompter = Prompter(template, loaded.tokenizer, loaded.window)
    scored = frozenset(SEGMENTS.index(segment) for segment in template.score)
    engine = Engine(loaded.model, scored, auto_budget(loaded.model), note)
    questions = load_questions(load_suite("zeroshot8"), Library(arguments.data_dir), arguments.limit)
    encoded = {task: list(prompter.encode(members)) for task, members in questions.items()}
    rate = matrix_rate(loaded.model, engine.budget)
    flops = flops_per_token(loaded.model)
    peer = best_peer(loaded, next(iter(encoded.values())), template.name)
    rows = []
    for task, members in encoded.items():
        batches = plan(members, scored, engine.budget)
        ours, mine = timed(lambda batches=batches: [row for batch in batches for row in engine.score(batch)])
        theirs, other = timed(lambda members=members: peer(members))
        totals = {(row.subtask, row.doc_id, row.choice): likelihood(row, template.name) for row in mine}
        expected = [totals[q.question.subtask, q.question.doc_id, c] for q in members for c in range(len(q.sequences))]
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(expected, other, strict=True))
        distinct = sum(len(packed.row.tokens) for batch in batches for packed in batch.rows)
        rows.append((task, len(members), ours, theirs, distinct, worst))
        note(f"{task}: {theirs / ours:.2f}x")
    show(arguments, loaded, rows, rate, flops, engine.budget)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--template", default="plain", choices=("plain", "inst"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=None)
    return parser.parse_args()


def note(line: str) -> None:
    """News, on standard error."""
    print(line, file=sys.stderr, flush=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def likelihood(row: Any, template: str) -> float:
    """The log-likelihood that both score: the continuation's, or the whole sequence's."""
    if template == "plain":
        return float(row.ll_continuation)
    return float(sum(getattr(row, f"ll_{segment}") for segment in SEGMENTS))


def silence_lm_eval() -> None:
    """It warns at each batch size that the model is already loaded."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def best_peer(
    loaded: Any, sample: list[EncodedQuestion], template: str
) -> Callable[[list[EncodedQuestion]], list[float]]:
    """lm-eval's model at the fastest of its batch sizes."""
    from lm_eval.models.huggingface import HFLM

    silence_lm_eval()

    def scorer(size: int) -> Callable[[list[EncodedQuestion]], list[float]]:
        peer = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=size, softmax_dtype="float32")
        return lambda members: [found for found, _ in peer._loglikelihood_tokens(requests(members), disable_tqdm=True)]

    def requests(members: list[EncodedQuestion]) -> list[Any]:
        pairs = []
        for member in members:
            for sequence in member.sequences:
                ids = sequence.tokens.tolist()
                cut = int(np.argmax(sequence.segments == CONTINUATION)) if template == "plain" else 1
                pairs.append((("", str(len(pairs))), ids[:cut], ids[cut:]))
        return pairs

    sizes = (4, 8, 16, 32)
    times = {size: timed(lambda size=size: scorer(size)(sample[:24]))[0] for size in sizes}
    best = min(times, key=lambda size: times[size])
    note(f"lm-eval's best batch size: {best} ({', '.join(f'{s}: {t:.1f} s' for s, t in times.items())})")
    return scorer(best)


def flops_per_token(model: Any) -> float:
    """2 × the parameters of all matrices, the output head included; attention's own products are left out."""
    return 2.0 * sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2)


def matrix_rate(model: Any, tokens: int) -> float:
    """FLOP/s of the model's own weight shapes, one after the other as in a forward pass, best of three passes."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    inputs = {p.shape[1]: torch.randn(tokens, p.shape[1], dtype=p.dtype, device=p.device) for p in weights}
    best = 0.0
    with torch.inference_mode():
        for _ in range(3):
            seconds, _ = timed(lambda: [torch.nn.functional.linear(inputs[p.shape[1]], p).sum() * 0 for p in weights])
            best = max(best, sum(2.0 * tokens * p.numel() for p in weights) / seconds)
    return best


def show(arguments: argparse.Namespace, loaded: Any, rows: list[Any], rate: float, flops: float, budget: int) -> None:
    """The table, in Markdown."""
    print(f"\n{loaded.name}, {loaded.dtype} on {loaded.device}, template {arguments.template}, "
          f"{arguments.limit} documents of each task, {budget} tokens a batch, {torch.get_num_threads()} threads, "
          f"matrix rate {rate / 1e9:.0f} GFLOP/s\n")  # fmt: skip
    print("| task | documents | evalkit s | lm-eval s | ratio | documents/s | tokens/s | of machine | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    total = ("all", sum(r[1] for r in rows), *(sum(r[i] for r in rows) for i in (2, 3, 4)), max(r[5] for r in rows))
    for task, documents, ours, theirs, distinct, worst in [*rows, total]:
        share = distinct * flops / ours / rate
        print(f"| {task} | {documents} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f}× | {documents / ours:.1f} "
              f"| {distinct / ours:.0f} | {share:.0%} | {worst:.1e} |")  # fmt: skip


if __name__ == "__main__":
    main()
