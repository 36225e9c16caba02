"""Check of whole rows: their states in one pass, padded or behind stored states, against those of each row alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from evalkit.scoring.forward import Forward
from evalkit.scoring.passes import UNLIMITED, Rows
from evalkit.scoring.sharing import _LOOKAHEAD_TOLERANCE, NOT_NUMBERS, TOLERANCE, SharingCheck, _gaps, _systematic
from evalkit.scoring.tree import Ints, build_tree

_ROUNDING = 10.0
"""Largest allowed distance of a state, in units of the rounding that is measured on the model itself: the distance of a
row's states from those of its first three quarters alone. It is at most `TOLERANCE`, or `_LOOKAHEAD_TOLERANCE` where
only half precision can be run, and at least `_LEAST`."""
_LEAST = 2e-5
_SHORTEST = 12
"""Fewest tokens of the longest row."""
_COLUMNS = 64
_EXCLUDED = -1e4


class RowCheck(SharingCheck):
    """Check of a model; `has_own_head`: log-probabilities by its own logits are compared, instead of final states."""

    def __init__(self, model: Any, has_own_head: bool) -> None:
        super().__init__(model)
        self._has_own_head = has_own_head
        self._columns = torch.from_numpy(self._tokens(_COLUMNS, seed=0)).long()

    def rows(self, length: int, with_states: bool) -> str:
        """Return why rows of up to `length` tokens cannot be computed together, or behind states; empty if they can."""
        length = max(length, _SHORTEST)
        try:
            with self._widened():
                worst = self._worst(length, with_states, wide=True)
        except RuntimeError:
            if not self._half:
                raise
            worst = self._worst(length, with_states, wide=False)
        if worst is None:
            return ""
        if np.isnan(worst):
            return NOT_NUMBERS
        where = "behind stored states" if with_states else "in padded rows"
        return f"its states differ by {worst:.2g} of their norm {where} of {length} tokens"

    def _worst(self, length: int, with_states: bool, wide: bool) -> float | None:
        forward = self._forward(wide)
        if self._has_own_head:
            forward.use_own_head(self._vocabulary, greedy=False)
        most = TOLERANCE if wide or not self._half else _LOOKAHEAD_TOLERANCE
        tolerance = min(most, max(_LEAST, _ROUNDING * self._rounding(forward, length)))
        return _systematic(partial(self._row_gaps, forward, length, with_states), tolerance)

    def _row_gaps(self, forward: Forward, length: int, with_states: bool, seed: int) -> torch.Tensor:
        sequences, trunk = self._sequences(length, with_states, seed)
        # The last token of a sequence is only predicted
        predicted = [np.append(tokens, 0).astype(np.int32) for tokens in sequences]
        rows = Rows(build_tree(predicted, [np.ones(len(tokens), np.bool_) for tokens in predicted]), trunk)
        passes = rows.passes(10**9, UNLIMITED if with_states else None)
        if with_states and not any(part.start > trunk for part in passes):
            raise ValueError("no two rows of the check begin with the same tokens")
        alone = [self._compared(forward.rows_alone(rows.tokens(row))) for row in range(len(rows.leaves))]
        gaps = torch.zeros(len(rows.tree.tokens))
        for part in passes:
            nodes, places = rows.places(part)
            states = self._compared(forward.pass_states(rows, part)[torch.from_numpy(places)])
            owners = zip(rows.owners[nodes].tolist(), rows.tree.positions[nodes].tolist(), strict=True)
            expected = torch.stack([alone[row][position] for row, position in owners])
            gaps[torch.from_numpy(nodes)] = _gaps(states, expected)
        return gaps

    def _rounding(self, forward: Forward, length: int) -> float:
        tokens = self._tokens(length, seed=0)
        cut = length * 3 // 4
        whole = self._compared(forward.rows_alone(tokens))
        return float(_gaps(self._compared(forward.rows_alone(tokens[:cut])), whole[:cut]).nan_to_num(0.0).max())

    def _sequences(self, length: int, with_states: bool, seed: int) -> tuple[list[Ints], int]:
        """Return random rows, and the length of their trunk: behind states three families, or else ragged ones."""
        if not with_states:
            lengths = (length, length // 2, max(1, length // 7), 3)
            return [self._tokens(size, seed + 10 * number) for number, size in enumerate(lengths, 1)], 0
        ends = [max(1, min(size, length // 4)) for size in (1, 19, 3, 7)]
        beginning = length - max(ends)
        trunk = beginning // 3
        common = self._tokens(trunk, seed)
        families = [np.append(common, self._tokens(beginning - trunk, seed + number)) for number in (1, 2)]
        tails = [self._tokens(size, seed + 10 * number) for number, size in enumerate(ends, 1)]
        sequences = [np.append(families[number // 2], tail) for number, tail in enumerate(tails)]
        # Recurrent layers have other code for a single token: a pass of its own, behind the trunk and one more token
        following, *last = self._tokens(9, seed + 3)
        sequences += [np.append(common, (following, token)) for token in last]
        return sequences, trunk

    def _compared(self, states: torch.Tensor) -> torch.Tensor:
        if not self._has_own_head:
            return states
        logprobs = states.float().log_softmax(-1)[:, self._columns.to(states.device)]
        return logprobs.masked_fill(logprobs < _EXCLUDED, 0)
