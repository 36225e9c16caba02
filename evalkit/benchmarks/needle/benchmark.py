"""Needle-in-a-haystack test: retrieval of a number from a long text, by length and depth.

In: a `NeedleRequest`. Out: a run folder with

needles.parquet   one row for each length, depth and repeat
results.json      the fraction of needles found
heatmap.png, .pdf
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import calling, naming
from evalkit.benchmarks.generated import GeneratedBenchmark, GenerationRequest
from evalkit.benchmarks.needle import HEATMAPS, NEEDLE, NEEDLES
from evalkit.benchmarks.outcomes import Metric
from evalkit.benchmarks.request import spread
from evalkit.display import Say
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    from evalkit.benchmarks.document_views import TaskView
    from evalkit.benchmarks.needle.plan import NeedlePlan
    from evalkit.generation.capacity import GeneratingFacts


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
    results_form = _NeedleResults

    request = naming("evalkit.benchmarks.needle.plan:NeedleRequest")
    plan = calling("evalkit.benchmarks.needle.plan:plan_needle")
    save = calling("evalkit.benchmarks.needle.results:save_needles")
    report = calling("evalkit.benchmarks.needle.results:needle_report")
    comparable = calling("evalkit.benchmarks.needle.results:Needles")
    figures = calling("evalkit.benchmarks.needle.results:run_figures")

    def documents(self, plan: NeedlePlan) -> dict[str, list[str]]:
        """Return the ids of the needle cases, which are their numbers."""
        return {NEEDLE: [str(number) for number in range(len(plan.cases))]}

    def generation_requests(
        self, plan: NeedlePlan, task: str, facts: GeneratingFacts, tokenizer: Any
    ) -> list[GenerationRequest]:
        """Build and tokenise the prompts of all cases."""
        from evalkit.benchmarks.needle.plan import MAX_NEW_TOKENS, pattern_of
        from evalkit.generation.prompts import Prompt, Stops, as_message

        chat, ends = plan.request.chat, frozenset(facts.ends)
        size = cache(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))

        def encode(text: str) -> list[int]:
            return as_message(tokenizer, text) if chat else list(tokenizer(text, verbose=False).input_ids)

        requests = []
        for number, case in enumerate(plan.cases):
            tokens = plan.haystack.prompt(case, encode, size, cue=not chat)
            # The next token may continue the number with a digit
            stops = Stops(ends, pattern=pattern_of(case), unsearched_tail=1)
            prompt = Prompt(number, tokens, MAX_NEW_TOKENS, stops)
            digest = hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()
            requests.append(GenerationRequest(str(number), prompt, digest, len(tokens), False))
        return requests

    def sampled(self, plan: NeedlePlan, count: int) -> NeedlePlan:
        """Return a plan with cases spread over lengths and depths."""
        return replace(plan, cases=tuple(plan.cases[place] for place in spread(len(plan.cases), count)))

    def serves(self, plan: NeedlePlan, run: Run) -> bool:
        """Return whether the table and the heatmaps exist."""
        return all((run.folder / name).is_file() for name in (NEEDLES, *HEATMAPS))

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Return the fraction of needles found."""
        self.refuse_rule(run, rule)
        [task] = run.stored["tasks"]
        return [Metric(NEEDLE, "found", task["n"], task["found"] / task["n"], None)]

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import AnswerView, answered
        from evalkit.benchmarks.needle.results import case_table

        if not tasks or NEEDLE in tasks:
            rows = case_table(run).to_dict("records")
            documents = [answered(row, NEEDLE, row["answer"], [row["secret"]], row["score"]) for row in rows]
            yield AnswerView(NEEDLE, "found", documents)

    def suites(self) -> Mapping[str, str]:
        return {NEEDLE: "retrieval of a number from a long text, by length and depth"}
