"""What benchmarks have in common whose answers are generated: prompts → batches → answers.

A benchmark of this kind says which documents there are, how each is asked, and what is made of the answers. Prompts
that begin alike go through the model together, and a batch is as large as memory allows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.benchmarks.base import Batch, Benchmark, Budget, Planned, Say
from evalkit.errors import RunError, UnknownNameError
from evalkit.runs.batch_devices import BatchDevice, place_of
from evalkit.runs.finished_rows import FinishedRows
from evalkit.runs.writing import RunWriter

if TYPE_CHECKING:
    from evalkit.generation.capacity import MeasuredCapacity
    from evalkit.generation.prompts import Prompt
    from evalkit.models.load import LoadedModel
    from evalkit.runs.folder import Run


class GeneratedAnswer(NamedTuple):
    """What the journal keeps of a document."""

    id: str
    """Of the document, unique in its task."""
    prompt_sha256: str
    """Of the whole prompt, before it was cut."""
    tokens_before: int
    """Of the whole prompt."""
    tokens: int
    """Of the prompt that the model saw."""
    truncated: bool
    reused: int
    """Tokens of it whose keys and values were another prompt's."""
    text: str
    """What was generated, special tokens apart; ends where nothing more is read."""
    new_tokens: int
    ended: str
    """"end" token, "enough" read, or "length"."""
    seconds: float


@dataclass(frozen=True)
class GenerationRequest:
    """A document as it is put to the model."""

    id: str
    """See `GeneratedAnswer`, as the next three."""
    prompt: Prompt
    """Its `index` names the document in the journal."""
    prompt_sha256: str
    tokens_before: int
    truncated: bool


@dataclass(frozen=True)
class GeneratingFacts:
    """What planning needs to know of a model that generates."""

    ends: tuple[int, ...]
    """Token ids that end a text."""
    room: MeasuredCapacity
    """What memory holds, and how long it takes."""


class GeneratedBenchmark(Benchmark):
    """A benchmark whose answers are generated."""

    row = GeneratedAnswer
    key = ("id",)

    @abstractmethod
    def documents(self, plan: Any) -> Mapping[str, Sequence[str]]:
        """Task → ids of its documents, in their order."""

    @abstractmethod
    def asked(self, plan: Any, task: str, facts: GeneratingFacts, tokenizer: Any) -> Sequence[GenerationRequest]:
        """A task's documents as they are put to the model, in their order."""

    @abstractmethod
    def save(self, plan: Any, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """Write tables and results.

        Args:
            plan: of the run.
            answers: task → one for each document, in their order.
            writer: of the run's folder.
        """

    def is_missing(self, plan: Any, finished: FinishedRows) -> bool:
        """Whether a document has no answer."""
        return bool(self._left(plan, finished))

    def computer(self, plan: Any, loaded: LoadedModel, budget: Budget, say: Say) -> _Generating:
        """See `Benchmark`."""
        return _Generating(loaded, budget.kept, plan.manifest["context"], say)

    def batches(self, plan: Any, facts: GeneratingFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        """See `Benchmark`."""
        room, found = facts.room, []
        left = self._left(plan, finished)
        say(f"the prompts of {len(left)} task{'s' * (len(left) > 1)} are tokenised")
        for task in left:
            asked = self.asked(plan, task, facts, tokenizer)
            by_index = {one.prompt.index: one for one in asked}
            for batch in room.batches([one.prompt for one in asked]):
                # What an earlier session left of a batch it left whole, or it was planned otherwise
                members = [by_index[prompt.index] for prompt in batch]
                if rest := [one for one in members if (task, one.id) not in finished]:
                    work = sum(room.work(one.prompt) for one in rest)
                    # A document is answered once, so its number names the batch in every session
                    found.append(Batch(task, rest[0].prompt.index, tuple(rest), work, len(rest)))
        prompts = [one.prompt for batch in found for one in batch.content]
        return Planned((batch for batch in found), sum(batch.work for batch in found), 0.0, room.estimate(prompts))

    def _left(self, plan: Any, finished: FinishedRows) -> list[str]:
        """Tasks of which a document has no answer."""
        return [task for task, ids in self.documents(plan).items() if any((task, one) not in finished for one in ids)]

    def refuse_rule(self, run: Run, rule: str | None) -> None:
        """Raise an `UnknownNameError` where another rule than the benchmark's own is asked for."""
        if rule not in (None, self.kind):
            raise UnknownNameError(f"rule of run {run.folder}", rule, (self.kind,))

    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        """See `Benchmark`."""
        documents = self.documents(plan)
        self.save(plan, {task: list(_answers(task, ids, finished, writer)) for task, ids in documents.items()}, writer)


class _Generating:
    """A model that generates."""

    def __init__(self, loaded: LoadedModel, budget: int | None, context: int, say: Say) -> None:
        from evalkit.generation.capacity import measure_capacity
        from evalkit.generation.generator import generator_of
        from evalkit.generation.tokens import end_tokens

        self._generator = generator_of(loaded, say)
        self._tokenizer = loaded.tokenizer
        self._say = say
        room = measure_capacity(loaded.model, self._generator, budget, context)
        self.facts = GeneratingFacts(tuple(sorted(end_tokens(loaded.model, loaded.tokenizer))), room)
        self.about = {"loaded": loaded.facts(), "token_budget": room.tokens}
        self._place = place_of(loaded.device, loaded.attention)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        """See `Computer`."""
        return self._place

    def compute(self, batch: Batch) -> list[GeneratedAnswer]:
        """See `Computer`."""
        found = self._generator.generate([one.prompt for one in batch.content], self._say)
        return [
            GeneratedAnswer(
                id=one.id,
                prompt_sha256=one.prompt_sha256,
                tokens_before=one.tokens_before,
                tokens=len(one.prompt.tokens),
                truncated=one.truncated,
                reused=generation.reused,
                text=self._tokenizer.decode(generation.tokens, skip_special_tokens=True),
                new_tokens=len(generation.tokens),
                ended=generation.ended,
                seconds=round(generation.seconds, 4),
            )
            for one, generation in zip(batch.content, found, strict=True)
        ]


def _answers(task: str, ids: Sequence[str], finished: FinishedRows, writer: RunWriter) -> Iterator[GeneratedAnswer]:
    found = {answer.id: answer for answer in finished.rows(task)}
    for one in ids:
        if one not in found:
            # Cannot happen unless somebody has removed lines of the journal while it was read
            raise RunError(
                f"the journal of {writer.folder} does not hold {task} document {one}; delete the folder and run the "
                "command again"
            )
        yield found[one]
