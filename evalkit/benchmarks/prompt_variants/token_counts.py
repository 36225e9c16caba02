"""Tokens of a suite's tasks under several prompts, estimated from a sample of their documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.tasks import load_questions
from evalkit.benchmarks.multiple_choice.token_counts import task_tokens
from evalkit.benchmarks.prompt_variants.orders import in_orders, orders_of
from evalkit.benchmarks.prompt_variants.plan import VariedPlan
from evalkit.benchmarks.task_tokens import TaskTokens
from evalkit.models.tokenizer_alone import window_of


def estimated_prompts(plan: VariedPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task; arguments as in `Benchmark.token_counts`."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prompters = {name: Prompter(one, tokenizer, window, say) for name, one in plan.prompts.templates.items()}
    found = load_questions(plan.suite, plan.library, plan.request.selection, plan.others, sample)
    orders = {task: orders_of(questions, plan.prompts.choice_orders) for task, questions in found.items()}
    plan.check_orders(orders)
    estimates = []
    for task, questions in found.items():
        ordered = [in_orders(one, orders[task]) for one in questions]
        parts = [
            task_tokens(plan, prompter, task, ordered if name == plan.template.name else questions)
            for name, prompter in prompters.items()
        ]
        estimates.append(_sum(parts))
    return estimates


def _sum(parts: Sequence[TaskTokens]) -> TaskTokens:
    """Return the tokens of a task under all prompts: no tree joins two templates."""
    sums = {name: sum(getattr(one, name) for one in parts) for name in ("rows", "alone", "distinct")}
    return replace(parts[0], **sums)
