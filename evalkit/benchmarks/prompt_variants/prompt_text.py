"""The first questions of each task under each prompt, for a terminal. In: a plan. Out: texts."""

from __future__ import annotations

from collections.abc import Iterator

import click

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.loading import load_model
from evalkit.benchmarks.multiple_choice.prompt_text import prompt_text
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions
from evalkit.benchmarks.prompt_variants.orders import order_name, orders_of, under_order
from evalkit.benchmarks.prompt_variants.plan import VariedPlan
from evalkit.data.sampling import FirstDocuments


def varied_prompts(plan: VariedPlan, count: int, say: Say) -> Iterator[str]:
    """Yield the prompts; arguments and errors as of `Benchmark.prompts`."""
    loaded = load_model(plan, say)
    found = load_questions(plan.suite, plan.library, FirstDocuments(count), plan.others)
    for name, template in plan.prompts.templates.items():
        prompter = Prompter(template, loaded.tokenizer, loaded.window, say)
        for questions in found.values():
            for shown, members in _by_order(plan, name, questions):
                for encoded in prompter.encode(members, plan.unconditional):
                    yield click.style(f"prompt {shown}", bold=True) + "\n" + prompt_text(encoded, loaded.tokenizer)


def _by_order(plan: VariedPlan, name: str, questions: list[Question]) -> Iterator[tuple[str, list[Question]]]:
    """Yield the questions under a template, then those of other orders under the run's own."""
    yield name, questions
    if name == plan.template.name:
        for order in orders_of(questions, plan.prompts.choice_orders)[1:]:
            yield order_name(order), [under_order(one, order) for one in questions]
