"""What RULER and the needle test share: two scores of a document from one prefill.

In: a prompt and the answers that it could have, the gold one first. Out: the request that generates an answer and the
log-likelihood of each possible one; from these, the columns of a table. The gold answer is *chosen* if it has fewer
bits per byte than every other one; a guess is right in one of eight.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.generated import GeneratedBenchmark
from evalkit.benchmarks.outcomes import Measure, Metric
from evalkit.errors import ScoringError
from evalkit.generation.prompts import Prompt
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.stats.estimates import mean

if TYPE_CHECKING:
    import pandas as pd

CHOICES = 8
CHOICE, BITS = "choice", "bits_per_byte"
"""Names of the measures of log-likelihoods, and of their columns."""
_MEASURES = {
    CHOICE: Measure(f"the gold answer among {CHOICES} has the fewest bits per byte, in %", False, "choice accuracy"),
    BITS: Measure("bits per byte of the gold answer after the text, lower is better", True, BITS, None, False),
}
_CONTROL = re.compile(r"[\x00-\x1f]")


def match_score(answer: str, references: Sequence[str], is_any: bool) -> float:
    """Return the share of the references that occur in an answer, or whether any does; RULER's score, from 0 to 1."""
    said = _CONTROL.sub("\n", answer.strip()).strip().lower()
    matches = [reference.lower() in said for reference in references]
    return float(any(matches)) if is_any else sum(matches) / len(matches)


def likelihood_columns(choices: Sequence[str], logprobs: str) -> dict[str, Any]:
    """Return the columns of the second score from the log-likelihoods of the choices, in nats."""
    bits = [-nats / math.log(2) / len(text.encode()) for text, nats in zip(choices, json.loads(logprobs), strict=True)]
    return {
        CHOICE: float(all(bits[0] < other for other in bits[1:])),
        BITS: bits[0],
        "chance": 1 / len(choices),
        "choices": json.dumps(choices, ensure_ascii=False),
        "logprobs": logprobs,
    }


def with_answers(prompt: Prompt, sequences: Sequence[Sequence[int]], context: int, label: str) -> Prompt:
    """Return a prompt whose possible answers are scored too; `sequences` are the tokens of prompt and answer.

    An answer begins at the first token in which one of them differs from the prompt. Nothing is cut: the prompt is
    followed by as many new tokens as the context window has room for, and a `ScoringError` says if the answers have
    none.
    """
    shared = len(prompt.tokens)
    for sequence in sequences:
        both = min(shared, len(sequence) - 1)
        differ = np.flatnonzero(prompt.tokens[:both] != np.asarray(sequence[:both]))
        shared = int(differ[0]) if len(differ) else both
    longest = max(len(prompt.tokens) + 1, *map(len, sequences))
    if longest > context or shared < 1:
        raise ScoringError(
            f"{label}: prompt and answer have {longest:,} tokens, and the context window has {context:,}; give a "
            "longer --context, or shorter --lengths"
        )
    answers = tuple(np.asarray(sequence[shared:], np.int64) for sequence in sequences)
    room = min(prompt.max_new_tokens, context - len(prompt.tokens))
    return replace(prompt, answers=answers, shared=shared, max_new_tokens=room)


SCORES = {"score": "stderr", CHOICE: "choice_stderr", BITS: "bits_stderr"}
"""Score → key of its standard error in results.json."""


class StoredScores(Stored):
    """Scores in results.json: means with standard errors over documents."""

    score: float
    stderr: float | None
    choice: float
    choice_stderr: float | None
    bits_per_byte: float
    bits_stderr: float | None


def sources_of(rows: pd.DataFrame) -> NDArray[np.int64]:
    """Return [rows] the number of each row's source; without sources, each row is its own."""
    return np.unique(rows["source"], return_inverse=True)[1] if "source" in rows else np.arange(len(rows))


def scores_of(rows: pd.DataFrame) -> dict[str, Any]:
    """Return a task's scores, as in results.json."""
    stored: dict[str, Any] = {"n": len(rows)}
    for name, error in SCORES.items():
        estimate = mean(rows[name].to_numpy(float), sources_of(rows))
        stored |= {name: estimate.value, error: None if math.isnan(estimate.variance) else estimate.stderr}
    return stored | {"chance": float(rows["chance"].mean())}


class RetrievalBenchmark(GeneratedBenchmark):
    """Base class: the rules of a run are its own, and those of the log-likelihoods, which old runs lack."""

    continuous = BITS

    @abstractmethod
    def own_metrics(self, run: Run) -> list[Metric]:
        """Return the metric of the generated answers, of each task."""

    def likelihood_metrics(self, run: Run) -> list[Metric]:
        metrics = []
        for task in run.stored["tasks"]:
            if task.get(CHOICE) is not None:
                name, n = task["task"], task["n"]
                values = task[CHOICE], task["choice_stderr"]
                metrics.append(Metric(name, _MEASURES[CHOICE].name, n, *values, chance=task["chance"]))
                metrics.append(Metric(name, BITS, n, task[BITS], task["bits_stderr"], False, None))
        return metrics

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        own, others = self.own_metrics(run), self.likelihood_metrics(run)
        if rule in (None, self.kind) or not others:
            self.refuse_rule(run, rule)
            return own + others
        measure = self.comparable(run).measure(str(rule))
        return [metric for metric in others if metric.name == measure.name]

    def measures(self, run: Run) -> dict[str, Measure]:
        return {self.kind: self.measure()} | (_MEASURES if self.likelihood_metrics(run) else {})
