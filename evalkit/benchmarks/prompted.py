"""Benchmarks of prompts with references, whose generated answers are scored by a metric. See docs/contributing.md.

In: documents, each a prompt and its references. Out: a run with a generated answer for each prompt, and the mean score
of each task. `PromptedBenchmark` is the base class of a package's own ones; those of request files and suite files are
in `answer_suites`. The settings are those of every run; for more settings, subclass `GeneratedBenchmark`.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from sys import float_info
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from evalkit.benchmarks import generated
from evalkit.benchmarks.answer_metrics import AnswerMetric, find_answer_metric, measure_of
from evalkit.benchmarks.base import ListedSuite
from evalkit.benchmarks.generated import AnswerPlan, TaskDocuments, answer_columns
from evalkit.benchmarks.outcomes import Measure, Metric, average_metric, metrics_report
from evalkit.benchmarks.request import DocumentRequest
from evalkit.data.requests import AnswerDocument
from evalkit.data.sampling import repeated_prompts
from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError
from evalkit.escape import counted, part_name
from evalkit.inputs.settings import setting
from evalkit.inputs.validated import Stored
from evalkit.reporting.report import Report
from evalkit.requests.requests import Generate
from evalkit.requests.rows import GeneratedRow
from evalkit.runs.folder import StoredTask, StoredValue
from evalkit.runs.journal import FinishedRows
from evalkit.runs.scales import FRACTION, Scale, stored_scale
from evalkit.runs.writing import RunWriter
from evalkit.stats.estimates import error_of_average, known_error
from evalkit.stats.estimates import mean as mean_of
from evalkit.suites.suites import AnswerSettings

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView

ANSWERS = "answers.parquet"


class _PromptedTask(StoredTask, StoredValue):
    n: int
    truncated: int
    graded: bool
    """This and `bounds` as of the task's `AnswerMetric`, so that a run is read without the package that adds it."""
    bounds: list[float] | None


class _PromptedResults(Stored):
    tasks: list[_PromptedTask]


@dataclass(frozen=True)
class PromptedRequest(DocumentRequest):
    """Settings of a run of a package's own prompts."""

    chat: bool = setting(False, "Put prompts into the tokenizer's chat template, for models tuned to chat.")


class PromptDocument(NamedTuple):
    """A prompt, and what its answer is compared with."""

    prompt: str
    references: str | Sequence[str]
    """The right answer, or several of which the best-matching one counts."""
    source: str = ""
    """What documents share, such as a passage: these are one draw in every interval."""


class PromptTask(NamedTuple):
    documents: Sequence[AnswerDocument]
    source: str
    """As of `TaskDocuments`."""
    settings: AnswerSettings


class PlannedPrompt(NamedTuple):
    document: AnswerDocument
    settings: AnswerSettings
    metric: AnswerMetric


class FinishedPrompted(generated.FinishedAnswers):
    """Results of a run of prompts with references."""

    checked = ("prompt", "references")
    prompt_settings: ClassVar = {"settings of its answers": "answers"}

    def metrics(self, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(rule)
        metrics = []
        for task in self.run.stored["tasks"]:
            numbers = (task["n"], task["value"], task["stderr"])
            metrics.append(Metric(_scale(task), task["task"], *numbers, truncated=task["truncated"]))
        return metrics

    def measures(self) -> dict[str, Measure]:
        return {self.run.kind: _common_measure([_stored_measure(task) for task in self.run.stored["tasks"]])}

    def groups(self) -> dict[str, tuple[str, ...]]:
        return _groups(self.run.manifest)

    def answers(self) -> pd.DataFrame:
        table = self.run.table(ANSWERS, ("task", "id", "source", "prompt", "references", "answer", "score"))
        return table.assign(references=table["references"].map(json.loads).map(tuple))

    def views(self, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import answer_views

        scales = {task["task"]: _scale(task) for task in self.run.stored["tasks"]}
        for view in answer_views(self.answers(), tasks, self.metric_of):
            yield replace(view, scale=scales[view.task])

    def report(self, rule: str | None = None, detail: bool = False) -> Report:
        metrics = self.metrics(rule)
        if len(metrics) > 1:
            metrics += map(average_metric, self.run.stored["averages"])
        cut = []
        for task in self.run.stored["tasks"]:
            if task["truncated"]:
                of_all = f"{task['truncated']:,} of {counted(task['n'], 'prompt')}"
                cut.append(f"{task['task']}: {of_all} too long for the context window, cut in the middle")
        return metrics_report(self.run, metrics, cut)


class AnswersBenchmark(generated.GeneratedBenchmark):
    """Base class of benchmarks of prompts with references."""

    request: Any = PromptedRequest
    results_form = _PromptedResults
    files = (ANSWERS,)
    read = FinishedPrompted

    def answer_metric(self, name: str) -> AnswerMetric:
        """Return the metric that a task's settings name."""
        return find_answer_metric(name)

    def prompted_plan(
        self, request: PromptedRequest, tasks: Mapping[str, PromptTask], settings: Mapping[str, Any], say: Say
    ) -> AnswerPlan:
        """Return the plan of a run; `settings` are further entries of the specification, such as the suite's name."""
        prompts = dict[str, TaskDocuments]()
        answers = dict[str, dict[str, Any]]()
        metrics = list[AnswerMetric]()
        for name, task in tasks.items():
            if not task.documents:
                raise UsageError(f"{task.source}: task {name} has no documents")
            metric = self.answer_metric(task.settings.metric)
            planned = [PlannedPrompt(document, task.settings, metric) for document in task.documents]
            documents = TaskDocuments(planned, task.source, _hash(task.documents))
            prompts[name] = documents.selected(name, request.selection)
            own = task.settings.model_dump(include=set(AnswerSettings.model_fields))
            answers[name] = own | {"version": metric.version}
            metrics.append(metric)
        _check_scales(metrics)
        checkpoint = request.model.locate(say)
        context = generated.context_of(request.model, checkpoint, self.kind)
        about = {**settings, "answers": answers}
        return generated.generated_plan(self.kind, request, checkpoint, context, prompts, about, say, request.chat)

    def ids(self, plan: AnswerPlan, task: str) -> list[str]:
        return [str(planned.document.doc_id) for planned in plan.tasks[task]]

    def generation_requests(self, plan: AnswerPlan, task: str, ends: frozenset[int], tokenizer: Any) -> list[Generate]:
        import numpy as np

        from evalkit.generation.prompts import Prompt, Stops, fit_prompt, prompt_tokens

        context = plan.manifest["context"]
        chat = plan.manifest["specification"]["chat"]
        requests = []
        for number, (document, settings, _) in enumerate(plan.tasks[task]):
            text = document.prompt
            label = f"{task} document {document.doc_id}"
            most = context - settings.max_new_tokens
            if settings.truncate:
                ids, before = fit_prompt(tokenizer, text, most, most, chat=chat, label=label)
            else:
                ids, before = prompt_tokens(tokenizer, text, chat), None
            tokens = np.array(ids, np.int64)
            if not 0 < len(tokens) <= most:
                raise ScoringError(
                    f"{label}: its prompt has {len(tokens):,} tokens; expected 1 to {most:,}, since "
                    f"{settings.max_new_tokens} of the context window of {context:,} are for the answer; with "
                    "truncate: middle a prompt that is too long loses its middle"
                )
            stops = Stops(ends, until=settings.until)
            prompt = Prompt(number, tokens, settings.max_new_tokens, stops)
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            requests.append(Generate(str(document.doc_id), prompt, digest, before))
        return requests

    def finish(self, plan: AnswerPlan, finished: FinishedRows, writer: RunWriter) -> None:
        caveats = {}
        for name, documents in plan.tasks.items():
            caveats[name] = repeated_prompts(planned.document.prompt for planned in documents)
        writer.save_caveats(caveats)
        super().finish(plan, finished, writer)

    def table_row(self, task: str, document: PlannedPrompt, answer: GeneratedRow) -> dict[str, Any]:
        asked = document.document
        metric = document.metric
        text = answer.text
        ends = [text.find(stop) for stop in document.settings.until if stop in text]
        text = text[: min(ends, default=len(text))]
        score = float(metric.score(text, asked.references))
        bounds = metric.scale.bounds
        low, high = bounds or (-float_info.max, float_info.max)
        if not low <= score <= high:  # NaN is not
            expected = f"{low:g} to {high:g}" if bounds else "a finite number"
            raise ScoringError(f"{task} document {answer.document}: {metric.name} scores {score}; expected {expected}")
        return {
            "task": task,
            "prompt": asked.prompt,
            "references": json.dumps(asked.references, ensure_ascii=False),
            **answer_columns(answer),
            "answer": text,
            "score": score,
            "source": asked.source or f"document {answer.document}",
        }

    def results(self, plan: AnswerPlan, table: pd.DataFrame) -> dict[str, Any]:
        results = dict[str, dict[str, Any]]()
        measures = dict[str, Measure]()
        for task, documents in plan.tasks.items():
            measure = measures[task] = documents[0].metric.measure
            rows = table[table["task"] == task]
            scores = rows["score"].to_numpy(float)
            sources = rows["source"].factorize()[0]
            error = known_error(mean_of(scores, sources).stderr)
            results[task] = {
                "task": task,
                "n": len(rows),
                "truncated": int(rows["truncated"].sum()),
                "graded": measure.graded,
                "bounds": measure.bounds,
                **measure.scale.stored(float(scores.mean()), error),
            }
        averages = []
        for name, tasks in _groups(plan.manifest).items():
            members = [results[task] for task in tasks]
            value = sum(member["value"] for member in members) / len(members)
            error = error_of_average([member["stderr"] for member in members])
            measure = _common_measure([measures[task] for task in tasks])
            size = plan.manifest.get("sizes", {}).get(name, len(tasks))
            averages.append({"name": part_name(name, len(tasks), size)} | measure.scale.stored(value, error))
        return {"tasks": list(results.values()), "averages": averages}


class PromptedBenchmark(AnswersBenchmark):
    """Base class of simple benchmarks; `kind` is also the name of the suite."""

    description: ClassVar[str]
    metric: ClassVar[str] = "score"
    """Name of an `AnswerMetric`; or, if the class has its own `score`, of that."""
    max_new_tokens: ClassVar[int] = 32
    until: ClassVar[tuple[str, ...]] = ("\n",)
    truncate: ClassVar[Literal["middle"] | None] = None
    """These as of `AnswerSettings`."""
    version: ClassVar[int] = 1
    """Increase it when `score` changes, so that runs before and after have different ids."""

    @abstractmethod
    def tasks(self) -> Mapping[str, Sequence[PromptDocument]]:
        """Return task → its documents, the same at every call."""

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Score an answer from 0 to 1, higher is better; `references` has at least one. By default by `metric`."""
        return find_answer_metric(self.metric).score(answer, references)

    def answer_metric(self, name: str) -> AnswerMetric:
        has_own = type(self).score is not PromptedBenchmark.score
        return AnswerMetric(Scale(self.metric, FRACTION), self.score) if has_own else find_answer_metric(name)

    def plan(self, request: PromptedRequest, say: Say) -> AnswerPlan:
        self._check_score()
        settings = AnswerSettings(
            metric=self.metric, max_new_tokens=self.max_new_tokens, until=self.until, truncate=self.truncate
        )
        tasks = {}
        for name, documents in self.tasks().items():
            numbered = [_numbered(number, document) for number, document in enumerate(documents)]
            tasks[name] = PromptTask(numbered, f"benchmark {self.kind}", settings)
        return self.prompted_plan(request, tasks, {"version": self.version}, say)

    def _check_score(self) -> None:
        """Raise a `UsageError` for a `score` of one reference, which would compare the answer with a tuple."""
        names = [*signature(self.score).parameters]
        if names[1:2] != ["references"]:
            raise UsageError(
                f"benchmark {self.kind}: score({', '.join(names)}) must be score(answer, references), of which the "
                "second is a tuple of all right answers; rename it, and return the best score over them"
            )

    def suites(self) -> dict[str, ListedSuite]:
        return {self.kind: ListedSuite(self.description, lambda: {"Average": tuple(self.tasks())})}


def _numbered(number: int, document: PromptDocument) -> AnswerDocument:
    references = document.references
    several = (references,) if isinstance(references, str) else tuple(references)
    if not several:
        raise UsageError(f"document {number} ({document.prompt!r:.60}) has no references")
    return AnswerDocument(number, document.prompt, several, document.source)


def _hash(documents: Sequence[AnswerDocument]) -> str:
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()


def _groups(manifest: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return average → its tasks; the last one is over all tasks."""
    own = manifest["specification"].get("groups", {})
    groups = {name: tuple(tasks) for name, tasks in own.items() if name != "Average"}
    return groups | {"Average": tuple(manifest["documents"])}


def _check_scales(metrics: Sequence[AnswerMetric]) -> None:
    """Raise a `UsageError` for metrics whose scores have no mean."""
    for first, metric in pairwise(metrics):
        if metric.scale != first.scale.named(metric.name):
            raise UsageError(
                f"metrics {first.name} and {metric.name} differ in unit, bounds or direction, so that their tasks have "
                "no average; write a suite for each"
            )


def _scale(task: Mapping[str, Any]) -> Scale:
    """Return the scale of a task of results.json."""
    bounds = task["bounds"] and tuple(task["bounds"])
    return replace(stored_scale(task), bounds=bounds)


def _stored_measure(task: Mapping[str, Any]) -> Measure:
    return measure_of(_scale(task), task["graded"])


def _common_measure(measures: Sequence[Measure]) -> Measure:
    """Return the measure of tasks with the same scale: their own, or one named "score" of several metrics."""
    by_name = {measure.name: measure for measure in measures}
    first = measures[0]
    if len(by_name) == 1:
        return first
    words = f"metric of each task ({', '.join(by_name)}), averaged over tasks"
    return replace(first, scale=first.scale.named("score"), words=words, graded=True)
