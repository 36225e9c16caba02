"""Plan of an analysis of attention: a request → documents and a manifest, without torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evalkit.benchmarks.attention import ATTENTION
from evalkit.benchmarks.attention.groups import GROUPS, MASS, parsed_layers
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, plan_suite
from evalkit.benchmarks.multiple_choice.suites import choose_tasks, load_suite
from evalkit.benchmarks.request import DEFAULT_SUITE, Request, SuiteRequest, numerics, plain_manifest
from evalkit.display import Say
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.reading import read_given_text
from evalkit.inputs.settings import setting
from evalkit.models.loading.locate import Checkpoint
from evalkit.runs.finding import run_folder

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.runs.journal import FinishedRows, Key

TEXT = "text"
"""Name of the task of a user's text, and of its template."""
VERSION = 2
"""Increased with every change of evalkit that changes a measure or a sample."""
_OF_DOCUMENTS = ("tasks", "template", "num_fewshot", "data_dir", "allow_unofficial_data")
"""Settings that a text does not have."""


@dataclass(frozen=True)
class AttentionRequest(Request):
    """Settings of an analysis of attention."""

    measures: tuple[str, ...] = setting((), f"Of {', '.join(GROUPS)}.", "all", metavar="NAMES")
    layers: tuple[str, ...] = setting(
        (), "From 0, or from -1 for the last one backwards.", "all; for the rank the last four", metavar="NUMBERS"
    )
    sample: int = setting(200, "Random documents of each task, or windows of a text.", metavar="N", shows_least=True)
    seed: int = setting(0, "Seed of the random sample.", metavar="N", least=0, shows_least=True)
    continuation: Literal["gold", "all"] = setting(
        "gold", "Continuation that is read: the gold answer's, or every choice's."
    )
    questions: str | None = setting(
        None, "Suite whose documents are read.", "zeroshot8", metavar="SUITE", names="name or file"
    )
    tasks: tuple[str, ...] = setting((), "Tasks of that suite.", "all", metavar="NAMES")
    template: str | None = setting(
        None, "How prompts are written (evalkit ls templates), or a YAML file.", "inst", names="file"
    )
    num_fewshot: int | None = setting(None, "Solved examples before each question.", "0", least=0)
    data_dir: Path | None = setting(
        None, "Folder of <task>.jsonl files, searched before other sources.", names="folder"
    )
    allow_unofficial_data: bool = setting(False, "Accept documents that are not the pinned ones; results are marked.")
    text: Path | None = setting(None, "Text file to read in windows of the context, in place of the tasks' documents.")


@dataclass(frozen=True)
class AttentionPlan:
    """A validated request with its documents and manifest."""

    request: AttentionRequest
    checkpoint: Checkpoint
    manifest: dict[str, Any]
    choices: ChoicePlan | None
    """Plan of the suite whose documents are read; None for a text."""
    text: str = ""
    """The user's text."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of measures."""
        return tuple(self.manifest["specification"]["measures"])

    @property
    def questions(self) -> dict[str, list[Question]]:
        """Task → the sampled documents; empty for a text."""
        return {} if self.choices is None else self.choices.questions

    @property
    def subtasks(self) -> dict[str, list[str]]:
        """Task → its subtasks."""
        subtasks = {task: [question.subtask for question in members] for task, members in self.questions.items()}
        return {task: [*dict.fromkeys(names)] for task, names in subtasks.items()} or {TEXT: [TEXT]}

    @property
    def work(self) -> dict[Key, int]:
        """Key of each document in the journal → its expected cost; empty for a text, whose windows are not known."""
        return {key_of(question): work_of(question) for members in self.questions.values() for question in members}

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        template = self.manifest["template"]["name"]
        return run_folder(self.request.output, self.checkpoint, ATTENTION, template, self.manifest)


def key_of(question: Question) -> Key:
    """Return a document's key in the journal."""
    return question.task, question.subtask, question.doc_id


def work_of(question: Question) -> int:
    """Return the expected cost of a document: its characters, and a few for the rest."""
    return len(question.contexts[0]) + len(question.continuations[0]) + 4


def is_missing(plan: AttentionPlan, finished: FinishedRows) -> bool:
    """Return whether a document has no rows. Of a text it is true, since its windows are known after planning only."""
    return plan.choices is None or any(key not in finished for key in plan.work)


def plan_attention(request: AttentionRequest, say: Say) -> AttentionPlan:
    """Validate a request and make the plan of its run."""
    for name in request.measures:
        if name not in GROUPS and name != "all":
            raise UnknownNameError("measure", name, GROUPS)
    every = not request.measures or "all" in request.measures
    groups = [name for name in GROUPS if every or name in request.measures]
    settings: dict[str, Any] = {
        "suite": ATTENTION,
        "measures": groups,
        "layers": sorted(parsed_layers(request.layers)),
        "sample": request.sample,
        "seed": request.seed,
        "version": VERSION,
    }
    if MASS in groups:
        from evalkit.benchmarks.attention.categories import tagger_identity

        settings["tagger"] = tagger_identity()
    if request.text is not None:
        return _plan_text(request, request.text, settings, say)
    suite = choose_tasks(load_suite(request.questions or DEFAULT_SUITE), request.tasks)
    shared = {name: getattr(request, name) for name in ("model", "output", "sample", "seed", *_OF_DOCUMENTS)}
    choices = plan_suite(SuiteRequest(**shared, suite=request.questions, rule="acc"), suite, say)
    kept = {name: value for name, value in choices.manifest["specification"].items() if name != "unconditional"}
    settings = kept | settings | {"questions": suite.name, "continuation": request.continuation}
    names = ("documents", "template", "labels", "short")
    more = {name: choices.manifest[name] for name in names if name in choices.manifest}
    manifest = plain_manifest(ATTENTION, request.model, choices.checkpoint, settings, **more)
    return AttentionPlan(request, choices.checkpoint, manifest, choices)


def _plan_text(request: AttentionRequest, path: Path, settings: dict[str, Any], say: Say) -> AttentionPlan:
    for name in ("questions", *_OF_DOCUMENTS):
        if getattr(request, name):
            raise UsageError(f"--{name.replace('_', '-')}: is for the documents of tasks; leave it out, or --text")
    if request.continuation != "gold":
        raise UsageError("--continuation: a text has none; leave it out, or --text")
    _, text = read_given_text(path)
    checkpoint = request.model.locate(say)
    digest = hashlib.sha256(text.encode()).hexdigest()
    settings = {**numerics(request.model, checkpoint, None, say), **settings, "documents": {TEXT: digest}}
    if request.model.context not in (None, "none"):
        # Windows may be shorter than the model's, which no extension shortens
        settings["window"] = int(request.model.context)
    documents = {TEXT: {"source": str(path), "official": None, "count": 1}}
    about = {"documents": documents, "template": {"name": TEXT}}
    manifest = plain_manifest(ATTENTION, request.model, checkpoint, settings, **about)
    return AttentionPlan(request, checkpoint, manifest, None, text)
