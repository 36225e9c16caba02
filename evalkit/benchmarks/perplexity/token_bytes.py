"""Bytes of a text that each token covers. In: a text, and its tokens with their characters. Out: bytes of each token.

Every byte of the text belongs to exactly one token. Where the tokens spell the bytes of the text, as in byte-level
vocabularies, these are known. Otherwise a token has the bytes of its characters; white space that no token has belongs
to the token after it, and what follows the last token to the last. A character that is split over several tokens is
shared among them by the bytes that each stands for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_SPELLING = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
"""Byte → its character in byte-level vocabularies, GPT-2's and all later ones."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token that stands for one byte, in tokenizers that fall back to bytes."""


def token_bytes(text: str, spans: NDArray[np.int64], added: NDArray[np.bool_], pieces: Sequence[str]) -> Counts:
    """Return the bytes of each token, [tokens]; their sum is the length of the text in UTF-8.

    Args:
        text: the text.
        spans: [tokens, 2] first character of each token, and the end of the last.
        added: [tokens] whether the tokenizer added it; it has no bytes unless no other token has.
        pieces: [tokens] the tokens as the vocabulary spells them.
    """
    found = np.zeros(len(spans), np.int64)
    own = np.flatnonzero(~(added & (spans[:, 0] == spans[:, 1])))
    if not len(own):
        found[:1] = len(text.encode())
        return found
    spelled = [pieces[token] for token in own.tolist()]
    if "".join(spelled) == text.encode().decode("latin-1").translate(_SPELLING):
        found[own] = [len(piece) for piece in spelled]
        return found
    offsets = _byte_offsets(text)
    starts, stops = spans[own, 0], np.maximum.accumulate(spans[own, 1])
    # A token that begins before the end of an earlier one shares a character with it; so does one without characters
    fresh = np.ones(len(own), bool)
    fresh[1:] = (starts[1:] >= stops[:-1]) & (spans[own[1:], 0] < spans[own[1:], 1])
    firsts = np.flatnonzero(fresh)
    ends = offsets[stops[np.append(firsts[1:], len(own)) - 1]]
    ends[-1] = offsets[-1]
    begins = np.concatenate(([0], ends[:-1]))
    counts = np.diff(np.append(firsts, len(own)))
    alone = counts == 1
    found[own[firsts[alone]]] = (ends - begins)[alone]
    for group in np.flatnonzero(~alone):
        members = own[firsts[group] : firsts[group] + counts[group]]
        total, gap = int(ends[group] - begins[group]), int(offsets[starts[firsts[group]]] - begins[group])
        found[members] = _shared([pieces[member] for member in members], total, gap)
    return found


def encoding_bytes(text: str, encoding: Any, tokenizer: Any) -> Counts:
    """Return the bytes of each token of a tokenizer's encoding; see `token_bytes`.

    Args:
        text: the text.
        encoding: with offsets and the mask of special tokens.
        tokenizer: the tokenizer.
    """
    spans = np.asarray(encoding["offset_mapping"], np.int64).reshape(-1, 2)
    added = np.asarray(encoding["special_tokens_mask"], bool)
    return token_bytes(text, spans, added, tokenizer.convert_ids_to_tokens(encoding["input_ids"]))


def _byte_offsets(text: str) -> Counts:
    """Return where each character begins in UTF-8, and the end of the last, [characters + 1]."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def _shared(pieces: Sequence[str], total: int, gap: int) -> list[int]:
    """Share bytes among tokens that have a character in common.

    Args:
        pieces: the tokens as the vocabulary spells them.
        total: bytes of all of them.
        gap: those before their first character, which only some vocabularies spell.
    """
    # Byte-level vocabularies spell each byte as one character; others spell characters, or single bytes
    for sizes in ([len(piece) for piece in pieces], [_spelled(piece) for piece in pieces]):
        if sum(sizes) == total:
            return sizes
        if sum(sizes) == total - gap:
            return [sizes[0] + gap, *sizes[1:]]
    cuts = [total * number // len(pieces) for number in range(len(pieces) + 1)]
    return [stop - start for start, stop in pairwise(cuts)]


def _spelled(piece: str) -> int:
    return 1 if _BYTE.fullmatch(piece) else len(piece.replace("▁", " ").encode())
