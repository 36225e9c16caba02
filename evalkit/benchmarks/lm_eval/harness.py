"""evalkit as an lm-eval model: lm-eval's Hugging Face class with evalkit's tokenisation, scoring and generation.

In: a checkpoint. Out: a `Harness` for `lm_eval.simple_evaluate(model=…)`, with the same tokens, windows and stopping
criteria as lm-eval's own class; prefixes are shared. `Answering` computes the batches of a run with it.
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
    RequestFacts,
    TextFacts,
    answer_text,
    items_of,
    prompts_of,
    validate_generation,
)
from evalkit.benchmarks.lm_eval.requests import (
    GENERATED,
    Encoding,
    ModelRequest,
    RequestRow,
    continuations_of,
    requests_of,
)
from evalkit.benchmarks.lm_eval.tasks import log_from
from evalkit.benchmarks.session import prefetched
from evalkit.compatibility.transformers import quiet
from evalkit.display import Say, news
from evalkit.errors import CheckpointError, UsageError
from evalkit.escape import brief
from evalkit.generation.prompts import Prompt
from evalkit.inputs.settings import check_names, with_settings
from evalkit.inputs.values import switch, whole
from evalkit.models.loading.load import LoadedModel
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import UNSTRETCHED, ModelSpec, model_spec
from evalkit.runs.traits import BatchDevice, place_of
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.pack import TreeBatch, plan


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
class Harness(HFLM):  # type: ignore[misc]
    """lm-eval's `HFLM` with a checkpoint that evalkit loads; see `harness`.

    Args:
        pretrained: a checkpoint as in `--model`, or a loaded model.
        **model: how the checkpoint is loaded; the fields of `ModelSpec`.
    """

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
        if max_batch_size is not None:
            whole("max_batch_size", max_batch_size, 1)
        check_names(model, ModelSpec)
        if isinstance(pretrained, LoadedModel):
            loaded = pretrained
            for name, value in model.items():
                if str(value) not in ("None", "False", "auto", UNSTRETCHED) or (name, value) == ("device_map", "auto"):
                    raise UsageError(f"{loaded.name}: the model is already loaded; leave out {name}, or give its path")
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
        given = token_budget not in (None, "auto")
        self._given_budget = whole("token_budget", token_budget, 1, ", or auto") if given else None
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

    def text_facts(self, budget: int | None) -> TextFacts:
        """Return the facts for batches of at most `budget` tokens of keys and values; None: as many as fit."""
        from evalkit.generation.prompts import capacity_of, end_tokens

        capacity = capacity_of(self.generator, budget, self.max_length)
        most = min(capacity.most_rows, self._most_texts or capacity.most_rows)
        ends = end_tokens(self.loaded.model, self.tokenizer)
        most_new = self.loaded.model.generation_config.max_new_tokens
        return TextFacts(tuple(sorted(ends)), most_new, replace(capacity, most_rows=most))

    def score(self, batch: TreeBatch) -> list[tuple[float, bool]]:
        """Return each sequence's (log-likelihood in nats, summed in float64; is greedy), in order."""
        return [
            (float(scores.logprobs[scored].astype(np.float64).sum()), bool(scores.greedy[scored].all()))
            for item, (_, sequences) in zip(batch.sets, self.engine.score(batch), strict=True)
            for scored, scores in zip(item.is_scored, sequences, strict=True)
        ]

    def texts(self, prompts: Sequence[Prompt]) -> list[str]:
        generations = self.generator.generate(prompts, self._say)
        pairs = zip(prompts, generations, strict=True)
        return [answer_text(self.tokenizer, prompt, generation.tokens) for prompt, generation in pairs]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [answer for [answer] in self._answers(requests)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, summed over lm-eval's windows, in order."""
        return [float(sum(likelihood for likelihood, _ in windows)) for windows in self._answers(requests)]

    def _answers(self, instances: Sequence[Any]) -> list[list[tuple[float, bool]]]:
        items, members = items_of(continuations_of(requests_of(instances), self.encoding, self._say))
        if len(items) and not self.engine.checked:
            self.engine.check(items)
        answers: list[dict[int, tuple[float, bool]]] = [{} for _ in instances]
        must_fit = self.engine.shares and self._given_budget == self.engine.budget
        batches = (planned.of(items) for planned in plan(items, self.engine.budget, must_fit))
        for batch in prefetched(batches, _build_tree):
            parts = [part for item in batch.items for part in members[item]]
            for part, answer in zip(parts, self.score(batch), strict=True):
                answers[part.position][part.window] = answer
                if not part.is_window:  # lm-eval does not cache windows of a longer text
                    self.cache_hook.add_partial("loglikelihood", instances[part.position].args, answer)
        return [[windows[number] for number in sorted(windows)] for windows in answers]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text of each request, in order; all are validated first."""
        to_generate = requests_of(requests)
        with quiet(), log_from(logging.ERROR):
            validate_generation(to_generate, self.loaded, self.max_length)
            facts = self.text_facts(self._given_budget)
            texts: dict[int, str] = {}
            for batch in facts.capacity.batches(prompts_of(to_generate, self.encoding, facts)):
                for prompt, text in zip(batch, self.texts(batch), strict=True):
                    texts[prompt.index] = text
                    self.cache_hook.add_partial("generate_until", requests[prompt.index].args, text)
        return [texts[number] for number in range(len(requests))]

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's description of the model, without `HFLM`'s request to the hub."""
        about = {"model_num_parameters": self.loaded.parameters, "model_dtype": self.loaded.dtype}
        return {**about, "model_revision": "", "model_sha": ""}


def _build_tree(batch: TreeBatch) -> None:
    _ = batch.tree


class Answering:
    """A `Computer` for lm-eval's requests; `setup` is of `batches.candidates`."""

    def __init__(self, setup: Sequence[ModelRequest], loaded: LoadedModel, budget: Budget, say: Say) -> None:
        self._harness = harness = Harness(loaded, token_budget=budget.scored, say=say)
        harness.remembers, harness.files = loaded.stock, loaded.files
        # Validated before anything is scored, not at their batch
        generated = [request for request in setup if request.kind == GENERATED]
        validate_generation(generated, loaded, harness.max_length)
        encoding, engine = harness.encoding, harness.engine
        # The start-up check uses a real sequence: the first that has a token
        for request in setup:
            if request.kind != GENERATED and (continuations := continuations_of([request], encoding, silent)):
                engine.check(items_of(continuations)[0])
                break
        texts = harness.text_facts(budget.kept) if generated else None
        prefix = (encoding.prefix_id, encoding.prefix_text)
        self.facts = RequestFacts(engine.budget, engine.shares, encoding.window, *prefix, texts)
        self.about = {
            "token_budget": engine.budget,
            "kept_tokens": texts.capacity.tokens if texts else None,
            "loaded": loaded.facts() | {"window": encoding.window, "prefix_id": encoding.prefix_id},
            **({"sharing": engine.describe()} if engine.checked else {}),
        }

    def place(self, batch: Batch | None = None) -> BatchDevice:
        loaded, engine = self._harness.loaded, self._harness.engine
        if batch is None or batch.content.prompts is not None:
            return place_of(loaded.device, loaded.attention)
        return place_of(loaded.device, str(engine.kernel) if engine.shares else "alone")

    def compute(self, batch: Batch) -> list[RequestRow]:
        rows: list[RequestRow] = batch.content.rows
        if batch.content.prompts is not None:
            texts = self._harness.texts(batch.content.prompts)
            return [row._replace(text=text) for row, text in zip(rows, texts, strict=True)]
        if batch.content.sequences is not None:
            answers = self._harness.score(batch.content.sequences)
            return [
                row._replace(likelihood=likelihood, greedy=greedy)
                for row, (likelihood, greedy) in zip(rows, answers, strict=True)
            ]
        return rows
