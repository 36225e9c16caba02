"""Checks that depend on a model's weights: scores must not depend on later tokens; whose output head is used.

In: a loaded model, and the lengths that are scored. Out: an error, or the reason why evalkit's output head cannot
replace the model's own. A check that was passed is not repeated for the same files of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from evalkit.errors import CheckpointError, ScoringError
from evalkit.scoring.architecture import rotary_lengths, window_of
from evalkit.scoring.check_cache import CheckCache
from evalkit.scoring.failures import TooManyTokens, failure_of, one_line
from evalkit.scoring.sharing import NOT_NUMBERS, SharingCheck

DAMAGED = "its weights may be damaged, or its dtype too narrow: try --dtype float32"
_TRIED = 64
"""Fewest tokens of the sequences on which a model is checked, over the whole vocabulary."""


class WeightChecks:
    """Checks of one model's weights, at lengths that grow with the sequences that are scored.

    Args:
        model: a Hugging Face causal language model.
        cache: passed checks of its architecture; None: none are kept.
        files: digest of the files that it was loaded from; None: no check is kept.
    """

    def __init__(self, model: Any, cache: CheckCache | None, files: str | None) -> None:
        self._model = model
        self._cache = None if files is None else cache
        self._files = files
        self._window = window_of(model.config)
        self._rotary = min((length for length in rotary_lengths(model.config) if length), default=None)
        self._covered = 0
        self.stored = False
        """Whether an earlier run's checks of the same weights were used."""
        self.head_failure = ""
        """Why evalkit's output head cannot replace the model's own, or empty."""

    def run(self, longest: int) -> None:
        """Check the output head, then causality in sequences of up to a length.

        Raises:
            CheckpointError, ScoringError: see `cover`.
        """
        check, length = SharingCheck(self._model), self._covering(0)
        self._covered, self.stored = 0, self._cache is not None
        self.head_failure = self._unless_passed("head", partial(_head_failure, check, length))
        self.cover(length)
        self.cover(longest)

    def cover(self, longest: int) -> None:
        """Check that no score depends on later tokens in sequences of up to a length, unless a check has covered it.

        A window, or a selection of tokens, has no effect on sequences that are shorter than it.

        Raises:
            CheckpointError: a score does, or is not a number, or the model does not run.
            ScoringError: out of memory.
        """
        if longest <= self._covered:
            return
        compared = "log-probabilities" if self.head_failure else "states"
        # Memory may hold the exact length only, or a window take effect between the two
        for length in dict.fromkeys((self._covering(longest), longest)):
            try:
                self._unless_passed(f"lookahead of {compared} to {length}", partial(self._check_causal, length))
            except (CheckpointError, ScoringError):
                if length == longest:
                    raise
            else:
                self._covered = length
                return

    def _covering(self, longest: int) -> int:
        """Return the length of the check that covers a length; rounded up, so that a few checks cover all."""
        return max(2, longest, min(self._window, max(_TRIED, 1 << (longest - 1).bit_length())))

    def _unless_passed(self, name: str, run: Callable[[], str]) -> str:
        if self._cache is None:
            return run()
        name = f"{name}, of weights {self._files}"
        self.stored &= self._cache.has_passed(name)
        return self._cache.check(name, run)

    def _check_causal(self, length: int) -> str:
        """Raise a `CheckpointError` if scores in sequences of this length change with later tokens, or are NaN."""
        at_equal_length = self._rotary is not None and length > self._rotary
        with one_line("does not run", length):
            lookahead = SharingCheck(self._model).lookahead(length, not self.head_failure, at_equal_length)
        if lookahead == NOT_NUMBERS:
            raise CheckpointError(f"on random tokens the model gives no numbers: {lookahead}; {DAMAGED}")
        if lookahead:
            raise CheckpointError(
                f"the model's predictions change with the tokens that follow ({lookahead}, in sequences of {length} "
                "tokens): it is not a causal language model, so its log-likelihoods mean nothing"
            )
        return ""


def _head_failure(check: SharingCheck, length: int) -> str:
    """Return why evalkit's output head cannot replace the model's own, or ""."""
    try:
        return failure_of(lambda: check.head(length))
    except TooManyTokens:
        return "out of memory in the check of its output head"
