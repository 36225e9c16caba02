"""Boundaries of a prompt's pieces in its tokens: which piece each token belongs to.

A token belongs to the piece of its last character; one that also has characters of an earlier piece straddles. Only
tokens beside a boundary are looked at where that suffices, since a list of every token's characters takes more time
than all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pieces_of_tokens(encoding: Any, tokens: int, ends: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Return the number of the piece of each token, [tokens], and how many tokens straddle.

    Args:
        encoding: the `tokenizers.Encoding` of the whole text.
        tokens: number of its tokens.
        ends: one past the last character of each piece, of which none is empty.
    """
    starts = [0]
    straddling = set()
    for boundary in ends[:-1]:
        found = _first_token(encoding, boundary, ends[-1], tokens)
        if found is None:
            return _by_characters(encoding, ends)
        token, start = found
        starts.append(token)
        if start < boundary:
            straddling.add(token)
    counts = [after - start for start, after in zip(starts, [*starts[1:], tokens], strict=True)]
    return np.repeat(np.arange(len(ends)), counts), len(straddling)


def _first_token(encoding: Any, boundary: int, end: int, tokens: int) -> tuple[int, int] | None:
    """Return the first token that ends after a boundary, and its first character; None if that is not certain."""
    character = boundary
    # Characters that no token has, such as spaces that were cut off
    while (token := encoding.char_to_token(character)) is None:
        character += 1
        if character == end:
            return None
    if character > boundary and token:
        start, after = encoding.token_to_chars(token - 1)
        if start == after or after > boundary:
            return None
    return token, encoding.token_to_chars(token)[0]


def _by_characters(encoding: Any, ends: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Find the pieces from every token's characters."""
    first, last = characters_of(encoding, ends[-1])
    first_piece = np.searchsorted(ends, np.minimum(first, last), side="right")
    piece = np.searchsorted(ends, last, side="right")
    return piece, int((first_piece != piece).sum())


def characters_of(encoding: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last character of each token, [tokens] each; the last is never after the text.

    Args:
        encoding: the `tokenizers.Encoding` of a text.
        length: the text's characters.
    """
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    # A token of white space only may have an empty span: its last character is still end - 1
    last = np.clip(offsets[:, 1] - 1, 0, max(length - 1, 0))
    return offsets[:, 0], last
