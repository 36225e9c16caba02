"""Texts with needles: a length, a depth and a repeat → the prompt and its secret."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count, cycle, islice
from pathlib import Path

from evalkit.errors import UsageError
from evalkit.inputs.reading import read_given_text
from evalkit.longcontext.ruler.data import CHOICES

BUILT_IN = "built-in 1"
"""Name and version of the generated text; increase the number when the text changes."""

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
_PIECE = re.compile(r".{1,400}?(?:[.!?。！？]+\s+|[。！？\n]\s*|\Z)|.{400}", re.DOTALL)
"""A sentence with the white space after it; at most 400 characters of text without sentences."""


@dataclass(frozen=True)
class NeedleCase:
    """A needle in a text, at one length and depth."""

    length: int
    """Maximum length of prompt and answer in tokens."""
    depth: float
    """Percentage of the text before the needle."""
    repeat: int

    @property
    def secret(self) -> str:
        """The hidden number: seven digits, the same in every run."""
        return str(1_000_000 + self._hash % 9_000_000)

    @property
    def others(self) -> list[str]:
        """Secrets of other cases, which the gold one is compared with."""
        return [replace(self, repeat=self.repeat + number).secret for number in range(1, CHOICES)]

    @property
    def city(self) -> str:
        return _CITIES[self._hash // 9_000_000 % len(_CITIES)]

    @property
    def _hash(self) -> int:
        return int.from_bytes(sha256(f"{self.length} {self.depth:g} {self.repeat}".encode()).digest()[:16], "big")

    def text(self, sentences: Sequence[str], before: int, cue: bool) -> str:
        """Return the prompt with the needle after `before` sentences.

        With a cue, it ends with the beginning of the answer, for models that only continue a text.
        """
        needle = f"The secret number of {self.city} is {self.secret}. "
        text = "".join((*sentences[:before], needle, *sentences[before:])).rstrip()
        question = f"Question: What is the secret number of {self.city}?"
        answer = f"\nAnswer: The secret number of {self.city} is" if cue else " Answer with the number alone."
        introduction = "A secret number is hidden in the following text. Read it carefully and remember the number."
        return f"{introduction}\n\n{text}\n\n{question}{answer}"


class Haystack:
    """The text that needles are hidden in: the user's text file in UTF-8, or the built-in text."""

    def __init__(self, file: Path | None) -> None:
        self.source = self.identity = BUILT_IN
        """Printed source of the text, its file, and its identity in a run's specification, the file's hash."""
        self._pieces: list[str] = []
        if file is not None:
            content, text = read_given_text(file)
            self._pieces = [piece for piece in _PIECE.findall(text.strip() + "\n") if piece.strip()]
            self.source, self.identity = str(file), sha256(content).hexdigest()

    def sentences(self, repeat: int) -> Iterator[str]:
        """Yield the text's sentences for one repeat without end, each with the white space after it.

        A user's text is repeated cyclically, with another start for each repeat.
        """
        if not self._pieces:
            return (f"{_sentence(repeat, number)} " for number in count())
        # Multiples of the golden ratio spread any number of starts evenly
        start = int(repeat * 0.6180339887 % 1 * len(self._pieces))
        return islice(cycle(self._pieces), start, None)

    def prompt(self, case: NeedleCase, total: Callable[[str], int], size: Callable[[str], int], *, cue: bool) -> str:
        """Return a case's prompt, with as many sentences as fit into its length.

        `total` is the number of tokens of a prompt and its answer, `size` that of a sentence inside a text. For the
        cue, see `NeedleCase.text`.
        """
        source, sentences, ends = self.sentences(case.repeat), list[str](), [0]
        best, fit, number = "", 0, 0  # the text so far, sentences known to fit, sentences tried
        room = case.length - total(case.text([], 0, cue))
        while True:
            # A sentence has about as many tokens in a text as alone, so a few rounds are enough
            while ends[number] < room:
                number += 1
                if number == len(ends):
                    sentences.append(next(source))
                    ends.append(ends[-1] + size(" " + sentences[-1].strip()))
            while number > fit:
                before = min(range(number + 1), key=lambda n: abs(ends[n] - case.depth / 100 * ends[number]))
                text = case.text(sentences[:number], before, cue)
                tokens = total(text)
                if tokens <= case.length:
                    break
                number -= 1
            if number == fit:
                break
            best, fit, room = text, number, ends[number] + case.length - tokens
        if not fit:
            raise UsageError(f"--lengths {case.length}: no room for a needle and a sentence; give longer lengths")
        return best


def _sentence(repeat: int, number: int) -> str:
    digest = sha256(f"{repeat} {number}".encode()).digest()
    words = {name: words[digest[index] % len(words)] for index, (name, words) in enumerate(_WORDS.items(), start=1)}
    text = _TEMPLATES[digest[0] % len(_TEMPLATES)].format(**words)
    return text[0].upper() + text[1:]
