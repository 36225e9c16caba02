"""Limits of tokenizer input: length of one text, and characters of one call.

A tokenizer needs up to 250 bytes of memory and 5 microseconds for each character; where it runs out of memory, the
process is aborted without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from evalkit.errors import ScoringError

LONGEST_TEXT = 2**23
"""Maximum characters of one text: two million tokens of English. LongBench's documents have some hundred thousand."""
_AT_ONCE = 2**21
"""Maximum characters in one call of the tokenizer; a longer text has a call of its own."""

Item = TypeVar("Item")


def check_text(text: str, label: str) -> None:
    """Raise a `ScoringError` that names the document if its text is too long or is not valid Unicode."""
    if len(text) > LONGEST_TEXT:
        raise ScoringError(
            f"{label}: its text has {len(text):,} characters, more than the maximum of {LONGEST_TEXT:,}; "
            "shorten it, or remove it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ScoringError(f"{label}: its text holds half of a surrogate pair ({text[error.start]!a})") from error


def in_calls(items: Iterable[Item], text: Callable[[Item], str], most: int) -> Iterator[list[Item]]:
    """Group items, in order, into lists for one call of the tokenizer each.

    Args:
        items: items with a text.
        text: returns an item's text.
        most: maximum items in one call.
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
