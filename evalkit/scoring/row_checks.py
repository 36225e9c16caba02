"""Check of whole rows: their states in one pass, padded or behind stored states, against those of each row alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from evalkit.models.called import CalledModel
from evalkit.models.memory import is_out_of_memory
from evalkit.scoring.forward import Forward
from evalkit.scoring.passes import UNLIMITED, Pass, Rows
from evalkit.scoring.sharing import (
    NOISE,
    NOT_NUMBERS,
    TOLERANCE,
    SharingCheck,
    root_mean_square,
    state_gaps,
    systematic,
)
from evalkit.scoring.tree import Ints, build_tree

_ROUNDING = 10.0
"""Largest allowed distance of a state, in units of the rounding that is measured on the model itself: the distance of a
row's states from those of its first three quarters alone. It is at most `TOLERANCE`, and at least `_LEAST`. Of
half precision that cannot be widened, the root mean square of all distances is compared with that of rounding."""
_LEAST = 2e-5
_MARGIN = 1.5
"""Tokens of the check's large pass by those of scoring: the last ones of a pass are padding."""
_SHORTEST = 12
"""Fewest tokens of the longest row."""


class RowCheck(SharingCheck):
    """Check of a model; `has_own_head`: log-probabilities by its own logits are compared, instead of final states."""

    def __init__(self, model: Any, has_own_head: bool) -> None:
        super().__init__(model)
        self._has_own_head = has_own_head
        self._by_logits = has_own_head or isinstance(model, CalledModel)

    def rows(self, length: int, with_states: bool, tokens: int = 0) -> str:
        """Return why rows of up to `length` tokens cannot be computed together, or behind states; empty if they can.

        Whole rows are repeated in a pass of about so many `tokens`: some models limit the tokens of an expert.
        """
        length = max(length, _SHORTEST)
        try:
            with self._widened():
                worst = self._worst(length, with_states, tokens, wide=True)
        except RuntimeError as error:
            if not self._half or is_out_of_memory(error):
                raise
            worst = self._worst(length, with_states, tokens, wide=False)
        if worst is None:
            return ""
        if np.isnan(worst):
            return NOT_NUMBERS
        what = "log-probabilities" if self._by_logits else "states"
        where = "behind stored states" if with_states else "in padded rows"
        return f"its {what} differ by {worst:.2g} of their norm {where} of {length} tokens"

    def _worst(self, length: int, with_states: bool, tokens: int, wide: bool) -> float | None:
        forward = self._forward(wide)
        if self._has_own_head:
            forward.use_own_head(self._vocabulary, greedy=False)
        gaps = partial(self._row_gaps, forward, length, with_states, tokens)
        rounding = self._rounding(forward, length)
        if self._half and not wide:
            # One token's rounding is as large as an error there, that of all together is not
            limit = NOISE * max(root_mean_square(rounding), torch.finfo(self._model.dtype).eps)
            worst = root_mean_square(gaps(0))
            return None if worst <= limit else worst
        tolerance = min(TOLERANCE, max(_LEAST, _ROUNDING * float(rounding.nan_to_num(0.0).max())))
        return systematic(gaps, tolerance)

    def _row_gaps(self, forward: Forward, length: int, with_states: bool, tokens: int, seed: int) -> torch.Tensor:
        sequences, trunk = self._sequences(length, with_states, tokens, seed)
        # The last token of a sequence is only predicted
        predicted = [np.append(sequence, 0).astype(np.int32) for sequence in sequences]
        rows = Rows(build_tree(predicted, [np.ones(len(sequence), np.bool_) for sequence in predicted]), trunk)
        passes = rows.passes(10**9, UNLIMITED if with_states else None)
        if with_states and not any(part.start > trunk for part in passes):
            raise ValueError("no two rows of the check begin with the same tokens")
        copies = 1 if with_states else max(1, math.ceil(_MARGIN * tokens / rows.computed(passes)))
        alone = [self._compared(forward.hidden_alone(rows.tokens(row))) for row in range(len(rows.leaves))]
        gaps = torch.zeros(len(rows.tree.tokens))
        for part in passes:
            nodes, places = rows.places(part)
            owners = zip(rows.owners[nodes].tolist(), rows.tree.positions[nodes].tolist(), strict=True)
            expected = torch.stack([alone[row][position] for row, position in owners])
            states = forward.pass_states(rows, Pass(part.start, list(part.families) * copies))
            of_copies = states.chunk(copies)
            differences = [state_gaps(self._compared(copy[torch.from_numpy(places)]), expected) for copy in of_copies]
            gaps[torch.from_numpy(nodes)] = torch.stack(differences).amax(0)
        return gaps

    def _rounding(self, forward: Forward, length: int) -> torch.Tensor:
        tokens = self._tokens(length, seed=0)
        cut = length * 3 // 4
        whole = self._compared(forward.hidden_alone(tokens))
        return state_gaps(self._compared(forward.hidden_alone(tokens[:cut])), whole[:cut])

    def _sequences(self, length: int, with_states: bool, tokens: int, seed: int) -> tuple[list[Ints], int]:
        """Return random rows, and the length of their trunk; behind states, families of rows. Their order is fixed."""
        if not with_states:
            lengths = (length, 3, length // 2, max(1, length // 7))[: max(2, tokens // length)]
            return [self._tokens_of_row(size, number, seed) for number, size in enumerate(lengths)], 0
        quarter = length // 4
        # Beginnings and tails, each long behind short; models have other code for a single token behind a state
        families = (
            (length - quarter, (quarter, 7)),
            (2 * quarter, (1, 1)),
            (quarter, (2 * quarter, 5)),
            (quarter, (19, 3)),
        )
        trunk = length // 8
        common = self._tokens(trunk, seed)
        rows = []
        for number, (beginning, tails) in enumerate(families):
            start = np.append(common, self._tokens_of_row(beginning - trunk, number, seed))
            rows += [
                np.append(start, self._tokens_of_row(min(size, length - beginning), row, seed + 100 * (number + 1)))
                for row, size in enumerate(tails)
            ]
        return rows, trunk

    def _tokens_of_row(self, length: int, number: int, seed: int) -> Ints:
        # Begun by its number, so that rows, and what is wrong in them, have the same order under every seed
        tokens = self._tokens(length, seed + 10 * (number + 1))
        tokens[0] = number
        return tokens

    def _compared(self, states: torch.Tensor) -> torch.Tensor:
        return self._log_probabilities(states) if self._by_logits else states
