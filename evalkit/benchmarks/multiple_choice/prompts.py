"""Rendering and tokenisation: questions → token sequences with the segment of each token.

In: `Question`s, a `Template` and a tokenizer. Out: one `TokenSequence` for each choice, tokenised exactly as if scored
alone. Segments are found by character offsets: a token belongs to the segment of its last character, so a token
that straddles a boundary counts with the later segment and no continuation is ever empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any

import numpy as np

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
        self._bos, self._eos = (None, None) if template.chat else _ends(template, tokenizer, say)
        # What a continuation without a context is predicted from: BOS, or else EOS, as in lm-eval
        known = (self._bos, tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._first = next((int(token_id) for token_id in known if token_id is not None), None)

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
            encoded = self._tokenizer(
                [text for _, _, text in call],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # its length warning ignores that the context is truncated below
            )
            for (question, pieces, _), ids, encoding in zip(call, encoded["input_ids"], encoded.encodings, strict=True):
                yield self._fit(question, self._sequence(question, pieces, ids, encoding.offsets))

    def _sequence(
        self, question: Question, pieces: Pieces, ids: list[int], offsets: list[tuple[int, int]]
    ) -> TokenSequence:
        ends = list(accumulate(len(text) for _, text in pieces))
        first, after = np.array(offsets, np.int64).reshape(-1, 2).T
        # A token of white space only may have an empty span: its last character is still after - 1
        last = np.clip(after - 1, 0, max(ends[-1] - 1, 0)) if ends else after
        piece = np.searchsorted(ends, last, side="right")
        straddles = int((np.searchsorted(ends, np.minimum(first, last), side="right") != piece).sum())
        segments = np.array([code for code, _ in pieces], np.int8)[piece]
        if not (segments == CONTINUATION).any():
            raise ScoringError(
                f"{question.label}: a choice has no token to score: it is empty, or its only token straddles the "
                "boundary to the template's next text; check the document and the template"
            )
        before = [] if self._bos is None and segments[0] != CONTINUATION else [self._first]
        if None in before:
            raise ScoringError(
                f"{question.label}: the context is empty and the tokenizer has neither BOS nor EOS to replace it; "
                "use another --tokenizer"
            )
        end = [] if self._eos is None else [self._eos]
        characters = None
        if self._characters:
            spans = np.column_stack((first, last + 1))
            characters = np.pad(spans, ((len(before), len(end)), (0, 0)), constant_values=-1).astype(np.int32)
        segments = np.concatenate((_SPECIAL[: len(before)], segments, _END[: len(end)]))
        return TokenSequence(np.array([*before, *ids, *end], np.int32), segments, 0, straddles, characters)

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
        cut = context[:excess]
        characters = None if sequence.characters is None else np.delete(sequence.characters, cut, axis=0)
        tokens, segments = np.delete(sequence.tokens, cut), np.delete(sequence.segments, cut)
        return TokenSequence(tokens, segments, excess, sequence.straddles, characters)


def _ends(template: Template, tokenizer: Any, say: Callable[[str], None]) -> tuple[int | None, int | None]:
    """Return the ids of BOS and EOS where sequences have them; `say` is called about those that do not exist."""
    bos: int | None = tokenizer.bos_token_id if template.bos != "never" else None
    eos: int | None = tokenizer.eos_token_id if template.eos else None
    if template.bos == "tokenizer" and tokenizer("a")["input_ids"][:1] != [bos]:
        bos = None
    elif template.bos == "always" and bos is None:
        say("the tokenizer has no BOS token: sequences start without one")
    if template.eos and eos is None:
        say("the tokenizer has no EOS token: sequences end without one")
    return bos, eos


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
        del placeholders["system"]
    parts: list[Part] = []
    for field, placeholder in placeholders.items():
        before, found, text = text.partition(placeholder)
        if not found:
            raise TemplateError(
                f"template {template.name}: the tokenizer's chat template omits the {field}; use another --template"
            )
        segment = "instruction" if field == "system" else field
        parts += [_literal("special", before), Part(segment, f"{{{field}}}")]
    eos = tokenizer.eos_token
    end = text[: text.index(eos) + len(eos)] if eos and eos in text else text
    return tuple(part for part in (*parts, _literal("end", end)) if part.text)


def _literal(segment: str, text: str) -> Part:
    return Part(segment, text.replace("{", "{{").replace("}", "}}"))
