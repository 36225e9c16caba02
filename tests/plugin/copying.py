"""Copying: does a model go on with a list of numbers that it has seen once?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evalkit.benchmarks.generated import Answer, Asked, GeneratedBenchmark, GeneratingFacts
from evalkit.benchmarks.generated_plan import context_of, generated_folder, generated_manifest
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Metric
from evalkit.benchmarks.request import Request, locate_checkpoint, numerics
from evalkit.generation.prompts import Prompt, Stops
from evalkit.models.locate import Checkpoint, Say
from evalkit.runs.folder import Run
from evalkit.runs.writing import RunWriter

COPYING = "copying"
ANSWERS = "answers.parquet"
NEW_TOKENS = 8


@dataclass(frozen=True)
class CopyingPlan:
    """What is to be copied, by which model."""

    common: Request
    checkpoint: Checkpoint
    texts: tuple[str, ...]
    manifest: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Of the run."""
        return generated_folder(self.common.output, self.checkpoint, self.manifest)


def plan_copying(request: Request, say: Say) -> CopyingPlan:
    """As many lists as the request's limit says."""
    checkpoint = locate_checkpoint(request, say)
    numbers = [" ".join(str((7 * n + 3 * k) % 10) for k in range(8 + n % 5)) for n in range(request.limit or 20)]
    texts = tuple(f"{one} ; {one[: len(one) // 2]}" for one in numbers)
    specification = {
        **numerics(request, checkpoint, say),
        "suite": COPYING,
        "documents": {COPYING: hashlib.sha256("\n".join(texts).encode()).hexdigest()},
    }
    documents = {COPYING: {"source": "made up", "official": None, "count": len(texts)}}
    context = context_of(request, checkpoint, COPYING)
    manifest = generated_manifest(COPYING, request, checkpoint, context, specification, False, documents)
    return CopyingPlan(request, checkpoint, texts, manifest)


class Copying(GeneratedBenchmark):
    """See the module."""

    kind = COPYING

    def documents(self, plan: CopyingPlan) -> dict[str, list[str]]:
        """The lists' numbers."""
        return {COPYING: [str(number) for number in range(len(plan.texts))]}

    def asked(self, plan: CopyingPlan, task: str, facts: GeneratingFacts, tokenizer: Any) -> list[Asked]:
        """The list, and half of it again."""
        found = []
        for number, text in enumerate(plan.texts):
            tokens = np.array(tokenizer(text).input_ids, np.int64)
            sha = hashlib.sha256(text.encode()).hexdigest()
            prompt = Prompt(number, tokens, NEW_TOKENS, Stops(frozenset(facts.ends)))
            found.append(Asked(str(number), prompt, sha, len(tokens), False))
        return found

    def save(self, plan: CopyingPlan, answers: Mapping[str, Sequence[Answer]], writer: RunWriter) -> None:
        """Scores are shares of new tokens that are digits of the list."""
        table = pd.DataFrame([answer._asdict() for answer in answers[COPYING]])
        table["task"], table["wanted"] = COPYING, list(plan.texts)
        table["score"] = [
            sum(letter in text for letter in answer) / max(1, len(answer))
            for text, answer in zip(plan.texts, table["text"], strict=True)
        ]
        writer.save_table(ANSWERS, table)
        mean, error = float(table["score"].mean()), float(table["score"].sem())
        about = {"task": COPYING, "n": len(table), "value": mean, "stderr": error}
        writer.save_results({"tasks": [about], "averages": [{"name": "Average", "accuracy": mean, "stderr": error}]})

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """One."""
        [task] = run.stored["tasks"]
        return [Metric(COPYING, "copied", task["n"], task["value"], task["stderr"])]

    def comparable(self, run: Run) -> Comparable:
        """Each list by itself."""
        table = run.table(ANSWERS, ("task", "id", "wanted", "score"))
        words = "share of letters that stand in the list, in %"
        return GradedAnswers(run, table.assign(source=table["id"]), ("wanted",), {"Average": [COPYING]}, words)

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """One suite of one task."""
        return {COPYING: {"Average": (COPYING,)}}
