"""Perplexity of texts: bits per byte by document and by position.

In: a `PerplexityRequest`. Out: a run folder with the tables of `results.py` and results.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evalkit.benchmarks.base import Benchmark, lazy
from evalkit.benchmarks.generated import DocumentPlan
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.perplexity.windows import KEY, PositionRow
from evalkit.benchmarks.request import DocumentRequest, numerics, plain_manifest
from evalkit.display import Say
from evalkit.errors import UnknownNameError
from evalkit.inputs.settings import setting
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

PERPLEXITY = "perplexity"
"""Name of the benchmark and of its suite."""
_VERSION = 1
"""Increased with every change of evalkit that changes a number of this benchmark."""
_METRICS = {
    "bits_per_byte": "stderr",
    "byte_perplexity": "",
    "word_perplexity": "",
    "token_perplexity": "",
    "document_bits_per_byte": "document_stderr",
}
"""Metric → key of its standard error in results.json, if it has one."""


class _Sums(Stored):
    n: int
    bytes: int
    words: int
    tokens: int
    windows: int
    nats: float
    bits_per_byte: float
    stderr: float | None
    byte_perplexity: float
    word_perplexity: float | None
    token_perplexity: float | None
    document_bits_per_byte: float
    document_stderr: float | None


class _PerplexityTask(StoredTask, _Sums):
    seconds: float


class _StoredBin(Stored):
    first: int


class _PerplexityResults(Stored):
    tasks: list[_PerplexityTask]
    whole: _Sums
    positions: list[_StoredBin]


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


class Perplexity(Benchmark):
    """Benchmark of perplexities of texts."""

    kind = PERPLEXITY
    row = PositionRow
    key = KEY
    request = PerplexityRequest
    results_form = _PerplexityResults

    facts = lazy("evalkit.benchmarks.perplexity.windows:PerplexityFacts")
    is_missing = lazy("evalkit.benchmarks.perplexity.batches:is_missing")
    setup = lazy("evalkit.benchmarks.perplexity.batches:setup_of")
    computer = lazy("evalkit.benchmarks.perplexity.batches:WindowScoring")
    batches = lazy("evalkit.benchmarks.perplexity.batches:planned_batches")
    token_counts = lazy("evalkit.benchmarks.perplexity.batches:task_tokens")
    finish = lazy("evalkit.benchmarks.perplexity.results:write_results")
    comparable = lazy("evalkit.benchmarks.perplexity.results:comparable_documents")
    headline = lazy("evalkit.benchmarks.perplexity.results_report:headline")
    report = lazy("evalkit.benchmarks.perplexity.results_report:perplexity_report")
    figures = lazy("evalkit.benchmarks.perplexity.results_report:run_figures")

    def plan(self, request: PerplexityRequest, say: Say) -> DocumentPlan:
        from evalkit.benchmarks.perplexity.texts import read_texts

        texts = read_texts(request.text, request.key)
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
        tasks = {
            name: [task.documents[place] for place in request.selection.places(name, [name] * len(task.documents))]
            for name, task in texts.items()
        }
        documents = {
            name: {"source": str(texts[name].source), "official": None, "count": len(members)}
            for name, members in tasks.items()
        }
        about = {"template": {"name": "text"}, "documents": documents}
        manifest = plain_manifest(PERPLEXITY, request.model, checkpoint, specification, **about)
        return DocumentPlan(request, checkpoint, tasks, manifest)

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        if rule not in (None, PERPLEXITY):
            raise UnknownNameError(f"rule of run {run.folder}", rule, (PERPLEXITY,))
        return [
            Metric(task["task"], name, task["n"], task[name], task[error] if error else None, False, None)
            for task in run.stored["tasks"]
            for name, error in _METRICS.items()
        ]

    def suites(self) -> Mapping[str, str]:
        return {PERPLEXITY: "bits per byte of texts, by document and position"}
