"""Tokens of lm-eval's requests, as its Hugging Face class splits, truncates and begins them.

In: `ModelRequest`s of one kind, and a tokenizer. Out: `Continuation`s to score, or `Prompt`s to continue. Neither torch
nor lm-eval's model classes are needed, so that a run is planned without the model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.lm_eval.requests import ROLLING, ModelRequest, RequestRow
from evalkit.benchmarks.lm_eval.tasks import log_from
from evalkit.compatibility.lm_eval import generation_arguments, rolling_windows
from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError
from evalkit.generation.prompts import Capacity, Decoding, Prompt, Stops
from evalkit.inputs.values import in_calls, whole
from evalkit.scoring.tree import Ints

NEW_TOKENS = 256
"""lm-eval's default of max_gen_toks."""
_AT_ONCE = 20_000
"""Texts in one call of the tokenizer, which bounds memory."""

Text = tuple[str, bool]
"""A text, and whether special tokens are added to it."""


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and the tokenisation settings of an `HFLM`."""

    tokenizer: Any
    prefix_id: int
    """The token that precedes a text without context: BOS, or EOS if there is no BOS."""
    window: int
    add_bos: bool | None = None
    """Whether texts begin with the BOS token; None: the tokenizer's default."""

    @cached_property
    def prefix_text(self) -> str:
        return str(self.tokenizer.decode(self.prefix_id))

    def special(self, text: str, prefix: str | None) -> Text:
        """Return a text to which special tokens are added unless it already begins with the prefix."""
        return text, self.add_bos is not False and not (prefix is not None and text.startswith(prefix))

    def ids(self, texts: Iterable[Text]) -> dict[Text, list[int]]:
        encoded: dict[Text, list[int]] = {}
        distinct = dict.fromkeys(texts)
        for special in (True, False):
            for part in in_calls([text for text, added in distinct if added is special], str, _AT_ONCE):
                ids = self.tokenizer(part, add_special_tokens=special, return_attention_mask=False, verbose=False)
                encoded.update(zip(((text, special) for text in part), ids["input_ids"], strict=True))
        return encoded


class Continuation(NamedTuple):
    """What is scored of a request: its continuation, or one window of its text."""

    request: ModelRequest
    row: RequestRow
    """Row of the journal without the answer, with the numbers of tokens."""
    tokens: Ints
    """[length] token ids of the context and of the continuation after it; empty for a text without tokens."""

    @classmethod
    def of(cls, request: ModelRequest, context: list[int], continuation: list[int], *place: int) -> Continuation:
        """Return it with the further arguments of `ModelRequest.row`."""
        row = request.row(len(context), len(continuation), *place)
        return cls(request, row, np.array(context + continuation, dtype=np.int32))


def continuations_of(requests: Sequence[ModelRequest], encoding: Encoding, say: Say) -> list[Continuation]:
    """Encode requests of one kind that is scored.

    White space at the end of a context moves to the continuation. Both are encoded together and split at the length of
    the context's own encoding. An empty context becomes the prefix token. Two cases that fail an assertion in lm-eval
    0.4.13 are supported: if one token spans the boundary and no token is left for the continuation, the continuation is
    encoded without its context (as in lm-eval's pull request 4055), which `say` reports once; a context of white space
    only is treated as empty. A continuation without tokens, or longer than the context window, is a `ScoringError`.
    """
    if requests and requests[0].kind == ROLLING:
        return _windows(requests, encoding)
    moved = []
    for request in requests:
        context, continuation = request.arguments
        kept = context.rstrip()
        moved.append((encoding.special(kept, encoding.prefix_text), context[len(kept) :] + continuation))
    texts: list[Text] = []
    for (context, special), rest in moved:
        texts += [(context, special), (context + rest, special)] if context else [(rest, False)]
    ids = encoding.ids(texts)
    continuations, spanned = [], []
    for request, ((context, special), rest) in zip(requests, moved, strict=True):
        if context:
            head = ids[context, special]
            tail = ids[context + rest, special][len(head) :]
            if not tail and rest:
                [tail] = encoding.ids([(rest, False)]).values()
                spanned.append(request)
        else:
            tail = ids[rest, False]
            # Its own first token is the context if it is the prefix token
            head, tail = (tail[:1], tail[1:]) if tail[:1] == [encoding.prefix_id] else ([encoding.prefix_id], tail)
        if not 0 < len(tail) <= encoding.window:
            raise ScoringError(
                f"{request.label}: its continuation has {len(tail)} tokens; the model's window allows 1 to "
                f"{encoding.window}"
            )
        # The last token is only predicted, so one more than the window fits
        cut = max(0, len(head) + len(tail) - encoding.window - 1)
        continuations.append(Continuation.of(request, head[cut:], tail, cut))
    if spanned:
        say(
            f"{len(spanned)} continuation(s) end inside a token that begins in their context, {spanned[0].label} "
            "for one; they are encoded without their context (lm-eval 0.4.13 fails on them)"
        )
    return continuations


def _windows(requests: Sequence[ModelRequest], encoding: Encoding) -> list[Continuation]:
    texts = [encoding.special(request.arguments[0], encoding.prefix_text) for request in requests]
    ids = encoding.ids(texts)
    continuations = []
    for request, text in zip(requests, texts, strict=True):
        windows = rolling_windows(ids[text], encoding.prefix_id, encoding.window)
        for number, (context, continuation) in enumerate(windows or [([], [])]):
            continuations.append(Continuation.of(request, context, continuation, 0, number, len(windows)))
    return continuations


@dataclass(frozen=True)
class TextFacts:
    ends: tuple[int, ...]
    """Token ids that end a text."""
    new_tokens: int | None
    """max_new_tokens of the model's generation config, which overrides the task's in `generate`; None if not set."""
    capacity: Capacity


def prompts_of(requests: Sequence[ModelRequest], encoding: Encoding, facts: TextFacts) -> list[Prompt]:
    """Return the prompts of `generate_until` requests; a sampled text depends on nothing but its own request.

    generation_kwargs that are not valid, or ask for more tokens than the window has, are a `ScoringError`.
    """
    # lm-eval's rule for generation checks for the BOS token only
    texts = [encoding.special(request.arguments[0], encoding.tokenizer.bos_token) for request in requests]
    ids = encoding.ids(texts)
    prompts = []
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        try:
            prompts.append(_prompt(index, request, ids[text], encoding, facts))
        except (TypeError, ValueError, UsageError) as error:
            raise ScoringError(f"{request.label}: its generation_kwargs are not valid ({error})") from error
    return prompts


def _prompt(index: int, request: ModelRequest, ids: list[int], encoding: Encoding, facts: TextFacts) -> Prompt:
    # lm-eval's warning does not apply here: the default temperature is the model's
    with log_from(logging.ERROR):
        settings = generation_arguments(request.arguments[1], NEW_TOKENS)
    until, length = settings.pop("until"), settings.pop("max_length", None)
    most = new_tokens = whole("max_gen_toks", settings.pop("max_gen_toks"), 1)
    if not all(isinstance(text, str) for text in until):
        raise TypeError("until is not a text or a list of texts")
    if not isinstance(settings["do_sample"], bool):
        raise TypeError(f"do_sample is {settings['do_sample']!r}; it must be true or false")
    if not settings["do_sample"] or settings.get("temperature") is None:
        settings.pop("temperature", None)
    if new_tokens >= encoding.window:
        raise ValueError(f"max_gen_toks is {new_tokens}; it must be less than the model's window, {encoding.window}")
    # The prompt is truncated to leave room for the text
    tokens = np.array(ids[-(encoding.window - new_tokens) :] or [encoding.prefix_id], dtype=np.int64)
    if length is not None:
        most = whole("max_length", length, 1) - len(tokens)
    if facts.new_tokens is not None:
        most = min(facts.new_tokens, encoding.window - len(tokens))
    if most < 1:
        raise ValueError(f"max_length is {length}, and the prompt has {len(tokens)} tokens; give max_gen_toks instead")
    own_ends, tokenizer = settings.get("eos_token_id"), encoding.tokenizer
    ends = facts.ends if own_ends is None else own_ends if isinstance(own_ends, list) else [own_ends]
    end_texts = [] if tokenizer.eos_token_id is None else [tokenizer.decode(tokenizer.eos_token_id)]
    stops = Stops(frozenset(ends), until=tuple(dict.fromkeys((*until, *end_texts))))
    # With lm-eval's default seed for torch
    name = f"1234 {request.task} {request.doc_id} {request.number} {request.sample}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    return Prompt(index, tokens, most, stops, Decoding(settings, seed))


def answer_text(tokenizer: Any, prompt: Prompt, tokens: Sequence[int]) -> str:
    """Return the answer: the generated text without special tokens, cut at the first stop string."""
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    for end in prompt.stops.until:
        text = text.partition(end)[0] if end else text
    return text
