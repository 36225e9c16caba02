"""Needle-in-a-haystack test: retrieval of a number from a long text, by length and depth.

In: a `NeedleRequest`. Out: a run folder with

needles.parquet   one row for each length, depth and repeat
results.json      the fraction of needles found
heatmap.png, .pdf
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.generated import GeneratedAnswer, GeneratedBenchmark, GenerationRequest
from evalkit.benchmarks.generated_plan import about_run
from evalkit.benchmarks.needle import NEEDLE
from evalkit.benchmarks.outcomes import GradedAnswers, Measure, Metric, run_content
from evalkit.benchmarks.request import spread
from evalkit.display import Say
from evalkit.errors import RunError
from evalkit.inputs.validated import Stored
from evalkit.reporting.decimals import percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.runs.forms import StoredTask

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView
    from evalkit.benchmarks.needle.plan import NeedlePlan, NeedleRequest
    from evalkit.generation.capacity import GeneratingFacts
    from evalkit.reporting.figures import RunFigure
    from evalkit.reporting.report import Report
    from evalkit.runs.writing import RunWriter


NEEDLES = "needles.parquet"
HEATMAPS = ("heatmap.png", "heatmap.pdf")
_ANSWER_COLUMNS = ("tokens", "reused", "text", "new_tokens", "ended", "seconds")
"""Fields of an answer that are columns of the table."""


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

    def request(self) -> type[NeedleRequest]:
        """Return `NeedleRequest`."""
        from evalkit.benchmarks.needle.plan import NeedleRequest

        return NeedleRequest

    def plan(self, request: NeedleRequest, say: Say) -> NeedlePlan:
        """Make the plan of a needle test."""
        from evalkit.benchmarks.needle.plan import plan_needle

        return plan_needle(request, say)

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

        found = []
        for number, case in enumerate(plan.cases):
            tokens = plan.haystack.prompt(case, encode, size, cue=not chat)
            # The next token may continue the number with a digit
            stops = Stops(ends, pattern=pattern_of(case), unsearched_tail=1)
            prompt = Prompt(number, tokens, MAX_NEW_TOKENS, stops)
            sha = hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()
            found.append(GenerationRequest(str(number), prompt, sha, len(tokens), False))
        return found

    def sampled(self, plan: NeedlePlan, count: int) -> NeedlePlan:
        """Return a plan with cases spread over lengths and depths."""
        return replace(plan, cases=tuple(plan.cases[place] for place in spread(len(plan.cases), count)))

    def save(self, plan: NeedlePlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
        """Write the table, the results and the heatmap."""
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
        # Last, since a heatmap can be drawn again from the results
        try:
            for name in HEATMAPS:
                needle_heatmap(found.to_numpy(float), depths, lengths, writer.folder / name)
        except RunError as error:
            raise RunError(f"{error}; the results are saved; run the same command again to draw the heatmap") from error

    def serves(self, plan: NeedlePlan, run: Run) -> bool:
        """Return whether the table and the heatmaps exist."""
        return all((run.folder / name).is_file() for name in (NEEDLES, *HEATMAPS))

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """Return the fraction of needles found."""
        self.refuse_rule(run, rule)
        [task] = run.stored["tasks"]
        return [Metric(NEEDLE, "found", task["n"], task["found"] / task["n"], None)]

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        """Return the fraction of needles found, by depth and length."""

        return needle_report(run)

    def views(self, run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        """Yield the answers of all cases."""
        from evalkit.benchmarks.document_views import AnswerView, answered

        if not tasks or NEEDLE in tasks:
            rows = case_table(run).to_dict("records")
            documents = [answered(row, NEEDLE, row["answer"], [row["secret"]], row["score"]) for row in rows]
            yield AnswerView(NEEDLE, "found", documents)

    def figures(self, runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
        """Return the heatmap of each run."""
        import numpy as np

        from evalkit.benchmarks.longbench.plots import needle_heatmap
        from evalkit.reporting.figures import RunFigure

        return [
            RunFigure(
                f"heatmap-{run.manifest['id']}",
                f"Needles found in %, by length of the text and depth in it: {name}.",
                partial(needle_heatmap, np.array(run.stored["found"]), run.stored["depths"], run.stored["lengths"]),
            )
            for run, name in zip(runs, names, strict=True)
        ]

    def suites(self) -> dict[str, str]:
        """Return the one suite."""
        return {NEEDLE: "retrieval of a number from a long text, by length and depth"}

    def comparable(self, run: Run) -> Needles:
        """Return the cases with their scores."""
        return Needles(run)


class Needles(GradedAnswers):
    """Scores of a needle test: 1 if the needle was found, else 0."""

    def __init__(self, run: Run) -> None:
        measure = Measure("share of needles found, in %", True)
        super().__init__(run, partial(case_table, run), ("secret",), {"Average": [NEEDLE]}, {NEEDLE: measure})

    def must_agree(self, task: str) -> dict[str, str]:
        """Return the text's identity."""
        return {"text": str(self.run.manifest["specification"]["text"])}


def case_table(run: Run) -> pd.DataFrame:
    """Return the table of a finished needle test with the cases as documents: task, id, source and score.

    Raises:
        RunError: as `load_needles`.
    """
    table = load_needles(run)
    places = table[["length", "depth", "repeat"]].astype(str).agg(" ".join, axis=1)
    return table.assign(task=NEEDLE, id=places, source=places, score=table["found"].astype(float))


def load_needles(run: Run) -> pd.DataFrame:
    """Return the table of a finished needle test.

    Raises:
        RunError: the run is not a needle test, is not finished, or its table is damaged.
    """
    if run.kind != NEEDLE:
        raise RunError(f"run {run.folder} is not a needle test")
    return run.table(NEEDLES, ("length", "depth", "repeat", "secret", "answer", "found"))


def _table(plan: NeedlePlan, answers: Sequence[GeneratedAnswer]) -> pd.DataFrame:
    """Return the table, one row for each case."""
    import pandas as pd

    from evalkit.benchmarks.needle.plan import is_found

    rows = []
    for case, answer in zip(plan.cases, answers, strict=True):
        about = {"length": case.length, "depth": case.depth, "repeat": case.repeat, "secret": case.secret}
        kept = {"answer" if name == "text" else name: getattr(answer, name) for name in _ANSWER_COLUMNS}
        rows.append(about | {"tokens_sha256": answer.prompt_sha256} | kept | {"found": is_found(case, answer.text)})
    return pd.DataFrame(rows)


def needle_report(run: Run) -> Report:
    """Return the percentage of needles found; one row for each depth, one column for each length."""
    stored = run.stored
    lengths, depths, found = stored["lengths"], stored["depths"], stored["found"]
    rows = [
        [f"{depth:g} %", *(percent(share, 0) for share in shares)] for depth, shares in zip(depths, found, strict=True)
    ]
    rows.append(["all", *(percent(sum(column) / len(column), 0) for column in zip(*found, strict=True))])
    [task] = stored["tasks"]
    texts = stored["repeats"]
    notes = (
        f"needles found in %, by tokens of the prompt and depth in it; {task['found']} of {task['n']} in all, "
        f"{texts} text{'s' if texts > 1 else ''} a cell",
        f"text: {run.manifest['documents']['needle']['source']}",
        *about_run(run),
    )
    table = simple_table("needle", ["depth", *(f"{length:,}" for length in lengths)], rows, ruled={len(depths)})
    records = [
        {"depth": depth, "length": length, "n": texts, "found": share}
        for depth, shares in zip(depths, found, strict=True)
        for length, share in zip(lengths, shares, strict=True)
    ]
    return Report((table,), notes=notes, content=run_content(run), records=records)
