"""lm-eval's requests for text: what each asks as a prompt for the generator, and its answer from what was generated.

In: (context, generation_kwargs) and a tokenizer. Out: a `Prompt` each, by lm-eval's rules: which special tokens stand
in front, what is cut on the left to leave room for the answer, what ends a text, and where it is cut.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.lm_eval.encoding import encode_texts
from evalkit.benchmarks.lm_eval.quiet import log_from
from evalkit.benchmarks.lm_eval.requests import RequestKey, label_of
from evalkit.compatibility.lm_eval import generation_arguments
from evalkit.errors import ScoringError, UsageError
from evalkit.generation.capacity import Capacity
from evalkit.generation.prompts import Decoding, Prompt, Stops
from evalkit.inputs import values
from evalkit.inputs.texts import check_text
from evalkit.models.context import refuse_generation
from evalkit.models.load import LoadedModel

NEW_TOKENS = 256
"""Where a task says nothing; lm-eval's default."""
_SEED = 1234
"""lm-eval's default for torch."""


@dataclass(frozen=True)
class TextFacts:
    """What planning needs to know of a model that writes texts."""

    ends: tuple[int, ...]
    """Token ids that end a text."""
    new_tokens: int | None
    """How many of them the model's generation config says a text has at most, which `generate` puts before a task's."""
    capacity: Capacity
    """What memory holds."""


class Settings(NamedTuple):
    """A request's generation_kwargs, taken apart."""

    until: tuple[str, ...]
    new_tokens: int
    """Most of them; the prompt is cut to leave room for as many."""
    length: int | None
    """Most tokens of prompt and text, where the task says that too."""
    choice: dict[str, Any]
    """The rest: settings of transformers' generation config."""


def settings_of(given: Mapping[str, Any], label: str) -> Settings:
    """Take a request's generation_kwargs apart.

    Raises:
        ScoringError: they are of wrong types; names task and document.
    """
    try:
        # Which logs what does not hold here: without a temperature the model's own is taken
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
        raise ScoringError(f"{label}: its generation_kwargs cannot be read ({error})") from error
    if not found.choice["do_sample"] or found.choice.get("temperature") is None:
        found.choice.pop("temperature", None)
    return found


def check_texts(requests: Sequence[Any], loaded: LoadedModel, window: int) -> None:
    """See to it that the texts that are asked for can be had.

    Args:
        requests: of kind `generate_until`.
        loaded: the model.
        window: tokens that it takes at once.

    Raises:
        ScoringError: more tokens are to be generated than the window holds, or in a way that is not served; names
            task and document.
        UsageError: the model's context is stretched in a way that is for scoring only.
    """
    from evalkit.generation.sampling import check_settings

    tried: set[str] = set()
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
        if repr(settings.choice) not in tried:
            tried.add(repr(settings.choice))
            try:
                check_settings(loaded.model, settings.choice)
            except UsageError as error:
                raise ScoringError(
                    f"{label}: its generation_kwargs, with the model's generation config, cannot be served: {error}"
                ) from error


def prompts_of(requests: Sequence[tuple[RequestKey, Any]], encoding: Any, facts: TextFacts) -> list[Prompt]:
    """Prompts of `generate_until` requests, in order.

    Args:
        requests: place and (context, generation_kwargs).
        encoding: an `Encoding`, or an `HFLM`.
        facts: of the model.

    Raises:
        ScoringError: a prompt leaves no room for a text; names task and document.
    """
    tokenizer = encoding.tokenizer
    end_text = None if tokenizer.eos_token_id is None else tokenizer.decode(tokenizer.eos_token_id)
    keys = {place: (arguments[0], _adds_special(encoding, arguments[0])) for place, arguments in requests}
    ids = encode_texts(tokenizer, dict.fromkeys(keys.values()))
    found = []
    for index, (place, (_, given)) in enumerate(requests):
        label = f"{place.task} document {place.doc_id}"
        settings = settings_of(given, label)
        kept = ids[keys[place]][-(encoding.max_length - settings.new_tokens) :]
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
        own = settings.choice.get("eos_token_id")
        named = facts.ends if own is None else own if isinstance(own, list) else [own]
        stops = Stops(frozenset(named), until=tuple(until))
        found.append(Prompt(index, tokens, most, stops, Decoding(settings.choice, seed_of(place))))
    return found


def seed_of(place: RequestKey) -> int:
    """Of a request's random numbers: its own, whatever is generated beside it, before it or in another run."""
    name = f"{_SEED} {place.task} {place.doc_id} {place.number} {place.part}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def text_of(tokenizer: Any, prompt: Prompt, tokens: Sequence[int]) -> str:
    """The answer: what was generated, special tokens apart, up to the first text that ends it."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    for end in prompt.stops.until:
        text = text.partition(end)[0] if end else text
    return text


def _adds_special(encoding: Any, text: str) -> bool:
    """lm-eval's rule for prompts of texts, which looks for a begin token only, and not for what stands for one."""
    begin = encoding.tokenizer.bos_token
    if begin is not None and text.startswith(begin):
        return False
    return True if encoding.add_bos_token is None else bool(encoding.add_bos_token)
