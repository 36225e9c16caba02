"""Word categories of tokens: which kinds of words attention goes to.

In: a prompt's pieces of text, its tokens' character spans and a tagger of words. Out: the category of each token.
The paper has four groups: special tokens and punctuation (here BOS, SPECIAL and PUNCTUATION), content, function, other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalkit.analysis.groups import CATEGORIES
from evalkit.analysis.tagger import Word
from evalkit.errors import DataError

BOS, SPECIAL, PUNCTUATION, CONTENT, FUNCTION, OTHER = range(len(CATEGORIES))
"""Numbers of the categories."""

CATEGORY_OF_TAG = {
    **dict.fromkeys(("PUNCT",), PUNCTUATION),
    **dict.fromkeys(("NOUN", "VERB", "ADJ", "ADV", "PROPN"), CONTENT),
    **dict.fromkeys(("DET", "ADP", "CCONJ", "SCONJ", "PART", "AUX", "PRON"), FUNCTION),
    **dict.fromkeys(("NUM", "SYM", "X", "SPACE", "INTJ"), OTHER),
}
"""Category of each universal part of speech and of spaCy's SPACE."""

Piece = tuple[bool, str]
"""Whether a piece of a prompt is a marker such as "[INST]", and its text."""


def categories_of(
    pieces: Sequence[Piece], offsets: ArrayLike, tagger: Callable[[str], Sequence[Word]]
) -> NDArray[np.int8]:
    """Return the category of each token of a prompt.

    A token belongs to its last character that is not white space. If that is part of a marker, the token is special;
    otherwise it has the category of the word, so all tokens of a word have the same one. Tokens of white space only
    are `OTHER`, in a marker `SPECIAL`. BOS and EOS are added as ids, without text; their categories are the caller's.

    Args:
        pieces: the prompt's text.
        offsets: [tokens, 2] first character of each token and one past its last, as fast tokenizers return them. Of an
            empty span, which tokenizers give to white space, the last character is the one before its end.
        tagger: returns the words of a text.

    Returns:
        [tokens] indices into `CATEGORIES`.

    Raises:
        DataError: the tagger returned an unknown tag, or no word for a character.
    """
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    text = "".join(piece for _, piece in pieces)
    if not text:
        return np.full(len(spans), OTHER, dtype=np.int8)
    last = np.clip(spans[:, 1] - 1, 0, len(text) - 1)
    nearest = np.maximum.accumulate(np.where(_visible(text), np.arange(len(text)), -1))[last]
    inside = nearest >= spans[:, 0]
    return _categories_of_characters(pieces, tagger)[np.where(inside, nearest, last)]


def tagged_texts(pieces: Sequence[Piece]) -> list[str]:
    """Return the texts that `categories_of` passes to its tagger, to tag those of many prompts at once."""
    return [text for _, text in _runs(pieces)]


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[int, str]]:
    """Yield the texts between markers with their first characters.

    White space around them is left out: as a word of its own it changes the tags of its neighbours.
    """
    start = 0
    for is_marker, group in groupby(pieces, itemgetter(0)):
        run = "".join(text for _, text in group)
        if not is_marker and (text := run.strip()):
            yield start + run.index(text), text
        start += len(run)


def _categories_of_characters(pieces: Sequence[Piece], tagger: Callable[[str], Sequence[Word]]) -> NDArray[np.int8]:
    """Return the category of each character, [characters]."""
    is_marker = np.repeat([is_marker for is_marker, _ in pieces], [len(text) for _, text in pieces])
    categories = np.where(is_marker, SPECIAL, OTHER).astype(np.int8)
    for start, text in _runs(pieces):
        categories[start : start + len(text)] = _of_text(text, tagger(text))
    return categories


def _of_text(text: str, words: Sequence[Word]) -> NDArray[np.int8]:
    categories = np.full(len(text), -1, dtype=np.int8)
    for word in words:
        if word.tag not in CATEGORY_OF_TAG:
            raise DataError(
                f"the tagger's tag {word.tag!r} of {text[word.start : word.end]!r} is not a universal part of speech"
            )
        categories[word.start : word.end] = CATEGORY_OF_TAG[word.tag]
    visible = _visible(text)
    if (missing := visible & (categories < 0)).any():
        raise DataError(f"the tagger has no word for character {missing.argmax()} of {text[:60]!r}")
    return np.where(visible, categories, OTHER).astype(np.int8)


def _visible(text: str) -> NDArray[np.bool_]:
    """Return which characters are not white space, [characters]."""
    return np.array([not character.isspace() for character in text], dtype=bool)
