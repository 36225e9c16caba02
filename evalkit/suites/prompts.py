"""Token sequences: questions are rendered and tokenised, with the segment of each token.

In: `Question`s, a `Template` and a tokenizer. Out: one `TokenSequence` for each choice, tokenised exactly as if scored
alone. Segments are found by character offsets: a token belongs to the segment of its last
character, so a token that straddles a boundary counts with the later segment and no continuation is ever empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import ScoringError, TemplateError
from evalkit.inputs.values import check_text, in_calls
from evalkit.models.loading.tokenizer import added_tokens, first_token
from evalkit.runs.score_table import CONTEXT, CONTINUATION, END, SEGMENTS, SPECIAL
from evalkit.suites.questions import Question
from evalkit.suites.templates import Part, Template

Pieces = list[tuple[int, str]]
"""The text of a sequence: (index into `SEGMENTS`, text)."""
_FIXED_DATE = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
"""Prepended to a chat template: some print the current date, and prompts must not change from day to day."""
_CALL = 512
"""Texts tokenised at a time: enough for the tokenizer's threads, few enough to keep their offsets in memory."""


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of one choice with their segments."""

    tokens: NDArray[np.int32]
    """[length] token ids."""
    segments: NDArray[np.int8]
    """[length] index into `SEGMENTS` of each token's segment."""
    truncated: int = 0
    """Number of context tokens truncated on the left to fit the context window."""
    straddles: int = 0
    characters: NDArray[np.int32] | None = None
    """[length, 2] each token's characters in the rendered text, [start, end); -1 of tokens that are added as ids. None
    unless the prompter was asked for them."""

    def spans(self) -> list[tuple[str, int, int]]:
        """Return (segment, first token, one past the last token) of each segment, in order."""
        changes = np.flatnonzero(np.diff(self.segments)) + 1
        bounds = [0, *changes.tolist(), len(self.segments)]
        return [(SEGMENTS[self.segments[start]], start, end) for start, end in pairwise(bounds)]


@dataclass(frozen=True)
class EncodedQuestion:
    question: Question
    sequences: tuple[TokenSequence, ...]
    unconditional: tuple[TokenSequence, ...] = ()
    """The choices without the context, if a rule needs them (`pmi`)."""


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
        self._template = template
        self._before = list[int]()
        self._after = list[int]()
        if template.chat:
            self._template = replace(template, parts=_chat_parts(template, tokenizer, say))
        else:
            self._before, self._after = _ends(template, tokenizer, say)
        self._first = list(first_token(tokenizer))

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
            parts = [self._apart(pieces) for _, pieces, _ in call]
            encoded = self._tokenizer(
                [text for texts in parts for text in texts],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # its length warning ignores that the context is truncated below
            )
            encodings = zip(encoded["input_ids"], encoded.encodings, strict=True)
            for (question, pieces, _), texts_apart in zip(call, parts, strict=True):
                ids, spans, start = list[int](), list[tuple[int, int]](), 0
                for text, (of_text, encoding) in zip(texts_apart, encodings, strict=False):
                    ids += of_text
                    spans += (
                        [(first + start, after + start) for first, after in encoding.offsets]
                        if start
                        else encoding.offsets
                    )
                    start += len(text)
                yield self._fit(question, self._sequence(question, pieces, ids, spans))

    def _apart(self, pieces: Pieces) -> list[str]:
        """Return the texts that are tokenised separately: all as one, or those before and from the continuation on."""
        codes, texts = [code for code, _ in pieces], [text for _, text in pieces]
        if not self._template.separate or CONTINUATION not in codes[1:]:
            return ["".join(texts)]
        cut = codes.index(CONTINUATION)
        return ["".join(texts[:cut]), "".join(texts[cut:])]

    def _sequence(
        self, question: Question, pieces: Pieces, ids: list[int], spans: list[tuple[int, int]]
    ) -> TokenSequence:
        ends = list(accumulate(len(text) for _, text in pieces))
        first, after = np.array(spans, np.int64).reshape(-1, 2).T
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
        before, end = self._before, self._after
        if not before and segments[0] == CONTINUATION:
            before = self._first
            if not before:
                raise ScoringError(
                    f"{question.label}: the context is empty and the tokenizer has neither BOS nor EOS to replace it; "
                    "use another --tokenizer"
                )
        characters = None
        if self._characters:
            columns = np.column_stack((first, last + 1))
            characters = np.pad(columns, ((len(before), len(end)), (0, 0)), constant_values=-1).astype(np.int32)
        around = ([SPECIAL] * len(before), segments, [END] * len(end))
        segments = np.concatenate(around, dtype=np.int8, casting="unsafe")
        return TokenSequence(np.array([*before, *ids, *end], np.int32), segments, 0, straddles, characters)

    def _fit(self, question: Question, sequence: TokenSequence) -> TokenSequence:
        """Truncate the context on the left to the window. The last token is only predicted, so it needs no position.

        Requests with a limit of their own (`LeafTask.most_tokens`) lose what comes first, in their own template.
        """
        limit = question.leaf.most_tokens
        window = self._window if limit is None else min(self._window, limit)
        excess = len(sequence.tokens) - (window + 1)
        if excess <= 0:
            return sequence
        before = np.flatnonzero(sequence.segments == CONTEXT)
        if limit is not None and self._template.separate:
            before = np.arange(np.flatnonzero(sequence.segments == CONTINUATION)[0])
        # If they start the sequence, the last of them must stay to predict the continuation from
        spare = len(before) - int(0 in before)
        if excess > spare:
            raise ScoringError(
                f"{question.label}: {len(sequence.tokens) - spare} tokens remain without its context, more than the "
                f"context window of {window}; use a shorter instruction or another model"
            )
        cut = before[:excess]
        characters = None if sequence.characters is None else np.delete(sequence.characters, cut, axis=0)
        tokens, segments = np.delete(sequence.tokens, cut), np.delete(sequence.segments, cut)
        return TokenSequence(tokens, segments, excess, sequence.straddles, characters)


def _ends(template: Template, tokenizer: Any, say: Callable[[str], None]) -> tuple[list[int], list[int]]:
    """Return the ids before and after each sequence; `say` is called about BOS or EOS that does not exist."""
    before = list[int]()
    if template.bos == "tokenizer":
        before, _ = added_tokens(tokenizer)
    elif template.bos == "always":
        before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        if not before:
            say("the tokenizer has no BOS token: sequences start without one")
    after = [] if tokenizer.eos_token_id is None or not template.eos else [tokenizer.eos_token_id]
    if template.eos and not after:
        say("the tokenizer has no EOS token: sequences end without one")
    return before, after


def _chat_parts(template: Template, tokenizer: Any, say: Callable[[str], None]) -> tuple[Part, ...]:
    """Return the parts of the tokenizer's chat template, found by rendering it with placeholders."""

    def refused(why: str) -> TemplateError:
        return TemplateError(f"template {template.name}: the tokenizer's chat template {why}; use another --template")

    fields = {"system": "system", "context": "user", "continuation": "assistant"}
    placeholders = {field: f"\ue000{field}\ue001" for field in fields}
    turns = [{"role": role, "content": placeholders[field]} for field, role in fields.items()]
    try:
        fixed: dict[str, Any] = {"tokenize": False, "chat_template": _FIXED_DATE + tokenizer.get_chat_template()}
        text = tokenizer.apply_chat_template(turns, **fixed)
    except Exception as first:  # a Jinja template may raise anything, and many reject a system turn
        try:
            text = tokenizer.apply_chat_template(turns[1:], **fixed)
        except Exception:
            raise refused(f"fails: {first}") from first
    if placeholders["system"] not in text:
        say("the tokenizer's chat template has no system turn: the instruction is left out")
        del placeholders["system"]
    parts: list[Part] = []
    for field, placeholder in placeholders.items():
        before, mark, text = text.partition(placeholder)
        if not mark:
            raise refused(f"omits the {field}")
        parts += [_literal("special", before), Part("instruction" if field == "system" else field, f"{{{field}}}")]
    eos = tokenizer.eos_token
    end = text[: text.index(eos) + len(eos)] if eos and eos in text else text
    return tuple(part for part in (*parts, _literal("end", end)) if part.text)


def _literal(segment: str, text: str) -> Part:
    return Part(segment, text.replace("{", "{{").replace("}", "}}"))
