"""Scoring engine: batches through shared prefixes if the model supports it, otherwise sequence by sequence.

In: sequences and batches from `pack`, a loaded model. Out: the scores of their sequences. Before anything is scored,
`check` verifies on synthetic sequences that sharing does not change scores, and that the model is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch

from evalkit.errors import CheckpointError, ScoringError
from evalkit.models.loading.tokenizer import refuse_tokens_without_rows
from evalkit.models.memory import keep_freed_blocks, refuse_to_split
from evalkit.scoring.architecture import kernels_for, longest_shared, window_of
from evalkit.scoring.checks import DAMAGED, ModelChecks, TooManyTokens, memory_for, runs
from evalkit.scoring.forward import Forward, Scores
from evalkit.scoring.pack import Sequences, TreeBatch, return_freed_memory
from evalkit.scoring.sharing import BatchLengths

DENSE_TOKENS = 512
"""Maximum tokens of a batch under the dense kernel, whose attention grows quadratically with the batch."""
_LONGEST = 4096
"""Maximum tokens of sequences in the start-up check; longer sequences are checked when they occur."""
_NO_MEMORY = "out of memory in the check at that length"
_LEAST_ROW = 256
_LEAST_LONGEST = 64
"""Minimum tokens of their longest sequence, where the context window allows it."""


class Engine:
    """Batch scorer for one model, with or without shared prefixes.

    Args:
        model: a Hugging Face causal language model.
        budget: maximum tokens of a batch; reduced where the model's attention requires it, and batches are split where
            memory runs out.
        say: called with a message for each fallback.
        greedy: whether to compute if tokens are the argmax.
        kernels: tree attention kernels, of `forward.KERNELS`, in the order in which they are tried; None: those that
            may work for the model, the fastest first.
        remembers: whether results of `check` are cached for models of the same class and config; False for a model
            that was changed after it was loaded.
        files: digest of the files that the model was loaded from, under which checks that depend on its weights are
            cached too; None: they are run.
    """

    def __init__(
        self,
        model: Any,
        budget: int,
        say: Callable[[str], None],
        greedy: bool = False,
        kernels: tuple[str, ...] | None = None,
        remembers: bool = False,
        files: str | None = None,
    ) -> None:
        keep_freed_blocks()
        self._model = model
        self._kernels = kernels or kernels_for(model)
        self._forward = Forward(model, self._kernels[0], greedy)
        self._say = say
        self._checks = ModelChecks(model, remembers, files, say)
        window, self._longest = window_of(model.config), longest_shared(model.config)
        self._reach = min(window, self._longest or window)
        """Greatest length of a sequence that fits in the context window and may be shared."""
        self._requested = budget
        self.budget = self._fitting_budget()
        """Maximum tokens of a batch; final once `check` has run."""
        self.dropped: list[str] = []
        """Kernels that do not work with this model, and why."""
        self.shares = True
        """Whether prefixes are shared; False after a failed check."""
        self.why_not = ""
        """The reason if prefixes are not shared, otherwise empty."""
        self.checked = False
        self._checked = BatchLengths(0, 0)
        """Lengths up to which sharing has been checked."""
        self._failures: dict[BatchLengths, str] = {}
        """Greater lengths → why prefixes cannot be shared at them, or empty. A result is valid for its own lengths
        only, so that a batch's scores do not depend on earlier batches."""
        self._reported: set[str] = set()

    @property
    def kernel(self) -> str:
        return self._forward.kernel

    def check(self, sequences: Sequences, alone: bool = False) -> None:
        """Check whether prefixes may be shared; otherwise score without sharing, with a warning.

        A model that does not run, whose predictions depend on later tokens, or are not numbers, is an error. Of the
        sequences, the longest of the first item is run unshared. If `alone`, there is nothing to share.
        """
        self._refuse_unknown(sequences)
        first = sequences[0]
        tokens = max(first.sequences, key=len)
        with runs(len(tokens)), memory_for(first.label, len(tokens)):
            logprobs = self._forward.score_alone(tokens).logprobs[1:]
        if np.isnan(logprobs).any():
            raise CheckpointError(f"the model's log-probabilities are not numbers (NaN) on {first.label}; {DAMAGED}")
        self._checks.check_weights(_longest_input(sequences))
        self.why_not = self._checks.head_failure
        if not alone and not self.why_not:
            for kernel in self._kernels:
                self._forward.kernel = kernel
                self.why_not = self._check_active_kernel()
                if not self.why_not:
                    break
                self.dropped.append(f"{kernel}: {self.why_not}")
        self.shares, self.checked = not (alone or self.why_not), True
        return_freed_memory()
        if alone:
            self.why_not = self.why_not or "nothing to share"
        elif self.why_not:
            self._say(
                f"warning: this model does not support scoring through shared prefixes ({self.why_not}); "
                "every sequence is scored alone, which is several times slower"
            )
        elif self.dropped:
            self._say(f"attention by {self.kernel}, which is slower ({'; '.join(self.dropped)})")

    def describe(self) -> dict[str, Any]:
        """Return the results of `check`, for a run's manifest."""
        results = {"shares": self.shares, "why_not": self.why_not, "kernel": self.kernel, "dropped": self.dropped}
        return results | {"checked": self._checked._asdict(), "stored": self._checks.stored and self.checked}

    def score(self, batch: TreeBatch, alone: bool = False) -> list[tuple[int, list[Scores]]]:
        """Score a batch; return each item's number and its sequences' scores. `alone`: by the model's own attention."""
        self._refuse_unknown(batch.sequences)
        longest = _longest_input(batch.sequences)
        if self.checked:
            self._checks.cover(longest)
        # For longer sequences, states in a shared row differ from those of the sequence alone
        shares = not alone and self.shares and (self._longest is None or longest <= self._longest)
        if shares and not self._failure_at(BatchLengths(len(batch.trunk) + len(batch.tree.tokens), longest)):
            scores = self._shared_scores(batch)
            if _are_finite(batch.sequences, scores):
                return list(zip(batch.items, scores, strict=True))
            # A NaN spreads over its row in spite of the mask; scoring unshared finds the sequence that it comes from
        # evalkit's output head needs less memory, but may not be the model's
        score = self._forward.score_alone if self._checks.head_failure else self._forward.score_unshared
        scores = []
        for item in batch.sets:
            members = []
            for tokens in item.sequences:
                with memory_for(item.label, len(tokens)):
                    members.append(score(tokens))
            scores.append(members)
            if not _are_finite(Sequences.of([item]), [members]):
                raise ScoringError(f"{item.label}: a log-likelihood is not a finite number; try --dtype float32")
        return list(zip(batch.items, scores, strict=True))

    def _refuse_unknown(self, sequences: Sequences) -> None:
        if not getattr(self._model, "tokens_without_rows", None):
            return
        for number, label in enumerate(sequences.labels):
            for tokens in sequences[number].sequences:
                refuse_tokens_without_rows(self._model, label, tokens)

    def _fitting_budget(self) -> int:
        return min(self._requested, DENSE_TOKENS) if self._forward.kernel == "dense" else self._requested

    def _check_active_kernel(self) -> str:
        while True:
            self.budget = self._fitting_budget()
            # Planned batches, with room for a trunk
            row = max(self.budget + self.budget // 4, _LEAST_ROW)
            lengths = BatchLengths(row, min(self._reach, _LONGEST, row // 2))
            with suppress(TooManyTokens):
                failure = self._checks.sharing(self.kernel, lengths, is_first=not self._checked.row)
                self._checked = BatchLengths(0, 0) if failure else lengths
                return failure
            if self.budget <= _LEAST_ROW:
                return f"out of memory at rows of {lengths.row} tokens"
            self._requested = self.budget // 2
            self._say(f"out of memory at {lengths.row} tokens: continuing with batches of {self._requested}")

    def _failure_at(self, lengths: BatchLengths) -> str:
        """Return why prefixes cannot be shared at these lengths, or ""; checked now where it has not been before."""
        if lengths.row <= self._checked.row and lengths.longest <= self._checked.longest:
            return ""
        # Rounded up, so that a few checks cover all lengths; memory may hold the smaller step only
        for steps in (1, 4):
            rounded = self._above(lengths, steps)
            if rounded not in self._failures:
                try:
                    self._failures[rounded] = self._checks.sharing(self.kernel, rounded, is_first=False)
                except TooManyTokens:
                    self._failures[rounded] = _NO_MEMORY
            if self._failures[rounded] != _NO_MEMORY:
                break
        else:
            refuse_to_split(f"the check of {rounded.row} tokens a batch")
        if failure := self._failures[rounded]:
            self._say_once(
                "lengths",
                f"warning: from {lengths.row} tokens a batch with {lengths.longest + 1} a sequence, prefixes are not "
                f"shared ({failure}); such sequences are scored one at a time, which is several times slower",
            )
        return failure

    def _above(self, lengths: BatchLengths, steps: int) -> BatchLengths:
        row = max(_rounded_up(lengths.row, steps), self._checked.row, _LEAST_ROW)
        longest = min(max(_rounded_up(lengths.longest, steps), _LEAST_LONGEST), self._reach)
        return BatchLengths(row, max(longest, lengths.longest, self._checked.longest))

    def _say_once(self, kind: str, line: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(line)

    def _shared_scores(self, batch: TreeBatch) -> list[list[Scores]]:
        tree = batch.tree
        with suppress(TooManyTokens):
            with memory_for(batch.sets[0].label, len(batch.trunk) + len(tree.tokens), at_most=len(batch.items) == 1):
                trunk = self._forward.trunk(batch.trunk)
                pairs = self._forward.score(tree, trunk)
            scores = iter(pairs.along(tree.paths, trunk.scores))
            return [list(islice(scores, len(item.sequences))) for item in batch.sets]
        # Outside the handler, so that the traceback no longer references the tensors
        refuse_to_split(f"{len(tree.tokens)} tokens")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._say_once("memory", f"out of memory at {len(tree.tokens)} tokens a batch: such batches are halved")
        half = len(batch.items) // 2
        halves = batch.part(slice(half)), batch.part(slice(half, None))
        return [scores for part in halves for scores in self._shared_scores(part)]


def _longest_input(sequences: Sequences) -> int:
    return int(sequences.lengths.max()) - 1


def _are_finite(sequences: Sequences, scores: list[list[Scores]]) -> bool:
    is_scored = sequences.is_scored.copy()
    is_scored[sequences.starts[:-1]] = False
    logprobs = np.concatenate([of_sequence.logprobs for members in scores for of_sequence in members])
    return bool(np.isfinite(logprobs[is_scored]).all())


def _rounded_up(length: int, steps: int) -> int:
    """Round up to the next of so many steps between powers of two."""
    step = max(1, (1 << (length - 1).bit_length()) // (2 * steps))
    return -(-length // step) * step
