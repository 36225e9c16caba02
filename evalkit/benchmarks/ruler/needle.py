"""Needle-in-a-haystack test: one needle in a text, in a grid of lengths and depths, with RULER's two scores.

In: a `NeedleRequest`. Out: a run folder with

needles.parquet   one row for each length, depth and repeat
results.json      the fraction of needles found, and the likelihood of their numbers
heatmap.png, .pdf
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from evalkit.benchmarks import generated
from evalkit.benchmarks.generated import DocumentPlan, GeneratedAnswer, GenerationRequest, TaskDocuments
from evalkit.benchmarks.outcomes import Measure, Metric, run_content
from evalkit.benchmarks.request import Request
from evalkit.benchmarks.ruler.haystack import Haystack, NeedleCase
from evalkit.benchmarks.ruler.results import draw_grid
from evalkit.benchmarks.ruler.retrieval import RetrievalBenchmark, likelihood_columns, scores_of, with_answers
from evalkit.display import Say
from evalkit.errors import RunError, UsageError
from evalkit.inputs.settings import setting
from evalkit.inputs.validated import Stored
from evalkit.reporting.decimals import percent
from evalkit.reporting.figures import RunFigure
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run, StoredTask

if TYPE_CHECKING:
    import pandas as pd

NEEDLE = "needle"
NEEDLES = "needles.parquet"
MAX_NEW_TOKENS = 32
"""Maximum length of an answer: a sentence with seven digits, each of which may be a token."""
_VERSION = 2
"""Increased with every change of evalkit that changes a number of this benchmark."""
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
    choice: float | None = None
    """Of runs before version 2, whose answers were only generated, None; so the likelihood."""
    bits_per_byte: float | None = None


class _NeedleResults(Stored):
    tasks: list[_NeedleTask]
    depths: list[float]
    lengths: list[int]
    repeats: int
    found: list[list[float]]


class Needle(RetrievalBenchmark):
    kind = NEEDLE
    request = NeedleRequest
    results_form = _NeedleResults
    files = (NEEDLES, "heatmap.png", "heatmap.pdf")
    metric = "found"
    checked = ("secret",)
    prompt_settings: ClassVar = {"text": "text"}

    def plan(self, request: NeedleRequest, say: Say) -> NeedlePlan:
        haystack = Haystack(request.text)
        checkpoint = request.model.locate(say)
        context = generated.context_of(request.model, checkpoint, NEEDLE)
        lengths = _lengths(request.lengths, context)
        depths = sorted(set(request.depths))
        if not depths or not all(0 <= depth <= 100 for depth in depths):
            shown = ", ".join(f"{depth:g}" for depth in depths)
            raise UsageError(f"--depths {shown}: expected percentages from 0 to 100")
        if (needles := len(lengths) * len(depths) * request.repeats) > _MAX_CASES:
            raise UsageError(f"{needles:,} needles, more than the maximum of {_MAX_CASES:,}; lower --repeats")
        cases = [NeedleCase(*case) for case in product(lengths, depths, range(request.repeats))]
        grid = {
            "version": _VERSION,
            "lengths": lengths,
            "depths": depths,
            "repeats": request.repeats,
            "text": haystack.identity,
        }
        tasks = {NEEDLE: TaskDocuments(cases, haystack.source)}
        plan = generated.generated_plan(NEEDLE, request, checkpoint, context, tasks, grid, say, request.chat)
        return NeedlePlan(**vars(plan), haystack=haystack)

    def generation_requests(
        self, plan: NeedlePlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[GenerationRequest]:
        import numpy as np

        from evalkit.generation.prompts import Prompt, Stops, as_message

        chat = plan.request.chat
        size = cache(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))

        def encode(text: str) -> list[int]:
            return as_message(tokenizer, text) if chat else list(tokenizer(text, verbose=False).input_ids)

        requests = []
        for number, case in enumerate(plan.tasks[task]):
            text, ids = plan.haystack.prompt(case, encode, size, cue=not chat)
            tokens, secrets = np.asarray(ids, np.int64), (case.secret, *case.others)
            if chat:  # an answer is a turn of its own
                sequences = [[*ids, *tokenizer(secret, add_special_tokens=False).input_ids] for secret in secrets]
            else:
                sequences = [encode(f"{text} {secret}") for secret in secrets]
            # The next token may continue the number with a digit
            stops = Stops(ends, pattern=case.pattern, unsearched_tail=1)
            digest = sha256(tokens.astype("<i8").tobytes()).hexdigest()
            prompt = Prompt(number, tokens, MAX_NEW_TOKENS, stops)
            prompt = with_answers(prompt, sequences, plan.manifest["context"], f"needle {number}")
            requests.append(GenerationRequest(str(number), prompt, digest))
        return requests

    def table_row(self, task: str, document: NeedleCase, answer: GeneratedAnswer) -> dict[str, Any]:
        return {
            "length": document.length,
            "depth": document.depth,
            "repeat": document.repeat,
            "secret": document.secret,
            "tokens_sha256": answer.prompt_sha256,
            "tokens": answer.tokens,
            "reused": answer.reused,
            "answer": answer.text,
            "new_tokens": answer.new_tokens,
            "ended": answer.ended,
            "seconds": answer.seconds,
            "found": document.is_found(answer.text),
            **likelihood_columns((document.secret, *document.others), answer.logprobs),
        }

    def results(self, plan: NeedlePlan, table: pd.DataFrame) -> dict[str, Any]:
        shares = table.pivot_table(index="depth", columns="length", values="found", aggfunc="mean")
        return {
            "tasks": [
                {"task": NEEDLE, **scores_of(table.assign(score=table["found"])), "found": int(table["found"].sum())}
            ],
            "averages": [{"name": "needles found", "accuracy": float(table["found"].mean()), "stderr": None}],
            "depths": [float(depth) for depth in shares.index],
            "lengths": [int(length) for length in shares.columns],
            "repeats": plan.request.repeats,
            "found": shares.to_numpy(float).tolist(),
        }

    def draw(self, results: Mapping[str, Any], folder: Path) -> None:
        try:
            for name in self.files[1:]:
                draw_grid(results, folder / name)
        except RunError as error:
            raise RunError(f"{error}; the results are saved; run the same command again to draw the heatmap") from error

    def own_metrics(self, run: Run) -> list[Metric]:
        [task] = run.stored["tasks"]
        return [Metric(NEEDLE, self.metric, task["n"], task["found"] / task["n"], None)]

    def measure(self) -> Measure:
        return Measure("share of needles found, in %", True)

    def answers(self, run: Run) -> pd.DataFrame:
        table = run.table(NEEDLES, ("length", "depth", "repeat", "secret", "answer", "found"))
        cases = table[["length", "depth", "repeat"]].astype(str).agg(" ".join, axis=1)
        references = table["secret"].map(lambda secret: [secret])
        score = table["found"].astype(float)
        return table.assign(task=NEEDLE, id=cases, source=cases, references=references, score=score)

    def report(self, run: Run, rule: str | None = None, detail: bool = False) -> Report:
        stored = run.stored
        lengths, texts, [task] = stored["lengths"], stored["repeats"], stored["tasks"]
        by_depth = list(zip(stored["depths"], stored["found"], strict=True))
        rows = [[f"{depth:g} %", *(percent(share, 0) for share in shares)] for depth, shares in by_depth]
        rows.append(["all", *(percent(sum(shares) / len(shares), 0) for shares in zip(*stored["found"], strict=True))])
        notes = (
            f"needles found in %, by tokens of the prompt and depth in it; {task['found']} of {task['n']} in all, "
            f"{texts} text{'s' if texts > 1 else ''} a cell",
            f"text: {run.manifest['documents'][NEEDLE]['source']}",
            *generated.about_run(run),
        )
        headers = ["depth", *(f"{length:,}" for length in lengths)]
        table = simple_table("needle", headers, rows, ruled={len(by_depth)})
        records = [
            {"depth": depth, "length": length, "n": texts, "found": share}
            for depth, shares in by_depth
            for length, share in zip(lengths, shares, strict=True)
        ]
        return Report((table,), notes=notes, content=run_content(run), records=records)

    def figures(self, runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
        words = "Needles found in %, by length of the text and depth in it"
        return [
            RunFigure(f"heatmap-{run.manifest['id']}", f"{words}: {name}.", partial(draw_grid, run.stored))
            for run, name in zip(runs, names, strict=True)
        ]

    def suites(self) -> Mapping[str, str]:
        return {NEEDLE: "retrieval of a number from a long text, by length and depth"}


def _lengths(requested: tuple[int, ...], context: int) -> list[int]:
    """Return the sorted prompt lengths, by default doubled from the shortest up to the context window."""
    most = context - MAX_NEW_TOKENS
    doubled = (_SHORTEST << power for power in range(most.bit_length()))
    lengths = set(requested or (length for length in doubled if length <= most))
    if not lengths or not all(1 <= length <= most for length in lengths):
        raise UsageError(
            f"--lengths {','.join(map(str, requested)) or 'by default'}: the model's context window is {context} "
            f"tokens, and an answer may need {MAX_NEW_TOKENS}; give lengths of 100 to {most}, or a longer --context"
        )
    return sorted(lengths)
