"""Base class of benchmarks with generated answers: prompts → batches → answers.

A subclass defines the documents, their prompts and the scores of the answers. Prompts with a common prefix are batched
together, and a batch is as large as memory allows.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.benchmarks.base import Batch, Benchmark, Budget, Planned, lazy
from evalkit.benchmarks.request import DocumentRequest, Request, TaskTokens, numerics, plain_manifest, spread
from evalkit.display import Say
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.models.context.extension import MOST_TOKENS, Extension, configured_window, refuse_generation
from evalkit.models.loading.files import generation_settings
from evalkit.models.loading.locate import Checkpoint, silent
from evalkit.models.loading.spec import ModelSpec, config_of
from evalkit.runs.batch_devices import BatchDevice, mixture, place_of
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import Run
from evalkit.runs.journal import FinishedRows
from evalkit.runs.traits import max_prompt_tokens
from evalkit.runs.writing import RunWriter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from evalkit.generation.capacity import GeneratingFacts
    from evalkit.generation.prompts import Ints, Prompt
    from evalkit.models.loading.load import LoadedModel


@dataclass(frozen=True)
class DocumentPlan:
    """A validated request with its documents and manifest, made without torch."""

    request: Any
    checkpoint: Checkpoint
    tasks: Mapping[str, Sequence[Any]]
    """Task → its documents."""
    manifest: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        suite, template = self.manifest["specification"]["suite"], self.manifest["template"]["name"]
        return run_folder(self.request.output, self.checkpoint, suite, template, self.manifest)


def context_of(model: ModelSpec, checkpoint: Checkpoint, what: str) -> int:
    """Return the context window for generation by a command, in tokens: the extended one, or the checkpoint's own."""
    if (extension := model.extension(checkpoint)) is not None:
        refuse_generation(extension, what)
        return extension.target
    _, window = configured_window(config_of(checkpoint, silent))
    if window is None:
        raise UsageError(
            f"{checkpoint.given}: its config has no context window; give --context with --context-original"
        )
    if window > MOST_TOKENS:
        raise UsageError(
            f"{checkpoint.given}: its config has a context window of {window:,} tokens, above the {MOST_TOKENS:,} "
            "positions that float32 can distinguish; give the real one as --context and --context-original"
        )
    return window


def generated_plan(
    kind: str,
    request: Request,
    checkpoint: Checkpoint,
    context: int,
    tasks: Mapping[str, Sequence[Any]],
    specification: Mapping[str, Any],
    documents: Mapping[str, Any],
    say: Say = silent,
    chat: bool = False,
) -> DocumentPlan:
    """Return the plan of a run, whose rule is the kind of benchmark.

    Args:
        kind: the benchmark, and its suite if the specification has no other.
        request: the model, the folders and the benchmark's settings.
        checkpoint: the model's checkpoint.
        context: see `context_of`.
        tasks: task → its documents.
        specification: the benchmark's own entries: everything that determines the texts, except what every run has,
            the chat template, the device and the end tokens.
        documents: task → source, whether it is official, and number of documents.
        say: called about the checkpoint.
        chat: whether prompts go into the chat template.
    """
    specification = {
        **numerics(request.model, checkpoint, None, say),
        **(request.selection.specification if isinstance(request, DocumentRequest) else {}),
        "suite": kind,
        **specification,
        "chat": chat,
        # Rounding differences may change a text
        "device": request.model.device,
        "end": _end_tokens(checkpoint),
    }
    about = {"template": {"name": "chat" if chat else "plain"}, "documents": documents, "context": context}
    return DocumentPlan(
        request, checkpoint, tasks, plain_manifest(kind, request.model, checkpoint, specification, **about)
    )


def about_run(run: Run) -> tuple[str, ...]:
    """Return the notes below a run's results: checkpoint, precision, prompts and context."""
    manifest, specification = run.manifest, run.manifest["specification"]
    parts = [str(manifest["model"]), specification["dtype"], f"{run.template} prompts"]
    if (most := max_prompt_tokens(specification)) is not None:
        parts.append(f"cut above {most:,} tokens of a context of {manifest['context']:,}")
    extension = specification["context_extension"]
    return (", ".join(parts), *([Extension(**extension).describe()] if extension else []), *mixture(manifest))


def _end_tokens(checkpoint: Checkpoint) -> Any:
    """Return the end tokens of a checkpoint's generation config; None for GGUF files, whose content is hashed."""
    settings = None if checkpoint.gguf is not None else generation_settings(checkpoint.folder)
    return (settings or {}).get("eos_token_id")


class GeneratedAnswer(NamedTuple):
    """The journal's row of a document."""

    id: str
    """Document id, unique in its task."""
    prompt_sha256: str
    """Hash of the whole prompt, before truncation."""
    tokens_before: int
    """Tokens of the whole prompt."""
    tokens: int
    """Tokens of the prompt after truncation."""
    truncated: bool
    reused: int
    """Prompt tokens whose keys and values were shared with another prompt."""
    text: str
    """Generated text without special tokens, up to the stopping criterion."""
    new_tokens: int
    ended: str
    """Stopping criterion: "end" (an end token), "enough" (a stop text or pattern) or "length"."""
    seconds: float


@dataclass(frozen=True)
class GenerationRequest:
    """A document with the prompt that is sent to the model."""

    id: str
    prompt: Prompt
    """Its `index` names the document in the journal."""
    prompt_sha256: str
    truncated_from: int | None = None
    """Tokens of the whole prompt, if it was truncated."""


class GeneratedBenchmark(Benchmark):
    """Base class of benchmarks with generated answers."""

    facts = lazy("evalkit.generation.capacity:GeneratingFacts")
    row = GeneratedAnswer
    key = ("id",)

    @abstractmethod
    def generation_requests(
        self, plan: Any, task: str, ends: frozenset[int], tokenizer: Any
    ) -> Sequence[GenerationRequest]:
        """Return the generation requests of a task's documents, in order; `ends` are the model's end tokens."""

    @abstractmethod
    def save(self, plan: Any, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """Write tables and results; `answers`: task → one answer for each document, in order."""

    def ids(self, plan: Any, task: str) -> Sequence[str]:
        """Return the ids of a task's documents, in order; by default their numbers."""
        return list(map(str, range(len(plan.tasks[task]))))

    def is_missing(self, plan: Any, finished: FinishedRows) -> bool:
        return bool(self._unfinished_tasks(plan, finished))

    def setup(self, plan: Any) -> int:
        """Return the context window, in tokens."""
        return int(plan.manifest["context"])

    def computer(self, setup: int, loaded: LoadedModel, budget: Budget, say: Say) -> _GenerationComputer:
        return _GenerationComputer(loaded, budget.kept, setup, say)

    def batches(self, plan: Any, facts: GeneratingFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        """Batch the prompts of the tasks that lack an answer."""
        room, found = facts.room, []
        unfinished = self._unfinished_tasks(plan, finished)
        say(f"tokenising the prompts of {len(unfinished)} task{'s' * (len(unfinished) > 1)}")
        for task in unfinished:
            requests = self.generation_requests(plan, task, frozenset(facts.ends), tokenizer)
            by_index = {one.prompt.index: one for one in requests}
            for batch in room.batches([one.prompt for one in requests]):
                # A batch is partly finished only if an earlier session planned it differently
                members = [by_index[prompt.index] for prompt in batch]
                if rest := [one for one in members if (task, one.id) not in finished]:
                    work = sum(room.work(one.prompt) for one in rest)
                    # A document is answered once, so its number identifies the batch in every session
                    found.append(Batch(task, rest[0].prompt.index, tuple(rest), work, len(rest)))
        prompts = [one.prompt for batch in found for one in batch.content]
        return Planned((batch for batch in found), sum(batch.work for batch in found), 0.0, room.estimate(prompts))

    def token_counts(self, plan: Any, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        """Estimate the tokens of prompts and answers. Prompts share whole chunks, as they are batched."""
        import numpy as np

        from evalkit.generation.generator import CHUNK
        from evalkit.scoring.sequences import distinct_tokens

        found = []
        for task, documents in plan.tasks.items():
            # Prompts of generated answers are longer than others
            places = spread(len(documents), sample // 4)
            sampled = replace(plan, tasks={task: [documents[place] for place in places]})
            prompts = [one.prompt for one in self.generation_requests(sampled, task, frozenset(), tokenizer)]
            scale = len(documents) / len(prompts)
            alone = sum(len(prompt.tokens) for prompt in prompts)
            # One id for each chunk, so that only whole chunks are shared; the rest of a prompt is its own
            chunks = [_chunk_ids(prompt.tokens, CHUNK) for prompt in prompts]
            repeated = CHUNK * (sum(map(len, chunks)) - distinct_tokens([np.append(ids, 0) for ids in chunks]))
            new = sum(prompt.max_new_tokens for prompt in prompts)
            counts = (scale * len(prompts), scale * alone, scale * (alone - repeated), scale * new)
            found.append(TaskTokens(task, len(documents), len(prompts), *counts))
        return found

    def _unfinished_tasks(self, plan: Any, finished: FinishedRows) -> list[str]:
        return [task for task in plan.tasks if any((task, one) not in finished for one in self.ids(plan, task))]

    def refuse_rule(self, run: Run, rule: str | None) -> None:
        """Raise an `UnknownNameError` for any rule but the benchmark's own."""
        if rule not in (None, self.kind):
            raise UnknownNameError(f"rule of run {run.folder}", rule, (self.kind,))

    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        ids = {task: self.ids(plan, task) for task in plan.tasks}
        self.save(plan, {task: _answers(task, ids[task], finished, writer) for task in ids}, writer)


class _GenerationComputer:
    def __init__(self, loaded: LoadedModel, budget: int | None, context: int, say: Say) -> None:
        from evalkit.generation.capacity import GeneratingFacts, measure_capacity
        from evalkit.generation.generator import generator_of
        from evalkit.generation.prompts import end_tokens

        self._generator, self._tokenizer, self._say = generator_of(loaded, say), loaded.tokenizer, say
        room = measure_capacity(loaded.model, self._generator, budget, context)
        self.facts = GeneratingFacts(tuple(sorted(end_tokens(loaded.model, loaded.tokenizer))), room)
        self.about = {"loaded": loaded.facts(), "token_budget": room.tokens}
        self._place = place_of(loaded.device, loaded.attention)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        return self._place

    def compute(self, batch: Batch) -> list[GeneratedAnswer]:
        found = self._generator.generate([one.prompt for one in batch.content], self._say)
        return [
            GeneratedAnswer(
                id=one.id,
                prompt_sha256=one.prompt_sha256,
                tokens_before=len(one.prompt.tokens) if one.truncated_from is None else one.truncated_from,
                tokens=len(one.prompt.tokens),
                truncated=one.truncated_from is not None,
                reused=generation.reused,
                text=self._tokenizer.decode(generation.tokens, skip_special_tokens=True),
                new_tokens=len(generation.tokens),
                ended=generation.ended,
                seconds=round(generation.seconds, 4),
            )
            for one, generation in zip(batch.content, found, strict=True)
        ]


def _chunk_ids(tokens: Ints, chunk: int) -> NDArray[np.int32]:
    """Return one number for each whole chunk that another prompt could share; equal chunks have equal numbers."""
    import numpy as np

    whole = (len(tokens) - 1) // chunk
    return np.array([zlib.crc32(part.tobytes()) >> 1 for part in tokens[: whole * chunk].reshape(whole, chunk)], "i4")


def _answers(task: str, ids: Sequence[str], finished: FinishedRows, writer: RunWriter) -> list[GeneratedAnswer]:
    found = {answer.id: answer for answer in finished.rows(task)}
    if lost := [one for one in ids if one not in found]:
        # Happens only if lines of the journal were removed while it was read
        raise RunError(
            f"the journal of {writer.folder} lacks {task} document {lost[0]}; delete the folder and run the "
            "command again"
        )
    return [found[one] for one in ids]
