"""Norms benchmark: the length of each hidden state, one row per document, layer and token, stored as columns."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from evalkit.benchmarks.base import Benchmark
from evalkit.benchmarks.generated import DocumentPlan, TaskDocuments, context_of, generated_plan
from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Measure, Metric
from evalkit.benchmarks.request import Request
from evalkit.benchmarks.results import FinishedResults
from evalkit.display import Say
from evalkit.inputs.validated import Stored
from evalkit.models.loading.load import LoadedModel
from evalkit.requests.batches import Batch, Budget, Computation, Planned
from evalkit.runs.columns import schema_of
from evalkit.runs.folder import StoredTask
from evalkit.runs.journal import FinishedRows
from evalkit.runs.scales import FRACTION, Scale
from evalkit.runs.traits import BatchDevice, place_of
from evalkit.runs.writing import RunWriter

NORMS = "norms"
MEASURE = Measure(Scale("score", FRACTION), "share of states that are longer than their mean, in %", True)
STATES, DOCUMENTS = "states.parquet", "documents.parquet"


class State(NamedTuple):
    document: int
    layer: int
    token: int
    norm: float


@dataclass(frozen=True)
class NormsRequest(Request):
    count: int = 12


@dataclass(frozen=True)
class NoFacts:
    """Planning needs to know nothing of the model."""


class Reading:
    facts = NoFacts()

    def __init__(self, loaded: LoadedModel) -> None:
        self.about = {"loaded": loaded.facts()}
        self._model = loaded.model
        self._place = place_of(loaded.device, loaded.attention)

    def place(self, batch: Batch | None = None) -> BatchDevice:
        return self._place

    def compute(self, batch: Batch) -> pa.RecordBatch:
        """No row is ever a Python object."""
        with torch.no_grad():
            states = self._model(torch.tensor([batch.content]), output_hidden_states=True).hidden_states
        norms = torch.stack(states)[:, 0].double().norm(dim=-1).numpy()
        layers, tokens = norms.shape
        columns = {
            "document": np.full(norms.size, batch.number),
            "layer": np.repeat(np.arange(layers), tokens),
            "token": np.tile(np.arange(tokens), layers),
            "norm": norms.ravel(),
        }
        return pa.record_batch(columns, schema=schema_of(State))


class NormsTask(StoredTask):
    n: int
    value: float
    stderr: float | None


class NormsResults(Stored):
    tasks: list[NormsTask]


class NormsComputation(Computation):
    rows = (State,)
    key = ("document",)
    facts = NoFacts

    def is_missing(self, plan: DocumentPlan, finished: FinishedRows) -> bool:
        return any((NORMS, number) not in finished for number in range(len(plan.tasks[NORMS])))

    def candidates(self, plan: DocumentPlan) -> None:
        pass

    def computer(self, candidates: None, loaded: LoadedModel, budget: Budget, say: Say) -> Reading:
        return Reading(loaded)

    def batches(self, plan: DocumentPlan, facts: NoFacts, tokenizer: Any, finished: FinishedRows, say: Say) -> Planned:
        left = [number for number in range(len(plan.tasks[NORMS])) if (NORMS, number) not in finished]
        found = (Batch(NORMS, number, tokenizer(plan.tasks[NORMS][number]).input_ids, State, 1.0, 1) for number in left)
        return Planned(found, len(plan.tasks[NORMS]), len(plan.tasks[NORMS]) - len(left))


class FinishedNorms(FinishedResults):
    def metrics(self, rule: str | None = None) -> list[Metric]:
        [task] = self.run.stored["tasks"]
        return [Metric(Scale("long states", FRACTION), NORMS, task["n"], task["value"], task["stderr"])]

    def comparable(self) -> Comparable:
        return GradedAnswers(self.run, self.documents, ("text",), {"Average": [NORMS]}, {NORMS: MEASURE})

    def documents(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, ("task", "id", "text", "score"))
        return table.assign(source=table["id"])


class Norms(Benchmark):
    kind = NORMS
    request = NormsRequest
    computation = NormsComputation()
    results_form = NormsResults
    read = FinishedNorms

    def plan(self, request: NormsRequest, say: Say) -> DocumentPlan:
        checkpoint = request.model.locate(say)
        texts = tuple(" ".join(str((5 * n + 3 * k) % 10) for k in range(6 + n % 4)) for n in range(request.count))
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        context = context_of(request.model, checkpoint, NORMS)
        tasks = {NORMS: TaskDocuments(texts, "made up", digest)}
        return generated_plan(NORMS, request, checkpoint, context, tasks, {}, say)

    def finish(self, plan: DocumentPlan, finished: FinishedRows, writer: RunWriter) -> None:
        """A document's score is the share of its states that are longer than their mean."""
        scores: list[float] = []

        def states() -> Iterator[pa.RecordBatch]:
            for batch in finished.batches(NORMS):
                norms = batch["norm"].to_numpy()
                scores.append(float((norms > norms.mean()).mean()))
                yield batch

        writer.save_batches(STATES, schema_of(State), states())
        ids = [str(number) for number in range(len(scores))]
        writer.save_table(
            DOCUMENTS, pd.DataFrame({"task": NORMS, "id": ids, "text": plan.tasks[NORMS], "score": scores})
        )
        mean, error = float(np.mean(scores)), float(pd.Series(scores).sem())
        about = {"task": NORMS, "n": len(scores), "value": mean, "stderr": error}
        average = {"name": "Average"} | MEASURE.scale.stored(mean, error)
        writer.save_results({"tasks": [about], "averages": [average]})
