"""Tokens of a suite's tasks, estimated from a sample of their documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions, selected_documents
from evalkit.benchmarks.task_tokens import TaskTokens
from evalkit.models.tokenizer_alone import window_of
from evalkit.scoring.token_counts import SampledGroup, estimated_tokens


def estimated(plan: ChoicePlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task; arguments as in `Benchmark.token_counts`."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prompter = Prompter(plan.template, tokenizer, window, say)
    found = load_questions(plan.suite, plan.library, plan.request.selection, plan.others, sample)
    return [task_tokens(plan, prompter, task, questions) for task, questions in found.items()]


def task_tokens(plan: ChoicePlan, prompter: Prompter, task: str, questions: Sequence[Question]) -> TaskTokens:
    """Return the estimates for a task.

    Args:
        plan: its limit is that of the task.
        prompter: of the template.
        task: its name.
        questions: sampled documents.

    Raises:
        EvalkitError: a document cannot be computed.
    """
    subjects: dict[str, list[Question]] = {}
    for question in questions:
        subjects.setdefault(question.subtask, []).append(question)
    every = {name: members[0].leaf.documents for name, members in subjects.items()}
    sizes = {name: len(found) for name, found in selected_documents(task, every, plan.request.selection).items()}
    groups, rows = [], 0.0
    for name, members in subjects.items():
        encoded = list(prompter.encode(members, plan.unconditional))
        sequences = [one.tokens for document in encoded for one in document.sequences + document.unconditional]
        groups.append(SampledGroup(sequences, len(members), sizes[name]))
        rows += sum(len(document.sequences) for document in encoded) * sizes[name] / len(members)
    return TaskTokens(task, sum(sizes.values()), len(questions), rows, *estimated_tokens(groups))
