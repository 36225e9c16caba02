"""Rows of the journal that answer requests: one type for scored sequences, one for generated texts.

A row has the key of its request. The kind of benchmark makes tables and metrics of rows, and of its documents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


class RequestKey(NamedTuple):
    """Identity of a request in a run."""

    task: str
    """Name of the task in the journal."""
    document: str
    """The document's identity in the task, such as "12" or "mmlu_anatomy 12"."""
    choice: int
    """Number of the request among those of its document."""
    texts: str
    """Digest of the request's texts, so that an answer is never used for another text; empty if the run's identity
    determines them."""


KEY = ("document", "choice", "texts", "part")
"""Columns that identify a row within its task."""


class ScoredRow(NamedTuple):
    """Log-likelihoods of one sequence of tokens by segment; the first token has none, and is not counted."""

    document: str
    choice: int
    part: int
    """Number of the sequence among those of the request: of a long text, its windows."""
    parts: int
    """Sequences of the request; 0 of a text without tokens."""
    texts: str
    segments: list[int]
    """The kind's codes of the segments, ascending; below, the numbers of each."""
    tokens: list[int]
    bytes: list[int]
    """UTF-8 bytes of each segment; empty if they are not counted."""
    likelihoods: list[float | None]
    """Sums of log-probabilities in nats; None of segments that are not scored."""
    greedy: bool | None
    """Whether every token of the continuation is the argmax; None if not requested."""
    truncated: int
    """Tokens left out on the left to fit the context window."""
    straddles: int
    """Tokens that span a boundary between segments."""

    def of(self, segment: int) -> tuple[int, float | None]:
        """Return the number of tokens and the log-likelihood of a segment; 0 and None if it is absent."""
        if segment not in self.segments:
            return 0, None
        index = self.segments.index(segment)
        return self.tokens[index], self.likelihoods[index]

    @staticmethod
    def check_columns(rows: pa.RecordBatch) -> None:
        """Raise `ValueError` unless the codes of each row's segments ascend, and each segment has its numbers."""
        lengths = rows["segments"].value_lengths().to_numpy()
        for name in ("tokens", "likelihoods", "bytes"):
            others = rows[name].value_lengths().to_numpy()
            is_absent = (others == 0) & (name == "bytes")
            if not ((others == lengths) | is_absent).all():
                raise ValueError(f"'{name}' and 'segments' of a row differ in length")
        codes = rows["segments"].flatten().to_numpy()
        row = np.repeat(np.arange(len(lengths)), lengths)
        is_ascending = (np.diff(codes) > 0) | (np.diff(row) > 0)
        if not is_ascending.all() or (codes < 0).any():
            raise ValueError("'segments' of a row are not ascending codes from 0")


class GeneratedRow(NamedTuple):
    """A generated text."""

    document: str
    choice: int
    part: int
    """Number of the text among those sampled for the request."""
    parts: int
    """Texts sampled for the request."""
    texts: str
    prompt_sha256: str
    """Hash of the whole prompt, before truncation."""
    tokens_before: int
    """Tokens of the prompt before truncation, and below after it."""
    tokens: int
    truncated: bool
    reused: int
    """Prompt tokens whose keys and values were shared with another prompt."""
    text: str
    """Generated text without special tokens, up to the stopping criterion."""
    new_tokens: int
    ended: str
    """Stopping criterion: "end" (an end token), "enough" (a stop text or pattern) or "length"."""
    seconds: float
    logprobs: str = ""
    """JSON list of the log-likelihoods of the prompt's answers, in nats; empty without answers."""


def key_of(row: ScoredRow | GeneratedRow) -> tuple[Any, ...]:
    """Return the key of a row within its task."""
    return tuple(getattr(row, name) for name in KEY)


class Finished(Protocol):
    """What planning needs of the finished rows of a run; see `FinishedRows`."""

    @property
    def without_batch(self) -> Collection[Any]: ...

    @property
    def parts(self) -> Mapping[Any, int]: ...

    def __contains__(self, key: Any) -> bool: ...


class NothingFinished:
    """The finished rows of what is not stored."""

    without_batch = frozenset[Any]()
    parts: Mapping[Any, int] = MappingProxyType({})

    def __contains__(self, key: Any) -> bool:
        return False


def is_finished(key: RequestKey, finished: Finished) -> bool:
    """Whether the journal has all rows of a request."""
    return all((*key, part) in finished for part in range(finished.parts.get(key, 1)))


def segment_columns(rows: pa.Table, segments: Collection[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return log-likelihoods and numbers of tokens, [rows, segments], of scored rows; NaN and 0 of absent segments."""
    column = rows["segments"].combine_chunks()
    parents = np.repeat(np.arange(len(rows)), column.value_lengths().to_numpy())
    codes = column.flatten().to_numpy()
    shape = len(rows), max(*segments, int(codes.max(initial=0))) + 1
    likelihoods = np.full(shape, np.nan)
    likelihoods[parents, codes] = rows["likelihoods"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    tokens = np.zeros(shape, np.int64)
    tokens[parents, codes] = rows["tokens"].combine_chunks().flatten().to_numpy()
    return likelihoods[:, list(segments)], tokens[:, list(segments)]
