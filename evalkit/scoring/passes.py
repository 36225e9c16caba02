"""Forward passes over whole sequences, for models whose attention cannot compute a tree.

In: a prefix tree without a trunk. Out: the `Pass`es that compute its nodes by the model's own attention. The rows of a
tree are the paths to its leaves. They are padded on the right, which changes nothing in a causal model. Behind states,
what several rows begin with is computed once, and the model's own cache of it is copied for each of them. All
beginnings of a pass have one length, since padding would enter a recurrent state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.scoring.tree import Ints, Tree

_MOST_ROWS = 64
"""Most rows of a family, so that the search for families is linear in the rows."""
_LEAST_SHARED = 8
"""Fewest tokens of a beginning; a shorter one costs less in each of its rows than in another pass."""
_NEAR = 0.8
"""Beginnings of a pass are cut to the shortest of them, which has at least this share of the longest."""


class Family(NamedTuple):
    """Neighbouring rows, [first, end), that begin with the same `shared` tokens; a single row shares none."""

    first: int
    end: int
    shared: int = 0

    @property
    def rows(self) -> range:
        return range(self.first, self.end)

    def parts(self, most_rows: float) -> list[Family]:
        """Divide the family into ones of so many rows, at least one; each computes the beginning again."""
        step = int(max(1, min(most_rows, len(self.rows))))
        return [Family(row, min(row + step, self.end), self.shared) for row in self.rows[::step]]


class StateLimit(NamedTuple):
    """Most bytes of the states that are stored for the rows of a pass, and what a row of the model takes."""

    most_bytes: float
    row_bytes: float
    """Whatever its length: recurrent states."""
    token_bytes: float
    """For each of its tokens: keys and values."""

    def rows(self, length: int) -> float:
        """Return how many rows of so many tokens a pass may have."""
        size = self.row_bytes + length * self.token_bytes
        return self.most_bytes / size if size else math.inf


UNLIMITED = StateLimit(math.inf, 0, 0)


class Pass(NamedTuple):
    """Rows that go through the model together, behind beginnings of `start` tokens, one for each family.

    A beginning has at least the trunk.
    """

    start: int
    families: Sequence[Family]

    @property
    def rows(self) -> list[int]:
        return [row for family in self.families for row in family.rows]

    def halves(self) -> list[Pass]:
        """Return two passes of about half of the families, or of half of the rows of a single one."""
        families = self.families
        if len(families) == 1:
            families = families[0].parts((len(self.rows) + 1) // 2)
        half = len(families) // 2
        return [Pass(self.start, families[:half]), Pass(self.start, families[half:])]


def _singles(families: Iterable[Family]) -> list[Family]:
    return [Family(row, row + 1) for family in families for row in family.rows]


@dataclass(frozen=True)
class Rows:
    """The rows of a tree, in its order. All of them begin with the `trunk`, whose states are kept for other trees."""

    tree: Tree
    trunk: int = 0

    @cached_property
    def leaves(self) -> NDArray[np.int64]:
        """[rows] last node of each row."""
        return np.flatnonzero(self.tree.ends == np.arange(1, len(self.tree.ends) + 1))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[rows] tokens of each row."""
        return self.tree.positions[self.leaves].astype(np.int64) + 1

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """[nodes] the first row that has each node; its state is read there."""
        return np.searchsorted(self.leaves, np.arange(len(self.tree.tokens)))

    def tokens(self, row: int) -> Ints:
        """Return the token ids of a row, [length]."""
        leaf = int(self.leaves[row])
        return self.tree.tokens[: leaf + 1][self.tree.ends[: leaf + 1] > leaf]

    def passes(self, most_tokens: int, states: StateLimit | None) -> list[Pass]:
        """Return passes of at most so many tokens each, padding included, unless a single family has more.

        Without a limit of `states`, none are stored. A family with more rows than the limit is divided.
        """
        stores = states is not None and len(self.leaves) > 0
        families = self._families() if stores else _singles([Family(0, len(self.leaves))])
        return [part for group in self._near(families) for part in self._cut(group, most_tokens, states)]

    def computed(self, passes: Iterable[Pass]) -> int:
        """Return the number of tokens that passes compute, padding included."""
        total = 0
        for part in passes:
            longest = int(self.lengths[part.rows].max()) - part.start
            total += len(part.families) * (part.start - self.trunk) + len(part.rows) * longest
        return total

    def inputs(self, part: Pass) -> tuple[Ints, Ints, NDArray[np.int64]]:
        """Return the tokens of a pass after the trunk: beginnings, [families, start - trunk], and rows after them.

        The rows are [rows, length]; the last array has the family of each.
        """
        sequences = [self.tokens(row) for row in part.rows]
        members = [len(family.rows) for family in part.families]
        firsts = np.cumsum([0, *members[:-1]])
        beginnings = np.stack([sequences[first][self.trunk : part.start] for first in firsts])
        longest = max(map(len, sequences))
        # Padded by tokens that the row has anyway: some models take positions, or a mask, from a token for padding
        padded = [np.pad(tokens[part.start :], (0, longest - len(tokens)), mode="edge") for tokens in sequences]
        return beginnings, np.stack(padded), np.repeat(np.arange(len(members)), members)

    def places(self, part: Pass) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the nodes whose states a pass computes, and their indices among its states.

        These are the trunk's, then those of the beginnings, then those of the rows, each flattened. The trunk's nodes
        belong to the first pass.
        """
        rows = part.rows
        nodes = np.flatnonzero(np.isin(self.owners, rows))
        positions = self.tree.positions[nodes].astype(np.int64)
        each = part.start - self.trunk
        length = int(self.lengths[rows].max()) - part.start
        order = np.argsort(rows)
        number = order[np.searchsorted(rows, self.owners[nodes], sorter=order)]
        family = np.repeat(np.arange(len(part.families)), [len(family.rows) for family in part.families])[number]
        in_beginning = self.trunk + family * each + (positions - self.trunk)
        in_row = self.trunk + len(part.families) * each + number * length + (positions - part.start)
        places = np.where(positions < part.start, in_beginning, in_row)
        return nodes, np.where(positions < self.trunk, positions, places)

    def _families(self) -> list[Family]:
        """Divide the rows into the families that save the most tokens."""
        # Tokens that each row shares with the row before
        shared = np.append(0, self.tree.positions[self.leaves[:-1] + 1]).astype(np.int64)
        saved = np.zeros(len(shared) + 1, np.int64)
        sizes = np.ones(len(shared) + 1, np.int64)
        for end in range(1, len(shared) + 1):
            least = max(0, end - _MOST_ROWS)
            # By the number of a family's rows before its last one, [1, 2, …]
            common = np.minimum.accumulate(shared[least + 1 : end][::-1])
            common = np.where(common >= max(_LEAST_SHARED, self.trunk), common - self.trunk, 0)
            together = saved[least : end - 1][::-1] + common * np.arange(1, len(common) + 1)
            saved[end] = saved[end - 1]
            if len(together) and together.max() > saved[end]:
                sizes[end] = 2 + int(together.argmax())
                saved[end] = together.max()
        families = []
        end = len(shared)
        while end:
            first = end - int(sizes[end])
            members = shared[first + 1 : end]
            families.append(Family(first, end, int(members.min()) if len(members) else 0))
            end = first
        return families[::-1]

    def _near(self, families: Sequence[Family]) -> Iterator[list[Family]]:
        """Group families whose beginnings have about the same length, the longest first."""
        group: list[Family] = []
        for family in sorted(families, key=lambda family: -family.shared):
            if group and family.shared < _NEAR * group[0].shared:
                yield group
                group = []
            group.append(family)
        if group:
            yield group

    def _cut(self, families: Sequence[Family], most_tokens: int, states: StateLimit | None) -> Iterator[Pass]:
        """Cut a group into passes, its longest rows first."""
        start = max(min(family.shared for family in families), self.trunk)
        beginning = start - self.trunk
        length = max(int(self.lengths[family.first : family.end].max()) for family in families)
        most_rows = states.rows(length) if states is not None and start else math.inf
        families = [part for family in families for part in family.parts(most_rows)]
        longest = {family: int(self.lengths[family.first : family.end].max()) - start for family in families}
        members: list[Family] = []
        rows = 0
        for family in sorted(families, key=lambda family: -longest[family]):
            length = longest[members[0] if members else family]
            together = rows + len(family.rows)
            is_full = max(together * length, (len(members) + 1) * beginning) > most_tokens
            if members and (is_full or together > most_rows):
                yield Pass(start, members)
                members = []
                rows = 0
            members.append(family)
            rows += len(family.rows)
        yield Pass(start, members)
