"""Perplexity of texts: bits per byte by document and by position.

In: a `PerplexityRequest`. Out: a run folder with the tables of `results.py` and results.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Benchmark, Budget, Planned
from evalkit.benchmarks.outcomes import GradedAnswers, Measure, Metric
from evalkit.benchmarks.perplexity import PERPLEXITY
from evalkit.benchmarks.perplexity.windows import KEY, WIDTH, PositionRow
from evalkit.benchmarks.request import TaskTokens, spread
from evalkit.display import Say
from evalkit.errors import UnknownNameError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.perplexity.batches import PerplexityFacts, PerplexitySetup, WindowScoring
    from evalkit.benchmarks.perplexity.plan import PerplexityPlan, PerplexityRequest
    from evalkit.models.load import LoadedModel
    from evalkit.reporting.figures import RunFigure
    from evalkit.reporting.report import Report
    from evalkit.runs.finished_rows import FinishedRows
    from evalkit.runs.writing import RunWriter

_ROW_BYTES = 40
"""Bytes of a row in journal and tables together."""
_METRICS = {
    "bits_per_byte": "stderr",
    "byte_perplexity": "",
    "word_perplexity": "",
    "token_perplexity": "",
    "document_bits_per_byte": "document_stderr",
}
"""Metric → key of its standard error in results.json, if it has one."""
_WORDS = (
    "bits per byte of each document, lower is better; the scores are means over documents, each of which counts the "
    "same, whereas the run's own bits_per_byte is over all bytes"
)


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
    last: int
    documents: int
    tokens: int
    bytes: int
    nats: float
    bits_per_byte: float | None
    stderr: float | None


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

    def request(self) -> type[PerplexityRequest]:
        """Return `PerplexityRequest`."""
        from evalkit.benchmarks.perplexity.plan import PerplexityRequest

        return PerplexityRequest

    def plan(self, request: PerplexityRequest, say: Say) -> PerplexityPlan:
        """Make the plan of a run."""
        from evalkit.benchmarks.perplexity.plan import plan_perplexity

        return plan_perplexity(request, say)

    def is_missing(self, plan: PerplexityPlan, finished: FinishedRows) -> bool:
        """Return whether the journal lacks a window of a document."""
        from evalkit.benchmarks.perplexity.batches import is_finished

        return not all(is_finished(one, finished) for members in plan.documents.values() for one in members)

    def facts(self) -> type[PerplexityFacts]:
        """Return `PerplexityFacts`."""
        from evalkit.benchmarks.perplexity.batches import PerplexityFacts

        return PerplexityFacts

    def setup(self, plan: PerplexityPlan) -> PerplexitySetup:
        """Return the windows' settings and the beginning of a document."""
        from evalkit.benchmarks.perplexity.batches import CHECKED_CHARACTERS, PerplexitySetup, are_long

        documents = [one for members in plan.documents.values() for one in members]
        first = replace(documents[0], text=documents[0].text[:CHECKED_CHARACTERS])
        return PerplexitySetup(first, plan.window, plan.request.stride, are_long(documents))

    def computer(self, setup: PerplexitySetup, loaded: LoadedModel, budget: Budget, say: Say) -> WindowScoring:
        """Prepare a loaded model for scoring."""
        from evalkit.benchmarks.perplexity.batches import WindowScoring

        return WindowScoring(setup, loaded, budget.scored, say)

    def batches(
        self, plan: PerplexityPlan, facts: PerplexityFacts, tokenizer: Any, finished: FinishedRows, say: Say
    ) -> Planned:
        """Plan the batches of windows that have no rows; work is counted in bytes."""
        from evalkit.benchmarks.perplexity.batches import batches_of, is_finished

        documents = [one for members in plan.documents.values() for one in members]
        total = sum(len(one.content) for one in documents)
        done = sum(len(one.content) for one in documents if is_finished(one, finished))
        return Planned(batches_of(plan, facts, tokenizer, finished), float(total), float(done))

    def finish(self, plan: PerplexityPlan, finished: FinishedRows, writer: RunWriter) -> None:
        """Write the tables and the results."""
        from evalkit.benchmarks.perplexity.results import write_results

        write_results(plan, finished, writer)

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Return bits per byte and perplexities of each task."""
        if rule not in (None, PERPLEXITY):
            raise UnknownNameError(f"rule of run {run.folder}", rule, (PERPLEXITY,))
        return [
            Metric(task["task"], name, task["n"], task[name], task[error] if error else None, False, None)
            for task in run.stored["tasks"]
            for name, error in _METRICS.items()
        ]

    def comparable(self, run: Run) -> GradedAnswers:
        """Return the documents with their bits per byte, under the rule "perplexity"."""
        tasks = tuple(run.manifest["documents"])
        measure = Measure(_WORDS, True, "bits_per_byte", None, False)
        return GradedAnswers(run, partial(_documents, run), ("bytes",), {"Average": tasks}, {PERPLEXITY: measure})

    def headline(self, run: Run, rule: str | None = None) -> tuple[float | None, str]:
        """Return bits per byte over all documents; as the sort key negative, since lower is better."""
        from evalkit.benchmarks.perplexity.results_report import value_text

        whole = run.stored["whole"]
        return -whole["bits_per_byte"], f"{value_text(whole)} bits per byte"

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """Return bits per byte and perplexities by task, and bits per byte by position."""
        from evalkit.benchmarks.perplexity.results_report import perplexity_report

        return perplexity_report(run)

    def figures(self, runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
        """Return bits per byte by position, with all runs on the same documents in one picture."""
        from evalkit.benchmarks.perplexity.results_report import run_figures

        return run_figures(runs, names)

    def token_counts(self, plan: PerplexityPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        """Count the tokens of a sample of each task's documents."""
        from evalkit.benchmarks.perplexity.windows import WindowSettings, windows_of
        from evalkit.models.spec import window_of

        window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
        window = min(window, plan.window or window)
        prefix = next(one for one in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if one is not None)
        settings = WindowSettings(window, min(plan.request.stride or window, window), prefix, tokenizer.decode(prefix))
        found = []
        for task, documents in plan.documents.items():
            taken = [documents[place] for place in spread(len(documents), sample)]
            lengths = [len(one.tokens) - 1 for document in taken for one in windows_of(document, tokenizer, settings)]
            scale = len(documents) / len(taken)
            tokens = scale * sum(lengths)
            row_bytes = _ROW_BYTES * math.ceil(sum(lengths) / len(lengths) / WIDTH)
            found.append(
                TaskTokens(task, len(documents), len(taken), scale * len(lengths), tokens, tokens, row_bytes=row_bytes)
            )
        return found

    def suites(self) -> Mapping[str, str]:
        """Return the one suite."""
        return {PERPLEXITY: "bits per byte of texts, by document and position"}


def _documents(run: Run) -> pd.DataFrame:
    """Return the table of documents with the columns of `GradedAnswers`."""
    from evalkit.benchmarks.perplexity.results import DOCUMENT_COLUMNS, DOCUMENTS

    table = run.table(DOCUMENTS, DOCUMENT_COLUMNS)
    return table.assign(id=table["document"], source=table["document"], score=table["bits_per_byte"])
