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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from math import inf
from typing import Any, NamedTuple

import numpy as np

from evalkit.errors import EvalkitError
from evalkit.longcontext.ruler.data import RulerData, RulerTask

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
    references: Sequence[str]
    depth: float | None = None
    """Percentage of the text before the needle, if there is one to be found."""
    length: int = 0
    """Tokens of the prompt and of the longest answer, as the generators count them."""
    source: str = ""
    """Equal for questions about one document; empty for texts that are drawn at random."""


class _Generator(ABC):
    """Random samples of a family of tasks: of a size, which is the number of sentences, words or documents."""

    step: int
    """Difference between the sizes that are tried."""
    most: float = inf
    """Largest size."""
    tries_more = False
    """Whether one size above the largest is tried too."""
    shrinks = True
    """Whether a sample that does not fit is drawn again in a smaller size."""

    def __init__(self, data: RulerData, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int]) -> None:
        self.data, self.task, self.length, self.seed, self.tokens = data, task, length, seed, tokens
        self.template, self.random = task.template + task.prefix, random.Random(seed)
        self.reserved = task.new_tokens
        """Tokens of a sample beside those of its text."""

    @abstractmethod
    def make(self, size: int, number: int) -> Sample:
        """Draw a sample. Raises `ValueError` or `IndexError` if that is impossible, after some random numbers."""

    def answered(self, sample: Sample) -> str:
        """Return the text whose tokens are counted in the search for the size."""
        return f"{sample.text} {list(sample.references)}"

    def finished(self, sample: Sample) -> Sample:
        """Return a sample with what is not counted in its length."""
        return sample

    def fits(self, length: int) -> bool:
        return length <= self.length

    def shuffled(self, items: Sequence[str]) -> list[str]:
        """Shuffle with the seed alone, whatever was drawn before."""
        kept = list(items)
        random.Random(self.seed).shuffle(kept)
        return kept

    def attempt(self, size: int, number: int) -> Sample | None:
        try:
            return self.make(size, number)
        except (ValueError, IndexError):
            return None

    def size(self) -> int:
        """Return the largest size of which the first sample fits; 0 if there is none."""
        size, total = self.step, 0.0
        while total + self.reserved < self.length:
            sample = self.attempt(size, 0)
            total = self.tokens(self.answered(sample)) if sample else inf
            if total + self.reserved > self.length:
                return size - self.step
            if size > self.most:
                return int(self.most)
            size += self.step
            if size > self.most and not self.tries_more:
                return int(self.most)
        return size

    def samples(self) -> Iterator[Sample]:
        if (largest := self.size()) <= 0:
            raise CannotBuild(f"the smallest sample is longer than {self.length:,} tokens")
        for number in count():
            size, tries = largest, 0
            while True:
                sample = self.attempt(size, number)
                if sample and self.fits(length := self.tokens(sample.text) + self.reserved):
                    break
                if self.shrinks and size > self.step:
                    size -= self.step
                elif (tries := tries + 1) == _TRIES:
                    raise CannotBuild(f"sample {number} does not fit into {self.length:,} tokens")
            yield self.finished(sample._replace(length=length))


class _Needles(_Generator):
    def __init__(self, data: RulerData, *common: Any) -> None:
        super().__init__(data, *common)
        settings = self.task.settings
        self._queries, self._values = settings["num_needle_q"], settings["num_needle_v"]
        self._keys = max(settings["num_needle_k"], self._queries)
        self._haystack, self._key_kind, self._kind = (
            settings[f"type_{name}"] for name in ("haystack", "needle_k", "needle_v")
        )
        self.step = 5 if self.length < _SHORT else 25
        if self._haystack == "essay":
            self.step, self.most, self.tries_more = 500, len(data.essays), True
            self._sentences = cache(lambda size: data.sentences(" ".join(data.essays[:size]).strip()))
        self._is_single = self._queries * self._values == 1
        if self._is_single:
            self.template = self.template.replace("Some", "A").replace("are all", "is").replace("are", "is")

    def answered(self, sample: Sample) -> str:
        return sample.text + " ".join(sample.references)

    def _drawn(self, kind: str) -> str:
        if kind == "words":
            return self.random.choice(self.data.keys)
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def _key(self, values: int = 1) -> tuple[str, list[str]]:
        return self._drawn(self._key_kind), [self._drawn(self._kind) for _ in range(values)]

    def _needles(self, key: str, values: Sequence[str]) -> list[str]:
        return [f"One of the special magic {self._kind} for {key} is: {value}." for value in values]

    def make(self, size: int, number: int) -> Sample:
        keys = [self._key(self._values) for _ in range(self._keys)]
        needles = self.shuffled([needle for key in keys for needle in self._needles(*key)])
        if self._haystack == "essay":
            sentences, depths = self._sentences(size), self.random.sample(_DEPTHS, len(needles))
            places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
            parts = [" ".join(sentences[start:stop]) for start, stop in zip([0, *places], [*places, None], strict=True)]
            context = " ".join([*(text for pair in zip(parts, needles, strict=False) for text in pair), parts[-1]])
        else:
            lines = [" ".join(_NOISE)] * size
            if self._haystack == "needle":
                lines = [needle for _ in range(size) for needle in self._needles(*self._key())]
            places = sorted(self.random.sample(range(size), len(needles)), reverse=True)
            for line, needle in zip(places, needles, strict=True):
                lines.insert(line, needle)
            context = "\n".join(lines)
        asked = [keys[key] for key in self.random.sample(range(self._keys), self._queries)]
        *names, last = (key for key, _ in asked)
        fields = {"context": context, "query": f"{', '.join(names)}, and {last}" if names else last}
        kind = self._kind.removesuffix("s") if self._is_single else self._kind
        answers = [value for _, values in asked for value in values]
        depth = 100 * context.index(answers[0]) / len(context) if self._is_single else None
        return Sample(self.template.format(type_needle_v=kind, **fields), answers, depth)


class _Variables(_Generator):
    """Variable tracking: chains of assignments between repeated sentences."""

    step, shrinks = 10, False

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self._numbers, self._letters, self._example = np.random.RandomState(self.seed), 5, ""
        self._example = self._drawn_example()
        self.reserved += self.tokens(self._example)

    def _drawn_example(self) -> str:
        """Return a solved example of at most 500 tokens, with shorter names; later samples change its names."""
        length, template, start = self.length, self.template, self.task.template.index(_BEGINNING)
        self._letters, self.length, self.step = 3, 500, 5
        if start:  # a model's template is not part of the example; its end is the last word
            self.template = " ".join(self.task.template[start:].split()[:-1]) + self.task.prefix
        try:
            sample = next(self.samples())
        except CannotBuild as error:
            raise CannotBuild("the prompt's solved example has more than 500 tokens") from error
        self._letters, self.length, self.step, self.template = 5, length, 10, template
        return f"{sample.text} {' '.join(sample.references)}\n\n"

    def _name(self, letters: int) -> str:
        return "".join(self.random.choices(string.ascii_uppercase, k=letters))

    def make(self, size: int, number: int) -> Sample:
        links, chains = self.task.settings["num_hops"] + 1, self.task.settings["num_chains"]
        names = [self._name(self._letters) for _ in range(links * chains)]
        while len({*names}) < links * chains:
            names.append(self._name(self._letters))
        lines: list[list[str]] = []
        for start in range(0, len(names), links):
            value, chain = self._numbers.randint(10000, 99999), names[start : start + links]
            if len(chain) < links:  # after a name that was drawn twice
                raise IndexError
            pairs = zip(chain[1:], chain, strict=False)
            lines.append([f"VAR {chain[0]} = {value}", *(f"VAR {name} = VAR {before} " for name, before in pairs)])
        noise = [" ".join(_NOISE) + "\n"] * size
        if size <= links:
            noise = [part + "." if part.strip() else part for text in noise for part in text.split(".")]
        for assigned in lines:
            places = sorted(self.random.sample(range(len(noise)), links))
            for inserted, (before, line) in enumerate(zip(places, assigned, strict=True)):
                noise.insert(before + inserted, line)
        context, query = " ".join(noise).replace(". \n", ".\n"), lines[0][0].rpartition("= ")[2]
        return Sample(self.template.format(context=context, query=query, num_v=links), names[:links])

    def finished(self, sample: Sample) -> Sample:
        if not self._example:
            return sample
        example, ending = self._example, self.task.prefix[-10:]
        for name in example[example.index(ending) + len(ending) :].split():
            example = example.replace(name, self._name(len(name)))
        before, _, after = sample.text.partition(_BEGINNING)
        return sample._replace(text=f"{before} {example}\n\n{_BEGINNING}{after}")


class _CommonWords(_Generator):
    step = 10

    def __init__(self, data: RulerData, *common: Any) -> None:
        super().__init__(data, *common)
        self._words = self.shuffled(sorted({*data.words("noun", "adjective", "verb")}))
        self.most = len(self._words)

    def answered(self, sample: Sample) -> str:
        return f"{sample.text} {numbered(sample.references)}"

    def _list(self, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
        words, asked = self.random.sample(self._words, size), self.task.settings["num_cw"]
        listed = numbered(self.shuffled(words[:asked] * often + words[asked:] * seldom))
        return self.template.format(context=listed, query=""), words[:asked]

    def make(self, size: int, number: int) -> Sample:
        often, seldom = self.task.settings["freq_cw"], self.task.settings["freq_ucw"]
        example, of_example = self._list(20, 3, 1) if self.length < _SHORT else self._list(40, 10, 3)
        text, common = self._list(size, 6, 1) if self.length < _SHORT else self._list(size, often, seldom)
        return Sample(f"{example}{numbered(of_example)}\n{text}", common)


class _FrequentWords(_Generator):
    """Coded words whose frequencies have a zeta distribution; the most frequent one is noise."""

    def __init__(self, *common: Any) -> None:
        from scipy.special import zeta

        super().__init__(*common)
        if (words := self.length // 50) < 4:
            raise CannotBuild(f"it has {words} different words, of which three are asked for")
        alpha, self.step = float(self.task.settings["alpha"]), self.length // 32
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
        repeated = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
        return self.template.format(context=" ".join(self.shuffled(repeated)), query="")

    def size(self) -> int:
        words, size = self._drawn(), self.length // 6
        while self.tokens(self._text(words, size)) < self.length:
            size += self.step
        return size - self.step

    def make(self, size: int, number: int) -> Sample:
        words = self._drawn()
        while self.tokens(text := self._text(words, size)) > self.length:
            if (size := size - self.step) <= 0:
                raise CannotBuild(f"sample {number} does not fit into {self.length:,} tokens")
        return Sample(text, words[1:4])


class _Documents(_Generator):
    step = 10

    def __init__(self, data: RulerData, *common: Any) -> None:
        super().__init__(data, *common)
        self._questions = data.squad if self.task.settings["dataset"] == "squad" else data.hotpotqa
        self.most = len(self._questions.documents)

    def make(self, size: int, number: int) -> Sample:
        if number >= len(self._questions.asked):
            raise CannotBuild(f"there are only {number:,} questions")
        question, answers, own, others = self._questions.asked[number]
        texts = self._questions.documents
        if size >= len(texts):
            chosen: Sequence[int] = range(len(texts))
        elif size - len(own) > len(others):
            related = {*own, *others}
            rest = [index for index in range(len(texts)) if index not in related]
            chosen = [*own, *others, *self.random.sample(rest, max(0, size - len(own) - len(others)))]
        else:
            chosen = [*own, *self.random.sample(others, size - len(own))]
        shown = enumerate(self.shuffled([texts[index] for index in chosen]), start=1)
        context = "\n\n".join(f"Document {document}:\n{text}" for document, text in shown)
        return Sample(self.template.format(context=context, query=question), answers, source=str(own[0]))


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


_FAMILIES: Mapping[str, type[_Generator]] = {
    "niah": _Needles,
    "variable_tracking": _Variables,
    "common_words_extraction": _CommonWords,
    "freq_words_extraction": _FrequentWords,
    "qa": _Documents,
}


def samples(data: RulerData, task: RulerTask, length: int, seed: int, tokens: Callable[[str], int]) -> Iterator[Sample]:
    """Yield the samples of a task without end; of a question set one for each question.

    Raises `CannotBuild` if the first or a later sample does not fit into `length` tokens.
    """
    return _FAMILIES[task.family](data, task, length, seed, tokens).samples()
