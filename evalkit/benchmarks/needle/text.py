"""Haystacks: a long text with one fact in it.

In: where the text comes from, a length in tokens, a depth. Out: token ids of the prompt. The text is a user's own, or
made of sentences that are put together from the lists below, the same everywhere. Texts of one repeat begin alike,
whatever their length, so that prompts share what stands before the needle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import DataError, UsageError
from evalkit.inputs.reading import MOST_TEXT_BYTES, Unreadable, read_bytes

BUILT_IN = "built-in 1"
"""Name of the text made here; another number whenever it changes."""

_TEMPLATES = (
    "{who} {did} the {what} {where} {when}.",
    "{when}, {who} {did} a {how} {what} {where}.",
    "Nobody knew why {who} had left the {what} {where}.",
    "The {what} {where} was more {how} than {who} remembered.",
    "{who} said that the {how} {what} belonged {where}.",
    "If {who} had come {when}, the {what} would still be {where}.",
    "It rained {when}, so {who} {did} the {what} and went home.",
    "Was it {who} or a neighbour who {did} the {what} {where}?",
    "There is a {how} {what} {where}, and {who} is proud of it.",
    "{who} looked for the {what} {where}, but found a {how} letter.",
    "Most people {where} would have {did} the {what}; {who} did not.",
    "{when} the {what} seemed {how}, at least to {who}.",
)
_WORDS: dict[str, tuple[str, ...]] = {
    "who": ("the baker", "Anna", "an old sailor", "the teacher", "my uncle", "Mr. Holt", "the postman", "a young nurse",
            "Tomas", "the gardener", "her sister", "the captain", "a stranger", "Ines", "the clockmaker", "our guide"),
    "did": ("painted", "repaired", "sold", "carried", "borrowed", "described", "washed", "measured", "polished",
            "bought", "cleaned", "praised"),
    "what": ("boat", "kettle", "ladder", "piano", "map", "lantern", "garden wall", "bicycle", "wooden chair", "bell",
             "basket of apples", "winter coat", "radio", "fence", "wagon", "mirror", "oven", "telescope"),
    "where": ("by the river", "behind the church", "in the attic", "at the market", "on the hill", "near the harbour",
              "under the bridge", "in the village square", "along the coast", "beside the mill", "in the valley",
              "at the edge of the forest", "across the street", "in the old station"),
    "when": ("in the morning", "last spring", "after the storm", "on a Sunday", "before dawn", "during the harvest",
             "many years ago", "at noon", "late in the autumn", "when the snow melted", "the week before", "at dusk"),
    "how": ("heavy", "beautiful", "crooked", "quiet", "useful", "strange", "colourful", "dusty", "familiar", "fragile",
            "costly", "plain", "bright", "narrow"),
}  # fmt: skip
_CITIES = ("Lisbon", "Oslo", "Prague", "Vienna", "Dublin", "Athens", "Warsaw", "Helsinki", "Madrid", "Bern", "Riga",
           "Cairo", "Lima", "Seoul", "Nairobi", "Quito")  # fmt: skip
_INTRODUCTION = "A secret number is hidden in the following text. Read it carefully and remember the number.\n\n"
_PIECE = re.compile(r".{1,400}?(?:[.!?。！？]+\s+|[。！？\n]\s*|\Z)|.{400}", re.DOTALL)
"""A sentence with the white space after it; of what has no sentences, 400 characters."""

Encode = Callable[[str], Sequence[int]]
"""A text → token ids of the prompt that it is in, special tokens and chat template included."""


@dataclass(frozen=True)
class NeedleCase:
    """One needle in one text."""

    length: int
    """Most tokens of the prompt."""
    depth: float
    """How much of the text stands before the needle, in percent."""
    repeat: int
    """Which text, from 0."""

    @property
    def secret(self) -> str:
        """Seven digits, the same in every run."""
        return str(1_000_000 + self._hash % 9_000_000)

    @property
    def city(self) -> str:
        """What the secret is about."""
        return _CITIES[self._hash // 9_000_000 % len(_CITIES)]

    @property
    def _hash(self) -> int:
        return int.from_bytes(sha256(f"{self.length} {self.depth:g} {self.repeat}".encode()).digest()[:16], "big")


class Haystack:
    """The text that needles are hidden in.

    Args:
        file: of the user's own text, in UTF-8; None: the built-in one.

    Raises:
        DataError: the file cannot be read, or holds no text.
    """

    def __init__(self, file: Path | None) -> None:
        self.source = BUILT_IN
        """For people, and for the run's identity where the text is the built-in one."""
        self.sha = BUILT_IN
        """What tells one text from another."""
        self._pieces: list[str] = []
        if file is None:
            return
        try:
            content = read_bytes(file.expanduser(), MOST_TEXT_BYTES)
            text = content.decode("utf-8-sig").strip()
        except Unreadable as error:
            raise DataError(f"--text {file}: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise DataError(f"--text {file}: cannot be read: {reason or error}") from error
        self._pieces = [piece for piece in _PIECE.findall(text + "\n") if piece.strip()]
        if not self._pieces:
            raise DataError(f"--text {file}: expected a text, found none")
        self.source, self.sha = str(file), sha256(content).hexdigest()

    def sentences(self, repeat: int) -> Iterator[str]:
        """The text from its beginning for one repeat, without end; each sentence with the white space after it.

        A user's text goes round; other repeats begin elsewhere in it.
        """
        if not self._pieces:
            return (f"{_sentence(repeat, number)} " for number in count())
        # By the golden ratio, which spreads any number of beginnings
        start = int(repeat * 0.6180339887 % 1 * len(self._pieces))
        return islice(cycle(self._pieces), start, None)

    def prompt(self, cell: NeedleCase, encode: Encode, size: Callable[[str], int], *, cue: bool) -> NDArray[np.int64]:
        """Token ids of a cell's prompt: as many sentences as there is room for.

        Args:
            cell: what to hide, where.
            encode: tokenises a prompt.
            size: tokens of a sentence inside a text.
            cue: end with the beginning of the answer, for models that only go on with a text.

        Raises:
            UsageError: there is no room for a sentence.
        """
        source, sentences, ends = self.sentences(cell.repeat), list[str](), [0]
        best: Sequence[int] = ()
        fit, number = 0, 0  # sentences that are known to fit, and that are tried
        room = cell.length - len(encode(_prompt(cell, [], 0, cue)))
        while True:
            # In a text a sentence has about as many tokens as by itself, so a few rounds fill it
            while ends[number] < room:
                number += 1
                if number == len(ends):
                    sentences.append(next(source))
                    ends.append(ends[-1] + size(" " + sentences[-1].strip()))
            tokens: Sequence[int] = ()
            while number > fit:
                place = min(range(number + 1), key=lambda n: abs(ends[n] - cell.depth / 100 * ends[number]))
                tokens = encode(_prompt(cell, sentences[:number], place, cue))
                if len(tokens) <= cell.length:
                    break
                number -= 1
            if number == fit:
                break
            best, fit, room = tokens, number, ends[number] + cell.length - len(tokens)
        if not fit:
            raise UsageError(f"--lengths {cell.length}: no room for a needle and a sentence; give longer ones")
        return np.asarray(best, np.int64)


def is_found(cell: NeedleCase, answer: str) -> bool:
    """Whether a cell's secret stands in an answer, digit by digit; commas between thousands count as nothing."""
    return cell.secret in re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer))


def pattern_of(cell: NeedleCase) -> str:
    """A regular expression for what `is_found` finds, whatever is written after it: the secret with no comma, or with
    those of thousands, and what shows that the number ends there.
    """
    first, second, third = cell.secret[:-6], cell.secret[-6:-3], cell.secret[-3:]
    written = "|".join((cell.secret, f"{first}{second},{third}", f"{first},{second},{third}"))
    return rf"(?<!\d)(?:{written})(?:[^\d,]|,\D|,\d{{1,2}}\D|,\d{{4}})"


def _prompt(cell: NeedleCase, sentences: Sequence[str], place: int, cue: bool) -> str:
    needle = f"The secret number of {cell.city} is {cell.secret}. "
    text = "".join((*sentences[:place], needle, *sentences[place:]))
    question = f"Question: What is the secret number of {cell.city}?"
    answer = f"\nAnswer: The secret number of {cell.city} is" if cue else " Answer with the number alone."
    return f"{_INTRODUCTION}{text.rstrip()}\n\n{question}{answer}"


def _sentence(repeat: int, number: int) -> str:
    digest = sha256(f"{repeat} {number}".encode()).digest()
    words = {name: words[digest[place] % len(words)] for place, (name, words) in enumerate(_WORDS.items(), start=1)}
    text = _TEMPLATES[digest[0] % len(_TEMPLATES)].format(**words)
    return text[0].upper() + text[1:]
