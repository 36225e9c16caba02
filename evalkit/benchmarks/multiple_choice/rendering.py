"""Rendering: questions → the text of their sequences by segment. No tokenizer.

In: the parts of a template and `Question`s. Out: `Piece`s, without BOS and EOS, which are added as ids.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from evalkit.benchmarks.document_views import Piece
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.multiple_choice.templates import Part


class Renderer:
    """Renderer of questions under one template.

    Args:
        parts: the template's parts, or those of a tokenizer's chat template.
        system: the instruction's text.
    """

    def __init__(self, parts: Sequence[Part], system: str) -> None:
        self._system = system
        # The text of most parts is the same in every question
        self._parts = [(part, _fixed(part, system)) for part in parts]

    def pieces(self, question: Question, choice: int, with_context: bool = True) -> list[Piece]:
        """Return the pieces of one choice's sequence, none of them empty.

        Args:
            question: the question.
            choice: index of the choice.
            with_context: whether to include the parts of the segment "context".
        """
        fields = {
            "system": self._system,
            "context": question.contexts[choice],
            "continuation": question.continuations[choice],
            "gap": question.gaps[choice],
            "delimiter": question.delimiter,
        }
        pieces = []
        for part, fixed in self._parts:
            if with_context or part.segment != "context":
                pieces.append(fixed or Piece(part.segment, part.text.format_map(fields)))
        return _shift_trailing_space([piece for piece in pieces if piece.text])


def _fixed(part: Part, system: str) -> Piece | None:
    """Return the piece of a part without a field of the question; None of other parts."""
    fields = {name for _, name, _, _ in string.Formatter().parse(part.text)}
    return Piece(part.segment, part.text.format(system=system)) if fields <= {None, "system"} else None


def _shift_trailing_space(pieces: list[Piece]) -> list[Piece]:
    """Move trailing white space of contexts to continuations, as lm-eval does: tokenizers join it to the next word."""
    for i in range(len(pieces) - 1):
        (segment, text), (next_segment, next_text) = pieces[i], pieces[i + 1]
        if segment == "context" and next_segment == "continuation" and text[-1].isspace():
            kept = text.rstrip()
            pieces[i], pieces[i + 1] = Piece(segment, kept), Piece(next_segment, text[len(kept) :] + next_text)
    return [piece for piece in pieces if piece.text]
