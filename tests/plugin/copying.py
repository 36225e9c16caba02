"""Copying benchmark: does a model continue a list of numbers that it has seen once?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

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
from evalkit.runs.writing import RunWriter
from evalkit.stats.estimates import error_of_mean

COPYING = "copying"
ANSWERS = "answers.parquet"
NEW_TOKENS = 8
LEAD, SURPLUS, LAYERS = "lead", "surplus", (0, 1, 2)
"""Stand in for what an analysis of a model's layers gives: a signed number of each, of which neither side is better;
and a number of which less is better."""
MEASURES = {
    COPYING: Measure("share of letters that stand in the list, in %", True),
    LEAD: Measure("code points that the answer is ahead of its list", True, LEAD, None, None, LAYERS),
    SURPLUS: Measure("characters more than the list's half", True, SURPLUS, None, False),
}


class CopyingLayer(Stored):
    """A number in results.json."""

    n: int
    value: float
    stderr: float | None


class CopyingTask(CopyingLayer, StoredTask):
    """A task there."""

    layers: list[CopyingLayer]


class CopyingResults(Stored):
    """What it must hold."""

    tasks: list[CopyingTask]


@dataclass(frozen=True)
class CopyingRequest(Request):
    """Settings of its own."""

    lists: int = 20
    """How many lists."""


class Copying(GeneratedBenchmark):
    """See the module."""

    kind = COPYING
    request = CopyingRequest
    results_form = CopyingResults

    def plan(self, request: CopyingRequest, say: Say) -> DocumentPlan:
        """Make the lists up."""
        checkpoint = request.model.locate(say)
        numbers = [" ".join(str((7 * n + 3 * k) % 10) for k in range(8 + n % 5)) for n in range(request.lists)]
        texts = tuple(f"{one} ; {one[: len(one) // 2]}" for one in numbers)
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        documents = {COPYING: {"source": "made up", "official": None, "count": len(texts)}}
        context = context_of(request.model, checkpoint, COPYING)
        specification = {"documents": {COPYING: digest}}
        return generated_plan(COPYING, request, checkpoint, context, {COPYING: texts}, specification, documents, say)

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[GenerationRequest]:
        """The list, and half of it again."""
        found = []
        for number, text in enumerate(plan.tasks[COPYING]):
            tokens = np.array(tokenizer(text).input_ids, np.int64)
            sha = hashlib.sha256(text.encode()).hexdigest()
            prompt = Prompt(number, tokens, NEW_TOKENS, Stops(ends))
            found.append(GenerationRequest(str(number), prompt, sha))
        return found

    def save(self, plan: DocumentPlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """Scores are shares of new tokens that are digits of the list."""
        table = pd.DataFrame([answer._asdict() for answer in answers[COPYING]])
        table["task"], table["reference"] = COPYING, list(plan.tasks[COPYING])
        table["score"] = [
            sum(letter in text for letter in answer) / max(1, len(answer))
            for text, answer in zip(plan.tasks[COPYING], table["text"], strict=True)
        ]
        pairs = list(zip(plan.tasks[COPYING], table["text"], strict=True))
        table[SURPLUS] = [len(answer) - len(text) / 2 for text, answer in pairs]
        for layer in LAYERS:
            table[f"{LEAD} {layer}"] = [lead(answer, layer) - lead(text, layer) for text, answer in pairs]
        writer.save_table(ANSWERS, table)
        about = numbers(table["score"])
        layers = [numbers(table[f"{LEAD} {layer}"]) for layer in LAYERS]
        average = {"name": "Average", "accuracy": about["value"], "stderr": about["stderr"]}
        writer.save_results({"tasks": [{"task": COPYING, **about, "layers": layers}], "averages": [average]})

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """The share that was copied, and each layer's lead."""
        self.refuse_rule(run, rule)
        [task] = run.stored["tasks"]
        layers = [
            Metric(COPYING, LEAD, **found, higher_is_better=None, bounds=None, layer=layer)
            for layer, found in zip(LAYERS, task["layers"], strict=True)
        ]
        return [Metric(COPYING, "copied", task["n"], task["value"], task["stderr"]), *layers]

    def comparable(self, run: Run) -> Comparable:
        """Each list by itself."""

        def load() -> pd.DataFrame:
            table = run.table(ANSWERS, ("task", "id", "reference", "score"))
            return table if "source" in table else table.assign(source=table["id"])

        return GradedAnswers(run, load, ("reference",), {"Average": [COPYING]}, MEASURES)

    def label(self, run: Run, task: str) -> Label:
        """With a capital."""
        return Label(task.capitalize(), "Copy")

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """One suite of one task."""
        return {COPYING: {"Average": (COPYING,)}}


def lead(text: str, layer: int) -> float:
    """Mean code point of every few characters."""
    codes = [ord(letter) for letter in text[layer :: layer + 1]]
    return sum(codes) / max(1, len(codes))


def numbers(values: pd.Series) -> dict[str, Any]:
    """Mean and standard error."""
    return {"n": len(values), "value": float(values.mean()), "stderr": error_of_mean(values.to_numpy(float))}
