"""Texts of single documents: the whole text to search in, and its beginning for a list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from evalkit.benchmarks.document_views import ChoiceText, ChoiceView, Piece, common_prefix
from evalkit.inspection.outcomes import TaskOutcomes

_PARAGRAPH = "\n\n"


def full_text(found: TaskOutcomes, place: int) -> str:
    """Return all texts of a document, joined by line ends; empty if it has none."""
    if isinstance(found.view, ChoiceView):
        text = choice_text_of(found, place)
        if text is None:
            return ""
        return "\n".join([_joined(text.common), *map(_joined, text.choices), *text.options])
    document = found.view.documents[place]
    return "\n".join([_joined(document.prompt), document.answer, *document.references])


def choice_text_of(found: TaskOutcomes, place: int) -> ChoiceText | None:
    """Return the texts of a document with choices; None if there are none."""
    if not isinstance(found.view, ChoiceView):
        return None
    subtask, identity = found.keys[place]
    return found.view.texts.get((subtask, int(identity)))


def option_text(found: TaskOutcomes, place: int, choice: int, most: int) -> str:
    """Return the number of a choice, with at most `most` characters of its option where texts are known."""
    text = choice_text_of(found, place)
    return str(choice) if text is None else f"{choice} {shortened(text.options[choice], most)}"


def beginnings(found: TaskOutcomes, places: Iterable[int], most: int) -> dict[int, str]:
    """Return index → the beginning of a document's context, on one line.

    The paragraphs with which all contexts of its subtask begin are left out: MMLU's heading, solved examples.

    Args:
        found: the task.
        places: indices of documents.
        most: maximum number of characters.
    """
    chosen = list(places)
    subtasks = {found.keys[place][0] for place in chosen}
    contexts: dict[str, list[str]] = defaultdict(list)
    for place, (subtask, _) in enumerate(found.keys):
        if subtask in subtasks:
            contexts[subtask].append(_context(found, place))
    shared = {subtask: _shared_paragraphs(texts) for subtask, texts in contexts.items()}
    return {place: shortened(_context(found, place)[shared[found.keys[place][0]] :], most) for place in chosen}


def shortened(text: str, most: int) -> str:
    """Return the beginning of a text on one line, with … where it is cut."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"


def _context(found: TaskOutcomes, place: int) -> str:
    """Return the context of a document, of its first choice if the choices have different ones."""
    if isinstance(found.view, ChoiceView):
        text = choice_text_of(found, place)
        pieces = () if text is None else (*text.common, *text.choices[0])
    else:
        pieces = found.view.documents[place].prompt
    return "".join(piece.text for piece in pieces if piece.segment == "context")


def _shared_paragraphs(texts: list[str]) -> int:
    """Return the number of characters of the paragraphs that all texts begin with; 0 for a single text."""
    if len(texts) < 2:
        return 0
    return common_prefix(texts).rfind(_PARAGRAPH) + 1


def _joined(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)
