"""Conversion between questions and the scoring engine.

In: encoded questions, and later their scores. Out: `SequenceSet`s for the engine, rows of the score table, and the
table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.encoded import CONTINUATION, EncodedQuestion, TokenSequence
from evalkit.errors import RunError
from evalkit.scores.table import CLUSTER, SEGMENTS, ScoreRow
from evalkit.scoring.pack import SequenceSet

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.scoring.head import Scores


def question_item(index: int, encoded: EncodedQuestion, scored: frozenset[int]) -> SequenceSet:
    """Return the sequences of a question for the engine: first the conditional ones, then the unconditional ones.

    Args:
        index: the question's number, which identifies its scores.
        encoded: the question.
        scored: indices into `SEGMENTS` of the segments to score. In unconditional sequences only the continuation is
            scored.
    """
    is_scored = np.isin(np.arange(len(SEGMENTS)), list(scored))
    masks = [is_scored[sequence.segments] for sequence in encoded.sequences]
    masks += [sequence.segments == CONTINUATION for sequence in encoded.unconditional]
    tokens = tuple(sequence.tokens for sequence in encoded.sequences + encoded.unconditional)
    return SequenceSet(index, encoded.question.label, encoded.question.subtask, tokens, tuple(masks))


def question_rows(encoded: EncodedQuestion, scores: Sequence[Scores], scored: frozenset[int]) -> Iterator[ScoreRow]:
    """Yield the score table's rows of one question, one for each choice.

    Args:
        encoded: the question.
        scores: scores of the sequences of `question_item`, in order.
        scored: indices of the segments that the template scores.
    """
    question = encoded.question
    count = len(encoded.sequences)
    for choice, sequence in enumerate(encoded.sequences):
        sums, counts = _segment_sums(sequence, scores[choice].logprobs, scored)
        ll_unconditional = None
        if encoded.unconditional:
            unconditional = scores[count + choice].logprobs
            sums_alone, _ = _segment_sums(encoded.unconditional[choice], unconditional, frozenset({CONTINUATION}))
            ll_unconditional = sums_alone[CONTINUATION]
        option = question.choices[choice]
        place = (question.task, question.subtask, question.doc_id, choice, count, question.gold)
        sizes = (len(option), len(option.encode("utf-8")), sequence.truncated, sequence.straddles)
        yield ScoreRow._make((*place, *sums, *counts, ll_unconditional, *sizes))


def part_table(questions: Sequence[Question], rows: pa.Table, folder: Path) -> pd.DataFrame:
    """Return the score table of questions: the journal's rows in the order of the documents.

    Args:
        questions: of one task.
        rows: from the journal, in any order of the documents.
        folder: of the run, for messages.

    Raises:
        RunError: a choice has no row.
    """
    order = {(question.subtask, question.doc_id): place for place, question in enumerate(questions)}
    documents = zip(rows["subtask"].to_pylist(), rows["doc_id"].to_pylist(), strict=True)
    # The sort keeps the order of a document's rows
    places = sorted((order[one], number) for number, one in enumerate(documents) if one in order)
    table = rows.take([number for _, number in places])
    found = list(zip((place for place, _ in places), table["choice"].to_pylist(), strict=True))
    if found != [(place, choice) for place, one in enumerate(questions) for choice in range(len(one.contexts))]:
        # Happens only if lines of the journal were removed while it was read
        raise RunError(
            f"the journal of {folder} lacks choices of some documents; delete the folder and run the command again"
        )
    scores: pd.DataFrame = table.to_pandas()
    return scores.assign(**{CLUSTER: [questions[place].cluster for place, _ in places]})


def _segment_sums(
    sequence: TokenSequence, scores: NDArray[np.float32], scored: frozenset[int]
) -> tuple[list[float | None], list[int]]:
    """Return each segment's sum of log-probabilities and number of tokens; the first token is not predicted."""
    segments = sequence.segments[1:]
    mask = np.isin(segments, list(scored))
    # float64: a float32 sum of thousands of values would lose precision
    weights = np.where(mask, scores[1:].astype(np.float64), 0.0)
    sums = np.bincount(segments, weights=weights, minlength=len(SEGMENTS))
    counts = np.bincount(segments, minlength=len(SEGMENTS))
    return [float(sums[s]) if s in scored else None for s in range(len(SEGMENTS))], counts.tolist()
