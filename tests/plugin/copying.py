"""Copying benchmark: does a model continue a list of numbers that it has seen once?"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from evalkit.benchmarks.document_views import TaskView
from evalkit.benchmarks.generated import (
    DocumentPlan,
    GeneratedAnswer,
    GeneratedBenchmark,
    GenerationRequest,
    context_of,
    generated_plan,
)
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Label, Measure, Metric
from evalkit.benchmarks.request import Request
from evalkit.display import Say
from evalkit.generation.prompts import Prompt, Stops
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask
from evalkit.stats.estimates import error_of_mean

COPYING = "copying"
ANSWERS = "answers.parquet"
LEAD, SURPLUS, LAYERS = "lead", "surplus", (0, 1, 2)
"""Stand for what an analysis of a model's layers gives: a signed number of each, of which neither side is better;
and a number of which less is better."""
MEASURES = {
    COPYING: Measure("share of letters that stand in the list, in %", True),
    LEAD: Measure("code points that the answer is ahead of its list", True, LEAD, None, None, LAYERS),
    SURPLUS: Measure("characters more than the list's half", True, SURPLUS, None, False),
}


class CopyingLayer(Stored):
    n: int
    value: float
    stderr: float | None


class CopyingTask(CopyingLayer, StoredTask):
    layers: list[CopyingLayer]


class CopyingResults(Stored):
    tasks: list[CopyingTask]


@dataclass(frozen=True)
class CopyingRequest(Request):
    lists: int = 20


class Copying(GeneratedBenchmark):
    kind = COPYING
    request = CopyingRequest
    results_form = CopyingResults
    files, checked = (ANSWERS,), ("reference",)

    def plan(self, request: CopyingRequest, say: Say) -> DocumentPlan:
        checkpoint = request.model.locate(say)
        lists = [" ".join(str((7 * n + 3 * k) % 10) for k in range(8 + n % 5)) for n in range(request.lists)]
        texts = tuple(f"{text} ; {text[: len(text) // 2]}" for text in lists)
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        documents = {COPYING: {"source": "made up", "official": None, "count": len(texts)}}
        context = context_of(request.model, checkpoint, COPYING)
        specification = {"documents": {COPYING: digest}}
        return generated_plan(COPYING, request, checkpoint, context, {COPYING: texts}, specification, documents, say)

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[GenerationRequest]:
        requests = []
        for number, text in enumerate(plan.tasks[COPYING]):
            prompt = Prompt(number, np.array(tokenizer(text).input_ids, np.int64), 8, Stops(ends))
            requests.append(GenerationRequest(str(number), prompt, hashlib.sha256(text.encode()).hexdigest()))
        return requests

<<<<<<< HEAD
    def save(self, plan: DocumentPlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """Scores are shares of new tokens that are digits of the list."""
        table = pd.DataFrame([answer._asdict() for answer in answers[COPYING]])
        table["task"], table["reference"] = COPYING, list(plan.tasks[COPYING])
        pairs = list(zip(plan.tasks[COPYING], table["text"], strict=True))
        table["score"] = [sum(letter in text for letter in answer) / max(1, len(answer)) for text, answer in pairs]
        table[SURPLUS] = [len(answer) - len(text) / 2 for text, answer in pairs]
        for layer in LAYERS:
            table[f"{LEAD} {layer}"] = [lead(answer, layer) - lead(text, layer) for text, answer in pairs]
        writer.save_table(ANSWERS, table)
        about, layers = numbers(table["score"]), [numbers(table[f"{LEAD} {layer}"]) for layer in LAYERS]
=======
    def table_row(self, task: str, document: str, answer: GeneratedAnswer) -> dict[str, Any]:
        """The score is the share of new letters that are in the list."""
        text = answer.text
        leads = {f"{LEAD} {layer}": lead(text, layer) - lead(document, layer) for layer in LAYERS}
        score = sum(letter in document for letter in text) / max(1, len(text))
        about = {"task": COPYING, "reference": document, "score": score, SURPLUS: len(text) - len(document) / 2}
        return answer._asdict() | about | leads

    def results(self, plan: DocumentPlan, table: pd.DataFrame) -> dict[str, Any]:
        """The means of the scores."""
        about = numbers(table["score"])
        layers = [numbers(table[f"{LEAD} {layer}"]) for layer in LAYERS]
>>>>>>> main
        average = {"name": "Average", "accuracy": about["value"], "stderr": about["stderr"]}
        return {"tasks": [{"task": COPYING, **about, "layers": layers}], "averages": [average]}

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(run, rule)
        [task] = run.stored["tasks"]
        layers = [
            Metric(COPYING, LEAD, **measured, higher_is_better=None, bounds=None, layer=layer)
            for layer, measured in zip(LAYERS, task["layers"], strict=True)
        ]
        return [Metric(COPYING, "copied", task["n"], task["value"], task["stderr"]), *layers]

    def answers(self, run: Run) -> pd.DataFrame:
        """Each list by itself, unless an older table says otherwise."""
        table = run.table(ANSWERS, ("task", "id", "reference", "score"))
        table = table if "source" in table else table.assign(source=table["id"])
        return table.assign(answer=table["text"], references=table["reference"].map(lambda reference: [reference]))

    def comparable(self, run: Run) -> Comparable:
<<<<<<< HEAD
        def load() -> pd.DataFrame:
            table = run.table(ANSWERS, ("task", "id", "reference", "score"))
            return table if "source" in table else table.assign(source=table["id"])

        return GradedAnswers(run, load, ("reference",), {"Average": [COPYING]}, MEASURES)
=======
        """With its further measures."""
        return GradedAnswers(run, lambda: self.answers(run), self.checked, {"Average": [COPYING]}, MEASURES)

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        """None, as of any benchmark that does not show its documents."""
        return iter(())
>>>>>>> main

    def label(self, run: Run, task: str) -> Label:
        return Label(task.capitalize(), "Copy")

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        return {COPYING: {"Average": (COPYING,)}}


def lead(text: str, layer: int) -> float:
    """Mean code point of every few characters."""
    codes = [ord(letter) for letter in text[layer :: layer + 1]]
    return sum(codes) / max(1, len(codes))


def numbers(values: pd.Series) -> dict[str, Any]:
    return {"n": len(values), "value": float(values.mean()), "stderr": error_of_mean(values.to_numpy(float))}
