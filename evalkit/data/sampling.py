"""Which documents of a task a run reads: all, the first ones, or a random sample, the same for every checkpoint.

In: the subject of each document of a task. Out: the places of the documents that are read, in order.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class FirstDocuments:
    """The first documents of each task, as lm-eval's limit takes them."""

    count: int | None = None
    """Documents of each task; None: all."""

    @property
    def specification(self) -> dict[str, Any]:
        """The entries of a run's specification."""
        return {"limit": self.count}

    def places(self, task: str, strata: Sequence[str]) -> list[int]:
        """Return the places of the documents, in order.

        The strata give their first documents cyclically and in order, so that a few documents cover several strata.

        Args:
            task: the task's name.
            strata: [documents] name of each one's stratum, such as its subject.
        """
        if self.count is None or self.count >= len(strata):
            return list(range(len(strata)))
        if len(set(strata)) == 1:  # at once: a log may say that its task has millions
            return list(range(self.count))
        turns: dict[str, int] = {}
        order: list[tuple[int, int, int]] = []
        names = {name: number for number, name in enumerate(dict.fromkeys(strata))}
        for place, stratum in enumerate(strata):
            turn = turns[stratum] = turns.get(stratum, -1) + 1
            order.append((turn, names[stratum], place))
        return sorted(place for _, _, place in sorted(order)[: self.count])


@dataclass(frozen=True)
class DocumentSample:
    """A random sample of each task's documents; with the same seed, a larger one contains the smaller ones."""

    count: int
    """Documents of each task; all of a task that has not more."""
    seed: int = 0

    @property
    def specification(self) -> dict[str, Any]:
        """The entries of a run's specification."""
        return {"limit": None, "sample": self.count, "seed": self.seed}

    def places(self, task: str, strata: Sequence[str]) -> list[int]:
        """Return the places of the sampled documents, in order.

        The documents of a stratum are shuffled, and evenly spaced on the line from 0 to 1 after a random start; the
        sample is the first ones on that line. So a stratum has its share of the sample, up to about one
        document, and documents have nearly the same probability (of 20 documents of MMLU, within 10 %; of 200, 1 %).

        Args:
            task: the task's name; the samples of two tasks are independent.
            strata: [documents] name of each one's stratum, such as its subject.
        """
        import numpy as np  # here, since a finished run is opened without it

        total = len(strata)
        if total <= self.count:
            return list(range(total))
        members: dict[str, list[int]] = {}
        for place, stratum in enumerate(strata):
            members.setdefault(stratum, []).append(place)
        position = np.empty(total)
        for stratum, places in members.items():
            random = np.random.default_rng([self.seed, zlib.crc32(task.encode()), zlib.crc32(stratum.encode())])
            order = random.permutation(len(places))
            position[places] = (order + random.random()) / len(places)
        return sorted(np.argsort(position, kind="stable")[: self.count].tolist())


DocumentSelection: TypeAlias = FirstDocuments | DocumentSample
ALL_DOCUMENTS = FirstDocuments()


def selection_of(specification: Mapping[str, Any]) -> DocumentSelection:
    """Return the selection that a run's specification names."""
    if (count := specification.get("sample")) is not None:
        return DocumentSample(count, specification["seed"])
    return FirstDocuments(specification.get("limit"))
