"""Tokens of lm-eval's requests, as of its Hugging Face class.

In: requests of a task, and an `Encoder`. Out: the request layer's `Score`s and `Generate`s. Neither torch nor lm-eval's
model classes are needed.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from evalkit.benchmarks.lm_eval.requests import GENERATED, ROLLING, ModelRequest
from evalkit.compatibility.lm_eval import generation_arguments, rolling_windows
from evalkit.display import Say
from evalkit.errors import CheckpointError, ScoringError, UsageError
from evalkit.generation.prompts import Decoding, Prompt, Stops
from evalkit.inputs.values import in_calls, text_digest, whole
from evalkit.requests.requests import Encoder, Facts, Generate, Score, ScoreDocument, TaskRequests
from evalkit.requests.rows import RequestKey
from evalkit.runs.score_table import CONTEXT, CONTINUATION
from evalkit.suites.lm_eval_tasks import log_from

NEW_TOKENS = 256
"""lm-eval's default of max_gen_toks."""
_AT_ONCE = 20_000
"""Texts in one call of the tokenizer, which bounds memory."""
_CANDIDATES = 2


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

    def ids(self, texts: Iterable[str], prefix: str | None = None, special: bool = True) -> dict[str, list[int]]:
        """Return text → token ids. Special tokens are added to a text unless it already begins with the prefix."""
        added = special and self.add_bos is not False
        by_special: dict[bool, list[str]] = {True: [], False: []}
        for text in dict.fromkeys(texts):
            by_special[added and not (prefix is not None and text.startswith(prefix))].append(text)
        encoded: dict[str, list[int]] = {}
        for with_special, members in by_special.items():
            for part in in_calls(members, str, _AT_ONCE):
                ids = self.tokenizer(part, add_special_tokens=with_special, return_attention_mask=False, verbose=False)
                encoded.update(zip(part, ids["input_ids"], strict=True))
        return encoded


class Continuation(NamedTuple):
    """What is scored of a request: its continuation, or one window of its text."""

    request: ModelRequest
    context: list[int]
    tokens: list[int]
    """Token ids of the continuation; empty for a text without tokens."""
    truncated: int = 0
    """Context tokens truncated on the left to fit the context window."""
    window: int = 0
    windows: int = 1

    @property
    def score(self) -> Score:
        segments = np.repeat(np.array([CONTEXT, CONTINUATION], np.int8), [len(self.context), len(self.tokens)])
        return Score(
            choice=self.request.number,
            texts=self.request.digest,
            tokens=np.array(self.context + self.tokens, dtype=np.int32),
            segments=segments,
            is_scored=segments == CONTINUATION,
            part=self.window,
            parts=self.windows,
            greedy=True,
            truncated=self.truncated,
        )


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
        moved.append((kept, context[len(kept) :] + continuation))
    with_context = [text for context, rest in moved if context for text in (context + rest, context)]
    ids = encoding.ids(with_context, encoding.prefix_text)
    without_context = encoding.ids((rest for context, rest in moved if not context), special=False)
    continuations, spanned = [], []
    for request, (context, rest) in zip(requests, moved, strict=True):
        if context:
            head = ids[context]
            tail = ids[context + rest][len(head) :]
            if not tail and rest:
                [tail] = encoding.ids([rest], special=False).values()
                spanned.append(request)
        else:
            tail = without_context[rest]
            # Its own first token is the context if it is the prefix token
            head, tail = (tail[:1], tail[1:]) if tail[:1] == [encoding.prefix_id] else ([encoding.prefix_id], tail)
        if not 0 < len(tail) <= encoding.window:
            raise ScoringError(
                f"{request.label}: its continuation has {len(tail)} tokens; it must have at least 1, and fit into the "
                f"model's window of {encoding.window}"
            )
        # The last token is only predicted, so one more than the window fits
        cut = max(0, len(head) + len(tail) - encoding.window - 1)
        continuations.append(Continuation(request, head[cut:], tail, cut))
    if spanned:
        say(
            f"{len(spanned)} continuation(s) end inside a token that begins in their context, {spanned[0].label} "
            "for one; they are encoded without their context (lm-eval 0.4.13 fails on them)"
        )
    return continuations


def _windows(requests: Sequence[ModelRequest], encoding: Encoding) -> list[Continuation]:
    ids = encoding.ids((request.arguments[0] for request in requests), encoding.prefix_text)
    continuations = []
    for request in requests:
        windows = rolling_windows(ids[request.arguments[0]], encoding.prefix_id, encoding.window)
        for number, (context, continuation) in enumerate(windows or [([], [])]):
            continuations.append(Continuation(request, context, continuation, 0, number, len(windows)))
    return continuations


def prompts_of(requests: Sequence[ModelRequest], encoding: Encoding, facts: Facts) -> list[tuple[Prompt, int | None]]:
    """Return the prompt of each `generate_until` request, and the number of its tokens before truncation, else None.

    A sampled text depends on nothing but its own request.
    generation_kwargs that are not valid, or ask for more tokens than the window has, are a `ScoringError`.
    """
    # lm-eval's rule for generation checks for the BOS token only
    ids = encoding.ids((request.arguments[0] for request in requests), encoding.tokenizer.bos_token)
    prompts = []
    for index, request in enumerate(requests):
        tokens = ids[request.arguments[0]]
        try:
            prompt = _prompt(index, request, tokens, encoding, facts)
        except (TypeError, ValueError, UsageError) as error:
            raise ScoringError(f"{request.label}: its generation_kwargs are not valid ({error})") from error
        prompts.append((prompt, len(tokens) if len(tokens) > len(prompt.tokens) else None))
    return prompts


def _prompt(index: int, request: ModelRequest, ids: list[int], encoding: Encoding, facts: Facts) -> Prompt:
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
    return Prompt(index, tokens, most, stops, Decoding(settings, seed), label=request.label)


def items_of(continuations: Sequence[Continuation]) -> list[list[Continuation]]:
    """Group consecutive continuations of a document; windows of a text, and what has no task, stay alone."""

    def owner(part: Continuation) -> Hashable:
        request = part.request
        is_alone = request.kind == ROLLING or request.task is None
        return (request.key, part.window) if is_alone else (request.task, request.doc_id)

    return [list(members) for _, members in groupby(continuations, key=owner)]


@dataclass(frozen=True)
class TaskModelRequests(TaskRequests):
    """The requests of one kind of a task of lm-eval."""

    task: str
    requests: Sequence[ModelRequest]
    add_bos: bool | None = None
    """See `Encoding`."""
    sizes: Mapping[str, int] | None = None

    @property
    def journal(self) -> str:
        return self.requests[0].journal

    @property
    def generates(self) -> bool:  # type: ignore[override]
        return self.requests[0].kind == GENERATED

    def costs(self) -> Iterator[tuple[RequestKey, float]]:
        samples = Counter(request.key for request in self.requests)
        for key, request in {request.key: request for request in self.requests}.items():
            yield key, request.work * samples[key]

    def candidates(self) -> TaskModelRequests:
        if self.generates:
            by_settings = {repr(request.arguments[1]): request for request in self.requests}
            return replace(self, requests=list(by_settings.values()))
        # An empty text has no token
        scored = [request for request in self.requests if request.arguments[-1]]
        return replace(self, requests=scored[:_CANDIDATES] or self.requests[:1])

    def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
        for parts in items_of(continuations_of(self.requests, encoding_of(encoder, self.add_bos), encoder.say)):
            request = parts[0].request
            work = sum(part.request.work / max(1, part.windows) for part in parts)
            scores = [part.score for part in parts]
            yield ScoreDocument(str(request.doc_id), request.label, request.task or "", scores, work)

    def generated(self, encoder: Encoder) -> Sequence[Generate]:
        samples = Counter(request.key for request in self.requests)
        prompts = prompts_of(self.requests, encoding_of(encoder, self.add_bos), encoder.facts)
        return [
            Generate(
                document=str(request.doc_id),
                prompt=prompt,
                prompt_sha256=text_digest(request.arguments[0]),
                truncated_from=truncated_from,
                choice=request.number,
                texts=request.digest,
                part=request.sample,
                parts=samples[request.key],
                without_stop=True,
            )
            for request, (prompt, truncated_from) in zip(self.requests, prompts, strict=True)
        ]

    def about(self, tokenizer: Any) -> dict[str, Any]:
        return {"prefix_id": encoding_of(Encoder(tokenizer, Facts(0))).prefix_id}


def encoding_of(encoder: Encoder, add_bos: bool | None = None) -> Encoding:
    """Return the tokenisation of lm-eval's class."""
    if not encoder.first:
        raise CheckpointError(
            "the tokenizer has neither a BOS nor an EOS token, and lm-eval needs one as prefix of a text without "
            "context; give another --tokenizer"
        )
    return Encoding(encoder.tokenizer, encoder.first[0], encoder.facts.window, add_bos)
