"""RULER's samples for a tokenizer, a length and a seed: the same as by the generators of its wheel.

In: a task, a length in tokens, a seed and a function that counts the tokens of a text. Out: `Sample`s, or a
`CannotBuild` with the reason. The order of random numbers is a fact of the generators, and determines the samples: even
the search for the number of sentences, words or documents that fit into the length draws some. What the generators do
by mistake is reproduced: prompts of fwe leave no room for an answer, those of vt have an example of another size.
"""

from __future__ import annotations

import random
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from math import inf
from typing import NamedTuple

import numpy as np

from evalkit.benchmarks.ruler.data import Questions, RulerData, RulerTask
from evalkit.errors import EvalkitError

_TRIES = 500
"""Times that a sample of the smallest size is drawn again until it fits; the generators never give up."""
_NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
_DEPTHS = tuple(np.linspace(0, 100, 40).round().astype(int).tolist())
_BEGINNING = "Memorize and track"
"""Beginning of vt's prompt, inside a model's template."""
_SHORT = 4096
"""Length below which cwe repeats words less often, and needles are added five at a time."""


class CannotBuild(EvalkitError):
    """A task has no samples of a length."""


class Sample(NamedTuple):
    """A document of RULER."""

    text: str
    """The prompt, with the beginning of the answer."""
    references: tuple[str, ...]
    length: int
    """Tokens of the prompt and of the longest answer, as the generators count them."""
    depth: float | None = None
    """Percentage of the text before the needle, if there is one to be found."""


class _Made(NamedTuple):
    text: str
    references: Sequence[str]
    depth: float | None = None


class _Generator(ABC):
    """Random samples of a family of tasks: of a size, which is the number of sentences, words or documents."""

    step: int
    """Difference between the sizes that are tried."""
    most: float = inf
    """Largest size."""
    joint = "{text}{answer}"
    """Text whose tokens are counted in the search for the size."""
    counts_before = False
    """Whether the largest size is reached only after a larger one was tried."""
    what = "the smallest sample"
    """What the length limits, in messages."""
    shrinks = True
    """Whether a sample that does not fit is drawn again in a smaller size."""

    def __init__(self, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int]) -> None:
        self.task, self.length, self.seed, self.tokens = task, length, seed, tokens
        self.random = random.Random(seed)
        self.reserved = task.new_tokens
        """Tokens of a sample beside those of `make`'s text."""

    @abstractmethod
    def make(self, size: int, number: int) -> _Made:
        """Draw a sample. Raises `ValueError` or `IndexError` if that is impossible, after some random numbers."""

    def answer(self, references: Sequence[str]) -> str:
        """Return the answer whose tokens are counted in the search for the size."""
        return " ".join(references)

    def fits(self, length: int) -> bool:
        return length <= self.length

    def finished(self, text: str) -> str:
        """Return a sample's text with what its length was counted without."""
        return text

    def shuffled(self, items: Sequence[str]) -> list[str]:
        """Shuffle with the seed alone, whatever was drawn before."""
        kept = list(items)
        random.Random(self.seed).shuffle(kept)
        return kept

    def size(self) -> int:
        """Return the largest size of which the first sample fits; 0 if there is none."""
        size, total = self.step, 0.0
        while total + self.reserved < self.length:
            made = self._attempt(size, 0)
            total = self.tokens(self.joint.format(text=made.text, answer=self.answer(made.references))) if made else inf
            if total + self.reserved > self.length:
                return size - self.step
            if size > self.most:
                return int(self.most)
            size += self.step
            if size > self.most and not self.counts_before:
                return int(self.most)
        return size

    def _attempt(self, size: int, number: int) -> _Made | None:
        try:
            return self.make(size, number)
        except (ValueError, IndexError):
            return None

    def samples(self) -> Iterator[Sample]:
        if (largest := self.size()) <= 0:
            raise CannotBuild(f"{self.what} is longer than {self.length:,} tokens")
        for number in count():
            size, tries = largest, 0
            while True:
                made = self._attempt(size, number)
                if made and self.fits(length := self.tokens(made.text) + self.reserved):
                    break
                if self.shrinks and size > self.step:
                    size -= self.step
                elif (tries := tries + 1) == _TRIES:
                    raise CannotBuild(f"sample {number} does not fit into {self.length:,} tokens")
            yield Sample(self.finished(made.text), tuple(made.references), length, made.depth)


class _Needles(_Generator):
    def __init__(
        self, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int], data: RulerData, words: list[str]
    ) -> None:
        super().__init__(task, length, seed, tokens)
        settings = task.settings
        self._queries, self._values = settings["num_needle_q"], settings["num_needle_v"]
        self._keys = max(settings["num_needle_k"], self._queries)
        self._haystack, self._kind = settings["type_haystack"], settings["type_needle_v"]
        self._data, self._words = data, words
        self.step = 500 if self._haystack == "essay" else 5 if length < _SHORT else 25
        if self._haystack == "essay":
            self.most, self.counts_before = len(data.essays), True
            self._sentences = cache(lambda size: data.sentences(" ".join(data.essays[:size]).strip()))
        template = task.template + task.prefix
        if self._queries * self._values == 1:
            template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        self._template = template

    def _drawn(self, kind: str) -> str:
        if kind == "words":
            return self.random.choice(self._words)
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self._kind} for {key} is: {value}."

    def make(self, size: int, number: int) -> _Made:
        of_keys, of_values = self.task.settings["type_needle_k"], self._kind
        pairs = [
            (self._drawn(of_keys), [self._drawn(of_values) for _ in range(self._values)]) for _ in range(self._keys)
        ]
        needles = self.shuffled([self._needle(key, value) for key, values in pairs for value in values])
        if self._haystack == "essay":
            sentences = self._sentences(size)
            depths = self.random.sample(_DEPTHS, len(needles))
            places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
            parts = [" ".join(sentences[start:stop]) for start, stop in zip([0, *places], [*places, None], strict=True)]
            between = [text for pair in zip(parts, needles, strict=False) for text in pair]
            context = " ".join([*between, parts[-1]])
        else:
            lines = [" ".join(_NOISE)] * size
            if self._haystack == "needle":
                lines = [self._needle(self._drawn(of_keys), self._drawn(of_values)) for _ in range(size)]
            places = sorted(self.random.sample(range(size), len(needles)), reverse=True)
            for line, needle in zip(places, needles, strict=True):
                lines.insert(line, needle)
            context = "\n".join(lines)
        asked = [pairs[key] for key in self.random.sample(range(self._keys), self._queries)]
        keys, answers = [key for key, _ in asked], [value for _, values in asked for value in values]
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        single = len(answers) == 1
        text = self._template.format(
            type_needle_v=self._kind.removesuffix("s") if single else self._kind, context=context, query=query
        )
        return _Made(text, answers, 100 * context.index(answers[0]) / len(context) if single else None)


class _Variables(_Generator):
    """Variable tracking: one chain of assignments between repeated sentences; `letters` are those of a name."""

    joint = "{text} {answer}"
    step, shrinks = 10, False

    def __init__(self, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int]) -> None:
        super().__init__(task, length, seed, tokens)
        self._numbers = np.random.RandomState(seed)
        self._letters, self._template, self._example = 5, task.template + task.prefix, ""
        self._example = self._drawn_example()
        self.reserved += tokens(self._example)

    def _drawn_example(self) -> str:
        """Return a solved example of at most 500 tokens, with shorter names; later samples change its names."""
        task, length, template = self.task, self.length, self._template
        self._letters, self.length, self.step, self.what = 3, 500, 5, "the solved example"
        if start := task.template.index(_BEGINNING):
            # A model's template is not part of the example; its end is the last word
            self._template = " ".join(task.template[start:].split()[:-1]) + task.prefix
        sample = next(self.samples())
        self._letters, self.length, self.step, self.what = 5, length, 10, _Generator.what
        self._template = template
        return f"{sample.text} {' '.join(sample.references)}\n\n"

    def answer(self, references: Sequence[str]) -> str:
        return str(list(references))

    def _name(self, letters: int) -> str:
        return "".join(self.random.choices(string.ascii_uppercase, k=letters))

    def make(self, size: int, number: int) -> _Made:
        hops, chains = self.task.settings["num_hops"], self.task.settings["num_chains"]
        names = [self._name(self._letters) for _ in range((hops + 1) * chains)]
        while len({*names}) < (hops + 1) * chains:
            names.append(self._name(self._letters))
        lines: list[list[str]] = []
        for start in range(0, len(names), hops + 1):
            value = self._numbers.randint(10000, 99999)
            chain = names[start : start + hops + 1]
            if len(chain) <= hops:  # after a name that was drawn twice
                raise IndexError
            pairs = zip(chain[1:], chain, strict=False)
            lines.append([f"VAR {chain[0]} = {value}", *(f"VAR {name} = VAR {before} " for name, before in pairs)])
        noise = [" ".join(_NOISE) + "\n"] * size
        if size <= len(lines[0]):
            noise = [part + "." if part.strip() else part for text in noise for part in text.split(".")]
        for chain in lines:
            places = sorted(self.random.sample(range(len(noise)), len(chain)))
            for inserted, (before, line) in enumerate(zip(places, chain, strict=True)):
                noise.insert(before + inserted, line)
        context = " ".join(noise).replace(". \n", ".\n")
        value_text = lines[0][0].rpartition("= ")[2]
        text = self._template.format(context=context, query=value_text, num_v=hops + 1)
        return _Made(text, names[: hops + 1])

    def finished(self, text: str) -> str:
        if not self._example:
            return text
        example = self._example
        ending = self.task.prefix[-10:]
        for name in example[example.index(ending) + len(ending) :].split():
            example = example.replace(name, self._name(len(name)))
        start = text.index(_BEGINNING)
        return f"{text[:start]} {example}\n\n{text[start:]}"


class _CommonWords(_Generator):
    joint = "{text} {answer}"
    step = 10

    def __init__(self, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int], words: list[str]) -> None:
        super().__init__(task, length, seed, tokens)
        self._words, self._common = self.shuffled(words), task.settings["num_cw"]
        self.most = len(self._words)
        of_task: tuple[int, int] = (task.settings["freq_cw"], task.settings["freq_ucw"])
        self._example, self._repeats = ((20, 3, 1), (6, 1)) if length < _SHORT else ((40, 10, 3), of_task)

    def answer(self, references: Sequence[str]) -> str:
        return numbered(references)

    def _list(self, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
        words = self.random.sample(self._words, size)
        common, others = words[: self._common], words[self._common :]
        return numbered(self.shuffled(common * often + others * seldom)), common

    def make(self, size: int, number: int) -> _Made:
        template = self.task.template + self.task.prefix
        shown, of_example = self._list(*self._example)
        context, common = self._list(size, *self._repeats)
        example = template.format(context=shown, query="") + numbered(of_example)
        return _Made(f"{example}\n{template.format(context=context, query='')}", common)


class _FrequentWords(_Generator):
    """Coded words whose frequencies have a zeta distribution; the most frequent one is noise."""

    def __init__(self, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int]) -> None:
        from scipy.special import zeta

        super().__init__(task, length, seed, tokens)
        if (words := length // 50) < 4:
            raise CannotBuild(f"it has {words} different words, of which three are asked for")
        self.step = length // 32
        alpha = float(task.settings["alpha"])
        self._powers, self._zeta = np.arange(1, words + 1) ** -alpha, zeta(alpha)

    def fits(self, length: int) -> bool:
        return True  # the room for an answer is not kept

    def _drawn(self) -> list[str]:
        words: set[str] = set()
        while len(words) < len(self._powers):
            words.add("".join(self.random.choices(string.ascii_lowercase, k=6)))
        return ["...", *self.shuffled(sorted(words))[1:]]

    def _text(self, words: Sequence[str], size: int) -> str:
        counts = (size * self._powers / self._zeta).astype(int).tolist()
        repeated = self.shuffled([word for word, times in zip(words, counts, strict=True) for _ in range(times)])
        return (self.task.template + self.task.prefix).format(context=" ".join(repeated), query="")

    def size(self) -> int:
        words, size = self._drawn(), self.length // 6
        while self.tokens(self._text(words, size)) < self.length:
            size += self.step
        return size - self.step

    def make(self, size: int, number: int) -> _Made:
        words = self._drawn()
        while self.tokens(text := self._text(words, size)) > self.length:
            if (size := size - self.step) <= 0:
                raise CannotBuild(f"sample {number} does not fit into {self.length:,} tokens")
        return _Made(text, words[1:4])


class _Documents(_Generator):
    joint = "{text} {answer}"
    step = 10

    def __init__(
        self, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int], questions: Questions
    ) -> None:
        super().__init__(task, length, seed, tokens)
        self._questions, self.most = questions, len(questions.documents)

    def answer(self, references: Sequence[str]) -> str:
        return str(list(references))

    def make(self, size: int, number: int) -> _Made:
        question, answers, own, others = self._questions.asked[number]
        texts = self._questions.documents
        if size >= len(texts):
            shown = list(texts)
        else:
            if size - len(own) > len(others):
                related = {*own, *others}
                rest = [index for index in range(len(texts)) if index not in related]
                chosen = [*own, *others, *self.random.sample(rest, max(0, size - len(own) - len(others)))]
            else:
                chosen = [*own, *self.random.sample(others, size - len(own))]
            shown = [texts[index] for index in chosen]
        listed = (f"Document {number}:\n{text}" for number, text in enumerate(self.shuffled(shown), start=1))
        template = self.task.template + self.task.prefix
        return _Made(template.format(context="\n\n".join(listed), query=question), answers)


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


class SampleMaker:
    """Samples of tasks, with what they share read once."""

    def __init__(self, data: RulerData, seed: int, tokens: Callable[[str], int]) -> None:
        self._data, self._seed, self._tokens = data, seed, tokens
        self._keys = cache(
            lambda: sorted({f"{first}-{last}" for first in data.words("adjective") for last in data.words("noun")})
        )
        self._words = cache(lambda: sorted({*data.words("noun", "adjective", "verb")}))

    def samples(self, task: RulerTask, length: int) -> Iterator[Sample]:
        """Yield the samples of a task without end, of a question set one for each question.

        Raises `CannotBuild` where the first or a later one does not fit into `length` tokens.
        """
        common = (task, length, self._seed, self._tokens)
        generator: _Generator
        if task.family == "niah":
            generator = _Needles(*common, self._data, self._keys())
        elif task.family == "variable_tracking":
            generator = _Variables(*common)
        elif task.family == "common_words_extraction":
            generator = _CommonWords(*common, self._words())
        elif task.family == "freq_words_extraction":
            generator = _FrequentWords(*common)
        else:
            dataset = task.settings["dataset"]
            generator = _Documents(*common, self._data.squad if dataset == "squad" else self._data.hotpotqa)
        return generator.samples()
