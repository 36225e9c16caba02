"""Scoring batches: shared where the model allows it, one by one where it does not.

In: items and batches from `pack`, a loaded model. Out: the scores of their sequences. Before anything is scored,
`check` compares shared with one-by-one scores on a few items and makes sure that the model does not look ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.models.stretch import BY_LENGTH_TYPE
from evalkit.scoring.forward import Forward, Scores
from evalkit.scoring.pack import Batch, Item
from evalkit.scoring.tree import trunk_length

FLOAT32_TOLERANCE = 1e-4
"""Shared and one-by-one log-likelihoods of a sequence differ by rounding only: relative, in float32."""
HEAD_TOLERANCE = 5e-3
"""Mean difference of a token's log-probability, in nats, between our head and the model's own on the same sequence: the
same arithmetic in the same order, so next to nothing in any dtype."""
LOOKAHEAD_TOLERANCE = 1e-3
"""In float32, how far a token's log-probability may move, in nats, when the tokens after it are cut off."""
HALF_TOLERANCE = 0.25
"""In bf16 and fp16, the mean difference of a token's log-probability, in nats. Rounding alone gives 0.05 to 0.1
(SmolLM2-135M in bf16, two documents of each task); a model that ignores the mask is off by whole nats."""
DENSE_TOKENS = 512
"""Most tokens of a batch whose tree is a mask over all of it, since attention then grows with its square."""

_CHECKED = 2
"""Items on which sharing is checked before anything is scored."""

Logprobs = NDArray[np.float32]


class Engine:
    """Scores batches with one model.

    Args:
        model: a Hugging Face causal language model.
        budget: most tokens of a batch; less where the model's attention needs it, parted where memory runs out.
        say: told of fallbacks.
        greedy: whether to find out if tokens are the likeliest.
        kernels: ways to attend inside a tree, of `forward.KERNELS`, in the order in which they are tried; None: those
            that may work for the model, the fastest first.
    """

    def __init__(
        self,
        model: Any,
        budget: int,
        say: Callable[[str], None],
        greedy: bool = False,
        kernels: tuple[str, ...] | None = None,
    ) -> None:
        self._kernels = kernels or _kernels(model)
        self._forward = Forward(model, self._kernels[0], greedy)
        self._say = say
        self._exact = model.dtype in (torch.float32, torch.float64)
        self._longest = _longest_shared(model.config)
        self._asked = budget
        self.budget = self._fitting_budget()
        """Most tokens of the batches that it is to be given; fixed once `check` has been passed."""
        self._limit: int | None = None
        """What has been learnt of the memory."""
        self.dropped: list[str] = []
        """Ways to attend that do not work with this model, and why."""
        self.shares = True
        """Whether prefixes are shared; False after a failed check."""
        self.why_not = ""
        """Why not, if so."""
        self.checked = False
        """Whether `check` has been passed."""
        self._own_head = True

    @property
    def kernel(self) -> str:
        """How it attends inside a tree: one of `forward.KERNELS`."""
        return self._forward.kernel

    def check(self, items: Sequence[Item]) -> None:
        """Compare shared with one-by-one scores; without agreement go on without sharing, and say so.

        Args:
            items: candidates, of which the first few that may be shared are used.

        Raises:
            CheckpointError: the model's predictions depend on later tokens, or are not numbers.
        """
        chosen = [item for item in items if self._within_reach([item])][:_CHECKED] or list(items[:1])
        sequences = [sequence for item in chosen for sequence in item.sequences]
        alone = [self._alone(item, s, own=False).logprobs for item in chosen for s in item.sequences]
        longest, reference = max(zip(sequences, alone, strict=True), key=lambda pair: len(pair[0]))
        self._check_causal(longest, reference)
        if any(np.isnan(scores[1:]).any() for scores in alone):
            raise CheckpointError(
                "the model's log-probabilities are not numbers (NaN); "
                "its weights may be damaged, or its dtype too narrow: try --dtype float32"
            )
        self.why_not = self._head_trouble(longest, reference)
        self._own_head = not self.why_not
        if self._own_head and self._within_reach(chosen):
            for kernel in self._kernels:
                self._forward.kernel = kernel
                self.budget = self._fitting_budget()
                self.why_not = self._sharing_trouble(chosen, alone)
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
        return {"shares": self.shares, "why_not": self.why_not, "kernel": self.kernel, "dropped": self.dropped}

    def score(self, batch: Batch) -> list[tuple[Item, list[Scores]]]:
        """Scores of a batch's items, of each the sequences in order, every token of `wanted` scored.

        Raises:
            ScoringError: out of memory on a single item, or a score that is not a number.
        """
        found = self._shared_scores(batch) if self._may_share(batch) else self._lone_scores(batch)
        for item, members in found:
            for wanted, scores in zip(item.wanted, members, strict=True):
                if not np.isfinite(scores.logprobs[1:][wanted[1:]]).all():
                    raise ScoringError(
                        f"{item.label}: a log-likelihood is not a finite number; "
                        "the dtype may be too narrow: try --dtype float32"
                    )
        return found

    def _fitting_budget(self) -> int:
        return min(self._asked, DENSE_TOKENS) if self._forward.kernel == "dense" else self._asked

    def _may_share(self, batch: Batch) -> bool:
        return self.shares and self._within_reach(batch.items)

    def _within_reach(self, items: Sequence[Item]) -> bool:
        """Whether sequences are short enough that the model treats each of their tokens as it would alone."""
        if self._longest is None:
            return True
        return max(len(sequence) for item in items for sequence in item.sequences) <= self._longest

    def _shared_scores(self, batch: Batch) -> list[tuple[Item, list[Scores]]]:
        tree, single = batch.tree, len(batch.items) == 1
        if self._limit is not None and len(tree.tokens) > self._limit and not single:
            return self._halves_scores(batch)
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
        self._limit = max(1, len(tree.tokens) // 2)
        self._say(f"out of memory at {len(tree.tokens)} tokens a batch: going on with {self._limit}")
        return self._halves_scores(batch)

    def _halves_scores(self, batch: Batch) -> list[tuple[Item, list[Scores]]]:
        half = len(batch.items) // 2
        parts = (Batch(batch.trunk, batch.items[:half]), Batch(batch.trunk, batch.items[half:]))
        return [found for part in parts for found in self._shared_scores(part)]

    def _lone_scores(self, batch: Batch) -> list[tuple[Item, list[Scores]]]:
        return [(item, [self._alone(item, s, own=self._own_head) for s in item.sequences]) for item in batch.items]

    def _alone(self, item: Item, tokens: NDArray[np.int32], own: bool) -> Scores:
        """One sequence by itself; with our own head, which needs less memory, where that is known to agree."""
        with _memory_for(item, len(tokens)):
            return self._forward.score_unshared(tokens) if own else self._forward.score_alone(tokens)

    def _check_causal(self, tokens: NDArray[np.int32], whole: Logprobs) -> None:
        if self._longest is not None and len(tokens) > self._longest:
            # Past it, rotary embeddings that depend on the length change with the tokens that follow
            tokens = tokens[: self._longest]
            whole = self._forward.score_alone(tokens).logprobs
        cut = self._forward.score_alone(tokens[: len(tokens) // 2 + 1]).logprobs
        gap = float(np.abs(whole[1 : len(cut)] - cut[1:]).mean())
        if gap > (LOOKAHEAD_TOLERANCE if self._exact else HALF_TOLERANCE):
            raise CheckpointError(
                f"the model's predictions change with the tokens that follow (by {gap:.2g} nats a token): "
                "it is not a causal language model, so its log-likelihoods mean nothing"
            )

    def _head_trouble(self, tokens: NDArray[np.int32], reference: Logprobs) -> str:
        """Why our output head cannot stand for the model's own, or nothing."""
        with _failing() as trouble:
            gap = float(np.abs(self._forward.score_unshared(tokens).logprobs - reference)[1:].mean())
            # Written so that NaN is trouble too
            if not gap <= HEAD_TOLERANCE:
                return f"its output head does more than evalkit knows, by {gap:.2g} nats"
        return "".join(trouble)

    def _sharing_trouble(self, items: list[Item], alone: list[Logprobs]) -> str:
        """Why prefixes cannot be shared under the present kernel, or nothing."""
        with _failing() as trouble:
            gap = self._largest_gap(items, alone)
            if not gap <= (FLOAT32_TOLERANCE if self._exact else HALF_TOLERANCE):
                return f"scores differ by {gap:.2g}"
        return "".join(trouble)

    def _largest_gap(self, items: list[Item], alone: list[Logprobs]) -> float:
        """Largest disagreement: in float32 of a sequence's sum, relative; below, mean of the tokens past the trunk."""
        expected = iter(alone)
        by_item = {item.index: [next(expected) for _ in item.sequences] for item in items}
        whole = [_whole(item) for item in items]
        gaps = []
        # Each also by itself: its sequences' common context is a trunk, which the items together may lack
        for group in (whole, *([item] for item in whole)):
            trunk = trunk_length([sequence for item in group for sequence in item.sequences])
            batch = Batch(group[0].sequences[0][:trunk], tuple(group))
            tails: list[Logprobs] = []
            for item, members in self._shared_scores(batch):
                for one, other in zip(members, by_item[item.index], strict=True):
                    differ = (one.logprobs - other)[1:]
                    if self._exact:
                        gaps.append(abs(float(differ.sum())) / max(abs(float(other[1:].sum())), 1.0))
                    # The trunk's own tokens agree whatever the model does with the mask, and would hide the rest
                    tails.append(np.abs(differ[max(trunk - 1, 0) :]))
            if not self._exact:
                gaps.append(float(np.concatenate(tails).mean()))
        # A NaN is the largest of all
        return float(np.max(gaps))


class _TooManyTokens(Exception):
    """Memory ran out on several items, which can still be parted."""


def _kernels(model: Any) -> tuple[str, ...]:
    """Ways to attend inside a tree that may work for a model, the fastest first."""
    implementation = model.config.get_text_config()._attn_implementation
    if not getattr(model, "_supports_attention_backend", False) or implementation != "sdpa":
        return ("dense",)
    return ("flex", "tiles", "dense") if model.device.type == "cuda" else ("tiles", "dense")


def _whole(item: Item) -> Item:
    """The same with every token to be scored."""
    return Item(
        item.index, item.label, item.group, item.sequences, tuple(np.ones(len(s), np.bool_) for s in item.sequences)
    )


@contextmanager
def _failing() -> Iterator[list[str]]:
    """Catch what goes wrong inside: an architecture of any kind may fail in any way where it is not asked alone."""
    trouble: list[str] = []
    try:
        yield trouble
    except ScoringError:
        raise
    except Exception as error:
        trouble.append(f"it fails ({type(error).__name__}: {first_line(error)[:120]})")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch means that memory ran out, on a GPU or (by its message) on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "not enough memory" in str(error) or ("alloc" in str(error).lower() and "memory" in str(error).lower())


@contextmanager
def _memory_for(item: Item, tokens: int, at_most: bool = True) -> Iterator[None]:
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


def _longest_shared(config: Any) -> int | None:
    """Length up to which a sequence may share a batch.

    Beyond a sliding window, which the tree mask replaces, tokens no longer see all that precedes them; and rotary
    embeddings that depend on the longest position of a batch change for all in it.
    """
    text = config.get_text_config()
    lengths = []
    kinds = getattr(text, "layer_types", None)
    if kinds is None or any("sliding" in kind or "chunked" in kind for kind in kinds):
        lengths.append(getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None))
    lengths += rotary_lengths(config)
    return min((int(length) for length in lengths if length), default=None)


def rotary_lengths(config: Any) -> list[int | None]:
    """Lengths that rotary embeddings were trained with, of those that depend on the longest position of a batch."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # Some have one set for each kind of layer
    sets = rope.values() if rope and all(isinstance(p, dict) for p in rope.values()) else [rope]
    return [
        parameters.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
        for parameters in sets
        if parameters.get("rope_type") in ("longrope", "dynamic", BY_LENGTH_TYPE)
    ]
