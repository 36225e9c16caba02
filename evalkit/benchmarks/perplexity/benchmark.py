"""Perplexity of texts: bits per byte by document and by position.

In: a `PerplexityRequest`. Out: a run folder with the tables of `results.py` and results.json. Short windows, of one
document or of several, go through the model together, as one tree; a long one is a batch by itself. A document may thus
be in several batches, which are in the order of documents and do not depend on what is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Batch, Batches, Benchmark, Budget, Planned, lazy
from evalkit.benchmarks.generated import DocumentPlan
from evalkit.benchmarks.outcomes import GradedAnswers, Measure, Metric
from evalkit.benchmarks.perplexity import SCALE, windows
from evalkit.benchmarks.perplexity.windows import LONG, PerplexityFacts, PositionRow, TextDocument, windows_of
from evalkit.benchmarks.request import DocumentRequest, TaskTokens, numerics, plain_manifest, spread
from evalkit.display import Say
from evalkit.errors import CheckpointError, UsageError
from evalkit.inputs.settings import setting
from evalkit.models.loading.spec import window_of
from evalkit.models.loading.tokenizer import added_tokens
from evalkit.runs.folder import Run
from evalkit.runs.journal import FinishedRows
from evalkit.runs.scales import Scale
from evalkit.runs.traits import BatchDevice, place_of

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.models.loading.load import LoadedModel

PERPLEXITY = "perplexity"
_VERSION = 1
"""Increased with every change of evalkit that changes a number of this benchmark."""
_BYTES_PER_TOKEN = 5
"""Assumed bytes of a token; English text has 4 to 5."""
_CHECKED_CHARACTERS = 1000
"""Characters of the first document on which the model is run at the start."""
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


_Setup = tuple[TextDocument, int | None, int | None, bool]
"""The beginning of the first document; requested tokens of a window (None: the model's) and stride; whether every
document is likely to fill a window that is a batch by itself."""


class Perplexity(Benchmark):
    kind = PERPLEXITY
    row = PositionRow
    key = windows.KEY
    request = PerplexityRequest
    facts = PerplexityFacts

    computer = lazy("evalkit.benchmarks.perplexity.benchmark:_WindowScoring")
    finish = lazy("evalkit.benchmarks.perplexity.results:finish")
    headline = lazy("evalkit.benchmarks.perplexity.results:headline")
    report = lazy("evalkit.benchmarks.perplexity.results:perplexity_report")
    figures = lazy("evalkit.benchmarks.perplexity.results:run_figures")

    def suites(self) -> Mapping[str, str]:
        return {PERPLEXITY: "bits per byte of texts, by document and position"}

    def plan(self, request: PerplexityRequest, say: Say) -> DocumentPlan:
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
        return DocumentPlan(request, checkpoint, {name: task.documents for name, task in tasks.items()}, manifest)

    def is_missing(self, plan: DocumentPlan, finished: FinishedRows) -> bool:
        return not all(_is_finished(document, finished) for document in _documents(plan))

    def setup(self, plan: DocumentPlan) -> _Setup:
        documents = _documents(plan)
        first = replace(documents[0], text=documents[0].text[:_CHECKED_CHARACTERS])
        # Where a document is short, its window is scored alone too
        is_long = len(documents) == 1 or all(len(document.content) >= _BYTES_PER_TOKEN * LONG for document in documents)
        return first, plan.manifest["specification"]["windows"]["tokens"], plan.request.stride, is_long

    def batches(
        self, plan: DocumentPlan, facts: PerplexityFacts, tokenizer: Any, finished: FinishedRows, say: Say
    ) -> Planned:
        documents = _documents(plan)
        total = sum(len(document.content) for document in documents)
        done = sum(len(document.content) for document in documents if _is_finished(document, finished))
        return Planned(_missing_batches(plan, facts, tokenizer, finished), float(total), float(done))

    def token_counts(self, plan: DocumentPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
        window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
        window = min(window, plan.manifest["specification"]["windows"]["tokens"] or window)
        _refuse_stride(plan.request.stride, window)
        stride = plan.request.stride or window
        counts = []
        for task, documents in plan.tasks.items():
            sampled = [documents[index] for index in spread(len(documents), sample)]
            texts = [document.text for document in sampled]
            sizes = map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
            cut = chain.from_iterable(windows.spans(size, 1, window, stride) for size in sizes)
            lengths = [stop - start - 1 for start, _, stop in cut]
            scale = len(documents) / len(sampled)
            tokens = scale * sum(lengths)
            counts.append(TaskTokens(task, len(documents), len(sampled), scale * len(lengths), tokens, tokens))
        return counts

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(run, rule)
        metrics = []
        for task in run.stored["tasks"]:
            for scale, value, error in _METRICS:
                stderr = task[error] if error else None
                metrics.append(Metric(scale, task["task"], task["n"], task[value], stderr))
        return metrics

    def comparable(self, run: Run) -> GradedAnswers:
        groups = {"Average": tuple(run.manifest["documents"])}
        return GradedAnswers(run, lambda: _scored(run), ("bytes",), groups, {PERPLEXITY: _MEASURE})


def _refuse_stride(stride: int | None, window: int) -> None:
    if stride is not None and stride > window:
        raise UsageError(f"--stride {stride}: more than the context window of {window:,} tokens; give fewer")


def _scored(run: Run) -> pd.DataFrame:
    table = run.table("documents.parquet")
    return table.assign(id=table["document"], source=table["document"], score=table["bits_per_byte"])


def _documents(plan: DocumentPlan) -> list[TextDocument]:
    return list(chain.from_iterable(plan.tasks.values()))


def _is_finished(document: TextDocument, finished: FinishedRows) -> bool:
    number = 0
    while (document.task, document.number, number, False) in finished:
        number += 1
    return (document.task, document.number, number, True) in finished


def _missing_batches(plan: DocumentPlan, facts: PerplexityFacts, tokenizer: Any, finished: FinishedRows) -> Batches:
    for task, documents in plan.tasks.items():
        if all(_is_finished(document, finished) for document in documents):
            continue
        cut = (windows_of(document, tokenizer, facts, plan.request.stride) for document in documents)
        for number, members in enumerate(windows.packed(chain.from_iterable(cut), facts.token_budget)):
            # A finished batch is left out as a whole: the others' numbers stay the same
            if any((task, window.document, window.number, window.is_last) not in finished for window in members):
                work = float(sum(int(window.bytes.sum()) for window in members))
                ended = sum(window.is_last for window in members)
                yield Batch(task, number, windows.content_of(task, members), work, ended)


class _WindowScoring:
    def __init__(self, setup: _Setup, loaded: LoadedModel, budget: Budget, say: Say) -> None:
        from evalkit.scoring.architecture import auto_budget
        from evalkit.scoring.engine import Engine

        first, requested, stride, is_long = setup
        window = min(loaded.window, requested or loaded.window)
        _refuse_stride(stride, window)
        before, _ = added_tokens(loaded.tokenizer)
        prefix = before or [token for token in (loaded.bos_id, loaded.eos_id) if token is not None][:1]
        if not prefix:
            raise CheckpointError(f"{loaded.name}: its tokenizer has no BOS or EOS token; give another --tokenizer")
        tokens = budget.scored or auto_budget(loaded.model)
        self._engine = engine = Engine(loaded.model, tokens, say, remembers=loaded.stock, files=loaded.files)
        facts = PerplexityFacts(window, engine.budget, tuple(prefix))
        first_window = windows_of(first, loaded.tokenizer, facts, stride)[0]
        # The check of sharing takes as long as some windows, and is not needed where each is a batch by itself
        alone = is_long and window >= windows.longest_shared(tokens)
        engine.check(windows.content_of(first.task, (first_window,)).batch.sequences, alone)
        self.facts = replace(facts, token_budget=engine.budget)
        self.about: dict[str, Any] = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts(),
        }
        kernel = engine.kernel if engine.shares else "alone"
        self._places = {True: place_of(loaded.device, "alone"), False: place_of(loaded.device, kernel)}

    def place(self, batch: Batch | None = None) -> BatchDevice:
        return self._places[batch is None or batch.content.is_alone]

    def compute(self, batch: Batch) -> list[PositionRow]:
        content = batch.content
        return [
            row
            for item, [scores] in self._engine.score(content.batch, alone=content.is_alone)
            for row in windows.rows_of(content.windows[item], scores.logprobs)
        ]
