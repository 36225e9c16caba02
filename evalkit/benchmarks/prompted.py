"""Simple benchmarks: prompts, references, and a function that scores an answer. See docs/contributing.md.

In: documents, each a prompt and a reference. Out: a run with a generated answer for each prompt, and the mean score of
each task. The settings are those of every run, and `limit`; for more settings, subclass `GeneratedBenchmark`.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from evalkit.benchmarks import generated
from evalkit.benchmarks.base import ListedSuite
from evalkit.benchmarks.generated import DocumentPlan, TaskDocuments, answer_columns
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.request import DocumentRequest
from evalkit.data.sampling import repeated_prompts
from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError
from evalkit.inputs.validated import Stored
from evalkit.requests.requests import Generate
from evalkit.requests.rows import GeneratedRow
from evalkit.runs.folder import StoredTask, StoredValue
from evalkit.runs.journal import FinishedRows
from evalkit.runs.writing import RunWriter
from evalkit.stats.estimates import error_of_average, error_of_mean

if TYPE_CHECKING:
    import pandas as pd

ANSWERS = "answers.parquet"


class _PromptedTask(StoredTask, StoredValue):
    n: int


class _PromptedResults(Stored):
    tasks: list[_PromptedTask]


class PromptDocument(NamedTuple):
    """A prompt, and what its answer is compared with."""

    prompt: str
    reference: str


class FinishedPrompted(generated.FinishedAnswers):
    checked = ("prompt", "reference")

    def metrics(self, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(rule)
        return [
            Metric(task["task"], task["metric"], task["n"], task["value"], task["stderr"])
            for task in self.run.stored["tasks"]
        ]

    def answers(self) -> pd.DataFrame:
        table = self.run.table(ANSWERS, ("task", "id", "source", "prompt", "reference", "answer", "score"))
        return table.assign(references=table["reference"].map(lambda reference: [reference]))


class PromptedBenchmark(generated.GeneratedBenchmark):
    """Base class of simple benchmarks; `kind` is also the name of the suite."""

    request = DocumentRequest
    results_form = _PromptedResults
    files = (ANSWERS,)
    read = FinishedPrompted
    description: ClassVar[str]
    metric: ClassVar[str] = "score"
    """Name of the metric, such as "exact match"."""
    max_new_tokens: ClassVar[int] = 32
    """Maximum length of an answer, in tokens."""
    until: ClassVar[tuple[str, ...]] = ("\n",)
    """Texts that end an answer and are not part of it."""
    version: ClassVar[int] = 1
    """Increase it when `score` changes, so that runs before and after have different ids."""

    @abstractmethod
    def tasks(self) -> Mapping[str, Sequence[PromptDocument]]:
        """Return task → its documents, the same at every call."""

    @abstractmethod
    def score(self, answer: str, reference: str) -> float:
        """Score an answer from 0 to 1; higher is better."""

    def plan(self, request: DocumentRequest, say: Say) -> DocumentPlan:
        every = {
            task: TaskDocuments(list(documents), f"benchmark {self.kind}").selected(task, request.selection)
            for task, documents in self.tasks().items()
        }
        tasks = {name: task._replace(digest=_hash(task.documents)) for name, task in every.items()}
        if empty := [name for name, task in tasks.items() if not task.documents]:
            raise UsageError(f"benchmark {self.kind}: task {empty[0]} has no documents")
        checkpoint = request.model.locate(say)
        settings = {"max_new_tokens": self.max_new_tokens, "until": list(self.until), "version": self.version}
        context = generated.context_of(request.model, checkpoint, self.kind)
        return generated.generated_plan(self.kind, request, checkpoint, context, tasks, settings, say)

    def finish(self, plan: DocumentPlan, finished: FinishedRows, writer: RunWriter) -> None:
        caveats = {}
        for name, documents in plan.tasks.items():
            caveats[name] = repeated_prompts(document.prompt for document in documents)
        writer.save_caveats(caveats)
        super().finish(plan, finished, writer)

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[Generate]:
        import numpy as np

        from evalkit.generation.prompts import Prompt, Stops

        stops, requests = Stops(ends, until=self.until), []
        for number, document in enumerate(plan.tasks[task]):
            tokens = np.array(tokenizer(document.prompt, verbose=False).input_ids, np.int64)
            if not 0 < len(tokens) <= (most := plan.manifest["context"] - self.max_new_tokens):
                raise ScoringError(
                    f"{task} document {number}: its prompt has {len(tokens):,} tokens; expected 1 to {most:,}, since "
                    f"{self.max_new_tokens} of the context window of {plan.manifest['context']:,} are for the answer"
                )
            digest = hashlib.sha256(document.prompt.encode("utf-8", "surrogatepass")).hexdigest()
            requests.append(Generate(str(number), Prompt(number, tokens, self.max_new_tokens, stops), digest))
        return requests

    def table_row(self, task: str, document: PromptDocument, answer: GeneratedRow) -> dict[str, Any]:
        text = answer.text
        text = text[: min((text.find(stop) for stop in self.until if stop in text), default=len(text))]
        score = float(self.score(text, document.reference))
        if not 0 <= score <= 1:
            raise ScoringError(
                f"{task} document {answer.document}: benchmark {self.kind} scores {score}; expected 0 to 1"
            )
        about = {"task": task, **document._asdict(), **answer_columns(answer)}
        return about | {"answer": text, "score": score, "source": answer.document}

    def results(self, plan: DocumentPlan, table: pd.DataFrame) -> dict[str, Any]:
        results, scale = list[dict[str, Any]](), generated.share_measure(self.metric).scale
        for task, rows in table.groupby("task", sort=False):
            mean, error = float(rows["score"].mean()), error_of_mean(rows["score"].to_numpy(float))
            results.append({"task": task, "n": len(rows)} | scale.stored(mean, error))
        mean = sum(result["value"] for result in results) / len(results)
        error = error_of_average([result["stderr"] for result in results])
        return {"tasks": results, "averages": [{"name": "Average"} | scale.stored(mean, error)]}

    def suites(self) -> dict[str, ListedSuite]:
        return {self.kind: ListedSuite(self.description, lambda: {"Average": tuple(self.tasks())})}


def _hash(documents: Sequence[PromptDocument]) -> str:
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()
