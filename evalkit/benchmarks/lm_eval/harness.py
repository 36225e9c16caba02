"""evalkit as an lm-eval model: lm-eval's Hugging Face class with evalkit's tokenisation, scoring and generation.

In: a checkpoint. Out: a `Harness` for `lm_eval.simple_evaluate(model=…)`, with the same tokens, windows and stopping
criteria as lm-eval's own class; prefixes are shared. It also computes the batches of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from evalkit.benchmarks.base import Batch, Budget
from evalkit.benchmarks.keywords import LoadingSettings
from evalkit.benchmarks.lm_eval.batches import (
    Encoding,
    RequestBatch,
    RequestFacts,
    TextFacts,
    answer_text,
    contents_of,
    first_sequences,
    prompts_of,
)
from evalkit.benchmarks.lm_eval.requests import (
    GENERATED,
    ROLLING,
    AnswersFromRows,
    ModelRequest,
    RequestRow,
    answer_in,
    requests_of,
    rows_of,
)
from evalkit.benchmarks.session import prefetched
from evalkit.compatibility.transformers import quiet
from evalkit.display import Say, news
from evalkit.errors import CheckpointError, ScoringError, UsageError
from evalkit.escape import brief
from evalkit.generation.prompts import Decoding
from evalkit.inputs.settings import check_names, settings_of, with_settings
from evalkit.inputs.values import switch, whole
from evalkit.models.context.extension import refuse_generation
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.spec import UNSTRETCHED, ModelSpec, model_spec
from evalkit.runs.traits import BatchDevice, place_of
from evalkit.scoring.architecture import auto_budget
from evalkit.suites.lm_eval_tasks import log_from


@with_settings(LoadingSettings, ModelSpec)
def harness(
    model: str | Path | LoadedModel,
    *,
    token_budget: int | Literal["auto"] | None = None,
    add_bos_token: bool | None = None,
    batch_size: int | Literal["auto"] | None = None,
    say: Callable[[str], None] = news,
    tokenizer: str | Path | None = None,
    **loading: Unpack[LoadingSettings],
) -> Harness:
    """Load a checkpoint as a model for lm-eval.

        lm_eval.simple_evaluate(model=evalkit.harness("demo"), tasks=["lambada_openai"], limit=50)

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or a loaded model.
        token_budget: most tokens of a scored batch, and of keys and values during generation; None or "auto": as
            many as fit into memory.
        add_bos_token: whether texts begin with the BOS token; None: the tokenizer's default.
        batch_size: most texts generated at once; None or "auto": as many as fit. No answer depends on it.
        say: called with each progress message; by default messages are printed to standard error.
        tokenizer: folder or hub name of another tokenizer.
        {settings}

    Raises:
        EvalkitError: the checkpoint or an argument is not valid; one line that names it.
    """
    return Harness(
        model,
        token_budget=token_budget,
        add_bos_token=add_bos_token,
        batch_size=batch_size,
        say=say,
        tokenizer=tokenizer,
        **loading,
    )


@register_model("evalkit")
class Harness(AnswersFromRows, HFLM):  # type: ignore[misc]
    """lm-eval's `HFLM` with a checkpoint that evalkit loads; see `harness`. For a run it is the `Computer`.

    Args:
        pretrained: a checkpoint as in `--model`, or a loaded model.
        **model: how the checkpoint is loaded; the fields of `ModelSpec`.
    """

    facts: RequestFacts
    about: dict[str, Any]

    def __init__(
        self,
        pretrained: str | Path | LoadedModel,
        *,
        token_budget: int | str | None = None,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        say: Callable[[str], None] = news,
        **model: Any,
    ) -> None:
        # lm-eval's command line passes strings, and "no" would be truthy
        if add_bos_token is not None:
            switch("add_bos_token", add_bos_token)
        check_names(model, ModelSpec)
        if isinstance(pretrained, LoadedModel):
            loaded = pretrained
            known = settings_of(ModelSpec)
            if given := [key for key, value in model.items() if value not in (None, UNSTRETCHED, known[key].default)]:
                raise UsageError(f"{loaded.name}: the model is already loaded; leave out {given[0]}, or give its path")
        else:
            spec = model_spec(pretrained, **model)
            checkpoint = spec.locate(say)
            spec.extension(checkpoint, say)
            loaded = spec.load(checkpoint, say)
        if loaded.bos_id is None and loaded.eos_id is None:
            raise CheckpointError(
                f"{loaded.name}: its tokenizer has neither a BOS nor an EOS token, and lm-eval needs one as prefix "
                "of a text without context; give another --tokenizer"
            )
        with quiet(), log_from(logging.ERROR):
            super().__init__(loaded.model, tokenizer=loaded.tokenizer, add_bos_token=add_bos_token, batch_size=1)
        self.loaded = loaded
        self.encoding = Encoding(self.tokenizer, self.prefix_token_id, self.max_length, self.add_bos_token)
        self._say = say
        automatic = batch_size is None or str(batch_size).startswith("auto")
        self._most_texts = None if automatic else whole("batch_size", batch_size, 1, ", or auto")
        # lm-eval's attribute, which other code may read
        self.batch_size_per_gpu = self._most_texts or 1
        self.remembers = loaded is not pretrained
        """Whether the model is unmodified since loading, so that the start-up check may reuse its stored result."""
        self.files: str | None = None
        """See `Engine`; None where other code could change the weights."""
        given_budget = token_budget not in (None, "auto")
        self._given_budget = whole("token_budget", token_budget, 1, ", or auto") if given_budget else None
        self.token_budget = self._given_budget or auto_budget(loaded.model)

    def __repr__(self) -> str:
        return brief(self, *self.loaded.summary)

    @cached_property
    def engine(self) -> Any:
        from evalkit.scoring.engine import Engine

        model, remembers = self.loaded.model, self.remembers
        return Engine(model, self.token_budget, self._say, greedy=True, remembers=remembers, files=self.files)

    @cached_property
    def generator(self) -> Any:
        from evalkit.generation.generator import generator_of

        return generator_of(self.loaded, self._say)

    def prepare(self, requests: Sequence[ModelRequest], kept: int | None) -> RequestFacts:
        """Check the model on some requests, before any is computed, and return the facts for their batches.

        `kept` is the most tokens of keys and values in a batch; None: as many as fit. Invalid or unsupported
        generation_kwargs are a `ScoringError`.
        """
        generated = {repr(request.arguments[1]): request for request in requests if request.kind == GENERATED}
        texts = self._text_facts([*generated.values()], kept) if generated else None
        engine, encoding = self.engine, self.encoding
        if not engine.checked and (sequences := first_sequences(requests, encoding)):
            engine.check(sequences)
        return RequestFacts(engine.budget, engine.shares, encoding.window, encoding.prefix_id, texts)

    def _text_facts(self, requests: Sequence[ModelRequest], kept: int | None) -> TextFacts:
        from evalkit.generation.prompts import capacity_of, end_tokens
        from evalkit.generation.rows import check_settings

        if self.loaded.extension is not None:
            refuse_generation(self.loaded.extension, requests[0].label)
        model, capacity = self.loaded.model, capacity_of(self.generator, kept, self.max_length)
        most = min(capacity.most_rows, self._most_texts or capacity.most_rows)
        ends = tuple(sorted(end_tokens(model, self.tokenizer)))
        facts = TextFacts(ends, model.generation_config.max_new_tokens, replace(capacity, most_rows=most))
        for request, prompt in zip(requests, prompts_of(requests, self.encoding, facts), strict=True):
            try:
                check_settings(model, (prompt.decoding or Decoding()).settings)
            except UsageError as error:
                raise ScoringError(f"{request.label}: its generation_kwargs are not supported: {error}") from error
        return facts

    def computed(self, content: RequestBatch) -> list[RequestRow]:
        """Return the rows of a batch with their answers: log-likelihoods in nats, summed in float64; or texts."""
        if content.prompts is not None:
            generations = self.generator.generate(content.prompts, self._say)
            pairs = zip(content.prompts, generations, strict=True)
            texts = [answer_text(self.tokenizer, prompt, generation.tokens) for prompt, generation in pairs]
            return [row._replace(text=text) for row, text in zip(content.rows, texts, strict=True)]
        if content.sequences is None:
            return content.rows
        members = [scores for _, sequences in self.engine.score(content.sequences) for scores in sequences]
        rows = []
        for row, scores in zip(content.rows, members, strict=True):
            continuation = slice(row.context_tokens, None)
            likelihood = float(scores.logprobs[continuation].astype(np.float64).sum())
            rows.append(row._replace(likelihood=likelihood, greedy=bool(scores.greedy[continuation].all())))
        return rows

    def rows(self, instances: list[Any]) -> list[list[RequestRow]]:
        """Compute lm-eval's requests of one kind; see `AnswersFromRows`."""
        if not instances:
            return []
        requests = requests_of(instances)
        distinct = list({request.key(): request for request in requests}.values())
        rows: dict[Any, RequestRow] = {}
        with quiet(), log_from(logging.ERROR):
            facts = self.prepare(distinct, self._given_budget)
            batches = contents_of(distinct, facts, self.encoding, self._given_budget, self._say)
            for _, members, content in prefetched(batches, lambda batch: batch[2].warm()):
                for request, row in zip(members, self.computed(content), strict=True):
                    rows[request.key(row.part - request.sample)] = row
                    if request.kind != ROLLING:  # lm-eval does not cache windows of a longer text
                        self.cache_hook.add_partial(request.kind, request.arguments, answer_in(row))
        return [rows_of(request, rows) for request in requests]

    def compute(self, batch: Batch) -> list[RequestRow]:
        return self.computed(batch.content)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        if batch is None or batch.content.prompts is not None:
            return place_of(self.loaded.device, self.loaded.attention)
        return place_of(self.loaded.device, str(self.engine.kernel) if self.engine.shares else "alone")

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's description of the model, without `HFLM`'s request to the hub."""
        about = {"model_num_parameters": self.loaded.parameters, "model_dtype": self.loaded.dtype}
        return {**about, "model_revision": "", "model_sha": ""}


def computer_of(setup: Sequence[ModelRequest], loaded: LoadedModel, budget: Budget, say: Say) -> Harness:
    """Return the `Computer` of a run; `setup` is of `batches.candidates`."""
    harness = Harness(loaded, token_budget=budget.scored, say=say)
    harness.remembers, harness.files = loaded.stock, loaded.files
    harness.facts = facts = harness.prepare(setup, budget.kept)
    harness.about = {
        "token_budget": facts.token_budget,
        "kept_tokens": facts.texts.capacity.tokens if facts.texts else None,
        "loaded": loaded.facts() | {"window": facts.window, "prefix_id": facts.prefix_id},
        **({"sharing": harness.engine.describe()} if harness.engine.checked else {}),
    }
    return harness
