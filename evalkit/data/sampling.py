"""Which documents of a task a run reads, and which of them share a source or a prompt.

All documents, the first ones, or a random sample, the same for every checkpoint; and a cluster for each document, which
the score table stores and statistics use: a model's answers to documents of one source are correlated.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeAlias


@dataclass(frozen=True)
class FirstDocuments:
    """The first documents of each task, as lm-eval's limit takes them; None: all."""

    count: int | None = None

    @property
    def specification(self) -> dict[str, Any]:
        return {"limit": self.count}

    @property
    def steps(self) -> list[FirstDocuments]:
        """Return the selection alone: it continues no smaller one."""
        return [self]

    def places(self, task: str, strata: Sequence[str]) -> list[int]:
        """Return the places of the first documents, in order; the `strata` of the documents give theirs cyclically."""
        if self.count is None or self.count >= len(strata):
            return list(range(len(strata)))
        if len(set(strata)) == 1:  # at once: a log may say that its task has millions
            return list(range(self.count))
        names = {name: number for number, name in enumerate(dict.fromkeys(strata))}
        turns = Counter[str]()

        def turn(document: int) -> tuple[int, int]:
            stratum = strata[document]
            turns[stratum] += 1
            return turns[stratum], names[stratum]

        return sorted(sorted(range(len(strata)), key=turn)[: self.count])


@dataclass(frozen=True)
class DocumentSample:
    """A random sample of each task's documents; with the same seed, a larger sample contains the smaller ones."""

    count: int
    """Documents of each task; all of a task that has not more."""
    seed: int = 0
    earlier: tuple[int, ...] | None = None
    """Of a look of `decide`, sizes of the samples that this one continues, the smallest first; none at the first look.
    No batch has documents of two of them."""

    @property
    def specification(self) -> dict[str, Any]:
        continued = {} if self.earlier is None else {"earlier": list(self.earlier)}
        return {"limit": None, "sample": self.count, "seed": self.seed, **continued}

    @property
    def steps(self) -> list[DocumentSample]:
        """Return the samples that this one continues, and this one last."""
        return [DocumentSample(count, self.seed) for count in (*(self.earlier or ()), self.count)]

    def places(self, task: str, strata: Sequence[str]) -> list[int]:
        """Return the places of the sampled documents, in order.

        The documents of a stratum are shuffled, and evenly spaced on the line from 0 to 1 after a random start; the
        sample is the first ones on that line. So a stratum has its share of the sample, up to about one
        document, and documents have nearly the same probability (of 20 documents of MMLU, within 10 %; of 200, 1 %).
        The samples of two tasks are independent.
        """
        import numpy as np  # here, since a finished run is opened without it

        total = len(strata)
        if total <= self.count:
            return list(range(total))
        members: dict[str, list[int]] = {}
        for number, stratum in enumerate(strata):
            members.setdefault(stratum, []).append(number)
        position = np.empty(total)
        for stratum, places in members.items():
            random = np.random.default_rng([self.seed, zlib.crc32(task.encode()), zlib.crc32(stratum.encode())])
            order = random.permutation(len(places))
            position[places] = (order + random.random()) / len(places)
        return sorted(np.argsort(position, kind="stable")[: self.count].tolist())


DocumentSelection: TypeAlias = FirstDocuments | DocumentSample
ALL_DOCUMENTS = FirstDocuments()


def number_of(selection: DocumentSelection, total: int) -> int:
    """Return how many of a task's documents a selection has."""
    return total if selection.count is None else min(selection.count, total)


def selection_of(specification: Mapping[str, Any]) -> DocumentSelection:
    """Return the selection that a run's specification names."""
    if (count := specification.get("sample")) is not None:
        earlier = specification.get("earlier")
        return DocumentSample(count, specification["seed"], None if earlier is None else tuple(earlier))
    return FirstDocuments(specification.get("limit"))


_TWINS_ALIKE = 0.7
"""Word similarity from which two sentences with the same options are twins.

WinoGrande's identifiers, which its canonical documents lack, give 284 pairs in the official split. Among sentences with
the same options, these pairs have a similarity of 0.79 or more, all others of 0.56 or less."""


def clusters_of(documents: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> list[int]:
    """Return the cluster of each document: the index of the first document of the same source.

    So the first documents of a task have the same clusters as in the whole task. A document without the field that the
    metadata names, which may occur in a user's file, is a cluster of its own. The `metadata` of a task file may have

        source: passage          documents with the same text in this field share a source (BoolQ's passages)
        twins: sentence          documents with the same options and nearly the same sentence do (WinoGrande's twins)
    """
    if "source" in metadata:
        first: dict[str, int] = {}
        texts = enumerate(document.get(str(metadata["source"])) for document in documents)
        return [first.setdefault(text, n) if isinstance(text, str) and text else n for n, text in texts]
    if "twins" not in metadata:
        return list(range(len(documents)))
    field, clusters = str(metadata["twins"]), list[int]()
    by_options: dict[frozenset[str], list[int]] = {}
    for number, document in enumerate(documents):
        options = frozenset(str(document.get(name)).lower() for name in ("option1", "option2"))
        earlier = by_options.setdefault(options, [])
        twin = next((other for other in earlier if _are_alike(document[field], documents[other][field])), None)
        clusters.append(number if twin is None else clusters[twin])
        earlier.append(number)
    return clusters


def _are_alike(first: str, second: str) -> bool:
    words: list[list[str]] = [re.findall(r"[\w']+", text.lower()) for text in (first, second)]
    return SequenceMatcher(None, words[0], words[1], autojunk=False).ratio() >= _TWINS_ALIKE


def repeated_prompts(documents: Iterable[Hashable]) -> list[str]:
    """Return a caveat if most documents share their requests with others, as with a prompt that lacks the question.

    Args:
        documents: contexts and continuations of each document.
    """
    numbers = Counter(documents)
    total, distinct = numbers.total(), len(numbers)
    if total > 1 and distinct == 1:
        return [f"{total:,} documents have one and the same prompt"]
    if 2 * distinct < total:
        return [f"{total:,} documents have {distinct:,} prompts, {max(numbers.values()):,} of them the same one"]
    return []


def spread(count: int, most: int, block: int = 1) -> list[int]:
    """Return at most `most` places among `count`, in blocks of neighbours that are evenly spread from the first.

    Neighbours may share a prefix, and parts of a task may differ in length, so both are sampled.
    """
    if count <= most:
        return list(range(count))
    blocks = max(1, most // block)
    starts = (number * (count - block) // blocks for number in range(blocks))
    return sorted({start + offset for start in starts for offset in range(block)})
