"""Scoring batches: shared where the model allows it, one by one where it does not.

In: items and batches from `pack`, a loaded model. Out: the scores of their sequences. Before anything is scored,
`check` finds out on made-up sequences whether sharing changes nothing (`sharing.py`), and that the model is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.errors import CheckpointError, EvalkitError, ScoringError, first_line
from evalkit.scoring.architecture import kernels_for, longest_shared, window_of
from evalkit.scoring.forward import Forward, Scores
from evalkit.scoring.memory import is_out_of_memory
from evalkit.scoring.pack import SequenceSet, TreeBatch
from evalkit.scoring.sharing import NOT_NUMBERS, Lengths, SharingCheck
from evalkit.scoring.verdicts import Verdicts

DENSE_TOKENS = 512
"""Most tokens of a batch whose tree is a mask over all of it, since attention then grows with its square."""
_LONGEST = 4096
"""Most tokens of the sequences that the check begins with; where longer ones come, they are checked then."""
_DAMAGED = "its weights may be damaged, or its dtype too narrow: try --dtype float32"
_TRIED = 64
"""Tokens of a sequence on which causality and the output head are checked, over the whole vocabulary."""
_LEAST_ROW = 256
"""Fewest tokens of the rows that are checked."""
_LEAST_LONGEST = 64
"""Fewest tokens of their longest sequence, where the model takes so many."""

Logprobs = NDArray[np.float32]


class Engine:
    """Scores batches with one model.

    Args:
        model: a Hugging Face causal language model.
        budget: most tokens of a batch; less where the model's attention needs it, parted where memory runs out.
        say: told of fallbacks.
        greedy: whether to find out if tokens are the argmax.
        kernels: ways to attend inside a tree, of `forward.KERNELS`, in the order in which they are tried; None: those
            that may work for the model, the fastest first.
        remembers: whether what `check` finds is kept for the next model of the same class and config, and taken from
            there; not for a model that was changed after it was loaded.
    """

    def __init__(
        self,
        model: Any,
        budget: int,
        say: Callable[[str], None],
        greedy: bool = False,
        kernels: tuple[str, ...] | None = None,
        remembers: bool = False,
    ) -> None:
        self._kernels = kernels or kernels_for(model)
        self._forward = Forward(model, self._kernels[0], greedy)
        self._say = say
        self._model = model
        self._verdicts = Verdicts(model) if remembers else None
        self._longest = longest_shared(model.config)
        self._asked = budget
        self.budget = self._fitting_budget()
        """Most tokens of the batches that it is to be given; fixed once `check` has been passed."""
        self.dropped: list[str] = []
        """Ways to attend that do not work with this model, and why."""
        self.shares = True
        """Whether prefixes are shared; False after a failed check."""
        self.why_not = ""
        """Why not, if so."""
        self.checked = False
        """Whether `check` has been passed."""
        self._own_head = True
        self._checked = Lengths(0, 0)
        """Up to which lengths sharing has been compared."""
        self._troubles: dict[Lengths, str] = {}
        """Greater lengths → why prefixes cannot be shared there, or nothing. What is found at one says nothing of
        another, so that a batch's scores do not depend on those before it."""
        self._told: set[str] = set()

    @property
    def kernel(self) -> str:
        """How it attends inside a tree: one of `forward.KERNELS`."""
        return self._forward.kernel

    def check(self, items: Sequence[SequenceSet]) -> None:
        """Find out whether prefixes may be shared; if not go on without, and say so.

        Args:
            items: some of those to be scored; the longest sequence of the first is run as it is.

        Raises:
            CheckpointError: the model does not run, its predictions depend on later tokens, or are not numbers.
        """
        self._try_one(items[0])
        check = SharingCheck(self._model)
        length = max(2, min(self._window(), _TRIED))
        # What these find depends on the weights, so that it is found for each checkpoint
        with _one_line("does not run"):
            lookahead = check.lookahead(length)
        if lookahead == NOT_NUMBERS:
            raise CheckpointError(f"on random tokens the model gives no numbers: {lookahead}; {_DAMAGED}")
        if lookahead:
            raise CheckpointError(
                f"the model's predictions change with the tokens that follow ({lookahead}): "
                "it is not a causal language model, so its log-likelihoods mean nothing"
            )
        try:
            self.why_not = _failure(lambda: check.head(length))
        except _TooManyTokens:
            self.why_not = "memory does not hold what its output head is compared with"
        self._own_head = not self.why_not
        if self._own_head:
            for kernel in self._kernels:
                self._forward.kernel = kernel
                self.why_not = self._check_kernel(check)
                if not self.why_not:
                    break
                self.dropped.append(f"{kernel}: {self.why_not}")
        self.shares, self.checked = not self.why_not, True
        if self.why_not:
            self._say(
                f"warning: this model does not support scoring through shared prefixes ({self.why_not}); "
                "every sequence is scored by itself, which is several times slower"
            )
        elif self.dropped:
            self._say(f"attention by {self.kernel}, which is slower ({'; '.join(self.dropped)})")

    def describe(self) -> dict[str, Any]:
        """What `check` has found, for a run's manifest."""
        found = {"shares": self.shares, "why_not": self.why_not, "kernel": self.kernel, "dropped": self.dropped}
        return found | {"checked": self._checked._asdict()}

    def score(self, batch: TreeBatch) -> list[tuple[SequenceSet, list[Scores]]]:
        """Scores of a batch's items, of each the sequences in order, every token of `is_scored` scored.

        Raises:
            ScoringError: out of memory on a single item, or a score that is not a number.
        """
        if self._may_share(batch):
            found = self._shared_scores(batch)
            if all(map(_is_finite, found)):
                return found
            # A masked NaN is a NaN still, and spreads over its row: by themselves they tell whose it is
        found = self._lone_scores(batch)
        for one in found:
            if not _is_finite(one):
                raise ScoringError(
                    f"{one[0].label}: a log-likelihood is not a finite number; "
                    "the dtype may be too narrow: try --dtype float32"
                )
        return found

    def _fitting_budget(self) -> int:
        return min(self._asked, DENSE_TOKENS) if self._forward.kernel == "dense" else self._asked

    def _window(self) -> int:
        """Tokens of a sequence that the model takes, and treats one by one as it would alone."""
        window = window_of(self._model.config)
        return min(window, self._longest or window)

    def _reach(self) -> int:
        """Tokens of the longest sequence that the check begins with."""
        return min(self._window(), _LONGEST, self._first_row() // 2)

    def _first_row(self) -> int:
        """Keys of the batches that are planned, with room for a trunk."""
        return max(self.budget + self.budget // 4, _LEAST_ROW)

    def _check_kernel(self, check: SharingCheck) -> str:
        """Compare sharing under the present kernel, in batches of the budget or of as much as memory holds."""
        self.budget = self._fitting_budget()
        while True:
            lengths = Lengths(self._first_row(), self._reach())
            try:
                trouble = self._compare(check, lengths)
            except _TooManyTokens:
                if self.budget <= _LEAST_ROW:
                    return f"memory does not hold rows of {lengths.row} tokens"
                self.budget = self._asked = self.budget // 2
                self._say(f"out of memory at {lengths.row} tokens: going on with batches of {self.budget}")
            else:
                self._checked = Lengths(0, 0) if trouble else lengths
                return trouble

    def _compare(self, check: SharingCheck, lengths: Lengths) -> str:
        """Why prefixes cannot be shared under the present kernel, or nothing."""

        def answer() -> str:
            return _failure(lambda: check.sharing(self.kernel, lengths))

        if self._verdicts is None:
            return answer()
        question = f"{self.kernel} row {lengths.row} longest {lengths.longest}"
        if not self._verdicts.knows(question) and not self._checked.row:
            self._say("comparing shared prefixes with the model's own forward pass, once for this architecture")
        return self._verdicts.ask(question, answer)

    def _may_share(self, batch: TreeBatch) -> bool:
        if not self.shares:
            return False
        # The last token is only predicted
        longest = max(len(sequence) for item in batch.items for sequence in item.sequences) - 1
        # Longer ones the model does not treat, token by token, as it would alone
        if self._longest is not None and longest > self._longest:
            return False
        return not self._trouble_at(Lengths(len(batch.trunk) + len(batch.tree.tokens), longest))

    def _trouble_at(self, lengths: Lengths) -> str:
        """Why prefixes cannot be shared at these lengths, or nothing; compared now where it has not been before."""
        if lengths.row <= self._checked.row and lengths.longest <= self._checked.longest:
            return ""
        # Rounded up, so that a few comparisons serve for all
        row = max(_rounded_up(lengths.row), self._checked.row, _LEAST_ROW)
        longest = min(max(_rounded_up(lengths.longest), _LEAST_LONGEST), self._window())
        asked = Lengths(row, max(longest, lengths.longest, self._checked.longest))
        if asked not in self._troubles:
            try:
                self._troubles[asked] = self._compare(SharingCheck(self._model), asked)
            except _TooManyTokens:
                self._troubles[asked] = "memory holds no comparison of that length"
        if trouble := self._troubles[asked]:
            row_too, longest_too = lengths.row > self._checked.row, lengths.longest > self._checked.longest
            places = [f"{lengths.row} tokens a batch"] * row_too
            places += [f"{lengths.longest + 1} tokens a sequence"] * longest_too
            self._tell(
                "lengths",
                f"warning: from {' or '.join(places)}, prefixes are not shared ({trouble}); such sequences are scored "
                "by themselves, which is several times slower",
            )
        return trouble

    def _tell(self, what: str, line: str) -> None:
        """Say a line, the first time that there is one of its kind."""
        if what not in self._told:
            self._told.add(what)
            self._say(line)

    def _shared_scores(self, batch: TreeBatch) -> list[tuple[SequenceSet, list[Scores]]]:
        tree, single = batch.tree, len(batch.items) == 1
        try:
            with _memory_for(batch.items[0], len(batch.trunk) + len(tree.tokens), at_most=single):
                trunk = self._forward.trunk(batch.trunk)
                pairs = self._forward.score(tree, trunk)
        except _TooManyTokens:
            pass
        else:
            paths = iter(tree.paths)
            return [(item, [pairs.along(next(paths), trunk.scores) for _ in item.sequences]) for item in batch.items]
        # Outside the handler, so that the traceback no longer holds the tensors
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._tell("memory", f"out of memory at {len(tree.tokens)} tokens a batch: such batches are halved")
        return self._halves_scores(batch)

    def _halves_scores(self, batch: TreeBatch) -> list[tuple[SequenceSet, list[Scores]]]:
        half = len(batch.items) // 2
        parts = (TreeBatch(batch.trunk, batch.items[:half]), TreeBatch(batch.trunk, batch.items[half:]))
        return [found for part in parts for found in self._shared_scores(part)]

    def _lone_scores(self, batch: TreeBatch) -> list[tuple[SequenceSet, list[Scores]]]:
        return [(item, [self._alone(item, s, own=self._own_head) for s in item.sequences]) for item in batch.items]

    def _alone(self, item: SequenceSet, tokens: NDArray[np.int32], own: bool) -> Scores:
        """One sequence by itself; with our own head, which needs less memory, where that is known to agree."""
        with _memory_for(item, len(tokens)):
            return self._forward.score_unshared(tokens) if own else self._forward.score_alone(tokens)

    def _try_one(self, item: SequenceSet) -> None:
        """Run a document as it is; refuse a model that cannot, or whose answer is no number."""
        longest = max(item.sequences, key=len)
        with _one_line("does not run"):
            found = self._alone(item, longest, own=False).logprobs[1:]
        if np.isnan(found).any():
            raise CheckpointError(f"the model's log-probabilities are not numbers (NaN) on {item.label}; {_DAMAGED}")


class _TooManyTokens(Exception):
    """Memory ran out on several items, which can still be parted."""


def _is_finite(scored: tuple[SequenceSet, list[Scores]]) -> bool:
    """Whether every score of an item is a number."""
    item, members = scored
    pairs = zip(item.is_scored, members, strict=True)
    return all(bool(np.isfinite(scores.logprobs[1:][mask[1:]]).all()) for mask, scores in pairs)


def _rounded_up(length: int) -> int:
    """To the next of four steps between powers of two."""
    step = max(1, (1 << length.bit_length()) // 8)
    return -(-length // step) * step


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn any failure of the model's own into one line that has its words."""
    try:
        yield
    except EvalkitError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ScoringError(f"out of memory on {_TRIED} tokens; free some, or use a smaller dtype") from error
        raise CheckpointError(f"the model {what} ({type(error).__name__}: {first_line(error)[:200]})") from error


def _failure(question: Callable[[], str]) -> str:
    """The answer, or how finding it failed: where it is not asked alone, an architecture may fail in any way.

    Raises:
        _TooManyTokens: memory ran out, which says nothing of the model.
    """
    try:
        return question()
    except ScoringError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise _TooManyTokens from None
        return f"it fails ({type(error).__name__}: {first_line(error)[:120]})"


@contextmanager
def _memory_for(item: SequenceSet, tokens: int, at_most: bool = True) -> Iterator[None]:
    """Turn a lack of memory into an error that names the document, or into `_TooManyTokens` if less can be tried."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if not at_most:
            raise _TooManyTokens from None
        raise ScoringError(
            f"{item.label}: {tokens} tokens are more than memory holds; free some or use a smaller dtype"
        ) from error
