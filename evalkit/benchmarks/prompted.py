"""Simple benchmarks: prompts, references, and a function that scores an answer. See docs/contributing.md.

In: documents, each a prompt and a reference. Out: a run with a generated answer for each prompt, and the mean score of
each task. The settings are those of every run, and `limit`; for more settings, subclass `GeneratedBenchmark`.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from evalkit.benchmarks.generated import (
    DocumentPlan,
    GeneratedAnswer,
    GeneratedBenchmark,
    GenerationRequest,
    context_of,
    generated_plan,
)
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Measure, Metric
from evalkit.benchmarks.request import DocumentRequest
from evalkit.display import Say
from evalkit.errors import ScoringError, UsageError
from evalkit.inputs.validated import Stored
from evalkit.runs.forms import StoredTask
from evalkit.stats.estimates import error_of_average, error_of_mean

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView
    from evalkit.runs.folder import Run
    from evalkit.runs.writing import RunWriter

ANSWERS = "answers.parquet"


class _PromptedTask(StoredTask):
    n: int
    score: float
    stderr: float | None


class _PromptedResults(Stored):
    """Schema of results.json, beyond the keys that every benchmark has."""

    tasks: list[_PromptedTask]


class PromptDocument(NamedTuple):
    """A prompt, and the reference that its answer is compared with."""

    prompt: str
    reference: str


class PromptedBenchmark(GeneratedBenchmark):
    """Base class of simple benchmarks; `kind` is also the name of the suite."""

    request = DocumentRequest
    results_form = _PromptedResults
    description: ClassVar[str]
    """Description of the suite in one line."""
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
        every = {task: list(documents) for task, documents in self.tasks().items()}
        tasks = {
            task: [documents[place] for place in request.selection.places(task, [task] * len(documents))]
            for task, documents in every.items()
        }
        if empty := [task for task, documents in tasks.items() if not documents]:
            raise UsageError(f"benchmark {self.kind}: task {empty[0]} has no documents")
        checkpoint = request.model.locate(say)
        specification = {
            "documents": {task: _hash(documents) for task, documents in tasks.items()},
            "max_new_tokens": self.max_new_tokens,
            "until": list(self.until),
            "version": self.version,
        }
        source = f"benchmark {self.kind}"
        about = {task: {"source": source, "official": None, "count": len(found)} for task, found in every.items()}
        context = context_of(request.model, checkpoint, self.kind)
        return generated_plan(self.kind, request, checkpoint, context, tasks, specification, about, say)

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[GenerationRequest]:
        import numpy as np

        from evalkit.generation.prompts import Prompt, Stops

        stops, found = Stops(ends, until=self.until), []
        for number, document in enumerate(plan.tasks[task]):
            tokens = np.array(tokenizer(document.prompt, verbose=False).input_ids, np.int64)
            if not 0 < len(tokens) <= (most := plan.manifest["context"] - self.max_new_tokens):
                raise ScoringError(
                    f"{task} document {number}: its prompt has {len(tokens):,} tokens; expected 1 to {most:,}, since "
                    f"{self.max_new_tokens} of the context window of {plan.manifest['context']:,} are for the answer"
                )
            sha = hashlib.sha256(document.prompt.encode("utf-8", "surrogatepass")).hexdigest()
            prompt = Prompt(number, tokens, self.max_new_tokens, stops)
            found.append(GenerationRequest(str(number), prompt, sha))
        return found

    def save(self, plan: DocumentPlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        import pandas as pd

        tables = [self._scored(task, documents, answers[task]) for task, documents in plan.tasks.items()]
        writer.save_table(ANSWERS, pd.concat(tables, ignore_index=True))
        means = [float(table["score"].mean()) for table in tables]
        errors = [error_of_mean(table["score"].to_numpy(float)) for table in tables]
        results = [
            {"task": task, "n": len(table), "score": mean, "stderr": error}
            for task, table, mean, error in zip(plan.tasks, tables, means, errors, strict=True)
        ]
        average = {"name": "Average", "accuracy": sum(means) / len(means), "stderr": error_of_average(errors)}
        writer.save_results({"tasks": results, "averages": [average]})

    def _scored(
        self, task: str, documents: Sequence[PromptDocument], answers: Sequence[GeneratedAnswer]
    ) -> pd.DataFrame:
        import pandas as pd

        rows = []
        for document, answer in zip(documents, answers, strict=True):
            text = _before(answer.text, self.until)
            score = float(self.score(text, document.reference))
            if not 0 <= score <= 1:
                raise ScoringError(
                    f"{task} document {answer.id}: benchmark {self.kind} scores {score}; expected 0 to 1"
                )
            about = {"task": task, **document._asdict(), **answer._asdict()}
            rows.append(about | {"answer": text, "score": score, "source": answer.id})
        return pd.DataFrame(rows)

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(run, rule)
        return [Metric(one["task"], self.metric, one["n"], one["score"], one["stderr"]) for one in run.stored["tasks"]]

    def comparable(self, run: Run) -> Comparable:
        """Return the documents with their scores; documents are independent."""
        columns = ("task", "id", "source", "prompt", "reference", "score")
        tasks = [one["task"] for one in run.stored["tasks"]]
        measure = Measure(f"{self.metric} in %", True, self.metric)
        return GradedAnswers(
            run, lambda: run.table(ANSWERS, columns), ("prompt", "reference"), {"Average": tasks}, {self.kind: measure}
        )

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import answer_views

        table = run.table(ANSWERS, ("task", "id", "prompt", "reference", "answer", "score"))
        table = table.assign(references=table["reference"].map(lambda reference: [reference]))
        yield from answer_views(table, tasks, lambda _: self.metric)

    def suites(self) -> dict[str, str]:
        return {self.kind: self.description}

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {self.kind: {"Average": tuple(self.tasks())}}


def _hash(documents: Sequence[PromptDocument]) -> str:
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()


def _before(text: str, until: Sequence[str]) -> str:
    """Return the text before the first occurrence of a text that ends it."""
    return text[: min((text.find(one) for one in until if one in text), default=len(text))]
