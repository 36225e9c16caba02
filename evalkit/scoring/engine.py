"""Scoring engine: each batch by the fastest way that is exact on the model.

In: sequences and batches from `pack`, a loaded model. Out: the scores of their sequences. The ways are a ladder:

    tree    every distinct token once, in one row, by tree attention or a mask
    state   what rows begin with once; the model's own cache of it is copied for each row
    rows    whole sequences, padded on the right
    alone   each sequence in a pass of its own

Before anything is scored, `check` verifies on synthetic sequences that the model is causal, and which ways give the
states of each sequence alone. Between `state` and `rows`, measured time decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch

from evalkit.compatibility.transformers import keeps_state
from evalkit.errors import CheckpointError, OutOfMemoryError, ScoringError
from evalkit.models.loading.tokenizer import refuse_tokens_without_rows
from evalkit.models.memory import keep_freed_blocks, refuse_to_split
from evalkit.scoring.architecture import (
    kernels_for,
    longest_shared,
    memory_beside_weights,
    most_logit_tokens,
    rotary_limit,
    window_of,
)
from evalkit.scoring.checks import DAMAGED, ModelChecks, TooManyTokens, memory_for, rounded_up, runs
from evalkit.scoring.forward import Forward, Scores
from evalkit.scoring.pack import Sequences, TreeBatch, return_freed_memory
from evalkit.scoring.passes import Rows, StateLimit
from evalkit.scoring.sharing import BatchLengths
from evalkit.scoring.tree import Ints

DENSE_TOKENS = 512
"""Maximum tokens of a batch under the dense kernel, whose attention grows quadratically with the batch."""
_LONGEST = 4096
"""Maximum tokens of sequences in the start-up check; longer sequences are checked when they occur."""
_NO_MEMORY = "out of memory in the check at that length"
TREE, STATE, ROWS, ALONE = "tree", "state", "rows", "alone"
_DESCRIBED = {
    STATE: "scoring behind the stored state of what sequences begin with",
    ROWS: "scoring whole sequences in padded rows",
    ALONE: "warning: every sequence is scored alone, which is several times slower",
}
_WORTH = 0.9
"""Share of the tokens of whole rows that are computed behind states, up to which these are timed."""
_STATE_LENGTHS = (16, 32)
"""Tokens whose stored states are measured; a sliding window is longer, or its share is overestimated."""
_STATE_SHARE = 0.25
"""Share of the memory beside the weights for the stored states of a pass."""
_CPU_STATES = 2**28
"""Most bytes of these on a CPU."""
_TIMED_SHARE = 0.5
"""Share of the budget's tokens on which ways are timed."""
_PASS_PARTS = (8, 32)
"""Smaller passes that are timed, as parts of the budget."""
_LEAST_PASS = 64
"""Fewest tokens of a smaller pass."""
_REPEATS = 2
"""How often a way is timed; the least counts. A GPU chooses kernels in the first pass."""
_ENOUGH = 1.0
"""Seconds from which one measurement is enough."""
_FASTER = 0.9
"""Share of a larger pass's seconds from which a smaller one is chosen."""
_LEAST_ROW = 256
_LEAST_LONGEST = 64
"""Minimum tokens of their longest sequence, where the context window allows it."""


class Engine:
    """Batch scorer for one model.

    Args:
        model: a Hugging Face causal language model, or a `CalledModel`.
        budget: maximum tokens of a forward pass; reduced where the model's attention requires it, and passes are split
            where memory runs out.
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
        self._greedy = greedy
        self._forward = Forward(model, self._kernels[0], greedy)
        self._say = say
        self._checks = ModelChecks(model, remembers, files, say)
        window, self._longest = window_of(model.config), longest_shared(model.config)
        self._longest_row = rotary_limit(model.config)
        """Most tokens of a row that may be padded, or follow a state: rotary embeddings depend on greater lengths."""
        self._reach = min(window, self._longest or window)
        """Greatest length of a sequence that fits in the context window and may be in a tree."""
        self._requested = budget
        self.budget = self._fitting_budget()
        """Maximum tokens of a batch; final once `check` has run."""
        self.dropped: list[str] = []
        """Kernels that do not work with this model, and why."""
        self.way = TREE
        """How batches are scored, if nothing about them prevents it."""
        self.why = ""
        """Why it is no faster way, otherwise empty."""
        self.pass_tokens = budget
        """Maximum tokens of a forward pass over whole rows, padding included."""
        self.checked = False
        self._checked = BatchLengths(0, 0)
        """Lengths up to which trees have been checked."""
        self._failures: dict[BatchLengths, str] = {}
        """Greater lengths → why prefixes cannot be shared at them, or empty. A result is valid for its own lengths
        only, so that a batch's scores do not depend on earlier batches."""
        self._reported: set[str] = set()

    @property
    def kernel(self) -> str:
        return self._forward.kernel

    def check(self, sequences: Sequences, alone: bool = False) -> None:
        """Choose the way in which batches are scored; a way other than `tree` is reported.

        A model that does not run, whose predictions depend on later tokens, or are not numbers, is an error. Of the
        sequences, the longest of the first item is run by the model's own forward pass; they are timed in several ways
        if these are possible. If `alone`, each sequence is a batch by itself.
        """
        self._refuse_unknown(sequences)
        first = sequences[0]
        tokens = max(first.sequences, key=len)
        with runs(len(tokens)), memory_for(first.label, len(tokens)):
            logprobs = self._forward.score_alone(tokens).logprobs[1:]
        if np.isnan(logprobs).any():
            raise CheckpointError(f"the model's log-probabilities are not numbers (NaN) on {first.label}; {DAMAGED}")
        self._checks.check_weights(_longest_input(sequences))
        if self._checks.head_failure:
            self._use_own_head()
        self.checked = True
        if alone:
            self.way = ALONE
            self.why = self._checks.head_failure or "nothing to share"
        elif why_no_tree := self._why_no_tree():
            self.way, why = self._way_of_rows(sequences)
            self.why = f"{why_no_tree}; {why}" if why else why_no_tree
            self._say(f"{_DESCRIBED[self.way]}, since prefixes cannot be shared in a tree: {self.why}")
        elif self.dropped:
            self._say(f"attention by {self.kernel}, which is slower ({'; '.join(self.dropped)})")
        return_freed_memory()

    def describe(self) -> dict[str, Any]:
        """Return the results of `check`, for a run's manifest."""
        results = {"way": self.way, "why": self.why, "kernel": self.kernel, "dropped": self.dropped}
        return results | {"checked": self._checked._asdict(), "stored": self._checks.stored and self.checked}

    def score(self, batch: TreeBatch, way: str = "", pass_tokens: int = 0) -> list[tuple[int, list[Scores]]]:
        """Score a batch; return each item's number and its sequences' scores.

        `way` and `pass_tokens` are those of a plan, if they may differ from the engine's own.
        """
        self._refuse_unknown(batch.sequences)
        longest = _longest_input(batch.sequences)
        if self.checked:
            self._checks.cover(longest)
        way = way or self.way
        if way == TREE and longest and self._fits_tree(batch, longest):
            scores = self._tree_scores(batch)
            if _are_finite(batch.sequences, scores):
                return list(zip(batch.items, scores, strict=True))
            # A NaN spreads over its row in spite of the mask; whole rows show the sequence that it comes from
        scores = self._row_scores(batch, self._possible(way, longest), pass_tokens or self.pass_tokens)
        for item, members in zip(batch.sets, scores, strict=True):
            if not _are_finite(Sequences.of([item]), [members]):
                raise ScoringError(f"{item.label}: a log-likelihood is not a finite number; try --dtype float32")
        return list(zip(batch.items, scores, strict=True))

    def _use_own_head(self) -> None:
        """Score rows by the model's own logits, in passes that memory holds all logits of."""
        self._forward.use_own_head(self._vocabulary, self._greedy)
        self._requested = min(self._requested, most_logit_tokens(self._model))

    def _refuse_unknown(self, sequences: Sequences) -> None:
        if not getattr(self._model, "tokens_without_rows", None):
            return
        for number, label in enumerate(sequences.labels):
            for tokens in sequences[number].sequences:
                refuse_tokens_without_rows(self._model, label, tokens)

    @property
    def _vocabulary(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    # Whole rows

    def _way_of_rows(self, sequences: Sequences) -> tuple[str, str]:
        """Return the fastest possible way without trees on sequences like these, and why it is no faster one.

        The size of its passes is measured too: some recurrent models are faster in small ones, on a CPU.
        """
        self.budget = self.pass_tokens = self._requested
        longest = _longest_input(sequences)
        if failure := self._checks.rows(longest, with_states=False, tokens=self.budget):
            return ALONE, failure
        batch = _batch_like(sequences, max(1, int(self.budget * _TIMED_SHARE)))
        in_rows = self._seconds(batch, ROWS, self.budget)
        for part in _PASS_PARTS:
            size = max(self.budget // part, _LEAST_PASS)
            if size >= self.pass_tokens:
                break
            seconds = self._seconds(batch, ROWS, size)
            if seconds > _FASTER * in_rows:
                break
            in_rows = seconds
            self.pass_tokens = size
        if failure := self._checks.rows(longest, with_states=True):
            return ROWS, f"states cannot be stored: {failure}"
        rows = Rows(batch.whole_tree)
        behind = rows.computed(rows.passes(self.pass_tokens, self._state_limit))
        whole = rows.computed(rows.passes(self.pass_tokens, None))
        if behind > _WORTH * whole:
            return ROWS, f"stored states would save {1 - behind / whole:.0%} of the tokens"
        behind_states = self._seconds(batch, STATE, self.pass_tokens)
        why = f"{behind_states:.2f} s behind stored states, {in_rows:.2f} s in padded rows"
        return STATE if behind_states < in_rows else ROWS, why

    @cached_property
    def _state_limit(self) -> StateLimit:
        short, long = (self._forward.stored_bytes(np.zeros(length, np.int32)) for length in _STATE_LENGTHS)
        of_token = (long - short) / (_STATE_LENGTHS[1] - _STATE_LENGTHS[0])
        most = min(memory_beside_weights(self._model).values()) * _STATE_SHARE
        if self._model.device.type == "cpu":
            most = min(most, _CPU_STATES)
        return StateLimit(most, short - of_token * _STATE_LENGTHS[0], of_token)

    def _possible(self, way: str, longest: int) -> str:
        """Return the fastest way in which sequences of these lengths can be scored without a tree, up to a way."""
        is_short = self._longest_row is None or longest <= self._longest_row
        if way == ALONE or not is_short:
            return ALONE
        if way == STATE and not self._checks.rows(longest, with_states=True):
            return STATE
        failure = self._checks.rows(longest, with_states=False, tokens=self.pass_tokens)
        if not failure:
            return ROWS
        self._say_once("rows", f"warning: sequences are scored one at a time, which is slow: {failure}")
        return ALONE

    def _scores_alone(self, batch: TreeBatch) -> list[list[Scores]]:
        scores = []
        for item in batch.sets:
            members = []
            for tokens, is_scored in zip(item.sequences, item.is_scored, strict=True):
                single = Sequences.of([item._replace(sequences=[tokens], is_scored=[is_scored])])
                [[of_sequence]] = self._row_scores(TreeBatch(batch.trunk[:0], (0,), single), ROWS, len(tokens))
                members.append(of_sequence)
            scores.append(members)
        return scores

    def _row_scores(self, batch: TreeBatch, way: str, pass_tokens: int) -> list[list[Scores]]:
        if way == ALONE:
            return self._scores_alone(batch)
        tree = batch.whole_tree
        rows = Rows(tree, len(batch.trunk) if way == STATE else 0)
        logprobs = np.full(len(tree.pair_nodes), np.nan, np.float32)
        greedy = np.zeros(len(tree.pair_nodes), np.bool_)
        waiting = rows.passes(pass_tokens, self._state_limit if way == STATE else None)[::-1]
        while waiting:
            part = waiting.pop()
            is_single = len(part.rows) == 1
            label = _label_of(batch, rows.tokens(part.rows[0])) if is_single else batch.sequences.labels[0]
            with suppress(TooManyTokens):
                with memory_for(label, int(rows.lengths[part.rows].max()), at_most=is_single):
                    pairs, scores = self._forward.score_pass(rows, part)
                logprobs[pairs] = scores.logprobs
                greedy[pairs] = scores.greedy
                continue
            # As in `_tree_scores`
            self._make_room(f"{len(part.rows)} sequences", "such passes are split")
            waiting += part.halves()[::-1]
        of_sequences = iter(Scores(logprobs, greedy).along(tree.paths, Scores.of_first()))
        return [list(islice(of_sequences, len(item.sequences))) for item in batch.sets]

    def _seconds(self, batch: TreeBatch, way: str, pass_tokens: int) -> float:
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            with suppress(OutOfMemoryError):
                self._row_scores(batch, way, pass_tokens)
                seconds.append(time.perf_counter() - started)
            if min(seconds, default=0.0) > _ENOUGH:
                break
        return min(seconds, default=math.inf)

    # Trees

    def _why_no_tree(self) -> str:
        """Return why no kernel can compute trees on this model, or "" and keep the first kernel that can."""
        if self._checks.head_failure:
            return self._checks.head_failure
        if keeps_state(self._model):
            return "it has a recurrent state"
        requested = self._requested
        for kernel in self._kernels:
            self._forward.kernel = kernel
            failure = self._check_active_kernel()
            if not failure:
                return ""
            self.dropped.append(f"{kernel}: {failure}")
        self._requested = requested
        return failure

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

    def _fits_tree(self, batch: TreeBatch, longest: int) -> bool:
        # A plan may come from a process in which a kernel passed its check
        if self.checked and not self._checked.row:
            return False
        # For longer sequences, states in a shared row differ from those of the sequence alone
        if self._longest is not None and longest > self._longest:
            return False
        return not self._failure_at(BatchLengths(len(batch.trunk) + len(batch.tree.tokens), longest))

    def _failure_at(self, lengths: BatchLengths) -> str:
        """Return why prefixes cannot be shared at these lengths, or ""; checked now where it has not been before."""
        if lengths.row <= self._checked.row and lengths.longest <= self._checked.longest:
            return ""
        # Rounded up, so that a few checks cover all lengths; memory may hold the smaller step only
        for steps in (1, 4):
            rounded = self._above(lengths, steps)
            if rounded not in self._failures:
                try:
                    is_first = not self._checked.row
                    self._failures[rounded] = self._checks.sharing(self.kernel, rounded, is_first)
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
                f"shared in a tree ({failure}); such sequences are scored as whole rows",
            )
        return failure

    def _above(self, lengths: BatchLengths, steps: int) -> BatchLengths:
        row = max(rounded_up(lengths.row, steps), self._checked.row, _LEAST_ROW)
        longest = min(max(rounded_up(lengths.longest, steps), _LEAST_LONGEST), self._reach)
        return BatchLengths(row, max(longest, lengths.longest, self._checked.longest))

    def _say_once(self, kind: str, line: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(line)

    def _tree_scores(self, batch: TreeBatch) -> list[list[Scores]]:
        tree = batch.tree
        with suppress(TooManyTokens):
            with memory_for(batch.sets[0].label, len(batch.trunk) + len(tree.tokens), at_most=len(batch.items) == 1):
                trunk = self._forward.trunk(batch.trunk)
                pairs = self._forward.score(tree, trunk)
            scores = iter(pairs.along(tree.paths, trunk.scores))
            return [list(islice(scores, len(item.sequences))) for item in batch.sets]
        # Outside the handler, so that the traceback no longer references the tensors
        self._make_room(f"{len(tree.tokens)} tokens a batch", "such batches are halved")
        half = len(batch.items) // 2
        halves = batch.part(slice(half)), batch.part(slice(half, None))
        return [scores for part in halves for scores in self._tree_scores(part)]

    def _make_room(self, size: str, consequence: str) -> None:
        refuse_to_split(size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._say_once("memory", f"out of memory at {size}: {consequence}")


def _batch_like(sequences: Sequences, tokens: int) -> TreeBatch:
    """Return a batch of about so many tokens: sequences, and copies of them in other tokens that share as much."""
    items = [sequences[number] for number in range(len(sequences))]
    vocabulary = np.unique(sequences.tokens)
    ratio = tokens / int(sequences.lengths.sum())
    chosen = items[:: max(1, round(1 / ratio))]
    shifted = [
        item._replace(sequences=[_shifted(members, copy, vocabulary) for members in item.sequences])
        for copy in range(max(1, round(ratio)))
        for item in chosen
    ]
    return TreeBatch(np.empty(0, np.int32), tuple(range(len(shifted))), Sequences.of(shifted))


def _shifted(tokens: Ints, steps: int, vocabulary: Ints) -> Ints:
    """Return other tokens of a vocabulary, which is sorted; equal ones stay equal."""
    return vocabulary[(np.searchsorted(vocabulary, tokens) + steps) % len(vocabulary)]


def _label_of(batch: TreeBatch, inputs: Ints) -> str:
    """Return the label of the item that has a sequence with these input tokens."""
    return next(
        item.label for item in batch.sets if any(np.array_equal(tokens[:-1], inputs) for tokens in item.sequences)
    )


def _longest_input(sequences: Sequences) -> int:
    return int(sequences.lengths.max()) - 1


def _are_finite(sequences: Sequences, scores: list[list[Scores]]) -> bool:
    is_scored = sequences.is_scored.copy()
    is_scored[sequences.starts[:-1]] = False
    logprobs = np.concatenate([of_sequence.logprobs for members in scores for of_sequence in members])
    return bool(np.isfinite(logprobs[is_scored]).all())
