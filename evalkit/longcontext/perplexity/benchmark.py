"""Perplexity of texts: bits per byte by document and by position.

In: a `PerplexityRequest`. Out: a run folder with the tables of `results.py` and results.json. Short windows, of one
document or of several, go through the model together, as one tree; a long one is a batch by itself. A document may thus
be in several batches, which are in the order of documents and do not depend on what is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from evalkit.benchmarks.base import Benchmark, ListedSuite, RequestPlan, lazy
from evalkit.benchmarks.generated import DocumentPlan
from evalkit.benchmarks.outcomes import GradedAnswers, Measure, Metric
from evalkit.benchmarks.request import DocumentRequest, numerics, plain_manifest
from evalkit.benchmarks.results import FinishedResults, of_run
from evalkit.data.sampling import spread
from evalkit.display import Say
from evalkit.inputs.settings import setting
from evalkit.longcontext.perplexity import SCALE, windows
from evalkit.longcontext.perplexity.windows import TextDocument, TextRequests
from evalkit.requests.requests import RunRequests
from evalkit.runs.scales import Scale

if TYPE_CHECKING:
    import pandas as pd


PERPLEXITY = "perplexity"
_VERSION = 1
"""Increased with every change of evalkit that changes a number of this benchmark."""
_METRICS = (
    (SCALE, "value", "stderr"),
    (Scale("byte_perplexity", "perplexity", higher_is_better=False), "byte_perplexity", None),
    (Scale("word_perplexity", "perplexity", higher_is_better=False), "word_perplexity", None),
    (Scale("token_perplexity", "perplexity", higher_is_better=False), "token_perplexity", None),
    (SCALE.named("document_bits_per_byte"), "document_bits_per_byte", "document_stderr"),
)
"""Scales of the metrics, and the keys of the value and of its standard error in results.json, if it has one."""
_MEASURE = Measure(
    SCALE,
    "bits per byte of each document, lower is better; the scores are means over documents, each of which counts the "
    "same, whereas the run's own bits_per_byte is over all bytes",
    graded=True,
)


@dataclass(frozen=True)
class PerplexityRequest(DocumentRequest):
    """Settings of a perplexity run."""

    text: tuple[Path, ...] = setting(
        (),
        "A .txt file (one document), a .jsonl file (one on each line), or a folder of them; repeat for several tasks.",
        metavar="FILE",
        has_variable=False,
    )
    key: str = setting("text", "Key of the text in .jsonl files.", has_variable=False)
    stride: int | None = setting(
        None,
        "Tokens that each window after the first scores; fewer give each token more context, and take longer.",
        "the window",
        metavar="TOKENS",
    )


@dataclass(frozen=True)
class PerplexityPlan(DocumentPlan, RequestPlan):
    @cached_property
    def requests(self) -> RunRequests:
        return RunRequests([self._requests(task, documents) for task, documents in self.tasks.items()])

    def sampled(self, sample: int) -> RunRequests:
        tasks = []
        for task, documents in self.tasks.items():
            chosen = [documents[index] for index in spread(len(documents), sample)]
            tasks.append(replace(self._requests(task, chosen), sizes={task: len(documents)}))
        return RunRequests(tasks)

    def _requests(self, task: str, documents: Sequence[TextDocument]) -> TextRequests:
        tokens = self.manifest["specification"]["windows"]["tokens"]
        return TextRequests(task, documents, tokens, self.request.stride)


class FinishedPerplexity(FinishedResults):
    headline = of_run("evalkit.longcontext.perplexity.results:headline")
    report = of_run("evalkit.longcontext.perplexity.results:perplexity_report")
    figures = lazy("evalkit.longcontext.perplexity.results:run_figures")

    def metrics(self, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(rule)
        metrics = []
        for task in self.run.stored["tasks"]:
            for scale, value, error in _METRICS:
                stderr = task[error] if error else None
                metrics.append(Metric(scale, task["task"], task["n"], task[value], stderr))
        return metrics

    def comparable(self) -> GradedAnswers:
        groups = {"Average": tuple(self.run.manifest["documents"])}
        return GradedAnswers(self.run, self._scored, ("bytes",), groups, {PERPLEXITY: _MEASURE})

    def _scored(self) -> pd.DataFrame:
        table = self.run.table("documents.parquet")
        return table.assign(id=table["document"], source=table["document"], score=table["bits_per_byte"])


class Perplexity(Benchmark):
    kind = PERPLEXITY
    request = PerplexityRequest
    read = FinishedPerplexity

    finish = lazy("evalkit.longcontext.perplexity.results:finish")

    def suites(self) -> dict[str, ListedSuite]:
        return {PERPLEXITY: ListedSuite("bits per byte of texts, by document and position")}

    def plan(self, request: PerplexityRequest, say: Say) -> PerplexityPlan:
        texts = windows.read_texts(request.text, request.key)
        checkpoint = request.model.locate(say)
        # Windows may be shorter than the model's, which no extension shortens
        context = request.model.context
        specification = {
            **numerics(request.model, checkpoint, request.limit, say),
            **request.selection.specification,
            "suite": PERPLEXITY,
            "documents": {name: task.digest for name, task in texts.items()},
            "windows": {"tokens": None if context in (None, "none") else int(context), "stride": request.stride},
            "version": _VERSION,
        }
        tasks = {name: task.selected(name, request.selection) for name, task in texts.items()}
        about = {"template": {"name": "text"}, "documents": {name: task.about() for name, task in tasks.items()}}
        manifest = plain_manifest(PERPLEXITY, request, checkpoint, specification, **about)
        return PerplexityPlan(request, checkpoint, {name: task.documents for name, task in tasks.items()}, manifest)
