"""Base class of benchmarks with generated answers: documents → prompts → batches → answers → a table and results.

A benchmark defines its settings and documents (`request`, `plan`), prompts (`generation_requests`), the scored row of
an answer (`table_row`), what is computed from the table (`results`), and how a finished run is read (`read`, a subclass
of `FinishedAnswers`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from evalkit.benchmarks.base import Benchmark, Plan, RequestPlan
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Measure
from evalkit.benchmarks.request import DocumentRequest, Request, numerics, plain_manifest
from evalkit.benchmarks.results import FinishedResults
from evalkit.data.sampling import DocumentSelection, spread
from evalkit.display import Say
from evalkit.errors import RunError, UsageError
from evalkit.models.context.extension import configured_window, refuse_generation
from evalkit.models.loading.files import MOST_TOKENS, generation_settings
from evalkit.models.loading.locate import Checkpoint, silent
from evalkit.models.loading.spec import ModelSpec, config_of
from evalkit.requests.requests import Encoder, Generate, RunRequests, TaskRequests
from evalkit.requests.rows import GeneratedRow, RequestKey
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import Run
from evalkit.runs.journal import FinishedRows
from evalkit.runs.notes import model_line, notes_below
from evalkit.runs.scales import FRACTION, Scale
from evalkit.runs.writing import RunWriter

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView


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
class DocumentPlan(Plan):
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
) -> AnswerPlan:
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
    return AnswerPlan(request, checkpoint, {name: task.documents for name, task in tasks.items()}, manifest)


def about_run(run: Run) -> tuple[str, ...]:
    """Return the notes below a run's results: checkpoint, precision, prompts and context."""
    prompts = [f"{run.template} prompts"]
    if (most := run.manifest["specification"].get("max_prompt_tokens")) is not None:
        prompts.append(f"cut above {most:,} tokens of a context of {run.manifest['context']:,}")
    return notes_below(run.manifest, [model_line(run, *prompts)])


def answer_columns(row: GeneratedRow) -> dict[str, Any]:
    """Return what a table has of an answer."""
    values = row._asdict()
    left_out = ("document", "choice", "part", "parts", "texts", "logprobs")
    return {"id": row.document} | {name: value for name, value in values.items() if name not in left_out}


@dataclass(frozen=True)
class AnswerRequests(TaskRequests):
    """Prompts of a task of a benchmark with generated answers."""

    plan: AnswerPlan
    """With the documents of these requests."""
    task: str
    sizes: Mapping[str, int] | None = None
    generates = True

    def costs(self) -> Iterator[tuple[RequestKey, float]]:
        for id in self.plan.benchmark.ids(self.plan, self.task):
            yield RequestKey(self.task, id, 0, ""), 1.0

    def candidates(self) -> AnswerRequests:
        return replace(self, plan=replace(self.plan, tasks={self.task: []}, request=None))

    def generated(self, encoder: Encoder) -> Sequence[Generate]:
        if not self.plan.tasks[self.task]:
            return ()
        ends = frozenset(encoder.facts.ends)
        requests = self.plan.benchmark.generation_requests(self.plan, self.task, ends, encoder.tokenizer)
        labels = [f"{self.task} document {request.document}" for request in requests]
        named = zip(requests, labels, strict=True)
        return [replace(request, prompt=replace(request.prompt, label=label)) for request, label in named]


@dataclass(frozen=True)
class AnswerPlan(DocumentPlan, RequestPlan):
    """Plan of a benchmark with generated answers."""

    @cached_property
    def requests(self) -> RunRequests:
        return RunRequests([AnswerRequests(self, task) for task in self.tasks])

    def sampled(self, sample: int) -> RunRequests:
        requests = []
        for task, documents in self.tasks.items():
            # Prompts of generated answers are longer than others
            part = [documents[number] for number in spread(len(documents), sample // 4)]
            plan = replace(self, tasks={task: part})
            requests.append(AnswerRequests(plan, task, {task: len(documents)}))
        return RunRequests(requests)

    def shown_prompts(self, count: int, say: Say) -> Iterator[str]:
        from evalkit.benchmarks.shown_prompts import shown_generations

        return shown_generations(self, count, say)

    @property
    def benchmark(self) -> GeneratedBenchmark:
        from evalkit.benchmarks.registry import benchmark

        kind = benchmark(self.manifest["kind"])
        assert isinstance(kind, GeneratedBenchmark)
        return kind


class GeneratedBenchmark(Benchmark):
    """Base class of benchmarks with generated answers, each of which has one score; see also `FinishedAnswers`."""

    files: ClassVar[tuple[str, ...]]
    """The file of a finished run: the table with one row for each answer."""

    @abstractmethod
    def generation_requests(self, plan: Any, task: str, ends: frozenset[int], tokenizer: Any) -> Sequence[Generate]:
        """Return the requests of a task's documents, in order; `ends` are the model's end tokens."""

    @abstractmethod
    def table_row(self, task: str, document: Any, answer: GeneratedRow) -> dict[str, Any]:
        """Return the row of the table for an answer, with its score."""

    @abstractmethod
    def results(self, plan: Any, table: pd.DataFrame) -> dict[str, Any]:
        """Return the content of results.json."""

    def ids(self, plan: Any, task: str) -> Sequence[str]:
        """Return the ids of a task's documents, in order; by default their numbers."""
        return list(map(str, range(len(plan.tasks[task]))))

    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        import pandas as pd

        rows = []
        for task, documents in plan.tasks.items():
            answers = {answer.document: answer for answer in finished.rows(task)}
            for id, document in zip(self.ids(plan, task), documents, strict=True):
                if id not in answers:
                    # Happens only if lines of the journal were removed while it was read
                    raise RunError(f"the journal of {writer.folder} lacks {task} document {id}; delete the folder")
                rows.append(self.table_row(task, document, answers[id]))
        table = pd.DataFrame(rows)
        results = self.results(plan, table)
        writer.save_table(self.files[0], table)
        writer.save_results(results)


def share_measure(metric: str) -> Measure:
    """Return the measure of scores from 0 to 1."""
    return Measure(Scale(metric, FRACTION), f"{metric} in %", graded=True)


class FinishedAnswers(FinishedResults):
    """Base class of the results of runs with generated answers."""

    checked: ClassVar[tuple[str, ...]]
    """Columns of `answers` that must be equal for two documents to be the same."""
    prompt_settings: ClassVar[Mapping[str, str]] = {}
    """Name in messages → entry of the specification, or its entry by task, that makes other prompts of the same
    documents."""
    continuous: ClassVar[str] = ""
    """Rule of the continuous measure that is reported beside the others, if there is one."""

    @abstractmethod
    def answers(self) -> pd.DataFrame:
        """Return columns task, id, source (of dependent documents), references, answer, score and `checked`."""

    def metric_of(self, task: str) -> str:
        """Return the name of a task's metric, such as "exact match"."""
        stored = next(entry for entry in self.run.stored["tasks"] if entry["task"] == task)
        return str(stored.get("metric", "score"))

    def measures(self) -> Mapping[str, Measure]:
        """Return rule → measure of the documents; the benchmark's own, under its name, comes first."""
        return {self.run.kind: share_measure(self.metric_of(self.run.stored["tasks"][0]["task"]))}

    def sample_of(self, task: str) -> str:
        """Return the common name of tasks that ask the same questions; empty if no other task does."""
        return ""

    def groups(self) -> Mapping[str, Sequence[str]]:
        return {"Average": tuple(self.run.manifest["documents"])}

    def comparable(self) -> Comparable:
        return _ComparableAnswers(self)

    def views(self, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import answer_views

        yield from answer_views(self.answers(), tasks, self.metric_of)


class _ComparableAnswers(GradedAnswers):
    def __init__(self, results: FinishedAnswers) -> None:
        super().__init__(results.run, results.answers, results.checked, results.groups(), results.measures())
        self._results = results

    def sample_of(self, task: str) -> str:
        return self._results.sample_of(task)

    def beside(self, rule: str) -> str | None:
        continuous = self._results.continuous
        return continuous if continuous in self.rules and rule != continuous else None

    def must_agree(self, task: str) -> dict[str, str]:
        specification = self.run.manifest["specification"]
        settings = {}
        for name, entry in self._results.prompt_settings.items():
            value = specification[entry]
            settings[name] = str(value[task] if isinstance(value, Mapping) else value)
        hashes = {"documents": str(specification["documents"].get(task, ""))} if "documents" in specification else {}
        return settings | hashes
