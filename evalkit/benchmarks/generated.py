"""Base class of benchmarks with generated answers: documents → prompts → batches → answers → a table and results.

A benchmark defines its settings and documents (`request`, `plan`), prompts (`generation_requests`), the scored row of
an answer (`table_row`), and what is computed from the table (`results`, `metrics`).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import click

from evalkit.benchmarks.base import Batch, Benchmark, Budget, Planned, lazy
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Measure
from evalkit.benchmarks.request import DocumentRequest, Request, TaskTokens, numerics, plain_manifest, spread
from evalkit.data.sampling import DocumentSelection
from evalkit.display import Say
from evalkit.errors import RunError, UsageError
from evalkit.escape import printable
from evalkit.models.context.extension import Extension, configured_window, refuse_generation
from evalkit.models.loading.files import MOST_TOKENS, generation_settings
from evalkit.models.loading.locate import Checkpoint, silent
from evalkit.models.loading.spec import ModelSpec, config_of
from evalkit.models.loading.tokenizer import fed_text
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import Run
from evalkit.runs.journal import FinishedRows
from evalkit.runs.traits import BatchDevice, place_of, run_notes
from evalkit.runs.writing import RunWriter

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView
    from evalkit.generation.prompts import GeneratingFacts, Prompt
    from evalkit.models.loading.load import LoadedModel


class TaskDocuments(NamedTuple):
    documents: Sequence[Any]
    source: str
    """Provenance for messages, such as "data-dir DIR/qasper.jsonl"."""
    digest: str | None = None
    """Hash of the content that determines the prompts; None if the benchmark's settings determine it."""
    official: bool | None = None
    """Whether they are the published ones; None if none are published."""
    total: int | None = None
    """Documents of the task before a selection; None: these."""

    def selected(self, task: str, selection: DocumentSelection) -> TaskDocuments:
        count = len(self.documents)
        numbers = selection.places(task, [task] * count)
        chosen = tuple(self.documents[number] for number in numbers)
        return self._replace(documents=chosen, total=self.total or count)

    def about(self) -> dict[str, Any]:
        count = len(self.documents)
        about = {"source": self.source, "official": self.official}
        return about | {"count": count, "total": self.total or count}


@dataclass(frozen=True)
class DocumentPlan:
    """A validated request with its documents and manifest, made without torch."""

    request: Any
    checkpoint: Checkpoint
    tasks: Mapping[str, Sequence[Any]]
    manifest: dict[str, Any]

    @property
    def folder(self) -> Path:
        suite, template = self.manifest["specification"]["suite"], self.manifest["template"]["name"]
        return run_folder(self.request.output, self.checkpoint, suite, template, self.manifest)


def context_of(model: ModelSpec, checkpoint: Checkpoint, what: str) -> int:
    """Return the context window for generation by a command, in tokens: the extended one, or the checkpoint's own."""
    if (extension := model.extension(checkpoint)) is not None:
        refuse_generation(extension, what)
        return extension.target
    _, window = configured_window(config_of(checkpoint, silent))
    if window is None or window > MOST_TOKENS:  # float32 cannot distinguish more positions
        raise UsageError(f"{checkpoint.given}: its config has no context window; give --context and --context-original")
    return window


def generated_plan(
    kind: str,
    request: Request,
    checkpoint: Checkpoint,
    context: int,
    tasks: Mapping[str, TaskDocuments],
    settings: Mapping[str, Any],
    say: Say = silent,
    chat: bool = False,
) -> DocumentPlan:
    """Return the plan of a run, whose suite is the kind of benchmark unless the settings have another.

    `settings` are the benchmark's own entries of the specification, which determine the texts beside the documents.
    """
    # The content of GGUF files is hashed as a whole
    generation = None if checkpoint.gguf is not None else generation_settings(checkpoint.folder)
    digests = {name: task.digest for name, task in tasks.items() if task.digest is not None}
    specification = {
        **numerics(request.model, checkpoint, None, say),
        **(request.selection.specification if isinstance(request, DocumentRequest) else {}),
        "suite": kind,
        **({"documents": digests} if digests else {}),
        **settings,
        "chat": chat,
        # Rounding differences may change a text
        "device": request.model.device,
        "end": (generation or {}).get("eos_token_id"),
    }
    about = {name: task.about() for name, task in tasks.items()}
    template = {"name": "chat" if chat else "plain"}
    more = {"template": template, "documents": about, "context": context}
    manifest = plain_manifest(kind, request, checkpoint, specification, **more)
    return DocumentPlan(request, checkpoint, {name: task.documents for name, task in tasks.items()}, manifest)


def about_run(run: Run) -> tuple[str, ...]:
    """Return the notes below a run's results: checkpoint, precision, prompts and context."""
    manifest, specification = run.manifest, run.manifest["specification"]
    parts = [run.model, specification["dtype"], f"{run.template} prompts"]
    if (most := specification.get("max_prompt_tokens")) is not None:
        parts.append(f"cut above {most:,} tokens of a context of {manifest['context']:,}")
    extension = specification["context_extension"]
    return (", ".join(parts), *([Extension(**extension).describe()] if extension else []), *run_notes(manifest))


class GeneratedAnswer(NamedTuple):
    """The journal's row of a document, whose id is unique in its task."""

    id: str
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

    def columns(self) -> dict[str, Any]:
        """Return what a table has of it."""
        return {name: value for name, value in self._asdict().items() if name != "logprobs"}


@dataclass(frozen=True)
class GenerationRequest:
    id: str
    prompt: Prompt
    """Its `index` names the document in the journal."""
    prompt_sha256: str
    truncated_from: int | None = None
    """Tokens of the whole prompt, if it was truncated."""


class GeneratedBenchmark(Benchmark):
    """Base class of benchmarks with generated answers, each of which has one score."""

    facts = lazy("evalkit.generation.prompts:GeneratingFacts")
    row = GeneratedAnswer
    key = ("id",)
    files: ClassVar[tuple[str, ...]]
    """The file of a finished run: the table with one row for each answer."""
    metric: ClassVar[str] = "score"
    """Name of the metric, such as "exact match"."""
    checked: ClassVar[tuple[str, ...]]
    """Columns of `answers` that must be equal for two documents to be the same."""
    prompt_settings: ClassVar[Mapping[str, str]] = {}
    """Name in messages → entry of the specification, or its entry by task, that makes other prompts of the same
    documents."""
    continuous: ClassVar[str] = ""
    """Rule of the continuous measure that is reported beside the others, if there is one."""

    @abstractmethod
    def generation_requests(
        self, plan: Any, task: str, ends: frozenset[int], tokenizer: Any
    ) -> Sequence[GenerationRequest]:
        """Return the requests of a task's documents, in order; `ends` are the model's end tokens."""

    @abstractmethod
    def table_row(self, task: str, document: Any, answer: GeneratedAnswer) -> dict[str, Any]:
        """Return the row of the table for an answer, with its score."""

    @abstractmethod
    def results(self, plan: Any, table: pd.DataFrame) -> dict[str, Any]:
        """Return the content of results.json."""

    @abstractmethod
    def answers(self, run: Run) -> pd.DataFrame:
        """Return columns task, id, source (of dependent documents), references, answer, score and `checked`."""

    def measure(self) -> Measure:
        return Measure(f"{self.metric} in %", True, self.metric)

    def measures(self, run: Run) -> Mapping[str, Measure]:
        """Return rule → measure of a run's documents; the benchmark's own, under its name, comes first."""
        return {self.kind: self.measure()}

    def metric_of(self, task: str) -> str:
        return self.metric

    def sample_of(self, task: str) -> str:
        """Return the common name of tasks that ask the same questions; empty if no other task does."""
        return ""

    def groups(self, run: Run) -> Mapping[str, Sequence[str]]:
        return {"Average": tuple(run.manifest["documents"])}

    def ids(self, plan: Any, task: str) -> Sequence[str]:
        """Return the ids of a task's documents, in order; by default their numbers."""
        return list(map(str, range(len(plan.tasks[task]))))

    def is_missing(self, plan: Any, finished: FinishedRows) -> bool:
        return bool(self._unfinished_tasks(plan, finished))

    def setup(self, plan: Any) -> int:
        return int(plan.manifest["context"])

    def computer(self, setup: int, loaded: LoadedModel, budget: Budget, say: Say) -> _GenerationComputer:
        return _GenerationComputer(loaded, budget.kept, setup, say)

    def batches(self, plan: Any, facts: GeneratingFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        room, batches, unfinished = facts.room, [], self._unfinished_tasks(plan, finished)
        say(f"tokenising the prompts of {len(unfinished)} task{'s' * (len(unfinished) > 1)}")
        for task in unfinished:
            requests = self.generation_requests(plan, task, frozenset(facts.ends), tokenizer)
            by_index = {request.prompt.index: request for request in requests}
            for prompts in room.batches([request.prompt for request in requests]):
                # A batch is partly finished only if an earlier session planned it differently
                members = [by_index[prompt.index] for prompt in prompts]
                if rest := [request for request in members if (task, request.id) not in finished]:
                    work = sum(room.work(request.prompt) for request in rest)
                    # A document is answered once, so its number identifies the batch in every session
                    batches.append(Batch(task, rest[0].prompt.index, tuple(rest), work, len(rest)))
        prompts = [request.prompt for batch in batches for request in batch.content]
        return Planned((batch for batch in batches), sum(batch.work for batch in batches), 0.0, room.estimate(prompts))

    def prompts(self, plan: Any, count: int, say: Say) -> Iterator[str]:
        from evalkit.models.loading.spec import tokenizer_alone

        tokenizer = tokenizer_alone(plan.checkpoint, say)
        for task, documents in plan.tasks.items():
            part = replace(plan, tasks={task: documents[:count]})
            for request in self.generation_requests(part, task, frozenset(), tokenizer):
                yield _shown_prompt(task, request, tokenizer)

    def token_counts(self, plan: Any, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        """Estimate the tokens of prompts and answers. Prompts share whole chunks, as they are batched."""
        from evalkit.generation.prompts import CHUNK

        counts = []
        for task, documents in plan.tasks.items():
            # Prompts of generated answers are longer than others
            part = replace(plan, tasks={task: [documents[number] for number in spread(len(documents), sample // 4)]})
            prompts = [request.prompt for request in self.generation_requests(part, task, frozenset(), tokenizer)]
            scale = len(documents) / len(prompts)
            alone = sum(len(prompt.tokens) for prompt in prompts)
            # Everything up to the end of each whole chunk that another prompt could share
            beginnings = [
                prompt.tokens[:end].tobytes() for prompt in prompts for end in range(CHUNK, len(prompt.tokens), CHUNK)
            ]
            repeated = CHUNK * (len(beginnings) - len(set(beginnings)))
            new = sum(prompt.max_new_tokens for prompt in prompts)
            sums = (scale * len(prompts), scale * alone, scale * (alone - repeated), scale * new)
            counts.append(TaskTokens(task, len(documents), len(prompts), *sums))
        return counts

    def _unfinished_tasks(self, plan: Any, finished: FinishedRows) -> list[str]:
        return [task for task in plan.tasks if any((task, id) not in finished for id in self.ids(plan, task))]

    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        import pandas as pd

        rows = []
        for task, documents in plan.tasks.items():
            answers = {answer.id: answer for answer in finished.rows(task)}
            for id, document in zip(self.ids(plan, task), documents, strict=True):
                if id not in answers:
                    # Happens only if lines of the journal were removed while it was read
                    raise RunError(f"the journal of {writer.folder} lacks {task} document {id}; delete the folder")
                rows.append(self.table_row(task, document, answers[id]))
        table = pd.DataFrame(rows)
        results = self.results(plan, table)
        writer.save_table(self.files[0], table)
        writer.save_results(results)

    def comparable(self, run: Run) -> Comparable:
        return _ComparableAnswers(self, run)

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import answer_views

        yield from answer_views(self.answers(run), tasks, self.metric_of)


def _shown_prompt(task: str, request: GenerationRequest, tokenizer: Any) -> str:
    tokens = request.prompt.tokens.tolist()
    cut = "" if request.truncated_from is None else f", cut from {request.truncated_from:,} in the middle"
    about = f"{task} document {request.id}: {len(tokens):,} tokens{cut}, then up to {request.prompt.max_new_tokens:,}"
    text = printable(fed_text(tokenizer, tokens), "\n\t")
    return f"{click.style(printable(about), bold=True)}\n{text}\n"


class _ComparableAnswers(GradedAnswers):
    def __init__(self, benchmark: GeneratedBenchmark, run: Run) -> None:
        groups, measures = benchmark.groups(run), benchmark.measures(run)
        super().__init__(run, partial(benchmark.answers, run), benchmark.checked, groups, measures)
        self._settings, self._continuous = benchmark.prompt_settings, benchmark.continuous
        self._sample_of = benchmark.sample_of

    def sample_of(self, task: str) -> str:
        return self._sample_of(task)

    def beside(self, rule: str) -> str | None:
        return self._continuous if self._continuous in self.rules and rule != self._continuous else None

    def must_agree(self, task: str) -> dict[str, str]:
        specification = self.run.manifest["specification"]
        settings = {}
        for name, entry in self._settings.items():
            value = specification[entry]
            settings[name] = str(value[task] if isinstance(value, Mapping) else value)
        hashes = {"documents": str(specification["documents"].get(task, ""))} if "documents" in specification else {}
        return settings | hashes


class _GenerationComputer:
    def __init__(self, loaded: LoadedModel, budget: int | None, context: int, say: Say) -> None:
        from evalkit.generation.generator import generator_of
        from evalkit.generation.prompts import GeneratingFacts, end_tokens, measure_capacity

        self._generator, self._tokenizer, self._say = generator_of(loaded, say), loaded.tokenizer, say
        room = measure_capacity(loaded.model, self._generator, budget, context)
        self.facts = GeneratingFacts(tuple(sorted(end_tokens(loaded.model, loaded.tokenizer))), room)
        self.about = {"loaded": loaded.facts(), "token_budget": room.tokens}
        self._place = place_of(loaded.device, loaded.attention)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        return self._place

    def compute(self, batch: Batch) -> list[GeneratedAnswer]:
        labels = [f"{batch.task} document {request.id}" for request in batch.content]
        named = zip(batch.content, labels, strict=True)
        prompts = [replace(request.prompt, label=label) for request, label in named]
        generations = self._generator.generate(prompts, self._say)
        return [
            GeneratedAnswer(
                id=request.id,
                prompt_sha256=request.prompt_sha256,
                tokens_before=request.truncated_from or len(request.prompt.tokens),
                tokens=len(request.prompt.tokens),
                truncated=request.truncated_from is not None,
                reused=generation.reused,
                text=self._tokenizer.decode(generation.tokens, skip_special_tokens=True),
                new_tokens=len(generation.tokens),
                ended=generation.ended,
                seconds=round(generation.seconds, 4),
                logprobs=json.dumps(generation.logprobs) if generation.logprobs else "",
            )
            for request, generation in zip(batch.content, generations, strict=True)
        ]
