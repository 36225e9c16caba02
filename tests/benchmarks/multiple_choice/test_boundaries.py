"""Pieces of tokens found at the boundaries, compared with those found from every token's characters."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from evalkit.benchmarks.multiple_choice.prompts import pieces_of_tokens

TEXT = [
    "Why does ice float on water? 夜里河水上涨，清晨时桥 he’d  rather\n\nrepair it: 12 — 7",
    "Der Fluss stieg über Nacht 🌊🌊",
] * 20
SPECIAL = ["<unk>"]


def byte_level(trim: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400))
    return tokenizer


def whole_texts() -> Tokenizer:
    """Merges over words, no token for unknown characters but their bytes, and a normaliser that changes lengths."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300))
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token=SPECIAL[0])
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def lower_words() -> Tokenizer:
    """Spaces are in no token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL[0]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    return tokenizer


MADE = {
    "bytes": byte_level(trim=False),
    "bytes, trimmed": byte_level(trim=True),
    "whole texts": whole_texts(),
    "unigram": unigram(),
    "lower words": lower_words(),
}


def by_characters(offsets: list[tuple[int, int]], ends: list[int]) -> tuple[list[int], int]:
    """The piece of each token's last character, and how many have characters of an earlier piece."""
    owner = [piece for piece, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) for _ in range(a, b)]
    last = [max(end - 1, 0) for _, end in offsets]
    firsts = [min(start, end) for (start, _), end in zip(offsets, last, strict=True)]
    return [owner[i] for i in last], sum(owner[a] != owner[b] for a, b in zip(firsts, last, strict=True))


@pytest.mark.parametrize("name", MADE)
@given(
    pieces=st.lists(
        st.text(st.sampled_from("ace rivoß夜🌊’\n\t é-12ﬁ①"), min_size=1, max_size=9), min_size=1, max_size=6
    )
)
def test_pieces_are_those_of_the_last_characters(name: str, pieces: list[str]) -> None:
    encoding = MADE[name].encode("".join(pieces), add_special_tokens=False)
    ends = list(accumulate(map(len, pieces)))
    found, straddles = pieces_of_tokens(encoding, len(encoding.ids), ends)
    assert (found.tolist(), straddles) == by_characters(encoding.offsets, ends)


def test_one_token_of_three_pieces() -> None:
    tokenizer = Tokenizer(
        models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, merges=[("a", "b"), ("ab", "c")])
    )
    found, straddles = pieces_of_tokens(tokenizer.encode("abcabc"), 2, [1, 2, 3, 6])
    assert np.array_equal(found, [2, 3])
    assert straddles == 1
