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
from evalkit.benchmarks.lm_eval.batches import EMPTY_TEXTS, GenerationContent, RequestFacts, items_of, likelihoods
from evalkit.benchmarks.lm_eval.encoding import Encoding, continuations_of
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.lm_eval.plan import TaskPlan, first_requests
from evalkit.benchmarks.lm_eval.requests import GENERATED, ModelRequest, RequestRow, group_by_task
from evalkit.benchmarks.lm_eval.texts import TextFacts, answer_text, prompts_of, validate_generation
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.display import Say
from evalkit.generation.capacity import Capacity
from evalkit.inputs.values import check_text
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import window_of
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.scoring.sequences import SampledGroup, estimated_tokens

_CANDIDATES = 8
"""Requests among which the start-up check chooses."""
_BLOCK = 4
"""Documents next to each other in a sample."""


@dataclass(frozen=True)
class AnsweringSetup:
    """What answering needs of a plan."""

    scored: tuple[ModelRequest, ...]
    """Requests among which the start-up check chooses."""
    generated: tuple[ModelRequest, ...]
    """A generation request of each distinct generation_kwargs."""


def setup_of(plan: TaskPlan) -> AnsweringSetup:
    """Return what answering needs of a plan.

    Raises:
        ScoringError: a prompt is not valid text; names task and document.
    """
    requests = [request for members in plan.requests.values() for request in members]
    generated: dict[str, ModelRequest] = {}
    for request in requests:
        if request.kind == GENERATED:
            check_text(request.arguments[0], request.label)
            generated.setdefault(repr(request.arguments[1]), request)
    # An empty text has no token
    scored = (request for request in requests if request.kind != GENERATED and request.arguments[-1])
    return AnsweringSetup(tuple(islice(scored, _CANDIDATES)), tuple(generated.values()))


class Answering:
    """A `Computer` for lm-eval's requests."""

    def __init__(self, setup: AnsweringSetup, loaded: LoadedModel, budget: Budget, say: Say) -> None:
        self._say = say
        self._harness = harness = Harness(loaded, token_budget=budget.scored, say=say)
        harness.remembers, harness.files = loaded.stock, loaded.files
        # Validated before anything is scored, not at their batch
        validate_generation(setup.generated, loaded, harness.max_length)
        encoding, engine = harness.encoding, harness.engine
        # The start-up check uses a real sequence: the first that has a token
        for request in setup.scored:
            if first := continuations_of([request], encoding, silent):
                engine.check(items_of(first)[0])
                break
        texts = harness.text_facts(budget.kept) if setup.generated else None
        prefix = (encoding.prefix_id, encoding.prefix_text)
        self.facts = RequestFacts(engine.budget, engine.shares, encoding.window, *prefix, texts)
        self.about = {
            "token_budget": engine.budget,
            "kept_tokens": texts.capacity.tokens if texts else None,
            "loaded": loaded.facts() | {"window": encoding.window, "prefix_id": encoding.prefix_id},
            **({"sharing": engine.describe()} if engine.checked else {}),
        }

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """See `Computer`."""
        loaded, engine = self._harness.loaded, self._harness.engine
        if batch is None or isinstance(batch.content, GenerationContent):
            return place_of(loaded.device, loaded.attention)
        return place_of(loaded.device, str(engine.kernel) if engine.shares else "alone")

    def compute(self, batch: Batch) -> list[RequestRow]:
        """See `Computer`."""
        content, harness = batch.content, self._harness
        if batch.number == EMPTY_TEXTS:
            return list(content)
        if isinstance(content, GenerationContent):
            generations = harness.generator.generate(content.prompts, self._say)
            return [
                row._replace(text=answer_text(harness.tokenizer, prompt, generation.tokens))
                for row, prompt, generation in zip(content.rows, content.prompts, generations, strict=True)
            ]
        return [
            row._replace(likelihood=likelihood, greedy=greedy)
            for row, (likelihood, greedy) in zip(content.rows, likelihoods(harness.engine, content.batch), strict=True)
        ]


def estimated(plan: TaskPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task; arguments as in `Benchmark.token_counts`."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prefix = next(token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if token is not None)
    encoding = Encoding(tokenizer, prefix, window)
    selection, estimates = plan.request.selection, []
    plan.randomness.restore()
    for name, task in plan.tasks.tasks.items():
        documents = len(selection.places(name, [name] * len(task.eval_docs)))
        places = spread(documents, sample, _BLOCK)
        for members in group_by_task(first_requests(task, documents, set(places))).values():
            estimates.append(_estimate(name, members, encoding, len(places), documents))
    return estimates


def _estimate(
    name: str, requests: Sequence[ModelRequest], encoding: Encoding, sampled: int, documents: int
) -> TaskTokens:
    scale = documents / sampled
    if requests[0].kind == GENERATED:
        prompts = prompts_of(requests, encoding, TextFacts((), None, Capacity(encoding.window, 1, 1, 0)))
        alone = scale * sum(len(prompt.tokens) for prompt in prompts)
        new = scale * sum(prompt.max_new_tokens for prompt in prompts)
        return TaskTokens(name, documents, sampled, scale * len(requests), alone, alone, new)
    continuations = continuations_of(requests, encoding, silent)
    sequences = [np.array((*part.context, *part.continuation), np.int32) for part in continuations]
    counts = estimated_tokens([SampledGroup(sequences, sampled, documents)]) if sequences else (0.0, 0.0)
    return TaskTokens(name, documents, sampled, scale * len(sequences), *counts)
