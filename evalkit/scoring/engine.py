"""Scoring batches: shared where the model allows it, one by one where it does not.

In: batches from `pack`, a loaded model. Out: rows of the score table. Before anything is scored, `check` compares
shared with one-by-one scores on a few questions and makes sure that the model does not look ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evalkit.errors import CheckpointError, ScoringError, first_line
from evalkit.prompts import EncodedQuestion
from evalkit.scoring.forward import Forward, Trunk
from evalkit.scoring.pack import Batch, PackedRow, all_sequences, plan
from evalkit.scoring.table import ScoreRow, question_rows
from evalkit.templates import SEGMENTS

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

_CHECKED = 2
"""Questions on which sharing is checked before anything is scored."""

Scores = NDArray[np.float32]


class Engine:
    """Scores batches with one model.

    Args:
        model: a Hugging Face causal language model.
        scored: indices into `SEGMENTS` of the segments to score.
        budget: most tokens of a batch; halved when memory runs out.
        say: told of fallbacks.
    """

    def __init__(self, model: Any, scored: frozenset[int], budget: int, say: Callable[[str], None]) -> None:
        self._forward = Forward(model)
        self.scored = scored
        self._say = say
        self._exact = model.dtype in (torch.float32, torch.float64)
        self._sliding = _sliding_window(model.config)
        self.budget = budget
        self.shares = True
        """Whether prefixes are shared; False after a failed check."""
        self.why_not = ""
        """Why not, if so."""
        self._own_head = True

    def check(self, questions: Sequence[EncodedQuestion]) -> None:
        """Compare shared with one-by-one scores; without agreement go on without sharing, and say so.

        Args:
            questions: candidates, of which the first few that may be shared are used.

        Raises:
            CheckpointError: the model's predictions depend on later tokens, or are not numbers.
        """
        chosen = [q for q in questions if self._within_sliding([q])][:_CHECKED] or list(questions[:1])
        sequences = [sequence for question in chosen for sequence in all_sequences(question)]
        alone = [self._alone(question, s.tokens, own=False) for question in chosen for s in all_sequences(question)]
        longest, reference = max(
            ((sequence.tokens, scores) for sequence, scores in zip(sequences, alone, strict=True)),
            key=lambda pair: len(pair[0]),
        )
        self._check_causal(longest, reference)
        if any(np.isnan(scores[1:]).any() for scores in alone):
            raise CheckpointError(
                "the model's log-probabilities are not numbers (NaN); "
                "its weights may be damaged, or its dtype too narrow: try --dtype float32"
            )
        try:
            gap = float(np.abs(self._forward.score_unshared(longest) - reference)[1:].mean())
            self._own_head = gap <= HEAD_TOLERANCE
            self.why_not = "" if self._own_head else f"its output head does more than evalkit knows, by {gap:.2g} nats"
            if self._own_head and self._within_sliding(chosen):
                gap = self._largest_gap(chosen, alone)
                if gap > (FLOAT32_TOLERANCE if self._exact else HALF_TOLERANCE):
                    self.why_not = f"scores differ by {gap:.2g}"
        except ScoringError:
            raise
        except Exception as error:  # an architecture of any kind may fail in any way where it is not asked alone
            self._own_head = False
            self.why_not = f"it fails ({type(error).__name__}: {first_line(error)[:120]})"
        self.shares = not self.why_not
        if self.why_not:
            self._say(
                f"warning: this model does not support scoring through shared prefixes ({self.why_not}); "
                "every sequence is scored by itself, which is several times slower"
            )

    def score(self, batch: Batch) -> list[ScoreRow]:
        """The score table's rows of a batch's questions.

        Raises:
            ScoringError: out of memory on a single row, or a score that is not a number.
        """
        found = self._shared_scores(batch) if self._may_share(batch) else self._lone_scores(batch)
        rows: list[ScoreRow] = []
        for question, scores in found:
            rows += question_rows(
                question, scores[: len(question.sequences)], scores[len(question.sequences) :], self.scored
            )
        for row in rows:
            likelihoods = (*(getattr(row, f"ll_{segment}") for segment in SEGMENTS), row.ll_unconditional)
            if not all(value is None or np.isfinite(value) for value in likelihoods):
                raise ScoringError(
                    f"{row.subtask} document {row.doc_id}: a log-likelihood is not a finite number; "
                    "the dtype may be too narrow: try --dtype float32"
                )
        return rows

    def _may_share(self, batch: Batch) -> bool:
        return self.shares and self._within_sliding([q for packed in batch.rows for q in packed.questions])

    def _within_sliding(self, questions: Sequence[EncodedQuestion]) -> bool:
        """Whether a sliding window is wide enough to make no difference, since the tree mask replaces it."""
        if self._sliding is None:
            return True
        return max(len(s.tokens) for question in questions for s in all_sequences(question)) <= self._sliding

    def _shared_scores(self, batch: Batch) -> list[tuple[EncodedQuestion, list[Scores]]]:
        with _memory_for(batch.rows[0].questions[0], len(batch.trunk)):
            trunk = self._forward.trunk(batch.trunk)
        pairs = self._within_memory(batch.rows, trunk)
        found = []
        for packed, scores in zip(batch.rows, pairs, strict=True):
            paths = iter(packed.row.paths)
            for question in packed.questions:
                found.append((question, [_along(next(paths), scores, trunk.scores) for _ in all_sequences(question)]))
        return found

    def _lone_scores(self, batch: Batch) -> list[tuple[EncodedQuestion, list[Scores]]]:
        return [
            (question, [self._alone(question, s.tokens, own=self._own_head) for s in all_sequences(question)])
            for packed in batch.rows
            for question in packed.questions
        ]

    def _alone(self, question: EncodedQuestion, tokens: NDArray[np.int32], own: bool) -> Scores:
        """One sequence by itself; with our own head, which needs less memory, where that is known to agree."""
        with _memory_for(question, len(tokens)):
            return self._forward.score_unshared(tokens) if own else self._forward.score_alone(tokens)

    def _within_memory(self, rows: Sequence[PackedRow], trunk: Trunk) -> list[Scores]:
        """Score rows, in halves once memory has run out."""
        size = len(rows) * max(len(packed.row.tokens) for packed in rows)
        if len(rows) == 1:
            with _memory_for(rows[0].questions[0], size):
                return self._forward.score([rows[0].row], trunk)
        if size <= self.budget:
            try:
                return self._forward.score([packed.row for packed in rows], trunk)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the handler, so that the traceback no longer holds the tensors
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.budget = size // 2
            self._say(f"out of memory at {size} tokens a batch: going on with {self.budget}")
        half = len(rows) // 2
        return self._within_memory(rows[:half], trunk) + self._within_memory(rows[half:], trunk)

    def _check_causal(self, tokens: NDArray[np.int32], whole: Scores) -> None:
        cut = self._forward.score_alone(tokens[: len(tokens) // 2 + 1])
        gap = float(np.abs(whole[1 : len(cut)] - cut[1:]).mean())
        if gap > (LOOKAHEAD_TOLERANCE if self._exact else HALF_TOLERANCE):
            raise CheckpointError(
                f"the model's predictions change with the tokens that follow (by {gap:.2g} nats a token): "
                "it is not a causal language model, so its log-likelihoods mean nothing"
            )

    def _largest_gap(self, questions: Sequence[EncodedQuestion], alone: list[Scores]) -> float:
        """Largest disagreement: in float32 of a sequence's sum, relative; below, mean of the tokens past the trunk."""
        expected = iter(alone)
        by_question = {id(q): [next(expected) for _ in all_sequences(q)] for q in questions}
        gaps = []
        every = frozenset(range(len(SEGMENTS)))
        # Each also by itself: its choices' common context is a trunk, which the questions together may lack
        for group in (questions, *([question] for question in questions)):
            tails: list[Scores] = []
            for batch in plan(group, every, self.budget):
                for question, scores in self._shared_scores(batch):
                    for one, other in zip(scores, by_question[id(question)], strict=True):
                        differ = (one - other)[1:]
                        if self._exact:
                            gaps.append(abs(float(differ.sum())) / max(abs(float(other[1:].sum())), 1.0))
                        # The trunk's own tokens agree whatever the model does with the mask, and would hide the rest
                        tails.append(np.abs(differ[max(len(batch.trunk) - 1, 0) :]))
            if not self._exact:
                gaps.append(float(np.concatenate(tails).mean()))
        return max(gaps)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch means that memory ran out, on a GPU or (by its message) on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "not enough memory" in str(error) or ("alloc" in str(error).lower() and "memory" in str(error).lower())


@contextmanager
def _memory_for(encoded: EncodedQuestion, tokens: int) -> Iterator[None]:
    """Turn a lack of memory that no smaller batch can mend into an error that names the document."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        label = encoded.question.label
        raise ScoringError(
            f"{label}: {tokens} tokens are more than memory holds; free some or use a smaller dtype"
        ) from error


def _along(path: NDArray[np.int32], pairs: Scores, trunk: Scores) -> Scores:
    """[length] scores of one sequence: the trunk's, then its path's pairs; NaN where not scored."""
    head = trunk if len(trunk) else np.full(1, np.nan, dtype=np.float32)
    tail = np.where(path >= 0, pairs[path], np.nan) if len(pairs) else np.full(len(path), np.nan)
    return np.concatenate((head, tail)).astype(np.float32)


def _sliding_window(config: Any) -> int | None:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return None
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    return int(window) if window else None
