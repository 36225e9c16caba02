"""Perplexity of texts: bits per byte by document and by position.

In: a `PerplexityRequest`. Out: a run folder with the tables of `results.py` and results.json.
"""

from __future__ import annotations

from collections.abc import Mapping

from evalkit.benchmarks.base import Benchmark, calling, naming
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.perplexity import PERPLEXITY
from evalkit.benchmarks.perplexity.windows import KEY, PositionRow
from evalkit.errors import UnknownNameError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

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


class Perplexity(Benchmark):
    """Benchmark of perplexities of texts."""

    kind = PERPLEXITY
    row = PositionRow
    key = KEY
    results_form = _PerplexityResults

    request = naming("evalkit.benchmarks.perplexity.plan:PerplexityRequest")
    plan = calling("evalkit.benchmarks.perplexity.plan:plan_perplexity")
    facts = naming("evalkit.benchmarks.perplexity.batches:PerplexityFacts")
    is_missing = calling("evalkit.benchmarks.perplexity.batches:is_missing")
    setup = calling("evalkit.benchmarks.perplexity.batches:setup_of")
    computer = calling("evalkit.benchmarks.perplexity.batches:WindowScoring")
    batches = calling("evalkit.benchmarks.perplexity.batches:planned_batches")
    token_counts = calling("evalkit.benchmarks.perplexity.batches:task_tokens")
    finish = calling("evalkit.benchmarks.perplexity.results:write_results")
    comparable = calling("evalkit.benchmarks.perplexity.results:comparable_documents")
    headline = calling("evalkit.benchmarks.perplexity.results_report:headline")
    report = calling("evalkit.benchmarks.perplexity.results_report:perplexity_report")
    figures = calling("evalkit.benchmarks.perplexity.results_report:run_figures")

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Return bits per byte and perplexities of each task."""
        if rule not in (None, PERPLEXITY):
            raise UnknownNameError(f"rule of run {run.folder}", rule, (PERPLEXITY,))
        return [
            Metric(task["task"], name, task["n"], task[name], task[error] if error else None, False, None)
            for task in run.stored["tasks"]
            for name, error in _METRICS.items()
        ]

    def suites(self) -> Mapping[str, str]:
        return {PERPLEXITY: "bits per byte of texts, by document and position"}
