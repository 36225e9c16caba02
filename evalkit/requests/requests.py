"""Requests: what is asked of a model, in tokens.

`Score`: a token sequence and its segments, of which some are scored. `Generate`: a prompt, its stops, the most new
tokens, and answers whose likelihood is computed too. Both have a key (task, document, choice). `TaskRequests` are those
of a task; a kind of benchmark implements it, and so decides what the tokens of a request are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.display import Say
from evalkit.generation.prompts import Capacity, Prompt, Speed
from evalkit.models.loading.locate import silent
from evalkit.models.loading.tokenizer import first_token
from evalkit.requests.rows import RequestKey
from evalkit.scoring.tree import Ints


class Score(NamedTuple):
    """A sequence of tokens to score."""

    choice: int
    texts: str
    tokens: Ints
    """[length] token ids; empty for a text without tokens, whose log-likelihood is 0."""
    segments: NDArray[np.integer[Any]]
    """[length] code of each token's segment."""
    is_scored: NDArray[np.bool_]
    """[length] whether the log-probability of each token is computed."""
    part: int = 0
    parts: int = 1
    greedy: bool = False
    """Whether to compute if the continuation's tokens are the argmax."""
    truncated: int = 0
    straddles: int = 0
    bytes: NDArray[np.integer[Any]] | None = None
    """[length] bytes of the text that each token covers; None if they are not counted."""


class ScoreDocument(NamedTuple):
    """The sequences of a document, which are scored in the same batch."""

    document: str
    label: str
    group: str
    """Documents of one group are likely to share a prefix, such as those of an MMLU subject."""
    scores: Sequence[Score]
    work: float
    """Expected cost, in the unit of `TaskRequests.costs`."""

    @property
    def is_last(self) -> bool:
        """Whether the document has no later part."""
        return self.scores[-1].part + 1 >= self.scores[-1].parts


@dataclass(frozen=True)
class Generate:
    """A prompt to continue."""

    document: str
    prompt: Prompt
    prompt_sha256: str
    truncated_from: int | None = None
    """Tokens of the whole prompt, if it was truncated."""
    choice: int = 0
    texts: str = ""
    part: int = 0
    parts: int = 1
    without_stop: bool = False
    """Whether the stored text ends before the first stop string."""

    def key(self, task: str) -> RequestKey:
        return RequestKey(task, self.document, self.choice, self.texts)


@dataclass(frozen=True)
class Facts:
    """Properties of a loaded model that planning needs."""

    window: int
    """Context window in tokens."""
    token_budget: int = 0
    """Most tokens of a scored batch."""
    way: str = ""
    """How most scored batches are computed: see `scoring.engine`."""
    pass_tokens: int = 0
    """Most tokens of a forward pass over whole sequences."""
    ends: tuple[int, ...] = ()
    """Token ids that end a generated text."""
    new_tokens: int | None = None
    """max_new_tokens of the model's generation config, which overrides a task's in transformers' `generate`."""
    capacity: Capacity | None = None
    """Of generation; None if nothing is generated."""
    speed: Speed | None = None
    """Of generation; None if it was not measured."""


@dataclass(frozen=True)
class Encoder:
    """What makes tokens of texts."""

    tokenizer: Any
    facts: Facts
    messages: Say = silent
    _said: set[str] = field(default_factory=set)

    def say(self, line: str) -> None:
        """Say a line, once."""
        if line not in self._said:
            self._said.add(line)
            self.messages(line)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """See `first_token`."""
        return first_token(self.tokenizer)


class TaskRequests(ABC):
    """The requests of a task under one prompt. It is pickled with a few documents (`candidates`)."""

    task: str
    generates: bool = False
    """Whether texts are generated; otherwise sequences are scored."""
    in_order: bool = False
    """Whether scored sequences are batched in their order, as windows of long texts are. Otherwise they are sorted, so
    that neighbours share prefixes."""
    first: int = 0
    """Number of the first batch."""
    step: int = 0
    """Index among the steps of a sample that continues others; the requests of each step are planned apart."""
    is_adoptable: bool = False
    """Whether rows of runs of other samples may be taken: texts and gold answers are in the keys."""
    sizes: Mapping[str, int] | None = None
    """Group → its documents in the whole task, if these requests are of a sample of them."""
    contents: Any = None
    """What determines the requests, hashable, so that their tokens can be kept for other models; None: they are not."""

    @property
    def journal(self) -> str:
        """Name of the task in the journal."""
        return self.task

    @abstractmethod
    def costs(self) -> Iterator[tuple[RequestKey, float]]:
        """Yield the key of each request, with its cost: characters that it adds, or so."""

    def without(self, keys: Collection[Any]) -> TaskRequests:
        """Return the requests of the documents that have none of these keys, which are keys of rows without a batch.

        By default these are only texts without tokens, which stay.
        """
        return self

    @abstractmethod
    def candidates(self) -> TaskRequests:
        """Return the requests of a few documents, on which a loaded model is checked; it may have none."""

    def scored(self, encoder: Encoder) -> Iterable[ScoreDocument]:
        """Yield the sequences of each document, in the order of the documents."""
        return ()

    def generated(self, encoder: Encoder) -> Sequence[Generate]:
        """Return the prompts of all documents, in order; the index of each prompt is its own."""
        return ()

    def is_alone(self, window: int, longest_shared: int) -> bool:
        """Whether every sequence is likely to be a batch by itself, in a context window of so many tokens."""
        return False

    def about(self, tokenizer: Any) -> dict[str, Any]:
        """Return entries of the manifest about the loaded model, by a tokenizer."""
        return {}


@dataclass(frozen=True)
class RunRequests:
    """The requests of a run."""

    tasks: Sequence[TaskRequests]
    message: str = ""
    """One line for the user about the prompts."""
    tokenizer: str = ""
    """Identity of the tokenizer, for what is kept for other models."""
    budget: int | None = None
    """Requested token budget; None: as many as fit."""
