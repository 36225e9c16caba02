"""The first prompts of each task, as the model reads them, formatted for a terminal: choices coloured by segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from evalkit.data.sampling import FirstDocuments
from evalkit.display import Say
from evalkit.escape import printable
from evalkit.reporting.terminal import COLOURS

if TYPE_CHECKING:
    from evalkit.benchmarks.generated import AnswerPlan
    from evalkit.benchmarks.suite_plan import ChoicePlan
    from evalkit.requests.requests import Generate
    from evalkit.suites.prompts import EncodedQuestion


def shown_prompts(plan: ChoicePlan, count: int, say: Say) -> Iterator[str]:
    """Yield the first questions of each task under every prompt; arguments and errors as of `Plan.shown_prompts`."""
    from evalkit.benchmarks.session import ModelHolder
    from evalkit.suites.prompt_sets import order_name, orders_of, under_order
    from evalkit.suites.prompts import Prompter

    loaded = ModelHolder().model_of(plan, say)
    by_task = plan.selected(FirstDocuments(count))
    for prompt, template in plan.prompts.templates.items():
        prompter = Prompter(template, loaded.tokenizer, loaded.window, say)
        for task, questions in by_task.items():
            prompts = [(prompt, questions)]
            if template is plan.template:
                for order in orders_of(questions, plan.prompts.choice_orders)[1:]:
                    prompts.append((order_name(order), [under_order(question, order) for question in questions]))
            for name, members in prompts:
                heading = click.style(f"prompt {name}", bold=True) + "\n" if name else ""
                for encoded in prompter.encode(members, plan.unconditional(task)):
                    yield heading + _prompt_text(encoded, loaded.tokenizer)


def _prompt_text(encoded: EncodedQuestion, tokenizer: Any) -> str:
    from evalkit.models.loading.tokenizer import fed_text

    question = encoded.question
    lines = [click.style(printable(f"{question.label}, gold answer {question.gold}"), bold=True)]
    for choice, sequence in enumerate(encoded.sequences):
        text, counts = "", []
        for segment, start, end in sequence.spans():
            fed = printable(fed_text(tokenizer, sequence.tokens[start:end].tolist()), "\n\t")
            text += click.style(fed, fg=COLOURS[segment])
            counts.append(click.style(f"{segment} {end - start}", fg=COLOURS[segment]))
        cut = f", {sequence.truncated} context tokens cut" if sequence.truncated else ""
        mark = "*" if choice == question.gold else " "
        lines += [f"[{choice}]{mark} {len(sequence.tokens)} tokens: {', '.join(counts)}{cut}", text, ""]
    return "\n".join(lines)


def shown_generations(plan: AnswerPlan, count: int, say: Say) -> Iterator[str]:
    """Yield the first prompts of each task whose answers are generated; as of `Plan.shown_prompts`."""
    from evalkit.models.loading.spec import tokenizer_alone

    tokenizer = tokenizer_alone(plan.checkpoint, say)
    for task, documents in plan.tasks.items():
        part = replace(plan, tasks={task: documents[:count]})
        for request in plan.benchmark.generation_requests(part, task, frozenset(), tokenizer):
            yield _generation_text(task, request, tokenizer)


def _generation_text(task: str, request: Generate, tokenizer: Any) -> str:
    from evalkit.models.loading.tokenizer import fed_text

    tokens = request.prompt.tokens.tolist()
    cut = "" if request.truncated_from is None else f", cut from {request.truncated_from:,} in the middle"
    most = request.prompt.max_new_tokens
    about = f"{task} document {request.document}: {len(tokens):,} tokens{cut}, then up to {most:,}"
    text = printable(fed_text(tokenizer, tokens), "\n\t")
    return f"{click.style(printable(about), bold=True)}\n{text}\n"
