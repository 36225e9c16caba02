"""Tokens of lm-eval's tasks, estimated from a sample of their documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.generating_facts import assumed_capacity
from evalkit.benchmarks.lm_eval.batches import continuations_of
from evalkit.benchmarks.lm_eval.encoding import Encoding
from evalkit.benchmarks.lm_eval.plan import TaskPlan, first_requests
from evalkit.benchmarks.lm_eval.requests import LMEvalRequest, group_by_task
from evalkit.benchmarks.lm_eval.texts import TextFacts, prompts_of
from evalkit.benchmarks.task_tokens import TaskTokens, spread
from evalkit.models.locate import silent
from evalkit.models.tokenizer_alone import window_of
from evalkit.scoring.token_counts import SampledGroup, estimated_tokens

_BLOCK = 4
"""Documents next to each other in a sample."""


def estimated(plan: TaskPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task; arguments as in `Benchmark.token_counts`."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prefix = next(one for one in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if one is not None)
    encoding = Encoding(tokenizer, prefix, tokenizer.decode(prefix), window)
    selection, found = plan.request.selection, []
    plan.randomness.restore()
    for name, task in plan.tasks.tasks.items():
        whole = len(selection.places(name, [name] * len(task.eval_docs)))
        places = spread(whole, sample, _BLOCK)
        for members in group_by_task(first_requests(task, whole, set(places))).values():
            found.append(_task(name, members, encoding, len(places), whole))
    return found


def _task(name: str, members: Sequence[LMEvalRequest], encoding: Encoding, sampled: int, documents: int) -> TaskTokens:
    scale = documents / sampled
    if members[0].key.kind == "generate_until":
        facts = TextFacts((), None, assumed_capacity(encoding.max_length))
        prompts = prompts_of([(one.key, one.request.args) for one in members], encoding, facts)
        alone = scale * sum(len(prompt.tokens) for prompt in prompts)
        new = scale * sum(prompt.max_new_tokens for prompt in prompts)
        return TaskTokens(name, documents, sampled, scale * len(members), alone, alone, new)
    sequences = [
        np.array((*one.context, *one.continuation), np.int32)
        for _, one, _ in continuations_of(members, encoding, silent)
    ]
    counts = estimated_tokens([SampledGroup(sequences, sampled, documents)]) if sequences else (0.0, 0.0)
    return TaskTokens(name, documents, sampled, scale * len(sequences), *counts)
