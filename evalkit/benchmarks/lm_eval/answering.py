"""A loaded model that answers lm-eval's requests, batch by batch."""

from __future__ import annotations

from evalkit.benchmarks.base import Batch, Budget, Say
from evalkit.benchmarks.lm_eval.batches import EMPTY, RequestFacts, ToGenerate, wanted_of
from evalkit.benchmarks.lm_eval.encoding import Encoding
from evalkit.benchmarks.lm_eval.harness import Harness
from evalkit.benchmarks.lm_eval.plan import TaskPlan
from evalkit.benchmarks.lm_eval.requests import RequestRow
from evalkit.benchmarks.lm_eval.scoring import items_of, likelihoods
from evalkit.benchmarks.lm_eval.texts import text_of
from evalkit.models.load import LoadedModel
from evalkit.models.locate import silent
from evalkit.runs.batch_devices import BatchDevice, place_of


class Answering:
    """A model that answers lm-eval's requests."""

    def __init__(self, plan: TaskPlan, loaded: LoadedModel, budget: Budget, say: Say) -> None:
        self._say = say
        self._harness = harness = Harness(loaded, token_budget=budget.scored, say=say)
        harness.remembers = loaded.stock
        every = [one for members in plan.asked.values() for one in members]
        # All before anything is scored, not when their turn comes
        texts = [one.request for one in every if one.place.kind == "generate_until"]
        harness.check_generation(texts)
        encoding = Encoding(harness.tokenizer, harness.prefix_token_id, harness.prefix_text, harness.max_length)
        # The start-up check takes a real sequence, the first that has a token
        for one in every:
            if one.place.kind != "generate_until" and (
                first := [wanted for _, wanted, _ in wanted_of([one], encoding, silent)]
            ):
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
        generates = batch is None or isinstance(batch.content, ToGenerate)
        return place_of(loaded.device, self._harness.kernel("generate_until" if generates else "loglikelihood"))

    def compute(self, batch: Batch) -> list[RequestRow]:
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

    def _generate(self, content: ToGenerate) -> list[RequestRow]:
        harness = self._harness
        found = harness.generator.generate(content.prompts, self._say)
        return [
            row._replace(text=text_of(harness.tokenizer, prompt, made.tokens))
            for row, prompt, made in zip(content.rows, content.prompts, found, strict=True)
        ]
