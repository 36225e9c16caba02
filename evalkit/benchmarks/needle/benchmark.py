"""A needle in a haystack: is a number found wherever it lies in a long text?

needles.parquet   a row for each length, depth and repeat
results.json      the share of needles found
heatmap.png, .pdf
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.generated import GeneratedAnswer, GeneratedBenchmark, GeneratingFacts, GenerationRequest
from evalkit.benchmarks.needle import NEEDLE
from evalkit.benchmarks.outcomes import GradedAnswers, Measure, Metric
from evalkit.errors import RunError
from evalkit.inputs.validated import Stored
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.needle.plan import NeedlePlan, NeedleRequest
    from evalkit.reporting.report import Report
    from evalkit.runs.writing import RunWriter

NEEDLES = "needles.parquet"
PICTURES = ("heatmap.png", "heatmap.pdf")
_KEPT = ("tokens", "reused", "text", "new_tokens", "ended", "seconds")
"""Of an answer, in the table."""


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
    """See the module."""

    kind = NEEDLE
    results_form = _NeedleResults

    def request(self) -> type[NeedleRequest]:
        """See `Benchmark`."""
        from evalkit.benchmarks.needle.plan import NeedleRequest

        return NeedleRequest

    def plan(self, request: NeedleRequest, say: Say) -> NeedlePlan:
        """See `Benchmark`."""
        from evalkit.benchmarks.needle.plan import plan_needle

        return plan_needle(request, say)

    def documents(self, plan: NeedlePlan) -> dict[str, list[str]]:
        """See `GeneratedBenchmark`: a cell's number is its id."""
        return {NEEDLE: [str(number) for number in range(len(plan.cells))]}

    def asked(self, plan: NeedlePlan, task: str, facts: GeneratingFacts, tokenizer: Any) -> list[GenerationRequest]:
        """See `GeneratedBenchmark`."""
        from evalkit.benchmarks.needle.plan import MAX_NEW_TOKENS
        from evalkit.benchmarks.needle.text import pattern_of
        from evalkit.generation.prompts import Prompt, Stops
        from evalkit.generation.tokens import as_message

        chat, ends = plan.request.chat, frozenset(facts.ends)
        size = cache(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))

        def encode(text: str) -> list[int]:
            return as_message(tokenizer, text) if chat else list(tokenizer(text, verbose=False).input_ids)

        found = []
        for number, cell in enumerate(plan.cells):
            tokens = plan.haystack.prompt(cell, encode, size, cue=not chat)
            # A digit may still follow the last token
            stops = Stops(ends, pattern=pattern_of(cell), unsearched_tail=1)
            prompt = Prompt(number, tokens, MAX_NEW_TOKENS, stops)
            sha = hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()
            found.append(GenerationRequest(str(number), prompt, sha, len(tokens), False))
        return found

    def save(self, plan: NeedlePlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """See `GeneratedBenchmark`."""
        from evalkit.benchmarks.longbench.plots import needle_heatmap

        table = _table(plan, answers[NEEDLE])
        writer.save_table(NEEDLES, table)
        found = table.pivot_table(index="depth", columns="length", values="found", aggfunc="mean")
        depths, lengths = [float(depth) for depth in found.index], [int(length) for length in found.columns]
        share = float(table["found"].mean())
        writer.save_results(
            {
                "tasks": [{"task": NEEDLE, "n": len(table), "found": int(table["found"].sum())}],
                "averages": [{"name": "needles found", "accuracy": share, "stderr": None}],
                "depths": depths,
                "lengths": lengths,
                "repeats": plan.request.repeats,
                "found": found.to_numpy(float).tolist(),
            },
        )
        # What can be drawn again comes last
        try:
            for name in PICTURES:
                needle_heatmap(found.to_numpy(float), depths, lengths, writer.folder / name)
        except RunError as error:
            raise RunError(f"{error}; the results are saved, and the same command draws what is missing") from error

    def serves(self, plan: NeedlePlan, run: Run) -> bool:
        """Whether table and pictures are there."""
        return all((run.folder / name).is_file() for name in (NEEDLES, *PICTURES))

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """The share of needles found."""
        self.refuse_rule(run, rule)
        [task] = run.stored["tasks"]
        return [Metric(NEEDLE, "found", task["n"], task["found"] / task["n"], None)]

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """See `Benchmark`: how often needles were found, by depth and length."""
        from evalkit.benchmarks.needle.results_report import needle_report

        return needle_report(run)

    def suites(self) -> dict[str, str]:
        """One."""
        return {NEEDLE: "is a number found wherever it lies in a long text?"}

    def comparable(self, run: Run) -> Needles:
        """See `Benchmark`."""
        return Needles(run)


class Needles(GradedAnswers):
    """See `GradedAnswers`: 1 where a needle was found."""

    def __init__(self, run: Run) -> None:
        measure = Measure("share of needles found, in %", True)
        super().__init__(run, self._cells, ("secret",), {"Average": [NEEDLE]}, {NEEDLE: measure})

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`."""
        return {"text": str(self.run.manifest["specification"]["text"])}

    def _cells(self) -> pd.DataFrame:
        table = load_needles(self.run)
        places = table[["length", "depth", "repeat"]].astype(str).agg(" ".join, axis=1)
        return table.assign(task=NEEDLE, id=places, source=places, score=table["found"].astype(float))


def load_needles(run: Run) -> pd.DataFrame:
    """The table of a finished needle test.

    Raises:
        RunError: it is no needle test, not finished, or its table is damaged.
    """
    if run.kind != NEEDLE:
        raise RunError(f"{run.folder} is not a needle test")
    return run.table(NEEDLES, ("length", "depth", "repeat", "secret", "answer", "found"))


def _table(plan: NeedlePlan, answers: Sequence[GeneratedAnswer]) -> pd.DataFrame:
    """A row for each cell."""
    import pandas as pd

    from evalkit.benchmarks.needle.text import is_found

    rows = []
    for cell, answer in zip(plan.cells, answers, strict=True):
        about = {"length": cell.length, "depth": cell.depth, "repeat": cell.repeat, "secret": cell.secret}
        kept = {"answer" if name == "text" else name: getattr(answer, name) for name in _KEPT}
        rows.append(about | {"tokens_sha256": answer.prompt_sha256} | kept | {"found": is_found(cell, answer.text)})
    return pd.DataFrame(rows)
