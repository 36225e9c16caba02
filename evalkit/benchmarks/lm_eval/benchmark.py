"""lm-eval's tasks: lm-eval builds the requests and computes the metrics; evalkit answers the requests and keeps them.

scores.parquet   the score table of the multiple-choice tasks with one gold answer
results.json     every metric of every task and group
lm_eval/         the same in lm-eval's form
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Batch, Benchmark, Held, Planned, Say
from evalkit.benchmarks.lm_eval.answers import Answers, Row, is_held, key_of
from evalkit.benchmarks.lm_eval.batches import EMPTY, RequestFacts, ToGenerate, asked_of, batches_of, work_of
from evalkit.benchmarks.lm_eval.plan import SEEDS, TaskPlan
from evalkit.benchmarks.lm_eval.quiet import quiet_lm_eval
from evalkit.benchmarks.lm_eval.results import write_results
from evalkit.benchmarks.lm_eval.scoring import likelihoods
from evalkit.errors import EvalkitError, RunError, first_line
from evalkit.models.locate import silent
from evalkit.runs.folder import LM_EVAL, Run
from evalkit.runs.place import Place, place_of
from evalkit.runs.writing import RunWriter

if TYPE_CHECKING:
    from evalkit.models.load import LoadedModel


class LMEval(Benchmark):
    """See the module."""

    kind = LM_EVAL
    row = Row

    def key(self, task: str, row: Row) -> Hashable:
        """Which request, or which window of one, and what it asked."""
        return key_of(task, row)

    def is_missing(self, plan: TaskPlan, held: Held) -> bool:
        """Whether a request has no answer."""
        return any(not is_held(held, *one) for members in asked_of(plan.requests).values() for one in members)

    def computer(self, plan: TaskPlan, loaded: LoadedModel, budget: int | None, say: Say) -> _Answering:
        """See `Benchmark`."""
        return _Answering(plan, loaded, budget, say)

    def batches(self, plan: TaskPlan, facts: RequestFacts, tokenizer: Any, held: Held, say: Say) -> Planned:
        """See `Benchmark`."""
        asked = asked_of(plan.requests)
        every = [one for members in asked.values() for one in members]
        return Planned(
            batches_of(asked, facts, tokenizer, held, plan.common.token_budget, say),
            sum(work_of(request) for _, request in every),
            sum(work_of(request) for place, request in every if is_held(held, place, request)),
        )

    def finish(self, plan: TaskPlan, held: Held, writer: RunWriter) -> None:
        """Have lm-eval measure every task, and write what comes out."""
        import lm_eval.evaluator

        request, tasks, answers = plan.common, plan.tasks, Answers(held)
        with quiet_lm_eval(writer.say):
            try:
                _ = plan.requests
                results = lm_eval.evaluator.evaluate(answers, tasks.as_lm_eval(), limit=request.limit, log_samples=True)
            except EvalkitError:
                raise
            except Exception as error:
                raise RunError(
                    f"lm-eval cannot evaluate {', '.join(tasks.names)} ({type(error).__name__}: {first_line(error)}); "
                    f"what was scored is kept in {writer.folder}"
                ) from error
        write_results(writer, tasks, answers, results, request.log_samples)

    def serves(self, plan: TaskPlan, run: Run) -> bool:
        """Whether a finished run has the sample files, if they are asked for."""
        return run.serves(plan.common.log_samples)


class _Answering:
    """A model that answers lm-eval's requests."""

    def __init__(self, plan: TaskPlan, loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.benchmarks.lm_eval.batches import wanted_of
        from evalkit.benchmarks.lm_eval.encoding import Encoding
        from evalkit.benchmarks.lm_eval.harness import Harness
        from evalkit.benchmarks.lm_eval.scoring import items_of

        self._harness = harness = Harness(loaded, token_budget=budget, say=say)
        harness.remembers = True
        asked = asked_of(plan.requests)
        # All before anything is scored, not when their turn comes
        harness.check_generation([r for members in asked.values() for p, r in members if p.kind == "generate_until"])
        encoding = Encoding(harness.tokenizer, harness.prefix_token_id, harness.prefix_text, harness.max_length)
        # The start-up check takes a real sequence, of the first task that has any
        for members in asked.values():
            scored = members[0][0].kind != "generate_until"
            if scored and (first := [wanted for _, wanted, _ in wanted_of(members[:1], encoding, silent)]):
                harness.engine.check(items_of(first)[0])
                break
        engine = harness.engine
        self.facts = RequestFacts(
            engine.budget,
            engine.shares,
            harness.max_length,
            harness.prefix_token_id,
            harness.prefix_text,
            harness.batch_size,
        )
        self.about = {
            "token_budget": engine.budget,
            "generation_batch": harness.batch_size,
            "loaded": loaded.facts() | {"window": harness.max_length, "prefix_id": harness.prefix_token_id},
            **({"sharing": engine.describe()} if engine.checked else {}),
        }

    def place(self, batch: Batch | None = None) -> Place:
        """See `Computer`."""
        loaded = self._harness.loaded
        generates = batch is None or isinstance(batch.content, ToGenerate)
        return place_of(loaded.device, self._harness.kernel("generate_until" if generates else "loglikelihood"))

    def compute(self, batch: Batch) -> list[Row]:
        """See `Computer`."""
        content = batch.content
        if batch.number == EMPTY:
            return list(content)
        if isinstance(content, ToGenerate):
            return self._generate(content)
        rows = []
        for item, found in likelihoods(self._harness.engine, content.batch):
            for row, (likelihood, greedy) in zip(content.rows[item.index], found, strict=True):
                rows.append(row._replace(likelihood=likelihood, greedy=greedy))
        return rows

    def _generate(self, content: ToGenerate) -> list[Row]:
        import torch
        from lm_eval.api.instance import Instance

        torch.manual_seed(SEEDS["torch"] + content.seed)
        requests = [
            Instance("generate_until", {}, arguments, 0, (task, doc_id, 1))
            for arguments, (task, doc_id) in zip(content.arguments, content.labels, strict=True)
        ]
        texts = self._harness.generate_until(requests)
        return [row._replace(text=text) for row, text in zip(content.rows, texts, strict=True)]
