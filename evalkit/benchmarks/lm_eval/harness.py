"""evalkit as an lm-eval model: lm-eval's Hugging Face class with evalkit's tokenisation, scoring and generation.

In: a checkpoint. Out: a `Harness` for `lm_eval.simple_evaluate(model=…)`. `loglikelihood` encodes in batches and scores
with shared prefixes. `loglikelihood_rolling` is lm-eval's, with its windows scored by evalkit. `generate_until` uses
evalkit's generator with lm-eval's rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from evalkit.benchmarks.keywords import LoadingSettings
from evalkit.benchmarks.lm_eval.batches import Continuation, score_all
from evalkit.benchmarks.lm_eval.calls import log_from
from evalkit.benchmarks.lm_eval.encoding import Pair, encode_pairs
from evalkit.benchmarks.lm_eval.requests import label_of, owner_of, with_keys
from evalkit.benchmarks.lm_eval.texts import TextFacts, answer_text, prompts_of, validate_generation
from evalkit.compatibility.transformers import quiet
from evalkit.data.wheels import say_on_stderr
from evalkit.errors import CheckpointError, UsageError
from evalkit.escape import brief
from evalkit.inputs.settings import check_names, with_settings
from evalkit.inputs.values import check_text, switch, whole
from evalkit.models.load import LoadedModel
from evalkit.models.spec import UNSTRETCHED, ModelSpec, model_spec


@with_settings(LoadingSettings, ModelSpec)
def harness(
    model: str | Path | LoadedModel,
    *,
    token_budget: int | Literal["auto"] | None = None,
    add_bos_token: bool | None = None,
    batch_size: int | Literal["auto"] | None = None,
    say: Callable[[str], None] = say_on_stderr,
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
    """lm-eval's `HFLM` with a checkpoint that evalkit loads.

    Args:
        pretrained: a checkpoint as in `--model`, or a loaded model.
        token_budget: most tokens of a scored batch, and of keys and values during generation; None: as many as fit.
        add_bos_token: as in lm-eval; None: the tokenizer's default.
        batch_size: most texts generated at once; None or "auto": as many as fit. No answer depends on it.
        say: called with messages for the user; by default they are printed to standard error.
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
        say: Callable[[str], None] = say_on_stderr,
        **model: Any,
    ) -> None:
        # lm-eval's command line passes strings, and "no" would be truthy
        if add_bos_token is not None:
            switch("add_bos_token", add_bos_token)
        if max_batch_size is not None:
            whole("max_batch_size", max_batch_size, 1)
        check_names(model, ModelSpec)
        loaded = pretrained
        if not isinstance(loaded, LoadedModel):
            spec = model_spec(loaded, **model)
            checkpoint = spec.locate(say)
            spec.extension(checkpoint, say)
            loaded = spec.load(checkpoint, say)
        elif given := [
            name
            for name, value in model.items()
            if str(value) not in ("None", "False", "auto", UNSTRETCHED) or (name, value) == ("device_map", "auto")
        ]:
            raise UsageError(f"{loaded.name}: the model is already loaded; leave out {given[0]}, or give its path")
        if loaded.bos_id is None and loaded.eos_id is None:
            raise CheckpointError(
                f"{loaded.name}: its tokenizer has neither a BOS nor an EOS token, and lm-eval needs one as prefix "
                "of a text without context; give another --tokenizer"
            )
        with quiet(), log_from(logging.ERROR):
            super().__init__(
                loaded.model,
                tokenizer=loaded.tokenizer,
                add_bos_token=add_bos_token,
                batch_size=1,
            )
        self.loaded = loaded
        self.prefix_text = self.tokenizer.decode(self.prefix_token_id)
        self._say = say
        self._engine: Any = None
        self._generator: Any = None
        self._most_texts = _batch_size(batch_size)
        # lm-eval's attribute, which other code may read
        self.batch_size_per_gpu = self._most_texts or 1
        self.remembers = loaded is not pretrained
        """Whether the model is unmodified since loading, so that the start-up check may reuse its stored result."""
        self.files: str | None = None
        """See `Engine`; None where other code could change the weights."""
        self.token_budget = _budget(token_budget, loaded.model)
        self.given_budget: int | None = None if token_budget in (None, "auto") else self.token_budget

    def __repr__(self) -> str:
        return brief(self, *self.loaded.summary)

    @property
    def engine(self) -> Any:
        """The scoring engine, created at first use."""
        if self._engine is None:
            from evalkit.scoring.engine import Engine

            self._engine = Engine(
                self.loaded.model,
                self.token_budget,
                self._say,
                greedy=True,
                remembers=self.remembers,
                files=self.files,
            )
        return self._engine

    @property
    def generator(self) -> Any:
        """The generator, created at first use."""
        if self._generator is None:
            from evalkit.generation.generator import generator_of

            self._generator = generator_of(self.loaded, self._say)
        return self._generator

    def text_facts(self, budget: int | None) -> TextFacts:
        """Return the facts that batches of generated texts need.

        Args:
            budget: most tokens of keys and values; None: as many as fit.
        """
        from evalkit.generation.capacity import capacity_of
        from evalkit.generation.prompts import end_tokens

        capacity = capacity_of(self.generator, budget, self.max_length)
        most = min(capacity.most_rows, self._most_texts or capacity.most_rows)
        ends = end_tokens(self.loaded.model, self.tokenizer)
        most_new = self.loaded.model.generation_config.max_new_tokens
        return TextFacts(tuple(sorted(ends)), most_new, replace(capacity, most_rows=most))

    def kernel(self, kind: str) -> str:
        """Return the attention kernel for requests of a kind, as in `BatchDevice`."""
        if kind == "generate_until":
            return self.loaded.attention
        return str(self.engine.kernel) if self.engine.shares else "alone"

    def encode(self, requests: Sequence[Any]) -> list[Pair]:
        """Return the token ids of `loglikelihood` requests.

        Raises:
            ScoringError: a continuation cannot be scored; names task and document.
        """
        return encode_pairs(self, [r.args for r in requests], lambda index: label_of(requests[index]), self._say)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of each request, in order."""
        pairs = self.encode(requests)
        continuations = [
            Continuation(pair.context, pair.continuation, label_of(request), owner_of(request), request.task_name or "")
            for pair, request in zip(pairs, requests, strict=True)
        ]
        return self._answers(continuations, [request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, with lm-eval's method; the windows of all texts are one call."""
        for request in requests:
            check_text(request.args[0], label_of(request))
        before = self.batch_size
        # lm-eval's batch size in windows; no window is shorter than a character
        self.batch_size_per_gpu = max(1, sum(len(request.args[0]) for request in requests))
        try:
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        finally:
            self.batch_size_per_gpu = before
        return found

    def check_generation(self, requests: Sequence[Any]) -> None:
        """Validate generation requests, see `texts.validate_generation`."""
        validate_generation(requests, self.loaded, self.max_length)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text of each request, in order; validates them first, see `check_generation`."""
        with quiet(), log_from(logging.ERROR):
            self.check_generation(requests)
            facts = self.text_facts(self.given_budget)
            prompts = prompts_of([(key, one.args) for key, one in with_keys(requests)], self, facts)
            texts: dict[int, str] = {}
            for batch in facts.capacity.batches(prompts):
                for prompt, generation in zip(batch, self.generator.generate(batch, self._say), strict=True):
                    text = texts[prompt.index] = answer_text(self.tokenizer, prompt, generation.tokens)
                    self.cache_hook.add_partial("generate_until", requests[prompt.index].args, text)
        return [texts[number] for number in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, is greedy) of requests in token ids; lm-eval calls this for rolling windows."""
        continuations = []
        for number, (_, context, continuation) in enumerate(requests):
            cut = max(0, len(context) + len(continuation) - self.max_length - 1)
            continuations.append(Continuation(context[cut:], continuation, f"request {number}", number))
        return self._answers(continuations, [request[0] for request in requests])

    def _answers(self, continuations: list[Continuation], cache_keys: list[Any]) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        for index, likelihood, greedy in score_all(self.engine, continuations, self.given_budget):
            answers[index] = (likelihood, greedy)
            if cache_keys[index] is not None:  # lm-eval does not cache windows of a longer text
                self.cache_hook.add_partial("loglikelihood", cache_keys[index], answers[index])
        return [answers[index] for index in range(len(continuations))]

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's description of the model, without `HFLM`'s request to the hub."""
        return {
            "model_num_parameters": self.loaded.parameters,
            "model_dtype": self.loaded.dtype,
            "model_revision": "",
            "model_sha": "",
        }


def _budget(given: int | str | None, model: Any) -> int:
    from evalkit.scoring.architecture import auto_budget

    if given is None or given == "auto":
        return auto_budget(model)
    return whole("token_budget", given, 1, ", or auto")


def _batch_size(given: int | str | None) -> int | None:
    if given is None or str(given).startswith("auto"):
        return None
    return whole("batch_size", given, 1, ", or auto")
