"""evalkit as an lm-eval model: lm-eval's own Hugging Face class with evalkit's tokenisation and scoring.

In: a checkpoint. Out: a `Harness`, which `lm_eval.simple_evaluate(model=…)` takes as it is. `loglikelihood` encodes in
batches and scores through shared prefixes, `loglikelihood_rolling` is lm-eval's with its windows scored here too, and
`generate_until` is evalkit's generator under lm-eval's rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from evalkit.benchmarks.lm_eval.encoding import Pair, encode_pairs
from evalkit.benchmarks.lm_eval.quiet import log_from
from evalkit.benchmarks.lm_eval.requests import label_of, owner_of, places
from evalkit.benchmarks.lm_eval.scoring import Wanted, score_all
from evalkit.benchmarks.lm_eval.texts import TextFacts, check_texts, prompts_of, text_of
from evalkit.brief import brief
from evalkit.data.wheels import say_on_stderr
from evalkit.errors import CheckpointError, UsageError
from evalkit.inputs.fields import check_field_names
from evalkit.inputs.texts import check_text
from evalkit.inputs.values import switch, whole
from evalkit.models.context_settings import UNSTRETCHED
from evalkit.models.load import LoadedModel
from evalkit.models.quiet import quiet
from evalkit.models.spec import ModelSpec, model_spec


def harness(
    model: str | Path | LoadedModel,
    *,
    token_budget: int | Literal["auto"] | None = None,
    add_bos_token: bool | None = None,
    batch_size: int | Literal["auto"] | None = None,
    say: Callable[[str], None] = say_on_stderr,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    context: int | Literal["none"] | None = None,
    context_method: str | None = None,
    context_original: int | None = None,
    context_config: str | Path | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Harness:
    """Load a checkpoint as a model for lm-eval.

        lm_eval.simple_evaluate(model=evalkit.harness("demo"), tasks=["lambada_openai"], limit=50)

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or one that is loaded already.
        token_budget: most tokens of a batch that is scored, and of keys and values that are kept while texts are
            generated; None or "auto": what fits into memory.
        add_bos_token: whether texts begin with the begin token; None leaves it to the tokenizer.
        batch_size: most texts that are generated at once; None or "auto": what fits. No answer depends on it.
        say: called with each line of news; printed to standard error by default.
        revision, tokenizer, device, dtype, attention, context, context_method, context_original, context_config,
            allow_pickle, trust_remote_code: how the checkpoint is loaded, see `evalkit.evaluate`.

    Raises:
        EvalkitError: whatever is wrong with the checkpoint or an argument, in one line.
    """
    return Harness(
        model,
        token_budget=token_budget,
        add_bos_token=add_bos_token,
        batch_size=batch_size,
        say=say,
        revision=revision,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        attention=attention,
        context=context,
        context_method=context_method,
        context_original=context_original,
        context_config=context_config,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )


@register_model("evalkit")
class Harness(HFLM):  # type: ignore[misc]
    """lm-eval's `HFLM` on a checkpoint that evalkit has loaded.

    Args:
        pretrained: a checkpoint as `--model` takes it, or one that is loaded already.
        token_budget: most tokens of a batch that is scored, and of keys and values that are kept while texts are
            generated; None: what fits.
        add_bos_token: as lm-eval's: None leaves it to the tokenizer.
        batch_size: most texts generated at once; None or "auto": what fits. No answer depends on it.
        say: told what the user should know; by default it is printed to standard error.
        **model: how the checkpoint is loaded, as the fields of `ModelSpec`.
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
        # lm-eval's command line hands on words, of which "no" would count as true
        if add_bos_token is not None:
            switch("add_bos_token", add_bos_token)
        if max_batch_size is not None:
            whole("max_batch_size", max_batch_size, 1)
        check_field_names(model, ModelSpec)
        loaded = pretrained
        if not isinstance(loaded, LoadedModel):
            spec = model_spec(loaded, **model)
            checkpoint = spec.locate(say)
            spec.extension(checkpoint, say)
            loaded = spec.load(checkpoint, say)
        elif given := [
            name for name, value in model.items() if str(value) not in ("None", "False", "auto", UNSTRETCHED)
        ]:
            raise UsageError(f"{loaded.name}: is loaded already; leave out {given[0]}, or give its path")
        if loaded.bos_id is None and loaded.eos_id is None:
            raise CheckpointError(
                f"{loaded.name}: its tokenizer has neither a begin nor an end token, and lm-eval needs one to put "
                "before a text without context; see --tokenizer"
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
        # lm-eval's own, which others may read
        self.batch_size_per_gpu = self._most_texts or 1
        self.remembers = loaded is not pretrained
        """Whether the model is as its checkpoint has it, so that the start-up check may take what it found before."""
        self.token_budget = _budget(token_budget, loaded.model)
        self.asked_budget: int | None = None if token_budget in (None, "auto") else self.token_budget

    def __repr__(self) -> str:
        return brief(self, *self.loaded.summary)

    @property
    def engine(self) -> Any:
        """What scores; made when it is first asked for."""
        if self._engine is None:
            from evalkit.scoring.engine import Engine

            self._engine = Engine(
                self.loaded.model, self.token_budget, self._say, greedy=True, remembers=self.remembers
            )
        return self._engine

    @property
    def generator(self) -> Any:
        """What generates; made when it is first asked for."""
        if self._generator is None:
            from evalkit.generation.generator import generator_of

            self._generator = generator_of(self.loaded, self._say)
        return self._generator

    def text_facts(self, budget: int | None) -> TextFacts:
        """What is needed to put texts into batches.

        Args:
            budget: most tokens of keys and values; None: what fits.
        """
        from evalkit.generation.room import capacity_of
        from evalkit.generation.tokens import end_tokens

        capacity = capacity_of(self.generator, budget, self.max_length)
        most = min(capacity.most_rows, self._most_texts or capacity.most_rows)
        ends = end_tokens(self.loaded.model, self.tokenizer)
        most_new = self.loaded.model.generation_config.max_new_tokens
        return TextFacts(tuple(sorted(ends)), most_new, replace(capacity, most_rows=most))

    def kernel(self, kind: str) -> str:
        """How the model attends for requests of a kind, as `BatchDevice` has it."""
        if kind == "generate_until":
            return self.loaded.attention
        return str(self.engine.kernel) if self.engine.shares else "alone"

    def encode(self, requests: Sequence[Any]) -> list[Pair]:
        """Token ids of `loglikelihood` requests.

        Raises:
            ScoringError: a continuation that cannot be scored; names task and document.
        """
        return encode_pairs(self, [r.args for r in requests], lambda index: label_of(requests[index]), self._say)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """lm-eval's (log-likelihood, greedy?) of each request, in order."""
        pairs = self.encode(requests)
        wanted = [
            Wanted(pair.context, pair.continuation, label_of(request), owner_of(request), request.task_name or "")
            for pair, request in zip(pairs, requests, strict=True)
        ]
        return self._answers(wanted, [request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """lm-eval's own, with the windows of all texts in one call."""
        for request in requests:
            check_text(request.args[0], label_of(request))
        before = self.batch_size
        # lm-eval counts windows here, and no window is shorter than a character
        self.batch_size_per_gpu = max(1, sum(len(request.args[0]) for request in requests))
        try:
            found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        finally:
            self.batch_size_per_gpu = before
        return found

    def check_generation(self, requests: Sequence[Any]) -> None:
        """See `texts.check_texts`."""
        check_texts(requests, self.loaded, self.max_length)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text of each request, in order, after a look at whether they can be had (see `check_generation`)."""
        with quiet(), log_from(logging.ERROR):
            self.check_generation(requests)
            facts = self.text_facts(self.asked_budget)
            prompts = prompts_of([(place, one.args) for place, one in places(requests)], self, facts)
            texts: dict[int, str] = {}
            for batch in facts.capacity.batches(prompts):
                for prompt, made in zip(batch, self.generator.generate(batch, self._say), strict=True):
                    text = texts[prompt.index] = text_of(self.tokenizer, prompt, made.tokens)
                    self.cache_hook.add_partial("generate_until", requests[prompt.index].args, text)
        return [texts[number] for number in range(len(requests))]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, greedy?) of requests in token ids: lm-eval's hook for whatever else it scores."""
        wanted = []
        for number, (_, context, continuation) in enumerate(requests):
            cut = max(0, len(context) + len(continuation) - self.max_length - 1)
            wanted.append(Wanted(context[cut:], continuation, f"request {number}", number))
        return self._answers(wanted, [request[0] for request in requests])

    def _answers(self, wanted: list[Wanted], keys: list[Any]) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        for place, likelihood, greedy in score_all(self.engine, wanted, self.asked_budget):
            found[place] = (likelihood, greedy)
            if keys[place] is not None:  # windows of a longer text are not lm-eval's to cache
                self.cache_hook.add_partial("loglikelihood", keys[place], found[place])
        return [found[place] for place in range(len(wanted))]

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes about the model; its own asks the hub."""
        return {
            "model_num_parameters": self.loaded.parameters,
            "model_dtype": self.loaded.dtype,
            "model_revision": "",
            "model_sha": "",
        }


def _budget(asked: int | str | None, model: Any) -> int:
    from evalkit.scoring.budget import auto_budget

    if asked is None or asked == "auto":
        return auto_budget(model)
    return whole("token_budget", asked, 1, ", or auto")


def _batch_size(asked: int | str | None) -> int | None:
    if asked is None or str(asked).startswith("auto"):
        return None
    return whole("batch_size", asked, 1, ", or auto")
