"""The short way to a benchmark: prompts, references, and a score of each answer. See docs/contributing.md.

In: documents of a prompt and a reference each. Out: a run with a text of the model for each prompt, and the mean of
their scores. Its settings are those of every run and `limit`; what needs more is a `GeneratedBenchmark` of its own.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.generated import GeneratedAnswer, GeneratedBenchmark, GeneratingFacts, GenerationRequest
from evalkit.benchmarks.generated_plan import GeneratedPlan, context_of, generated_manifest
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Measure, Metric
from evalkit.benchmarks.request import Request, numerics
from evalkit.errors import ScoringError, UsageError
from evalkit.inputs.validated import Stored
from evalkit.models.locate import Checkpoint
from evalkit.runs.forms import StoredTask
from evalkit.stats.estimates import error_of_average, error_of_mean

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.runs.folder import Run
    from evalkit.runs.writing import RunWriter

ANSWERS = "answers.parquet"


class _PromptedTask(StoredTask):
    n: int
    score: float
    stderr: float | None


class _PromptedResults(Stored):
    """What results.json has beside what all have."""

    tasks: list[_PromptedTask]


class PromptDocument(NamedTuple):
    """What is asked, and what the answer is scored against."""

    prompt: str
    reference: str


@dataclass(frozen=True)
class PromptedRequest(Request):
    """What a user can ask of a benchmark of prompts."""

    limit: int | None = None
    """Most documents of each task; None: all."""


@dataclass(frozen=True)
class PromptedPlan(GeneratedPlan):
    """A request with everything found that does not need torch."""

    request: PromptedRequest
    checkpoint: Checkpoint
    tasks: Mapping[str, Sequence[PromptDocument]]
    """Up to the limit."""
    manifest: dict[str, Any]


class PromptedBenchmark(GeneratedBenchmark):
    """A benchmark of prompts; `kind` is also the name of its suite."""

    results_form = _PromptedResults
    description: ClassVar[str]
    """What is asked, in a line."""
    metric: ClassVar[str] = "score"
    """Name of what is measured, such as "exact match"."""
    max_new_tokens: ClassVar[int] = 32
    """Of an answer."""
    until: ClassVar[tuple[str, ...]] = ("\n",)
    """Texts that end an answer; it is scored without them."""
    version: ClassVar[int] = 1
    """To be raised when `score` changes, so that runs of both do not pass for the same."""

    @abstractmethod
    def tasks(self) -> Mapping[str, Sequence[PromptDocument]]:
        """Task → its documents, the same at every call."""

    @abstractmethod
    def score(self, answer: str, reference: str) -> float:
        """Score an answer, from 0 to 1, the higher the better."""

    def request(self) -> type[PromptedRequest]:
        """See `PromptedRequest`."""
        return PromptedRequest

    def plan(self, request: PromptedRequest, say: Say) -> PromptedPlan:
        """See `Benchmark`."""
        every = {task: list(documents) for task, documents in self.tasks().items()}
        tasks = {task: documents[: request.limit] for task, documents in every.items()}
        if empty := [task for task, documents in tasks.items() if not documents]:
            raise UsageError(f"benchmark {self.kind}: task {empty[0]} has no documents")
        checkpoint = request.model.locate(say)
        specification = {
            **numerics(request.model, checkpoint, request.limit, say),
            "suite": self.kind,
            "documents": {task: _hash(documents) for task, documents in tasks.items()},
            "max_new_tokens": self.max_new_tokens,
            "until": list(self.until),
            "version": self.version,
        }
        source = f"benchmark {self.kind}"
        about = {task: {"source": source, "official": None, "count": len(found)} for task, found in every.items()}
        context = context_of(request.model, checkpoint, self.kind)
        manifest = generated_manifest(self.kind, request.model, checkpoint, context, specification, False, about)
        return PromptedPlan(request, checkpoint, tasks, manifest)

    def documents(self, plan: PromptedPlan) -> dict[str, list[str]]:
        """See `GeneratedBenchmark`: a document's number is its id."""
        return {task: [str(number) for number in range(len(found))] for task, found in plan.tasks.items()}

    def asked(self, plan: PromptedPlan, task: str, facts: GeneratingFacts, tokenizer: Any) -> list[GenerationRequest]:
        """See `GeneratedBenchmark`."""
        import numpy as np

        from evalkit.generation.prompts import Prompt, Stops

        stops, found = Stops(frozenset(facts.ends), until=self.until), []
        for number, document in enumerate(plan.tasks[task]):
            tokens = np.array(tokenizer(document.prompt, verbose=False).input_ids, np.int64)
            if not 0 < len(tokens) <= (most := plan.manifest["context"] - self.max_new_tokens):
                raise ScoringError(
                    f"{task} document {number}: its prompt has {len(tokens):,} tokens; expected 1 to {most:,}, which "
                    f"leaves {self.max_new_tokens} of the model's {plan.manifest['context']:,} for an answer"
                )
            sha = hashlib.sha256(document.prompt.encode("utf-8", "surrogatepass")).hexdigest()
            prompt = Prompt(number, tokens, self.max_new_tokens, stops)
            found.append(GenerationRequest(str(number), prompt, sha, len(tokens), False))
        return found

    def save(self, plan: PromptedPlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """See `GeneratedBenchmark`."""
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
        """See `Benchmark`."""
        self.refuse_rule(run, rule)
        return [Metric(one["task"], self.metric, one["n"], one["score"], one["stderr"]) for one in run.stored["tasks"]]

    def comparable(self, run: Run) -> Comparable:
        """See `Benchmark`: each document by itself."""
        columns = ("task", "id", "source", "prompt", "reference", "score")
        tasks = [one["task"] for one in run.stored["tasks"]]
        measure = Measure(f"{self.metric} in %", True, self.metric)
        return GradedAnswers(
            run, lambda: run.table(ANSWERS, columns), ("prompt", "reference"), {"Average": tasks}, {self.kind: measure}
        )

    def suites(self) -> dict[str, str]:
        """See `Benchmark`: one."""
        return {self.kind: self.description}

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """See `Benchmark`: over all tasks."""
        return {self.kind: {"Average": tuple(self.tasks())}}


def _hash(documents: Sequence[PromptDocument]) -> str:
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()


def _before(text: str, until: Sequence[str]) -> str:
    """The text up to what ends it."""
    return text[: min((text.find(one) for one in until if one in text), default=len(text))]
