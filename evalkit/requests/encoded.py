"""Scored documents in flat arrays, and the rows that answer them.

The 56,168 sequences of MMLU take 60 MB in arrays; as objects they would take many times that, and longer to plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.requests.requests import ScoreDocument
from evalkit.requests.rows import ScoredRow
from evalkit.runs.score_table import CONTINUATION
from evalkit.scoring.pack import Sequences, TreeBatch, offsets

if TYPE_CHECKING:
    from evalkit.scoring.forward import Scores


class _Head(NamedTuple):
    """A sequence without its tokens."""

    choice: int
    part: int
    parts: int
    greedy: bool
    truncated: int
    straddles: int


@dataclass(frozen=True)
class DocumentHead:
    """A document of a batch without its tokens: what is needed to make rows of its scores."""

    document: str
    heads: Sequence[_Head]
    texts: Sequence[str]
    lengths: Sequence[int]
    segments: NDArray[np.integer[Any]]
    """[tokens of all sequences]"""
    is_scored: NDArray[np.bool_]
    bytes: NDArray[np.integer[Any]] | None

    def keys(self, journal: str) -> list[tuple[Any, ...]]:
        """Return the keys of its rows."""
        pairs = zip(self.heads, self.texts, strict=True)
        return [(journal, self.document, head.choice, texts, head.part) for head, texts in pairs]


@dataclass(frozen=True)
class EncodedDocuments:
    sequences: Sequences
    """For the engine; an item is a document."""
    segments: NDArray[np.integer[Any]]
    """[tokens] code of each token's segment."""
    bytes: NDArray[np.integer[Any]] | None
    """[tokens], if they are counted."""
    heads: NDArray[np.int32]
    """[sequences, fields of `_Head`]"""
    texts: Sequence[str]
    """[sequences]"""
    documents: Sequence[str]
    """[documents]"""
    work: Sequence[float]
    """[documents]"""
    is_last: Sequence[bool]
    """[documents]"""

    @classmethod
    def of(cls, documents: Iterable[ScoreDocument]) -> EncodedDocuments:
        """Join the sequences of documents. Texts without tokens are left out."""
        tokens = array("i")
        is_scored = bytearray()
        segments: list[NDArray[np.integer[Any]]] = []
        sizes: list[NDArray[np.integer[Any]]] = []
        lengths = array("q")
        counts = array("q")
        heads = array("i")
        texts: list[str] = []
        names: list[str] = []
        labels: list[str] = []
        groups: list[str] = []
        work: list[float] = []
        is_last: list[bool] = []
        for document in documents:
            scores = [score for score in document.scores if len(score.tokens)]
            if not scores:
                continue
            counts.append(len(scores))
            names.append(document.document)
            labels.append(document.label)
            groups.append(document.group)
            work.append(document.work)
            is_last.append(document.is_last)
            for score in scores:
                tokens.frombytes(np.asarray(score.tokens, np.int32).tobytes())
                is_scored += np.asarray(score.is_scored, np.bool_).tobytes()
                segments.append(score.segments)
                lengths.append(len(score.tokens))
                texts.append(score.texts)
                heads.extend((score.choice, score.part, score.parts, score.greedy, score.truncated, score.straddles))
                if score.bytes is not None:
                    sizes.append(score.bytes)
        flat = Sequences(
            np.asarray(tokens), np.frombuffer(is_scored, np.bool_), offsets(lengths), offsets(counts), labels, groups
        )
        codes = np.concatenate(segments) if segments else np.empty(0, np.int8)
        of_bytes = np.concatenate(sizes) if sizes else None
        columns = np.asarray(heads).reshape(-1, len(_Head._fields))
        return cls(flat, codes, of_bytes, columns, texts, names, work, is_last)

    def head(self, number: int) -> DocumentHead:
        """Return a document, given by its number, without its tokens."""
        first, end = self.sequences.first[number : number + 2].tolist()
        start, stop = self.sequences.starts[[first, end]].tolist()
        return DocumentHead(
            document=self.documents[number],
            heads=[_Head(*values) for values in self.heads[first:end].tolist()],
            texts=self.texts[first:end],
            lengths=self.sequences.lengths[first:end].tolist(),
            segments=self.segments[start:stop],
            is_scored=self.sequences.is_scored[start:stop],
            bytes=None if self.bytes is None else self.bytes[start:stop],
        )


@dataclass(frozen=True)
class ScoreBatch:
    """Content of a batch of scored documents."""

    tree: TreeBatch
    documents: Sequence[DocumentHead]
    """In the order of the tree's items."""
    way: str
    """How it is scored (`scoring.engine`), if the model's checks allow it."""
    pass_tokens: int

    def warm(self) -> None:
        if self.way != "alone":
            _ = self.tree.tree if self.way == "tree" else self.tree.whole_tree


@dataclass(frozen=True)
class EmptyTexts:
    """Content of a batch without a sequence: texts without tokens, whose log-likelihood is 0."""

    rows: list[ScoredRow]


def empty_rows(documents: Iterable[ScoreDocument]) -> list[ScoredRow]:
    """Return the rows of texts without tokens."""
    return [
        ScoredRow(document.document, score.choice, score.part, 0, score.texts, [], [], [], [], True, 0, 0)
        for document in documents
        for score in document.scores
        if not len(score.tokens)
    ]


def scored_rows(document: DocumentHead, scores: Sequence[Scores]) -> list[ScoredRow]:
    """Return the rows of a document; `scores` are those of its sequences, in order."""
    starts = offsets(document.lengths)
    width = int(document.segments.max()) + 1
    shape = (len(document.heads), width)
    # The first token of a sequence has no log-probability
    has_score = np.ones(len(document.segments), np.bool_)
    has_score[starts[:-1]] = False
    sequence = np.repeat(np.arange(len(document.heads)), document.lengths)
    codes = (sequence * width + document.segments)[has_score]
    logprobs = np.concatenate([of_sequence.logprobs[1:] for of_sequence in scores])

    def by_segment(weights: NDArray[Any] | None) -> NDArray[Any]:
        # float64, as `bincount` sums: a float32 sum of thousands of values would lose precision
        return np.bincount(codes, weights, minlength=shape[0] * width).reshape(shape)

    counts = by_segment(None)
    sums = by_segment(logprobs)
    scored = by_segment(document.is_scored[has_score])
    sizes = None if document.bytes is None else by_segment(document.bytes[has_score]).astype(np.int64)
    rows = []
    for number, head in enumerate(document.heads):
        present = np.flatnonzero(counts[number])
        likelihoods = [float(sums[number, code]) if scored[number, code] else None for code in present]
        greedy = None
        if head.greedy:
            is_continuation = document.segments[starts[number] : starts[number + 1]] == CONTINUATION
            greedy = bool(scores[number].greedy[is_continuation].all())
        rows.append(
            ScoredRow(
                document=document.document,
                choice=head.choice,
                part=head.part,
                parts=head.parts,
                texts=document.texts[number],
                segments=present.tolist(),
                tokens=counts[number, present].tolist(),
                bytes=[] if sizes is None else sizes[number, present].tolist(),
                likelihoods=likelihoods,
                greedy=greedy,
                truncated=head.truncated,
                straddles=head.straddles,
            )
        )
    return rows
