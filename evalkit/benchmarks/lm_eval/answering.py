"""Computation of lm-eval's requests on a loaded model.

In: the requests that show how the model is prepared, a loaded model, and batches. Out: a `RequestRow` with the answer
to each request. Tokens of tasks are estimated from a sample of their documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from evalkit.benchmarks.base import Batch, Budget
from evalkit.benchmarks.lm_eval.batches import (
    EMPTY_TEXTS,
    GenerationContent,
    RequestFacts,
    continuations_of,
    items_of,
    likelihoods,
)
from evalkit.benchmarks.lm_eval.encoding import Encoding
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.lm_eval.plan import TaskPlan, first_requests
from evalkit.benchmarks.lm_eval.requests import LMEvalRequest, RequestRow, group_by_task, label_of
from evalkit.benchmarks.lm_eval.texts import TextFacts, answer_text, prompts_of
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.display import Say
from evalkit.generation.capacity import assumed_capacity
from evalkit.inputs.values import check_text
from evalkit.models.load import LoadedModel
from evalkit.models.locate import silent
from evalkit.models.spec import window_of
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.scoring.sequences import SampledGroup, estimated_tokens

_CANDIDATES = 8
"""Requests among which the start-up check chooses."""


@dataclass(frozen=True)
class AnsweringSetup:
    """What answering needs of a plan."""

    scored: tuple[LMEvalRequest, ...]
    """Requests among which the start-up check chooses."""
    generated: tuple[LMEvalRequest, ...]
    """A generation request of each distinct generation_kwargs."""


def setup_of(plan: TaskPlan) -> AnsweringSetup:
    """Return what answering needs of a plan.

    Raises:
        ScoringError: a prompt is not valid text; names task and document.
    """
    requests = [one for members in plan.requests_by_task.values() for one in members]
    generated: dict[str, LMEvalRequest] = {}
    for one in requests:
        if one.key.kind == "generate_until":
            check_text(one.request.args[0], label_of(one.request))
            generated.setdefault(repr(one.request.args[1]), one)
    # An empty text has no token
    scored = (one for one in requests if one.key.kind != "generate_until" and one.request.args[-1])
    return AnsweringSetup(tuple(islice(scored, _CANDIDATES)), tuple(generated.values()))


class Answering:
    """A `Computer` for lm-eval's requests."""

    def __init__(self, setup: AnsweringSetup, loaded: LoadedModel, budget: Budget, say: Say) -> None:
        self._say = say
        self._harness = harness = Harness(loaded, token_budget=budget.scored, say=say)
        harness.remembers, harness.files = loaded.stock, loaded.files
        # Validated before anything is scored, not at their batch
        texts = [one.request for one in setup.generated]
        harness.check_generation(texts)
        encoding = Encoding(harness.tokenizer, harness.prefix_token_id, harness.prefix_text, harness.max_length)
        # The start-up check uses a real sequence: the first that has a token
        for one in setup.scored:
            if first := [continuation for _, continuation, _ in continuations_of([one], encoding, silent)]:
                harness.engine.check(items_of(first)[0])
                break
        engine = harness.engine
        self.facts = RequestFacts(
            engine.budget,
            engine.shares,
            harness.max_length,
            harness.prefix_token_id,
            harness.prefix_text,
            harness.text_facts(budget.kept) if texts else None,
        )
        self.about = {
            "token_budget": engine.budget,
            "kept_tokens": self.facts.texts.capacity.tokens if self.facts.texts else None,
            "loaded": loaded.facts() | {"window": harness.max_length, "prefix_id": harness.prefix_token_id},
            **({"sharing": engine.describe()} if engine.checked else {}),
        }

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """See `Computer`."""
        loaded = self._harness.loaded
        generates = batch is None or isinstance(batch.content, GenerationContent)
        return place_of(loaded.device, self._harness.kernel("generate_until" if generates else "loglikelihood"))

    def compute(self, batch: Batch) -> list[RequestRow]:
        """See `Computer`."""
        content = batch.content
        if batch.number == EMPTY_TEXTS:
            return list(content)
        if isinstance(content, GenerationContent):
            return self._generate(content)
        rows = []
        for item, scores in likelihoods(self._harness.engine, content.batch):
            for row, (likelihood, greedy) in zip(content.rows[item.index], scores, strict=True):
                rows.append(row._replace(likelihood=likelihood, greedy=greedy))
        return rows

    def _generate(self, content: GenerationContent) -> list[RequestRow]:
        harness = self._harness
        generations = harness.generator.generate(content.prompts, self._say)
        return [
            row._replace(text=answer_text(harness.tokenizer, prompt, generation.tokens))
            for row, prompt, generation in zip(content.rows, content.prompts, generations, strict=True)
        ]


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
