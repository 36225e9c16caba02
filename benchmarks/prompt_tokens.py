"""Tokens of a run under several prompts: with shared trees, in one run for each prompt, and in one tree for all.

    python benchmarks/prompt_tokens.py [CHECKPOINT] [DOCUMENTS OF A TASK]

Prints for each task of zeroshot8 the input tokens of all shipped prompts (`--vary` with all three factors),
and what the run saves of those of one run for each prompt:

one by one      every sequence by itself
run by run      distinct tokens of one run for each prompt
as run          distinct tokens of a run under all prompts: orders of the options share a tree, templates do not
one tree        the same if all prompts of a document shared one tree, without prefixes that documents share

No weights are read. Counts are estimates from the sampled documents (`scoring/sequences.py`).
"""

from __future__ import annotations

import sys

from evalkit.benchmarks.multiple_choice.scoring import task_tokens

from evalkit.benchmarks.run import planned
from evalkit.benchmarks.suite_plan import ChoicePlan
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone, window_of
from evalkit.scoring.pack import distinct_tokens
from evalkit.suites.prompt_sets import in_orders, orders_of, under_order
from evalkit.suites.prompts import Prompter
from evalkit.suites.question_loading import load_questions
from evalkit.suites.questions import Question

VARY = ("template", "choice_order", "system_prompt")


def main(model: str = "demo", sample: int = 60) -> None:
    """Print the table."""
    plan = planned(model, {"vary": VARY}, silent)
    assert isinstance(plan, ChoicePlan)
    tokenizer = tokenizer_alone(plan.checkpoint, silent)
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, silent)
    prompters = {one.name: Prompter(one, tokenizer, window) for one in plan.prompts.templates.values()}
    print(
        f"{'task':14} {'prompts':>7} {'one by one':>12} {'run by run':>12} {'as run':>12} {'one tree':>12} {'saved':>6}"
    )
    for task, questions in load_questions(plan.suite, plan.library, others=plan.others, estimate=sample).items():
        print(counted(plan, prompters, task, questions))


def counted(plan: ChoicePlan, prompters: dict[str, Prompter], task: str, questions: list[Question]) -> str:
    """Return the line of a task, in millions of tokens."""
    base, orders = plan.template.name, orders_of(questions, plan.prompts.choice_orders)
    ordered = [in_orders(one, orders) for one in questions]
    under = [[under_order(one, order) for one in questions] for order in orders[1:]]
    plain = [task_tokens(plan, one, task, questions) for one in prompters.values()]
    single = [*plain, *(task_tokens(plan, prompters[base], task, one) for one in under)]
    shared = [task_tokens(plan, prompters[base], task, ordered), *plain[1:]]
    scale = plain[0].documents / len(questions)
    whole = scale * sum(one_tree(prompters, base, *pair) for pair in zip(questions, ordered, strict=True))
    alone, runs, run = (sum(getattr(one, name) for one in found) for name, found in
                        (("alone", single), ("distinct", single), ("distinct", shared)))  # fmt: skip
    numbers = " ".join(f"{number / 1e6:11.2f}M" for number in (alone, runs, run, whole))
    return f"{task:14} {len(single):7} {numbers} {100 * (1 - run / runs):11.1f}%"


def one_tree(prompters: dict[str, Prompter], base: str, question: Question, ordered: Question) -> int:
    """Return the distinct tokens of a document under all prompts."""
    encoded = [
        next(iter(prompter.encode([ordered if name == base else question]))) for name, prompter in prompters.items()
    ]
    return distinct_tokens([sequence.tokens for one in encoded for sequence in one.sequences])


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
