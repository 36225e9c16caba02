"""Word categories of tokens: alignment with made-up words, and sentences categorised by hand with real ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from evalkit.benchmarks.attention.categories import (
    BOS,
    CATEGORIES,
    CATEGORY_OF_TAG,
    CONTENT,
    FUNCTION,
    OTHER,
    PUNCTUATION,
    SPECIAL,
    Piece,
    Tagger,
    Word,
    categories_of,
    tagged_texts,
)
from evalkit.errors import DataError
from evalkit.models.loading.locate import locate
from evalkit.models.loading.spec import tokenizer_alone

LETTERS = "bspcfo"
"""Initial letters of `CATEGORIES`."""
UNIVERSAL = {
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ",
    "SYM", "VERB", "X",
}  # fmt: skip
"""The 17 tags of universaldependencies.org/u/pos."""
FUNCTION_WORDS = {"the": "DET", "in": "ADP", "do": "AUX", "n't": "PART", "is": "AUX", "it": "PRON"}


def made_up_words(text: str) -> list[Word]:
    """Split a text as spaCy would, in simple cases; letters and emoji are nouns."""
    words = re.finditer(r"[^\W\d_]+(?=n't)|n't|\d[\d.,]*\d|\d|[^\W\d_]+|\s+|.", text)
    return [Word(*word.span(), _tag(word.group())) for word in words]


def _tag(word: str) -> str:
    if word.lower() in FUNCTION_WORDS:
        return FUNCTION_WORDS[word.lower()]
    if word.isspace():
        return "SPACE"
    if word[0].isdigit():
        return "NUM"
    return "PUNCT" if word in set("'.,!?()-") else "NOUN"


def byte_tokens(text: str, trim: bool) -> list[tuple[int, int]]:
    """Return the spans of a byte-level tokenizer without merges: a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    spans: list[tuple[int, int]] = tokenizer.encode(text).offsets
    return spans


def cut(tokens: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text and its tokens' spans, from tokens separated by bars."""
    parts = tokens.split("|")
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return "".join(parts), list(zip([0, *ends[:-1]], ends, strict=True))


def letters(pieces: list[Piece], spans: Any, tagger: Any = made_up_words) -> str:
    found = categories_of(pieces, spans, tagger)
    assert found.dtype == np.int8
    assert found.shape == (len(spans),)
    return "".join(LETTERS[category] for category in found)


def test_the_categories_in_order() -> None:
    assert CATEGORIES == ("bos", "special", "punctuation", "content", "function", "other")
    assert (BOS, SPECIAL, PUNCTUATION, CONTENT, FUNCTION, OTHER) == (0, 1, 2, 3, 4, 5)


def test_every_universal_tag_and_space_has_the_papers_group() -> None:
    assert CATEGORY_OF_TAG.keys() == UNIVERSAL | {"SPACE"}
    groups = {category: {tag for tag in CATEGORY_OF_TAG if CATEGORY_OF_TAG[tag] == category} for category in range(6)}
    assert groups == {
        BOS: set(),
        SPECIAL: set(),
        PUNCTUATION: {"PUNCT"},
        CONTENT: {"NOUN", "VERB", "ADJ", "ADV", "PROPN"},
        FUNCTION: {"DET", "ADP", "CCONJ", "SCONJ", "PART", "AUX", "PRON"},
        OTHER: {"NUM", "SYM", "X", "SPACE", "INTJ"},
    }


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("I| don|'t", "cff"),  # "do" + "n't": a token with letters of both has its last letter's word
        ("I| do|n|'|t| it", "cfffff"),
        ("It| cost| 1|,|2|5|0|.|7|5| in| the| end|.", "fcooooooooffcp"),
        (" Stra|ß|e| in| Kö|ln|,| café", "cccfccpc"),
        ("the| 漢|字|!", "fccp"),
        ("photo|synth|esis| is| un|believ|able", "cccfccc"),
        ("the|   | end|  | is", "focof"),
        ("end|.\n\n|In", "cpf"),  # the new lines belong to the full stop's token
        ("end|\n\n|In", "cof"),
        ("end).| In", "pf"),
        ("  the", "f"),
        ("the  | end", "fc"),
        ("end| |-| |the|\u00a0|", "copofoo"),
    ],
)
def test_tokens_have_their_words_category(tokens: str, expected: str) -> None:
    text, spans = cut(tokens)
    assert letters([(False, text)], spans) == expected


@pytest.mark.parametrize("trim", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in 😀", "ffocccc"),  # four bytes
        ("漢 é in", "ccc" + "o" + "cc" + "o" + "ff"),
        ("it  is\n", "ff" + "oo" + "ff" + "o"),
        ("\u00a0\u00a0in", "oooo" + "ff"),
        ("e\u0301 1", "c" + "cc" + "oo"),  # a combining accent
    ],
)
def test_bytes_have_their_characters_category(text: str, expected: str, trim: bool) -> None:
    """The trimmed spans of spaces are empty."""

    def words(text: str) -> list[Word]:
        return [Word(*one.span(), _tag(one.group())) for one in re.finditer(r"\S+", text)]

    spans = byte_tokens(text, trim)
    assert any(start == end for start, end in spans) == (trim and " " in text)
    assert letters([(False, text)], spans, words) == expected


def test_markers_are_special_wherever_they_are() -> None:
    pieces = [
        (True, "[INST]"),
        (False, " In the"),
        (True, " [/INST]\n"),
        (False, "the end"),
        (False, "."),
        (True, "</s>"),
    ]
    text, spans = cut("[|INST|]| In| the| [/|INST|]|\n|the| end|.|</|s>")
    assert text == "".join(piece for _, piece in pieces)
    assert letters(pieces, spans) == "sss" + "ff" + "ssss" + "fcp" + "ss"


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [("the|]x", "fc"), ("the] |x", "sc"), ("the]| x", "sc"), ("th|e]|  |x", "fsoc"), ("the|]  |x", "fsc")],
)
def test_a_token_of_marker_and_text_belongs_to_its_last_visible_character(tokens: str, expected: str) -> None:
    text, spans = cut(tokens)
    before, _, after = text.partition("]")
    assert letters([(False, before), (True, "]"), (False, after)], spans) == expected


def test_neighbouring_pieces_are_one_text_without_the_white_space_around_it() -> None:
    pieces = [(False, " \n"), (False, "I d"), (False, "on't "), (True, ">"), (False, "  "), (True, "<"), (False, "do")]
    assert tagged_texts(pieces) == ["I don't", "do"]
    asked: list[str] = []

    def asking(text: str) -> list[Word]:
        asked.append(text)
        return made_up_words(text)

    _, spans = cut(" |\n|I| do|n't| >|  |<|do")
    assert letters(pieces, spans, asking) == "oocffsosf"
    assert asked == tagged_texts(pieces)


@pytest.mark.parametrize("pieces", [[], [(False, "")], [(False, ""), (True, "")]])
def test_empty_texts(pieces: list[Piece]) -> None:
    assert letters(pieces, []) == ""
    assert letters(pieces, [(0, 0)]) == "o"  # a tokenizer's own prefix


def test_white_space_alone_is_not_tagged() -> None:
    def no_tagger(text: str) -> list[Word]:
        raise AssertionError(text)

    assert letters([(False, " \n"), (True, "</s>")], [(0, 1), (1, 2), (2, 6)], no_tagger) == "oos"


@pytest.mark.parametrize("tag", ["", "NN", "noun", "CONJ"])
def test_an_unknown_tag_is_an_error(tag: str) -> None:
    with pytest.raises(DataError, match=f"tag '{tag}' of 'end' is not a universal part of speech"):
        categories_of([(False, "end")], [(0, 3)], lambda _: [Word(0, 3, tag)])


def test_a_character_without_a_word_is_an_error() -> None:
    with pytest.raises(DataError, match="no word for character 4 of 'the end'"):
        categories_of([(False, " the end")], [(0, 4), (4, 8)], lambda _: [Word(0, 3, "DET")])


def by_token(pieces: list[Piece], span: tuple[int, int]) -> int:
    """The rule for one token, character by character."""
    text = "".join(piece for _, piece in pieces)
    marked = [is_marker for is_marker, piece in pieces for _ in piece]
    first, last = min(span[0], max(span[1] - 1, 0)), max(span[1] - 1, 0)
    position = next((place for place in range(last, first - 1, -1) if not text[place].isspace()), last)
    if marked[position]:
        return SPECIAL
    if text[position].isspace():
        return OTHER
    start, end = position, position + 1
    while start > 0 and not marked[start - 1]:
        start -= 1
    while end < len(text) and not marked[end]:
        end += 1
    run = text[start:end]
    shift = start + len(run) - len(run.lstrip())
    [word] = [word for word in made_up_words(run.strip()) if shift + word.start <= position < shift + word.end]
    return CATEGORY_OF_TAG[word.tag]


TEXT = st.text(st.sampled_from("the don't [x] 漢é😀\n\u00a01.5,"), max_size=12)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.booleans(), TEXT), min_size=1, max_size=5), st.data())
def test_any_spans_in_any_pieces(pieces: list[Piece], data: st.DataObject) -> None:
    length = len("".join(text for _, text in pieces))
    if length == 0:
        return
    ends = st.integers(0, length)
    spans = data.draw(st.lists(st.tuples(ends, ends).map(lambda pair: (min(pair), max(pair))), max_size=8))
    expected = [by_token(pieces, span) for span in spans]
    assert categories_of(pieces, spans, made_up_words).tolist() == expected


BY_HAND = [
    ("She| didn|'t| eat|,| and| we| won|'t| either|.", "f ff c p f f ff c p"),
    ("In| |2|0|1|6|,| |4|0|%| of| U|.|S|.| adults| paid| $|9|.|7|5|.", "f o oooo p o oo c f cccc c c o oooo p"),
    ("The| café| in| K|ö|ln| isn|'t| na|ïve|.", "f c f ccc ff cc p"),
    ("We| met| in| 東|東|東|京|京|.", "f c f ccccc p"),
    ("Rain|  | fell|.|\n\n| Then| it| stopped|  ", "c o c p o c f c o"),
    ("The| dog|'s| photosynthesis| was| unbelie|vable|.", "f c f c f cc p"),
    (
        "Ann|’|s| sister| is| here|;| we|’|ll| see| her| at| |5| p|.|m|.| today|.",
        "c ff c f c p f ff c f f o o cccc c p",
    ),
    ("Two| negatively|-|charged| particles| (|ions|)| --| yes|,| both| of| them", "o c p c c p c p p o p f f f"),
    ('A| well|-|known| man|,| "|Bob|",| said|:| "|Why| not|?"', "f c p c c p p c p c p p f f p"),
    ("Oh|,| she| has| to| have| had| three| or| four| of| these|.", "o p f c f f c o f o f f p"),
    ("It| cost| |1|,|2|5|0|.|7|5| dollars| on| |4| July| |1|9|9|9|.", "f c o oooooooo c f o o c o oooo p"),
    ("Do| you| have| a| car| that| they| made|?", "f f c f c f f c p"),
    ("He| cannot|;| it|'s| its| tail|!", "f f p f f f c p"),
]
"""The demo tokenizer's tokens and their categories, written by hand. The tokens of a multi-byte character repeat it."""


@pytest.fixture(scope="module")
def demo_tokenizer(demo: Path) -> Any:
    return tokenizer_alone(locate(str(demo)), lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "expected"), BY_HAND)
def test_sentences_by_hand(tagger: Tagger, demo_tokenizer: Any, tokens: str, expected: str) -> None:
    text = re.sub(r"([^\x00-\x7f])(\|\1)+", r"\1", tokens).replace("|", "")
    instruction = [(True, "[INST]"), (False, " Which word? "), (True, "[/INST]")]
    pieces = [*instruction, (False, f" {text}")]
    whole = "".join(piece for _, piece in pieces)
    spans = demo_tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    count = len(tokens.split("|"))
    assert [whole[start:end] for start, end in spans[-count:]] == f" {tokens}".split("|")
    found = letters(pieces, spans, lambda text: tagger([text])[text])
    assert found == "sss" + "fcp" + "ssss" + expected.replace(" ", "")
