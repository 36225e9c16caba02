"""The computation of every run that asks a model for log-likelihoods and texts: its plan has `requests`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evalkit.display import Say
from evalkit.models.loading.spec import window_of
from evalkit.requests import planner
from evalkit.requests.batches import Budget, Computation, Planned, TaskTokens
from evalkit.requests.requests import Encoder, Facts, TaskRequests
from evalkit.requests.rows import KEY, GeneratedRow, ScoredRow

if TYPE_CHECKING:
    from evalkit.models.loading.load import LoadedModel
    from evalkit.requests.computer import RequestComputer
    from evalkit.runs.journal import FinishedRows, Key


class RequestComputation(Computation):
    rows = (ScoredRow, GeneratedRow)
    key = KEY
    facts = Facts

    def is_missing(self, plan: Any, finished: FinishedRows) -> bool:
        return any(planner.is_missing(task, finished) for task in plan.requests.tasks)

    def needs_logits_only(self, plan: Any) -> bool:
        return not any(task.generates for task in plan.requests.tasks)

    def candidates(self, plan: Any) -> list[TaskRequests]:
        return [task.candidates() for task in plan.requests.tasks]

    def computer(
        self, candidates: Sequence[TaskRequests], loaded: LoadedModel, budget: Budget, say: Say
    ) -> RequestComputer:
        from evalkit.requests.computer import RequestComputer

        computer = RequestComputer(loaded, budget, say)
        computer.prepare(candidates)
        return computer

    def batches(self, plan: Any, facts: Facts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        return planner.planned(plan.requests, Encoder(tokenizer, facts, say), finished)

    def shared_rows(self, plan: Any) -> list[tuple[int, set[Key]]]:
        tasks = [task for task in plan.requests.tasks if task.is_adoptable]
        return [(task.step, {(*key, 0) for key, _ in task.costs()}) for task in tasks]

    def token_counts(self, plan: Any, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
        return planner.token_counts(plan.sampled(sample), Encoder(tokenizer, Facts(window), say))


REQUESTS = RequestComputation()
