"""Needle-in-a-haystack test: retrieval of a number from a long text, by length and depth.

In: a `NeedleRequest`. Out: a run folder with

needles.parquet   one row for each length, depth and repeat
results.json      the fraction of needles found
heatmap.png, .pdf
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import lazy
from evalkit.benchmarks.generated import (
    DocumentPlan,
    GeneratedBenchmark,
    GenerationRequest,
    context_of,
    generated_plan,
)
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.request import Request
from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.inputs.settings import setting
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    from evalkit.benchmarks.document_views import TaskView
    from evalkit.benchmarks.needle.text import Haystack

NEEDLE = "needle"
"""Name of the benchmark and of its one task."""
NEEDLES = "needles.parquet"
HEATMAPS = ("heatmap.png", "heatmap.pdf")
MAX_NEW_TOKENS = 32
"""Maximum length of an answer: a sentence with seven digits, each of which may be a token."""
_SHORTEST = 1000
_MAX_CASES = 100_000


@dataclass(frozen=True)
class NeedleRequest(Request):
    """Settings of a needle test."""

    lengths: tuple[int, ...] = setting(
        (), "Tokens of the prompts, separated by commas.", "1000,2000,4000,… up to the context window"
    )
    depths: tuple[float, ...] = setting(
        (0.0, 25.0, 50.0, 75.0, 100.0), "Positions of the needle, in percent of the text."
    )
    repeats: int = setting(3, "Texts for each length and depth.")
    text: Path | None = setting(None, "Text file to hide needles in.", "sentences made by evalkit")
    chat: bool = setting(False, "Put prompts into the tokenizer's chat template, for models tuned to chat.")


@dataclass(frozen=True)
class NeedlePlan(DocumentPlan):
    """A plan whose documents are cases, ordered by length, depth and repeat."""

    haystack: Haystack


class _NeedleTask(StoredTask):
    n: int
    found: int


class _NeedleResults(Stored):
    tasks: list[_NeedleTask]
    depths: list[float]
    lengths: list[int]
    repeats: int
    found: list[list[float]]


class Needle(GeneratedBenchmark):
    """Benchmark of needle-in-a-haystack tests."""

    kind = NEEDLE
    request = NeedleRequest
    results_form = _NeedleResults
    files = (NEEDLES, *HEATMAPS)

    save = lazy("evalkit.benchmarks.needle.results:save_needles")
    report = lazy("evalkit.benchmarks.needle.results:needle_report")
    comparable = lazy("evalkit.benchmarks.needle.results:Needles")
    figures = lazy("evalkit.benchmarks.needle.results:run_figures")

    def plan(self, request: NeedleRequest, say: Say) -> NeedlePlan:
        from evalkit.benchmarks.needle.text import Haystack, NeedleCase

        haystack = Haystack(request.text)
        checkpoint = request.model.locate(say)
        context = context_of(request.model, checkpoint, NEEDLE)
        lengths = _lengths(request.lengths, context)
        depths = sorted(set(request.depths))
        if not depths or not all(0 <= depth <= 100 for depth in depths):
            shown = ", ".join(f"{depth:g}" for depth in depths)
            raise UsageError(f"--depths {shown}: expected percentages from 0 to 100")
        if (count := len(lengths) * len(depths) * request.repeats) > _MAX_CASES:
            raise UsageError(
                f"{count:,} needles, more than the maximum of {_MAX_CASES:,}; "
                "lower --repeats, or give fewer lengths or depths"
            )
        cases = [NeedleCase(*case) for case in product(lengths, depths, range(request.repeats))]
        grid = {"lengths": lengths, "depths": depths, "repeats": request.repeats, "text": haystack.identity}
        documents = {NEEDLE: {"source": haystack.source, "official": None, "count": len(cases)}}
        tasks = {NEEDLE: cases}
        plan = generated_plan(NEEDLE, request, checkpoint, context, tasks, grid, documents, say, request.chat)
        return NeedlePlan(**vars(plan), haystack=haystack)

    def generation_requests(
        self, plan: NeedlePlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[GenerationRequest]:
        import numpy as np

        from evalkit.benchmarks.needle.text import pattern_of
        from evalkit.generation.prompts import Prompt, Stops, as_message

        chat = plan.request.chat
        size = cache(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))

        def encode(text: str) -> list[int]:
            return as_message(tokenizer, text) if chat else list(tokenizer(text, verbose=False).input_ids)

        requests = []
        for number, case in enumerate(plan.tasks[task]):
            tokens = np.asarray(plan.haystack.prompt(case, encode, size, cue=not chat), np.int64)
            # The next token may continue the number with a digit
            stops = Stops(ends, pattern=pattern_of(case), unsearched_tail=1)
            digest = hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()
            requests.append(GenerationRequest(str(number), Prompt(number, tokens, MAX_NEW_TOKENS, stops), digest))
        return requests

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(run, rule)
        [task] = run.stored["tasks"]
        return [Metric(NEEDLE, "found", task["n"], task["found"] / task["n"], None)]

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import answer_views
        from evalkit.benchmarks.needle.results import load_needles

        table = load_needles(run)
        table = table.assign(references=table["secret"].map(lambda secret: [secret]))
        yield from answer_views(table, tasks, lambda _: "found")

    def suites(self) -> Mapping[str, str]:
        return {NEEDLE: "retrieval of a number from a long text, by length and depth"}


def _lengths(requested: tuple[int, ...], context: int) -> list[int]:
    """Return the sorted prompt lengths; raise a `UsageError` if the context window is too short for one."""
    most = context - MAX_NEW_TOKENS
    if not requested:
        doubled = [_SHORTEST << power for power in range(most.bit_length()) if _SHORTEST << power <= most]
        if not doubled:
            raise UsageError(
                f"the model's context window is {context} tokens; give --lengths of at most {most}, or a longer "
                "--context"
            )
        return doubled
    if not all(1 <= length <= most for length in requested):
        raise UsageError(
            f"--lengths {','.join(map(str, requested))}: the model's context window is {context} tokens, and an answer "
            f"may need {MAX_NEW_TOKENS}; give lengths of 100 to {most}, or a longer --context"
        )
    return sorted(set(requested))
