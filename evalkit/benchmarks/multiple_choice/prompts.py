"""Rendering and tokenisation: questions → token sequences with the segment of each token.

In: `Question`s, a `Template` and a tokenizer. Out: one `TokenSequence` for each choice, tokenised exactly as if scored
alone. Segments are found by character offsets: a token belongs to the segment of its last character, so a token
that straddles a boundary counts with the later segment and no continuation is ever empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.encoded import (
    CONTEXT,
    CONTINUATION,
    END,
    SPECIAL,
    EncodedQuestion,
    TokenSequence,
)
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.multiple_choice.templates import Part, Template
from evalkit.errors import ScoringError, TemplateError
from evalkit.inputs.values import check_text, in_calls
from evalkit.runs.score_table import SEGMENTS

Pieces = list[tuple[int, str]]
"""The text of a sequence: (index into `SEGMENTS`, text)."""
_FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
"""Prepended to a chat template: some print the current date, and prompts must not change from day to day."""
_CALL = 512
"""Texts tokenised at a time: enough for the tokenizer's threads, few enough to keep their offsets in memory."""
_SPECIAL, _END = np.array([SPECIAL], np.int8), np.array([END], np.int8)


class Prompter:
    """Renderer and tokeniser of questions under one template.

    Args:
        template: the prompt template.
        tokenizer: a fast Hugging Face tokenizer (character offsets are needed).
        window: the model's context window in tokens.
        say: called once for each special token or turn that the tokenizer lacks.
        characters: whether sequences have their tokens' characters.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Any,
        window: int,
        say: Callable[[str], None] = lambda _: None,
        characters: bool = False,
    ) -> None:
        self._tokenizer, self._window, self._characters = tokenizer, window, characters
        self._template = replace(template, parts=_chat_parts(template, tokenizer, say)) if template.chat else template
        self._bos, self._eos = self._opening(say), self._closing(say)
        known = (self._bos, tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._first = next((int(token_id) for token_id in known if token_id is not None), None)

    @cached_property
    def identity(self) -> str | None:
        """What sequences depend on beside the questions; None if it is more than data, such as other code."""
        tokenizer, template = self._tokenizer, self._template
        if not type(tokenizer).__module__.startswith("transformers."):
            return None
        try:
            content = tokenizer.backend_tokenizer.to_str()
        except Exception:  # what tokenizers raises for parts that are code, such as a word splitter for Chinese
            return None
        whole = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        ends = [self._bos, self._eos, tokenizer.bos_token_id, tokenizer.eos_token_id]
        parts = [[part.segment, part.text] for part in template.parts]
        return repr((parts, template.system, ends, self._window, tokenizer.split_special_tokens, whole))

    def encode(self, questions: Sequence[Question], unconditional: bool = False) -> Iterator[EncodedQuestion]:
        """Render and tokenise questions, in order.

        Raises:
            ScoringError: a sequence does not fit the window even without its context, or has no tokens to score.
        """
        contexts = (True, False) if unconditional else (True,)
        sequences = self._sequences(
            (question, self.render(question, choice, with_context))
            for question in questions
            for with_context in contexts
            for choice in range(len(question.contexts))
        )
        for question in questions:
            count = len(question.contexts)
            conditional = tuple(islice(sequences, count))
            yield EncodedQuestion(question, conditional, tuple(islice(sequences, count if unconditional else 0)))

    def render(self, question: Question, choice: int, with_context: bool = True) -> Pieces:
        """Return the text of a sequence without BOS and EOS, which are added as ids."""
        pieces = self._template.pieces(question, choice, with_context)
        return [(SEGMENTS.index(piece.segment), piece.text) for piece in pieces]

    def _sequences(self, rendered: Iterable[tuple[Question, Pieces]]) -> Iterator[TokenSequence]:
        texts = ((question, pieces, "".join(text for _, text in pieces)) for question, pieces in rendered)
        for call in in_calls(texts, itemgetter(2), _CALL):
            for question, _, text in call:
                check_text(text, question.label)
            found = self._tokenizer(
                [text for _, _, text in call],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # its length warning ignores that the context is truncated below
            )
            for (question, pieces, _), ids, encoding in zip(call, found["input_ids"], found.encodings, strict=True):
                yield self._fit(question, self._sequence(question, pieces, ids, encoding))

    def _sequence(self, question: Question, pieces: Pieces, ids: list[int], encoding: Any) -> TokenSequence:
        ends = list(accumulate(len(text) for _, text in pieces))
        piece, straddles = pieces_of_tokens(encoding, len(ids), ends) if ids else (np.zeros(0, np.int64), 0)
        segments = np.array([code for code, _ in pieces], np.int8)[piece]
        if not (segments == CONTINUATION).any():
            raise ScoringError(
                f"{question.label}: a choice has no token to score: it is empty, or its only token straddles the "
                "boundary to the template's next text; check the document and the template"
            )
        before = [] if self._bos is None and segments[0] != CONTINUATION else [self._first_id(question)]
        after = [] if self._eos is None else [self._eos]
        characters = None
        if self._characters:
            spans = np.add(np.column_stack(_characters_of(encoding, ends[-1])), (0, 1))
            characters = np.pad(spans, ((len(before), len(after)), (0, 0)), constant_values=-1).astype(np.int32)
        segments = np.concatenate((_SPECIAL[: len(before)], segments, _END[: len(after)]))
        return TokenSequence(np.array([*before, *ids, *after], np.int32), segments, 0, straddles, characters)

    def _fit(self, question: Question, sequence: TokenSequence) -> TokenSequence:
        """Truncate the context on the left to the window. The last token is only predicted, so it needs no position."""
        excess = len(sequence.tokens) - (self._window + 1)
        if excess <= 0:
            return sequence
        context = np.flatnonzero(sequence.segments == CONTEXT)
        # If the sequence starts with the context, its last token must stay to predict the continuation from
        spare = len(context) - int(sequence.segments[0] == CONTEXT)
        if excess > spare:
            raise ScoringError(
                f"{question.label}: {len(sequence.tokens) - spare} tokens remain without its context, more than the "
                f"context window of {self._window}; use a shorter instruction or another model"
            )
        keep = np.ones(len(sequence.tokens), dtype=bool)
        keep[context[:excess]] = False
        characters = None if sequence.characters is None else sequence.characters[keep]
        return TokenSequence(sequence.tokens[keep], sequence.segments[keep], excess, sequence.straddles, characters)

    def _first_id(self, question: Question) -> int:
        """Return BOS, or else EOS, from which a continuation without context is predicted (as in lm-eval)."""
        if self._first is None:
            raise ScoringError(
                f"{question.label}: the context is empty and the tokenizer has neither BOS nor EOS to replace it; "
                "use another --tokenizer"
            )
        return self._first

    def _opening(self, say: Callable[[str], None]) -> int | None:
        bos: int | None = self._tokenizer.bos_token_id
        if self._template.chat or self._template.bos == "never":
            return None
        if self._template.bos == "tokenizer":
            ids = self._tokenizer("a")["input_ids"]
            return bos if ids and ids[0] == bos else None
        if bos is None:
            say("the tokenizer has no BOS token: sequences start without one")
        return bos

    def _closing(self, say: Callable[[str], None]) -> int | None:
        if self._template.chat or not self._template.eos:
            return None
        eos: int | None = self._tokenizer.eos_token_id
        if eos is None:
            say("the tokenizer has no EOS token: sequences end without one")
        return eos


def pieces_of_tokens(encoding: Any, tokens: int, ends: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Return the number of the piece of each token, [tokens], and how many tokens straddle.

    Where the tokens beside each boundary tell, no Python object is made for every token's characters.

    Args:
        encoding: of the `tokenizers` library.
        tokens: their number.
        ends: the character after each piece.
    """
    starts = [0]
    straddling = set()
    for boundary in ends[:-1]:
        found = _first_token(encoding, boundary, ends[-1])
        if found is None:
            first, last = _characters_of(encoding, ends[-1])
            first_piece = np.searchsorted(ends, np.minimum(first, last), side="right")
            piece = np.searchsorted(ends, last, side="right")
            return piece, int((first_piece != piece).sum())
        token, start = found
        starts.append(token)
        if start < boundary:
            straddling.add(token)
    return np.repeat(np.arange(len(ends)), np.diff([*starts, tokens])), len(straddling)


def _first_token(encoding: Any, boundary: int, end: int) -> tuple[int, int] | None:
    """Return the first token that ends after a boundary, and its first character; None if that is not certain."""
    character = boundary
    # Characters that no token has, such as spaces that were cut off
    while (token := encoding.char_to_token(character)) is None:
        character += 1
        if character == end:
            return None
    if character > boundary and token:
        start, after = encoding.token_to_chars(token - 1)
        if start == after or after > boundary:
            return None
    return token, encoding.token_to_chars(token)[0]


def _characters_of(encoding: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last character of each token, [tokens] each; the last is never after the text."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    # A token of white space only may have an empty span: its last character is still end - 1
    return offsets[:, 0], np.clip(offsets[:, 1] - 1, 0, max(length - 1, 0))


def _chat_parts(template: Template, tokenizer: Any, say: Callable[[str], None]) -> tuple[Part, ...]:
    """Return the parts of the tokenizer's chat template, found by rendering it with placeholders."""
    if not tokenizer.chat_template:
        raise TemplateError(f"template {template.name}: the tokenizer has no chat template; use another --template")
    placeholders = {field: f"\ue000{field}\ue001" for field in ("system", "context", "continuation")}
    roles = ("system", "user", "assistant")
    turns = [{"role": role, "content": text} for role, text in zip(roles, placeholders.values(), strict=True)]
    fixed: dict[str, Any] = {"tokenize": False, "chat_template": _FIXED_DATE + tokenizer.get_chat_template()}
    try:
        text = tokenizer.apply_chat_template(turns, **fixed)
    except Exception as first:  # a Jinja template may raise anything, and many reject a system turn
        try:
            text = tokenizer.apply_chat_template(turns[1:], **fixed)
        except Exception:
            raise TemplateError(
                f"template {template.name}: the tokenizer's chat template fails: {first}; use another --template"
            ) from first
    if placeholders["system"] not in text:
        say("the tokenizer's chat template has no system turn: the instruction is left out")
    parts: list[Part] = []
    for (field, placeholder), segment in zip(
        placeholders.items(), ("instruction", "context", "continuation"), strict=True
    ):
        before, found, after = text.partition(placeholder)
        if found:
            parts += [_literal("special", before), Part(segment, f"{{{field}}}")]
            text = after
        elif field != "system":
            raise TemplateError(
                f"template {template.name}: the tokenizer's chat template omits the {field}; use another --template"
            )
    eos = tokenizer.eos_token
    end = text[: text.index(eos) + len(eos)] if eos and eos in text else text
    return tuple(part for part in (*parts, _literal("end", end)) if part.text)


def _literal(segment: str, text: str) -> Part:
    return Part(segment, text.replace("{", "{{").replace("}", "}}"))
