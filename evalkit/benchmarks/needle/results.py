"""Results of a needle test: its table, results.json and heatmap; a finished test's report, figures and documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from evalkit.benchmarks.generated import about_run
from evalkit.benchmarks.needle.benchmark import HEATMAPS, NEEDLE, NEEDLES
from evalkit.benchmarks.needle.text import is_found
from evalkit.benchmarks.outcomes import GradedAnswers, Measure, run_content
from evalkit.errors import RunError
from evalkit.reporting.decimals import percent
from evalkit.reporting.figures import RunFigure, new_figure, save_figure
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    from evalkit.benchmarks.generated import GeneratedAnswer
    from evalkit.benchmarks.needle.benchmark import NeedlePlan
    from evalkit.runs.writing import RunWriter

_ANSWER_COLUMNS = ("tokens", "reused", "text", "new_tokens", "ended", "seconds")
"""Fields of an answer that are columns of the table."""
_MOST_LABELLED = 144
"""Most cells of a heatmap with numbers in them; in smaller cells they are not readable."""


def save_needles(plan: NeedlePlan, answers: Mapping[str, Sequence[GeneratedAnswer]], writer: RunWriter) -> None:
    """Write the table, one row for each case, the results and the heatmap."""
    rows = []
    for case, answer in zip(plan.tasks[NEEDLE], answers[NEEDLE], strict=True):
        about = {"length": case.length, "depth": case.depth, "repeat": case.repeat, "secret": case.secret}
        kept = {"answer" if name == "text" else name: getattr(answer, name) for name in _ANSWER_COLUMNS}
        rows.append(about | {"tokens_sha256": answer.prompt_sha256} | kept | {"found": is_found(case, answer.text)})
    table = pd.DataFrame(rows)
    writer.save_table(NEEDLES, table)
    shares = table.pivot_table(index="depth", columns="length", values="found", aggfunc="mean")
    depths, lengths = [float(depth) for depth in shares.index], [int(length) for length in shares.columns]
    share = float(table["found"].mean())
    writer.save_results(
        {
            "tasks": [{"task": NEEDLE, "n": len(table), "found": int(table["found"].sum())}],
            "averages": [{"name": "needles found", "accuracy": share, "stderr": None}],
            "depths": depths,
            "lengths": lengths,
            "repeats": plan.request.repeats,
            "found": shares.to_numpy(float).tolist(),
        }
    )
    # Last, since a heatmap can be drawn again from the results
    try:
        for name in HEATMAPS:
            needle_heatmap(shares.to_numpy(float), depths, lengths, writer.folder / name)
    except RunError as error:
        raise RunError(f"{error}; the results are saved; run the same command again to draw the heatmap") from error


def load_needles(run: Run) -> pd.DataFrame:
    """Return the table of a finished needle test with the cases as documents: task, id, source and score."""
    table = run.table(NEEDLES, ("length", "depth", "repeat", "secret", "answer", "found"))
    places = table[["length", "depth", "repeat"]].astype(str).agg(" ".join, axis=1)
    return table.assign(task=NEEDLE, id=places, source=places, score=table["found"].astype(float))


class Needles(GradedAnswers):
    """Scores of a needle test: 1 if the needle was found, else 0."""

    def __init__(self, run: Run) -> None:
        measure = Measure("share of needles found, in %", True)
        super().__init__(run, partial(load_needles, run), ("secret",), {"Average": [NEEDLE]}, {NEEDLE: measure})

    def must_agree(self, task: str) -> dict[str, str]:
        return {"text": str(self.run.manifest["specification"]["text"])}


def needle_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the percentage of needles found, by depth and length; other arguments change nothing."""
    stored = run.stored
    lengths, depths, shares_by_depth = stored["lengths"], stored["depths"], stored["found"]
    by_depth = list(zip(depths, shares_by_depth, strict=True))
    rows = [[f"{depth:g} %", *(percent(share, 0) for share in shares)] for depth, shares in by_depth]
    rows.append(["all", *(percent(sum(column) / len(column), 0) for column in zip(*shares_by_depth, strict=True))])
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
        for depth, shares in by_depth
        for length, share in zip(lengths, shares, strict=True)
    ]
    return Report((table,), notes=notes, content=run_content(run), records=records)


def run_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return the heatmap of each run."""
    return [
        RunFigure(
            f"heatmap-{run.manifest['id']}",
            f"Needles found in %, by length of the text and depth in it: {name}.",
            partial(needle_heatmap, np.array(run.stored["found"]), run.stored["depths"], run.stored["lengths"]),
        )
        for run, name in zip(runs, names, strict=True)
    ]


def needle_heatmap(scores: np.ndarray, depths: Sequence[float], lengths: Sequence[int], path: Path) -> None:
    """Draw the rate of found needles into a .png, .pdf or .svg file.

    Args:
        scores: [depth, length], fractions from 0 to 1; NaN for cells without a measurement, drawn grey.
        depths: of the rows, in percent of the text from its start.
        lengths: of the columns, in tokens.
        path: the file.
    """
    figure = new_figure(max(3.4, 2.2 + 0.62 * len(lengths)), max(3.2, 1.5 + 0.36 * len(depths)))
    axes = figure.subplots()
    axes.set_facecolor("#d9d9d9")
    image = axes.imshow(np.ma.masked_invalid(100 * scores), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("depth of the needle in %")
    if scores.size <= _MOST_LABELLED:
        for (row, column), value in np.ndenumerate(scores):
            text = "" if np.isnan(value) else percent(value, 0)
            colour = "black" if value > 0.6 else "white"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, label="needles found in %", ticks=[0, 25, 50, 75, 100])
    save_figure(figure, path)
