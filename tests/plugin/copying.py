"""Copying benchmark: does a model continue a list of numbers that it has seen once?"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from evalkit.benchmarks.base import ListedSuite
from evalkit.benchmarks.document_views import TaskView
from evalkit.benchmarks.generated import (
    DocumentPlan,
    FinishedAnswers,
    GeneratedBenchmark,
    TaskDocuments,
    answer_columns,
    context_of,
    generated_plan,
)
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Measure, Metric
from evalkit.benchmarks.request import Request
from evalkit.display import Say
from evalkit.generation.prompts import Prompt, Stops
from evalkit.inputs.validated import Stored
from evalkit.requests.requests import Generate
from evalkit.requests.rows import GeneratedRow
from evalkit.runs.folder import StoredTask
from evalkit.runs.scales import FRACTION, Scale
from evalkit.stats.estimates import error_of_mean
from evalkit.suites.suites import Label

COPYING = "copying"
ANSWERS = "answers.parquet"
NEW_TOKENS = 8
LEAD, SURPLUS, LAYERS = "lead", "surplus", (0, 1, 2)
"""Stand in for what an analysis of a model's layers gives: a signed number of each, of which neither side is better;
and a number of which less is better."""
MEASURES = {
    COPYING: Measure(Scale("score", FRACTION), "share of letters that stand in the list, in %", True),
    LEAD: Measure(
        Scale(LEAD, "code points", None), "code points that the answer is ahead of its list", True, layers=LAYERS
    ),
    SURPLUS: Measure(Scale(SURPLUS, "characters", False), "characters more than the list's half", True),
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


class FinishedCopying(FinishedAnswers):
    checked = ("reference",)

    def metrics(self, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(rule)
        [task] = self.run.stored["tasks"]
        layers = [
            Metric(MEASURES[LEAD].scale, COPYING, **found, layer=layer)
            for layer, found in zip(LAYERS, task["layers"], strict=True)
        ]
        return [Metric(Scale("copied", FRACTION), COPYING, task["n"], task["value"], task["stderr"]), *layers]

    def answers(self) -> pd.DataFrame:
        table = self.run.table(ANSWERS, ("task", "id", "reference", "score"))
        table = table if "source" in table else table.assign(source=table["id"])
        return table.assign(answer=table["text"], references=table["reference"].map(lambda reference: [reference]))

    def comparable(self) -> Comparable:
        return GradedAnswers(self.run, self.answers, self.checked, {"Average": [COPYING]}, MEASURES)

    def views(self, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        """None, as of any benchmark that does not show its documents."""
        return iter(())

    def label(self, task: str) -> Label:
        return Label(task.capitalize(), "Copy")


class Copying(GeneratedBenchmark):
    kind = COPYING
    request = CopyingRequest
    read = FinishedCopying
    results_form = CopyingResults
    files = (ANSWERS,)

    def plan(self, request: CopyingRequest, say: Say) -> DocumentPlan:
        checkpoint = request.model.locate(say)
        numbers = [" ".join(str((7 * n + 3 * k) % 10) for k in range(8 + n % 5)) for n in range(request.lists)]
        texts = tuple(f"{one} ; {one[: len(one) // 2]}" for one in numbers)
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        context = context_of(request.model, checkpoint, COPYING)
        tasks = {COPYING: TaskDocuments(texts, "made up", digest)}
        return generated_plan(COPYING, request, checkpoint, context, tasks, {}, say)

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[Generate]:
        found = []
        for number, text in enumerate(plan.tasks[COPYING]):
            tokens = np.array(tokenizer(text).input_ids, np.int64)
            sha = hashlib.sha256(text.encode()).hexdigest()
            prompt = Prompt(number, tokens, NEW_TOKENS, Stops(ends))
            found.append(Generate(str(number), prompt, sha))
        return found

    def table_row(self, task: str, document: str, answer: GeneratedRow) -> dict[str, Any]:
        """The score is the share of new letters that are in the list."""
        text = answer.text
        leads = {f"{LEAD} {layer}": lead(text, layer) - lead(document, layer) for layer in LAYERS}
        score = sum(letter in document for letter in text) / max(1, len(text))
        about = {"task": COPYING, "reference": document, "score": score, SURPLUS: len(text) - len(document) / 2}
        return answer_columns(answer) | about | leads

    def results(self, plan: DocumentPlan, table: pd.DataFrame) -> dict[str, Any]:
        about = numbers(table["score"])
        layers = [numbers(table[f"{LEAD} {layer}"]) for layer in LAYERS]
        average = {"name": "Average"} | MEASURES[COPYING].scale.stored(about["value"], about["stderr"])
        return {"tasks": [{"task": COPYING, **about, "layers": layers}], "averages": [average]}

    def suites(self) -> dict[str, ListedSuite]:
        return {COPYING: ListedSuite(averages=lambda: {"Average": (COPYING,)})}


def lead(text: str, layer: int) -> float:
    codes = [ord(letter) for letter in text[layer :: layer + 1]]
    return sum(codes) / max(1, len(codes))


def numbers(values: pd.Series) -> dict[str, Any]:
    return {"n": len(values), "value": float(values.mean()), "stderr": error_of_mean(values.to_numpy(float))}
