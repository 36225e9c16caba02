"""Texts on their way to a tokenizer: how long one may be, and how many go at once.

A tokenizer needs up to 250 bytes of memory and 5 microseconds for each character; where memory runs out inside it, the
process is aborted without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from evalkit.errors import ScoringError

LONGEST_TEXT = 2**23
"""Characters of one text: two million tokens of English. Documents of LongBench have up to some hundred thousand."""
_AT_ONCE = 2**21
"""Characters in one call of the tokenizer; a longer text goes by itself."""

Item = TypeVar("Item")


def check_text(text: str, label: str) -> None:
    """Raise a `ScoringError` that names the document where its text is none that a tokenizer takes."""
    if len(text) > LONGEST_TEXT:
        raise ScoringError(
            f"{label}: its text has {len(text):,} characters, more than the {LONGEST_TEXT:,} that are tokenised; "
            "shorten it, or leave it out"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ScoringError(f"{label}: its text holds half of a surrogate pair ({text[error.start]!a})") from error


def in_calls(items: Iterable[Item], text: Callable[[Item], str], most: int) -> Iterator[list[Item]]:
    """Items in their order, in lists for one call of the tokenizer each.

    Args:
        items: each with a text.
        text: gives it.
        most: items in one call.
    """
    call: list[Item] = []
    characters = 0
    for item in items:
        size = len(text(item))
        if call and (len(call) == most or characters + size > _AT_ONCE):
            yield call
            call, characters = [], 0
        call.append(item)
        characters += size
    if call:
        yield call
