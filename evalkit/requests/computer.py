"""Computation of requests by a loaded model: scored sequences by the engine, texts by the generator.

In: a loaded model, and some requests of the run on which it is checked. Out: facts for planning, and rows of batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError
from evalkit.generation.prompts import Decoding
from evalkit.models.context.extension import refuse_generation
from evalkit.requests.batches import Batch, Budget
from evalkit.requests.encoded import EmptyTexts, EncodedDocuments, ScoreBatch, scored_rows
from evalkit.requests.planner import longest_shared
from evalkit.requests.requests import Encoder, Facts, Generate, TaskRequests
from evalkit.requests.rows import GeneratedRow, ScoredRow
from evalkit.runs.traits import BatchDevice, place_of
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine

if TYPE_CHECKING:
    from evalkit.generation.generator import Generator
    from evalkit.generation.rows import Generation
    from evalkit.models.loading.load import LoadedModel


class RequestComputer:
    """Computer of requests.

    Args:
        loaded: the model.
        budget: most tokens at a time.
        say: called with messages.
        remembers: whether results of start-up checks may be stored; None: as the loaded model says.
        most_texts: most texts generated at a time; None: as many as fit.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        budget: Budget,
        say: Say,
        remembers: bool | None = None,
        most_texts: int | None = None,
    ) -> None:
        self.loaded = loaded
        self.budget = budget
        self._say = say
        self._remembers = loaded.stock if remembers is None else remembers
        self._files = loaded.files if remembers is None else None
        self._most_texts = most_texts
        self._greedy = False
        self.facts = Facts(loaded.window)
        self.about: dict[str, Any] = {}

    @cached_property
    def engine(self) -> Engine:
        tokens = self.budget.scored or auto_budget(self.loaded.model)
        greedy, files = self._greedy, self._files
        return Engine(self.loaded.model, tokens, self._say, greedy, remembers=self._remembers, files=files)

    @cached_property
    def generator(self) -> Generator:
        from evalkit.generation.generator import generator_of

        return generator_of(self.loaded, self._say)

    def prepare(self, candidates: Sequence[TaskRequests], is_timed: bool = True) -> Facts:
        """Check the model on requests, and return the facts for planning; `is_timed`: measure generation's speed."""
        encoder = Encoder(self.loaded.tokenizer, Facts(self.loaded.window))
        facts: dict[str, Any] = {"window": self.loaded.window}
        budgets: dict[str, int] = {}
        about: dict[str, Any] = {}
        if any(not task.generates for task in candidates):
            facts |= self._check_scoring(candidates, encoder)
            budgets["token_budget"] = self.engine.budget
            if self.engine.checked:
                about["sharing"] = self.engine.describe()
        if any(task.generates for task in candidates):
            facts |= self._check_generation(candidates, is_timed)
            # Of runs that only generate, the token budget is that of keys and values
            budgets["kept_tokens" if budgets else "token_budget"] = facts["capacity"].tokens
        self.facts = Facts(**facts)
        self.about = budgets | about | {"loaded": self._loaded_facts(candidates)}
        return self.facts

    def place(self, batch: Batch | None = None) -> BatchDevice:
        device = self.loaded.device
        is_generated = batch is not None and batch.row is GeneratedRow
        if is_generated or (batch is None and not self.facts.token_budget):
            return place_of(device, self.loaded.attention)
        content = None if batch is None else batch.content
        planned = content.way if isinstance(content, ScoreBatch) else ""
        way = planned or self.engine.way
        return place_of(device, str(self.engine.kernel) if way == "tree" else way)

    def compute(self, batch: Batch) -> list[ScoredRow] | list[GeneratedRow]:
        content = batch.content
        if isinstance(content, EmptyTexts):
            return content.rows
        if isinstance(content, ScoreBatch):
            if not self.engine.checked:  # no candidate had a token
                self.engine.check(content.tree.sequences, content.way == "alone")
            scores = self.engine.score(content.tree, content.way, content.pass_tokens)
            pairs = zip(content.documents, scores, strict=True)
            return [row for document, (_, of_document) in pairs for row in scored_rows(document, of_document)]
        generations = self.generator.generate([asked.prompt for asked in content], self._say)
        return [self._generated_row(*pair) for pair in zip(content, generations, strict=True)]

    def _loaded_facts(self, candidates: Sequence[TaskRequests]) -> dict[str, Any]:
        loaded = self.loaded.facts()
        for task in candidates:
            for name, value in task.about(self.loaded.tokenizer).items():
                known = loaded.get(name)
                loaded[name] = {**known, **value} if isinstance(known, dict) else value
        return loaded

    def _check_scoring(self, candidates: Sequence[TaskRequests], encoder: Encoder) -> dict[str, Any]:
        documents = [document for task in candidates if not task.generates for document in task.scored(encoder)]
        self._greedy |= any(score.greedy for document in documents for score in document.scores)
        engine = self.engine
        encoded = EncodedDocuments.of(documents)
        if len(encoded.documents) and not engine.checked:
            # The check of sharing takes as long as some sequences, and is not needed where each is a batch by itself
            longest = longest_shared(engine.budget)
            is_alone = all(task.is_alone(self.loaded.window, longest) for task in candidates)
            engine.check(encoded.sequences, is_alone)
        return {"token_budget": engine.budget, "way": engine.way, "pass_tokens": engine.pass_tokens}

    def _check_generation(self, candidates: Sequence[TaskRequests], is_timed: bool) -> dict[str, Any]:
        from evalkit.generation.prompts import capacity_of, end_tokens, measured_speed
        from evalkit.generation.rows import check_settings

        model, window = self.loaded.model, self.loaded.window
        capacity = capacity_of(self.generator, self.budget.kept, window, self._most_texts)
        facts: dict[str, Any] = {
            "ends": tuple(sorted(end_tokens(model, self.loaded.tokenizer))),
            "new_tokens": getattr(model.generation_config, "max_new_tokens", None),
            "capacity": capacity,
        }
        encoder = Encoder(self.loaded.tokenizer, Facts(window, **facts))
        for task in (task for task in candidates if task.generates):
            for asked in task.generated(encoder):
                if self.loaded.extension is not None:
                    refuse_generation(self.loaded.extension, asked.prompt.label)
                try:
                    check_settings(model, (asked.prompt.decoding or Decoding()).settings)
                except UsageError as error:
                    label = asked.prompt.label
                    raise ScoringError(f"{label}: its generation_kwargs are not supported: {error}") from error
        return facts | {"speed": measured_speed(model, self.generator, window) if is_timed else None}

    def _generated_row(self, asked: Generate, generation: Generation) -> GeneratedRow:
        text = str(self.loaded.tokenizer.decode(generation.tokens, skip_special_tokens=True))
        for stop in asked.prompt.stops.until if asked.without_stop else ():
            text = text.partition(stop)[0] if stop else text
        return GeneratedRow(
            document=asked.document,
            choice=asked.choice,
            part=asked.part,
            parts=asked.parts,
            texts=asked.texts,
            prompt_sha256=asked.prompt_sha256,
            tokens_before=asked.truncated_from or len(asked.prompt.tokens),
            tokens=len(asked.prompt.tokens),
            truncated=asked.truncated_from is not None,
            reused=generation.reused,
            text=text,
            new_tokens=len(generation.tokens),
            ended=generation.ended,
            seconds=round(generation.seconds, 4),
            logprobs=json.dumps(generation.logprobs) if generation.logprobs else "",
        )
