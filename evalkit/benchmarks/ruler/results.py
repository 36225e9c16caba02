"""RULER's results: tables of answers → scores by task and length, means, the effective length; report and figures.

In: a table of answers, one row for each task, length and sample; or results.json. A mean of a length is that of its
tasks, each of which counts the same. The effective length is the longest with a mean of at least 85.6 %, which
Llama-2-7B has at 4K (Hsieh et al. 2024, RULER, section 4); its interval is that of a bootstrap over the samples of each
task. wAvg (inc) and (dec) weight the lengths by their rank, from the shortest and from the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from evalkit.benchmarks.generated import about_run
from evalkit.benchmarks.outcomes import run_content
from evalkit.benchmarks.ruler.data import TASKS
from evalkit.benchmarks.ruler.retrieval import BITS, CHOICE, CHOICES, SCORES, StoredScores, scores_of, sources_of
from evalkit.errors import UnknownNameError
from evalkit.escape import part_name
from evalkit.inputs.validated import Stored
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.figures import FigurePanel, RunFigure, draw_panels, legend_texts, new_figure, save_figure
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.folder import Run, StoredAverage, StoredTask
from evalkit.stats.estimates import Floats, error_of_average, resampled_means

if TYPE_CHECKING:
    import pandas as pd

RULER = "ruler"
ANSWERS = "answers.parquet"
THRESHOLD = 0.856
_SEED, _RESAMPLES = 40654, 2000
_DEPTHS = 5
"""Bands of the depth in the figure."""
_MOST_LABELLED = 144
"""Most cells of a grid with numbers in them; in smaller cells they are not readable."""
_KEYS = {RULER: "score", CHOICE: CHOICE, BITS: BITS}
"""Rule → key of its score in results.json."""
_TITLES = {
    RULER: "RULER's score in %: the share of the right answers that the generated text has",
    CHOICE: f"choice in %: the gold answer has the fewest bits per byte of {CHOICES}; chance {100 / CHOICES:g} %",
    BITS: "bits per byte of the gold answer ↓",
}


class _RulerTask(StoredTask, StoredScores):
    n: int
    chance: float


class _Length(StoredAverage, StoredScores):
    length: int


class RulerResults(Stored):
    tasks: list[_RulerTask]
    averages: list[StoredAverage]
    lengths: list[_Length]
    effective: dict[str, int]
    """The effective length, and the bounds of its interval: "length", "low", "high"; 0 is below the shortest."""


def name_at(task: str, length: int) -> str:
    return f"{task}@{short(length)}"


def short(length: int) -> str:
    """Return a length as it is named: 4k for 4,096 tokens."""
    return f"{length // 1024}k" if length and not length % 1024 else str(length)


def length_of(name: str) -> int:
    text = name.rpartition("@")[2]
    return 1024 * int(text[:-1]) if text.endswith("k") else int(text)


def is_any(name: str) -> bool:
    """Whether one of a task's references is enough."""
    return name.startswith("qa_")


def by_length(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return length → the tasks of that length, which are in their order."""
    groups: dict[str, tuple[str, ...]] = {}
    for name in names:
        key = name.rpartition("@")[2]
        groups[key] = (*groups.get(key, ()), name)
    return groups


def results_of(table: pd.DataFrame, size: int) -> dict[str, Any]:
    """Return the content of results.json; `size` is the number of requested tasks."""
    tasks, resampled = [], dict[int, list[Floats]]()
    for name, rows in table.groupby("task", sort=False):
        length, task = int(rows["length"].iloc[0]), str(name)
        tasks.append({"task": task, "length": length, **scores_of(rows)})
        seed = [_SEED, crc32(task.encode())]
        means = resampled_means(rows["score"].to_numpy(float), sources_of(rows), _RESAMPLES, seed)
        resampled.setdefault(length, []).append(means)
    lengths = [_mean(short(length), [task for task in tasks if task["length"] == length], size) for length in resampled]
    scores = {length["length"]: length["score"] for length in lengths}
    drawn = {length: np.mean(of_tasks, axis=0) for length, of_tasks in resampled.items()}
    draws = np.max([length * (means >= THRESHOLD) for length, means in drawn.items()], axis=0)
    low, high = np.percentile(draws, (2.5, 97.5), method="nearest").tolist()
    every = [_mean("Average", tasks, size * len(lengths))] if len(lengths) > 1 else []
    averages = [{name: part[name] for name in ("name", "accuracy", "stderr")} for part in lengths + every]
    effective = {"length": effective_length(scores), "low": int(low), "high": int(high)}
    return {"tasks": tasks, "averages": averages, "lengths": lengths, "effective": effective}


def _mean(name: str, tasks: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    mean: dict[str, Any] = {"name": part_name(name, len(tasks), size), "length": tasks[0]["length"]}
    for score, error in SCORES.items():
        mean[score] = sum(task[score] for task in tasks) / len(tasks)
        mean[error] = error_of_average([task[error] for task in tasks])
    return mean | {"accuracy": mean["score"]}


def effective_length(scores: Mapping[int, float]) -> int:
    """Return the longest length with a mean score of at least 85.6 %; 0 if there is none. Scores are fractions."""
    return max((length for length, score in scores.items() if score >= THRESHOLD), default=0)


def weighted(scores: Mapping[int, float], increasing: bool) -> float:
    """Return the mean over lengths, weighted by their rank from the shortest (`increasing`) or from the longest."""
    values = [scores[length] for length in sorted(scores, reverse=not increasing)]
    return float(np.average(values, weights=range(1, len(values) + 1)))


def ruler_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the tables of a run under a rule; of None, under all, and the summary of lengths."""
    if rule not in (None, *_TITLES):
        raise UnknownNameError(f"rule of run {run.folder}", str(rule), _TITLES)
    parts = [
        Report((_by_task(run, name),), verdict=(_TITLES[name],)) for name in _TITLES if rule in (None, RULER, name)
    ]
    parts += [lengths_report([run], [run.model])] if rule in (None, RULER) else []
    notes = (*run.manifest.get("not_built", ()), f"{_samples(run)} samples a task and length", *about_run(run))
    parts[-1] = parts[-1].with_notes(notes)
    records = [dict(task) for task in run.stored["tasks"]]
    return Report((), content=run_content(run), records=records, parts=tuple(parts))


def _samples(run: Run) -> str:
    counts = sorted({task["n"] for task in run.stored["tasks"]})
    return "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))


def _cell(scores: Mapping[str, Any] | None, rule: str) -> str:
    return "–" if scores is None else _shown(scores[_KEYS[rule]], rule)


def _shown(value: float | None, rule: str) -> str:
    scale, places = (1, 3) if rule == BITS else (100, 1)
    return "–" if value is None else fixed(scale * value, places)


def _by_task(run: Run, rule: str) -> Table:
    """Return a table of a run: a line for each task, and of means with standard errors; a column for each length."""
    scores = {task["task"]: task for task in run.stored["tasks"]}
    lengths = [length["length"] for length in run.stored["lengths"]]
    names = [name for name in TASKS if any(name_at(name, length) in scores for length in lengths)]
    rows = [[name, *(_cell(scores.get(name_at(name, length)), rule) for length in lengths)] for name in names]
    rows.append(["mean", *(_cell(length, rule) for length in run.stored["lengths"])])
    rows.append(["± SE", *(_shown(length[SCORES[_KEYS[rule]]], rule) for length in run.stored["lengths"])])
    return simple_table(rule, ["task", *map(short, lengths)], rows, ruled={len(names)})


def lengths_report(runs: Sequence[Run], names: Sequence[str], rule: str = RULER) -> Report:
    """Return a table with a line for each run: means at each length, weighted means, RULER's effective length."""
    every = sorted({length["length"] for run in runs for length in run.stored["lengths"]})
    rows, records, notes = [], [], []
    for run, name in zip(runs, names, strict=True):
        of = {length["length"]: length for length in run.stored["lengths"]}
        scores = {length: part[_KEYS[rule]] for length, part in of.items()}
        means = [weighted(scores, increasing) for increasing in (True, False)]
        row = [name, *(_cell(of.get(length), rule) for length in every), *(_shown(mean, rule) for mean in means)]
        record = {"name": name, "run": run.manifest["id"], **{short(length): scores.get(length) for length in every}}
        record |= {"wavg_inc": means[0], "wavg_dec": means[1]}
        if rule == RULER:
            effective = [run.stored["effective"][key] for key in ("length", "low", "high")]
            named = [short(length) if length else f"<{short(min(of))}" for length in effective]
            row += [named[0], f"{named[1]} to {named[2]}"]
            record |= dict(zip(("effective_length", "low", "high"), effective, strict=True))
        rows.append(row)
        records.append(record)
        notes += [f"{name}: {part['name']}, a mean of fewer tasks" for part in of.values() if " of " in part["name"]]
    headers = ["model", *map(short, every), "wAvg (inc)", "wAvg (dec)"]
    headers += ["effective", "95 % interval"] if rule == RULER else []
    if rule == RULER:
        notes.append(f"effective: the longest length with a mean of at least {100 * THRESHOLD:.1f} %")
    table = simple_table("lengths", headers, rows)
    return Report((table,), verdict=(f"Means over tasks: {_TITLES[rule]}",), notes=tuple(notes), records=records)


def run_figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
    words = "RULER by length, the mean over tasks of both scores, with standard errors."
    figures = [RunFigure("ruler-lengths", words, partial(draw_lengths, runs, names))]
    for run, name in zip(runs, names, strict=True):
        if grid := _grid(run):
            shown = f"Single needles of RULER's tasks found in %, by length of the text and depth in it: {name}."
            figures.append(RunFigure(f"ruler-depths-{run.manifest['id']}", shown, partial(draw_grid, grid)))
    return figures


def _grid(run: Run) -> dict[str, Any]:
    """Return the shares of needles found by length and depth, as `draw_grid` reads them; empty without needles."""
    table = run.table(ANSWERS, ("length", "depth", "score")).dropna(subset="depth")
    middles = (table["depth"] // (100 / _DEPTHS)).clip(upper=_DEPTHS - 1) * (100 / _DEPTHS) + 50 / _DEPTHS
    shares = table.pivot_table(index=middles, columns="length", values="score", aggfunc="mean")
    depths, lengths = map(list, (shares.index, shares.columns))
    return {"depths": depths, "lengths": lengths, "found": shares.to_numpy(float)} if depths else {}


def draw_grid(results: Mapping[str, Any], path: Path) -> None:
    """Draw the shares of needles found, [depths, lengths], into a .png, .pdf or .svg file."""
    shares, lengths, depths = np.array(results["found"]), results["lengths"], results["depths"]
    figure = new_figure(max(3.4, 2.2 + 0.62 * len(lengths)), max(3.2, 1.5 + 0.36 * len(depths)))
    axes = figure.subplots()
    image = axes.imshow(100 * shares, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("depth of the needle in %")
    for (row, column), share in np.ndenumerate(shares) if shares.size <= _MOST_LABELLED else ():
        if not np.isnan(share):
            colour = "#111111" if share > 0.6 else "white"  # which pages leave as they are
            axes.text(column, row, percent(share, 0), ha="center", va="center", fontsize=8, color=colour)
    figure.colorbar(image, ax=axes, label="needles found in %", ticks=[0, 25, 50, 75, 100])
    save_figure(figure, path)


def draw_lengths(runs: Sequence[Run], names: Sequence[str], path: Path) -> None:
    """Draw the mean of each score by length, a line for each run, into a .png, .pdf or .svg file."""
    import pandas as pd

    panels = []
    for rule, label, reference in (
        (RULER, "score in %", None),
        (CHOICE, "choice in %", 1 / CHOICES),
        (BITS, BITS, None),
    ):
        key = _KEYS[rule]
        points = [
            {"run": name, "length": part["length"], "value": part[key], "spread": part[SCORES[key]] or 0.0}
            for run, name in zip(runs, names, strict=True)
            for part in run.stored["lengths"]
        ]
        panels.append(
            FigurePanel(
                rule, pd.DataFrame(points), "length", label, x_label="length in tokens", percent=rule != BITS,
                ticks="doubling", reference=reference,
            )
        )  # fmt: skip
    draw_panels(panels, legend_texts(names), 3, "", path)
