"""lm-eval's generation requests: prompts for the generator, and answers from generated tokens.

In: (context, generation_kwargs) and a tokenizer. Out: a `Prompt` each, by lm-eval's rules for special tokens,
truncation on the left to leave room for the answer, and stopping criteria; and the answer, cut at the first stop
string.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.lm_eval.calls import log_from
from evalkit.benchmarks.lm_eval.encoding import encode_texts
from evalkit.benchmarks.lm_eval.requests import RequestKey, label_of
from evalkit.compatibility.lm_eval import generation_arguments
from evalkit.errors import ScoringError, UsageError
from evalkit.generation.capacity import Capacity
from evalkit.generation.prompts import Decoding, Prompt, Stops
from evalkit.inputs import values
from evalkit.inputs.values import check_text
from evalkit.models.context import refuse_generation
from evalkit.models.load import LoadedModel

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


class Settings(NamedTuple):
    """A request's generation_kwargs, parsed."""

    until: tuple[str, ...]
    new_tokens: int
    """Most generated tokens; the prompt is truncated to leave room for them."""
    length: int | None
    """Most tokens of prompt and text, if the task sets max_length."""
    decoding: dict[str, Any]
    """The other settings, of transformers' generation config."""


def settings_of(given: Mapping[str, Any], label: str) -> Settings:
    """Parse a request's generation_kwargs."""
    try:
        # lm-eval's warning does not apply here: the default temperature is the model's
        with log_from(logging.ERROR):
            settings = generation_arguments(given, NEW_TOKENS)
        until, new_tokens, length = (
            settings.pop("until"),
            settings.pop("max_gen_toks"),
            settings.pop("max_length", None),
        )
        if not all(isinstance(text, str) for text in until):
            raise TypeError("until is not a text or a list of texts")
        if not isinstance(settings["do_sample"], bool):
            raise TypeError(f"do_sample is {settings['do_sample']!r}; it must be true or false")
        limits = [
            values.whole(name, value, 1) for name, value in (("max_gen_toks", new_tokens), ("max_length", length or 1))
        ]
        found = Settings(tuple(until), limits[0], None if length is None else limits[1], settings)
    except (TypeError, ValueError, UsageError) as error:
        raise ScoringError(f"{label}: its generation_kwargs are not valid ({error})") from error
    if not found.decoding["do_sample"] or found.decoding.get("temperature") is None:
        found.decoding.pop("temperature", None)
    return found


def validate_generation(requests: Sequence[Any], loaded: LoadedModel, window: int) -> None:
    """Validate generation requests.

    Args:
        requests: requests of kind `generate_until`.
        loaded: the model.
        window: its context window in tokens.

    Raises:
        ScoringError: a request needs more new tokens than the context window, or decoding settings that are not
            supported; names task and document.
        UsageError: the model's context extension supports scoring only.
    """
    from evalkit.generation.rows import check_settings

    checked: set[str] = set()
    for request in requests:
        label = label_of(request)
        check_text(request.args[0], label)
        if loaded.extension is not None:
            refuse_generation(loaded.extension, label)
        settings = settings_of(request.args[1], label)
        if settings.new_tokens >= window:
            raise ScoringError(
                f"{label}: asks for {settings.new_tokens} tokens of text, and the model's window is {window}; lower "
                "max_gen_toks in the task's generation_kwargs"
            )
        if repr(settings.decoding) not in checked:
            checked.add(repr(settings.decoding))
            try:
                check_settings(loaded.model, settings.decoding)
            except UsageError as error:
                raise ScoringError(
                    f"{label}: its generation_kwargs, with the model's generation config, are not supported: {error}"
                ) from error


def prompts_of(requests: Sequence[tuple[RequestKey, Any]], encoding: Any, facts: TextFacts) -> list[Prompt]:
    """Return the prompts of `generate_until` requests, in order.

    Args:
        requests: key and (context, generation_kwargs).
        encoding: an `Encoding`, or an `HFLM`.
        facts: about the model.

    Raises:
        ScoringError: a prompt leaves no room for generated tokens; names task and document.
    """
    tokenizer = encoding.tokenizer
    end_text = None if tokenizer.eos_token_id is None else tokenizer.decode(tokenizer.eos_token_id)
    contexts = {key: (arguments[0], _adds_special(encoding, arguments[0])) for key, arguments in requests}
    ids = encode_texts(tokenizer, dict.fromkeys(contexts.values()))
    prompts = []
    for index, (key, (_, given)) in enumerate(requests):
        label = f"{key.task} document {key.doc_id}"
        settings = settings_of(given, label)
        kept = ids[contexts[key]][-(encoding.max_length - settings.new_tokens) :]
        tokens = np.array(kept or [encoding.prefix_token_id], dtype=np.int64)
        most = settings.new_tokens if settings.length is None else settings.length - len(tokens)
        if facts.new_tokens is not None:
            most = min(facts.new_tokens, encoding.max_length - len(tokens))
        if most < 1:
            raise ScoringError(
                f"{label}: its generation_kwargs have max_length {settings.length}, and its prompt has {len(tokens)} "
                "tokens; give max_gen_toks instead"
            )
        until = dict.fromkeys((*settings.until, *([] if end_text is None else [end_text])))
        given_ends = settings.decoding.get("eos_token_id")
        ends = facts.ends if given_ends is None else given_ends if isinstance(given_ends, list) else [given_ends]
        stops = Stops(frozenset(ends), until=tuple(until))
        prompts.append(Prompt(index, tokens, most, stops, Decoding(settings.decoding, seed_of(key))))
    return prompts


def seed_of(key: RequestKey) -> int:
    """Return the seed of a request, which does not depend on other requests or on the run."""
    name = f"{_SEED} {key.task} {key.doc_id} {key.number} {key.part}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def answer_text(tokenizer: Any, prompt: Prompt, tokens: Sequence[int]) -> str:
    """Return the answer: the generated text without special tokens, cut at the first stop string."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    for end in prompt.stops.until:
        text = text.partition(end)[0] if end else text
    return text


def _adds_special(encoding: Any, text: str) -> bool:
    """Return whether to add special tokens: lm-eval's rule for generation, which checks for the BOS token only."""
    bos = encoding.tokenizer.bos_token
    if bos is not None and text.startswith(bos):
        return False
    return True if encoding.add_bos_token is None else bool(encoding.add_bos_token)
