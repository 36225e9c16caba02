"""Tokens of a run under several prompts: with shared trees, in one run for each prompt, and in one tree for all.

    python benchmarks/prompt_tokens.py [CHECKPOINT] [DOCUMENTS OF A TASK]

Prints for each task of zeroshot8 the input tokens of all shipped prompts (`--vary` with all three factors),
and what the run saves of those of one run for each prompt:

one by one      every sequence by itself
run by run      distinct tokens of one run for each prompt
as run          distinct tokens of a run under all prompts: orders of the options share a tree, templates do not
one tree        the same if all prompts of a document shared one tree, without prefixes that documents share

No weights are read. Counts are estimates from the sampled documents (`requests/planner.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from evalkit.benchmarks.run import planned
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone, window_of
from evalkit.requests.batches import TaskTokens
from evalkit.requests.planner import token_counts
from evalkit.requests.requests import Encoder, Facts, RunRequests
from evalkit.scoring.pack import distinct_tokens
from evalkit.suites.choice_requests import ChoiceRequests
from evalkit.suites.questions import Question

VARY = ("template", "choice_order", "system_prompt")


def main(model: str = "demo", sample: int = 60) -> None:
    """Print the table."""
    plan = planned(model, {"vary": VARY}, silent)
    tokenizer = tokenizer_alone(plan.checkpoint, silent)
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, silent)
    encoder = Encoder(tokenizer, Facts(window))
    print(
        f"{'task':14} {'prompts':>7} {'one by one':>12} {'run by run':>12} {'as run':>12} {'one tree':>12} {'saved':>6}"
    )
    parts: Any = plan.sampled(sample).tasks
    for task, members in groupby(parts, lambda part: part.task):
        print(counted(task, list(members), encoder))


def counted(task: str, parts: Sequence[ChoiceRequests], encoder: Encoder) -> str:
    """Return the line of a task, in millions of tokens."""
    single = [tokens_of([one], encoder) for part in parts for one in by_order(part)]
    as_run = tokens_of(parts, encoder)
    alone = sum(one.alone for one in single)
    run_by_run = sum(one.distinct for one in single)
    sequences = zip(*(part.scored(encoder) for part in parts), strict=True)
    whole = sum(
        distinct_tokens([score.tokens for document in documents for score in document.scores])
        for documents in sequences
    )
    scale = as_run.documents / as_run.sampled
    numbers = (alone, run_by_run, as_run.distinct, scale * whole)
    millions = " ".join(f"{number / 1e6:11.2f}M" for number in numbers)
    return f"{task:14} {len(single):7} {millions} {100 * (1 - as_run.distinct / run_by_run):11.1f}%"


def tokens_of(parts: Sequence[ChoiceRequests], encoder: Encoder) -> TaskTokens:
    """Return the estimate of a task under some prompts."""
    [tokens] = token_counts(RunRequests(parts), encoder)
    return tokens


def by_order(part: ChoiceRequests) -> Iterator[ChoiceRequests]:
    """Yield the requests of a prompt with each order of the options by itself."""
    count = len(part.orders)
    for number, order in enumerate(part.orders):
        yield replace(part, questions=[in_order(one, number, count) for one in part.questions], orders=[order])


def in_order(question: Question, number: int, count: int) -> Question:
    """Return a question with the choices of one of several orders, which follow each other."""
    size = len(question.contexts) // count
    members = slice(number * size, (number + 1) * size)
    names = ("contexts", "continuations", "gaps", "choices")
    texts: dict[str, Any] = {name: getattr(question, name)[members] for name in names}
    return replace(question, **texts)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
