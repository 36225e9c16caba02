"""Tokens of a task's questions, encoded once and then read from evalkit's cache.

In: questions and a `Prompter`. Out: `EncodedQuestions`. Checkpoints of one training share a tokenizer, so each but the
first is spared half a minute of tokenising. A stored task belongs to the texts of its questions, the prompter and the
whole content of its tokenizer, library versions, and evalkit's own code. Tasks of few tokens are not stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion, EncodedQuestions
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.stored_tables import read_table, write_table
from evalkit.resources import source_digest
from evalkit.scoring.sequences import SequenceArrays

if TYPE_CHECKING:
    import pyarrow as pa

_KIND = "tokens"
_LEAST = 2**14
"""Tokens of a task from which they are stored; fewer take about 30 ms."""
_ARRAYS = ("tokens", "starts", "first", "segments", "cuts")


def encoded_questions(
    prompter: Prompter,
    questions: Sequence[Question],
    unconditional: bool,
    pace: Callable[[Iterable[EncodedQuestion]], Iterable[EncodedQuestion]] = iter,
) -> EncodedQuestions:
    """Encode the questions of a task.

    Args:
        prompter: renders and tokenises.
        questions: of one task.
        unconditional: whether choices are encoded without their context too.
        pace: passes the encoded questions on, as slowly as it likes.

    Raises:
        ScoringError: as `Prompter.encode`.
    """
    key = _key(prompter, questions, unconditional)
    if key is not None and (table := read_table(_KIND, key)) is not None:
        return _from_table(questions, table)
    found = EncodedQuestions.of(questions, pace(prompter.encode(questions, unconditional)))
    if key is not None and len(found.segments) >= _LEAST:
        write_table(_KIND, key, _table(found))
    return found


def _key(prompter: Prompter, questions: Sequence[Question], unconditional: bool) -> str | None:
    """Return what the tokens depend on; None if that is not known."""
    identity = prompter.identity
    if identity is None:
        return None
    texts = hashlib.sha256()
    for one in questions:
        parts = (one.contexts, one.continuations, one.delimiter, one.gaps)
        texts.update(repr(parts).encode("utf-8", "surrogatepass"))
    versions = {name: version(name) for name in ("tokenizers", "transformers")}
    return json.dumps([identity, texts.hexdigest(), unconditional, versions, source_digest()], sort_keys=True)


def _table(found: EncodedQuestions) -> pa.Table:
    """Return a table with one row, whose columns are arrays."""
    import pyarrow as pa

    arrays = found.arrays
    columns = (arrays.tokens, arrays.starts, arrays.first, found.segments, found.cuts.ravel())
    whole = (pa.LargeListArray.from_arrays([0, len(column)], pa.array(column)) for column in columns)
    return pa.table(dict(zip(_ARRAYS, whole, strict=True)))


def _from_table(questions: Sequence[Question], table: pa.Table) -> EncodedQuestions:
    tokens, starts, first, segments, cuts = (table[name].chunk(0).values.to_numpy() for name in _ARRAYS)
    return EncodedQuestions(questions, SequenceArrays(tokens, starts, first), segments, cuts.reshape(-1, 2))
