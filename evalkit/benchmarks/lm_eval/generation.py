"""lm-eval's requests for generated texts: settings as transformers' `generate` reads them, prompts and answers.

In: `ModelRequest`s of kind `generate_until`. Out: `Prompt`s for evalkit's generator. A sampled text depends on nothing
but its own request: neither on the batch nor on the order.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.lm_eval.requests import Encoding, ModelRequest
from evalkit.benchmarks.lm_eval.tasks import log_from
from evalkit.compatibility.lm_eval import generation_arguments
from evalkit.errors import ScoringError, UsageError
from evalkit.generation.prompts import Capacity, Decoding, Prompt, Stops
from evalkit.inputs.values import check_text, whole
from evalkit.models.context.extension import refuse_generation
from evalkit.models.loading.load import LoadedModel

NEW_TOKENS = 256
"""Default number of generated tokens; lm-eval's default."""
_SEED = 1234
"""lm-eval's default seed for torch."""


@dataclass(frozen=True)
class TextFacts:
    """Facts about the model that planning of generated texts needs."""

    ends: tuple[int, ...]
    """Token ids that end a text."""
    new_tokens: int | None
    """max_new_tokens of the model's generation config, which overrides the task's in `generate`; None if not set."""
    capacity: Capacity
    """Memory limits of a batch."""


class _Settings(NamedTuple):
    """A request's generation_kwargs, parsed."""

    until: tuple[str, ...]
    new_tokens: int
    """Most generated tokens; the prompt is truncated to leave room for them."""
    length: int | None
    """Most tokens of prompt and text, if the task sets max_length."""
    decoding: dict[str, Any]
    """The other settings, of transformers' generation config."""


def _settings_of(request: ModelRequest) -> _Settings:
    try:
        # lm-eval's warning does not apply here: the default temperature is the model's
        with log_from(logging.ERROR):
            decoding = generation_arguments(request.arguments[1], NEW_TOKENS)
        until, length = decoding.pop("until"), decoding.pop("max_length", None)
        if not all(isinstance(text, str) for text in until):
            raise TypeError("until is not a text or a list of texts")
        if not isinstance(decoding["do_sample"], bool):
            raise TypeError(f"do_sample is {decoding['do_sample']!r}; it must be true or false")
        new_tokens = whole("max_gen_toks", decoding.pop("max_gen_toks"), 1)
        length = None if length is None else whole("max_length", length or 1, 1)
    except (TypeError, ValueError, UsageError) as error:
        raise ScoringError(f"{request.label}: its generation_kwargs are not valid ({error})") from error
    if not decoding["do_sample"] or decoding.get("temperature") is None:
        decoding.pop("temperature", None)
    return _Settings(tuple(until), new_tokens, length, decoding)


def validate_generation(requests: Sequence[ModelRequest], loaded: LoadedModel, window: int) -> None:
    """Validate generation requests for a model with a context window of `window` tokens.

    Raises:
        ScoringError: a request needs more new tokens than the context window, or decoding settings that are not
            supported; names task and document.
        UsageError: the model's context extension supports scoring only.
    """
    from evalkit.generation.rows import check_settings

    checked: set[str] = set()
    for request in requests:
        check_text(request.arguments[0], request.label)
        if loaded.extension is not None:
            refuse_generation(loaded.extension, request.label)
        settings = _settings_of(request)
        if settings.new_tokens >= window:
            raise ScoringError(
                f"{request.label}: asks for {settings.new_tokens} tokens of text, and the model's window is {window}; "
                "lower max_gen_toks in the task's generation_kwargs"
            )
        if repr(settings.decoding) not in checked:
            checked.add(repr(settings.decoding))
            try:
                check_settings(loaded.model, settings.decoding)
            except UsageError as error:
                raise ScoringError(
                    f"{request.label}: its generation_kwargs, with the model's generation config, are not supported: "
                    f"{error}"
                ) from error


def prompts_of(requests: Sequence[ModelRequest], encoding: Encoding, facts: TextFacts) -> list[Prompt]:
    """Return the prompts of `generate_until` requests; `Prompt.index` is the index of the request.

    Raises:
        ScoringError: a prompt leaves no room for generated tokens; names task and document.
    """
    tokenizer = encoding.tokenizer
    end_texts = [] if tokenizer.eos_token_id is None else [tokenizer.decode(tokenizer.eos_token_id)]
    # lm-eval's rule for generation checks for the BOS token only
    texts = [encoding.special(request.arguments[0], tokenizer.bos_token) for request in requests]
    ids = encoding.ids(texts)
    prompts = []
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        settings = _settings_of(request)
        kept = ids[text][-(encoding.window - settings.new_tokens) :]
        tokens = np.array(kept or [encoding.prefix_id], dtype=np.int64)
        most = settings.new_tokens if settings.length is None else settings.length - len(tokens)
        if facts.new_tokens is not None:
            most = min(facts.new_tokens, encoding.window - len(tokens))
        if most < 1:
            raise ScoringError(
                f"{request.label}: its generation_kwargs have max_length {settings.length}, and its prompt has "
                f"{len(tokens)} tokens; give max_gen_toks instead"
            )
        own_ends = settings.decoding.get("eos_token_id")
        ends = facts.ends if own_ends is None else own_ends if isinstance(own_ends, list) else [own_ends]
        stops = Stops(frozenset(ends), until=tuple(dict.fromkeys((*settings.until, *end_texts))))
        prompts.append(Prompt(index, tokens, most, stops, Decoding(settings.decoding, _seed_of(request))))
    return prompts


def _seed_of(request: ModelRequest) -> int:
    name = f"{_SEED} {request.task} {request.doc_id} {request.number} {request.sample}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def answer_text(tokenizer: Any, prompt: Prompt, tokens: Sequence[int]) -> str:
    """Return the answer: the generated text without special tokens, cut at the first stop string."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    for end in prompt.stops.until:
        text = text.partition(end)[0] if end else text
    return text
