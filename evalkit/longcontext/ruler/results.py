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
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from evalkit.benchmarks.generated import about_run
from evalkit.benchmarks.outcomes import run_content
from evalkit.errors import UnknownNameError
from evalkit.escape import part_name
from evalkit.inputs.validated import Stored
from evalkit.longcontext.ruler.data import CHOICES, TASKS
from evalkit.reporting.decimals import percent
from evalkit.reporting.figures import FigurePanel, RunFigure, draw_panels, legend_texts, new_figure, save_figure
from evalkit.reporting.numbers import MEANS, SHARES, UNKNOWN, following
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.folder import Run, StoredAverage, StoredTask, StoredValue
from evalkit.runs.scales import FRACTION, Scale
from evalkit.stats.estimates import Floats, error_of_average, known_error, mean, resampled_means

if TYPE_CHECKING:
    import pandas as pd

RULER = "ruler"
ANSWERS = "answers.parquet"
THRESHOLD = 0.856
SCORE, CHOICE, BITS = "score", "choice", "bits_per_byte"
"""Names of the three scores in tables; as a rule, the first has the name of the benchmark."""
VALUE = "value"
"""Name of the first score in results.json."""
_FORMATS = {VALUE: SHARES, CHOICE: SHARES, BITS: MEANS}
_SEED, _RESAMPLES = 40654, 2000
_BANDS = 5
"""Bands of depth in the figure of tasks whose needles are at random depths."""
_MOST_LABELLED = 144
"""Most cells of a grid with numbers in them; in smaller cells they are not readable."""


class RulerScore(NamedTuple):
    """One of the scores of each document."""

    scale: Scale
    error: str
    """Key of its standard error in results.json."""
    title: str
    label: str
    """Of axes."""
    chance: float | None = None


SCORES = {
    VALUE: RulerScore(
        Scale(SCORE, FRACTION),
        "stderr",
        "score in %: the share of the right answers that are in the generated text",
        "score in %",
    ),
    CHOICE: RulerScore(
        Scale("choice accuracy", FRACTION),
        "choice_stderr",
        f"choice in %: the gold answer has the fewest bits per byte of up to {CHOICES}; chance {100 / CHOICES:g} %",
        "choice in %",
        1 / CHOICES,
    ),
    BITS: RulerScore(
        Scale(BITS, "bits per byte", higher_is_better=False),
        "bits_stderr",
        "bits per byte of the gold answer, lower is better",
        "bits per byte",
    ),
}
"""Key of a score in results.json → the score."""


class _Scores(StoredValue):
    """Scores in results.json: means with standard errors over documents."""

    choice: float
    choice_stderr: float | None
    bits_per_byte: float
    bits_stderr: float | None


class _RulerTask(StoredTask, _Scores):
    n: int
    chance: float


class RulerResults(Stored):
    tasks: list[_RulerTask]
    averages: list[StoredAverage]
    effective: dict[str, int | None]
    """The effective length, and the bounds of its interval: "length", "low", "high"; 0 is below the shortest. No bounds
    if the samples do not show how much a length's mean varies."""


def name_at(task: str, length: int) -> str:
    return f"{task}@{short(length)}"


def short(length: int) -> str:
    """Return a length as it is named: 4k for 4,096 tokens."""
    return f"{length // 1024}k" if length and not length % 1024 else str(length)


def length_of(name: str) -> int:
    text = name.rpartition("@")[2]
    return 1024 * int(text[:-1]) if text.endswith("k") else int(text)


def sample_of(name: str) -> str:
    """Return the name that tasks have in common which ask the same questions at several lengths."""
    return name.partition("@")[0] if is_question(name) else name


def is_question(name: str) -> bool:
    """Whether a task has questions of a data set, each with several right answers of which one is enough."""
    return name.startswith("qa_")


def by_length(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return length → the tasks of that length, which are in their order."""
    groups: dict[str, tuple[str, ...]] = {}
    for name in names:
        key = name.rpartition("@")[2]
        groups[key] = (*groups.get(key, ()), name)
    return groups


def results_of(table: pd.DataFrame, size: int) -> dict[str, Any]:
    """Return the content of results.json; `size` is the number of tasks of the whole benchmark."""
    tasks, resampled, sources = [], dict[int, list[Floats]](), dict[int, list[int]]()
    about = SCORES[VALUE].scale.entries
    for name, rows in table.groupby("task", sort=False):
        length, task = int(rows["length"].iloc[0]), str(name)
        scores: dict[str, Any] = {"n": len(rows), "chance": float(rows["chance"].mean())} | about
        codes = np.unique(rows["source"], return_inverse=True)[1]
        for key, score in SCORES.items():
            estimate = mean(rows[SCORE if key == VALUE else key].to_numpy(float), codes)
            scores |= {key: estimate.value, score.error: known_error(estimate.stderr)}
        tasks.append({"task": task, "length": length, **scores})
        seed = [_SEED, crc32(sample_of(task).encode())]  # the same questions are drawn together
        means = resampled_means(rows[SCORE].to_numpy(float), codes, _RESAMPLES, seed)
        resampled.setdefault(length, []).append(means)
        sources.setdefault(length, []).append(len(np.unique(codes)))
    drawn = {length: np.mean(of_tasks, axis=0) for length, of_tasks in resampled.items()}
    draws = np.max([length * (means >= THRESHOLD) for length, means in drawn.items()], axis=0)
    is_known = all(_is_sure(means, sum(sources[length])) for length, means in drawn.items())
    low, high = np.quantile(draws, (0.025, 0.975), method="nearest").tolist() if is_known else (None, None)
    lengths = lengths_of(tasks, size)
    every = [_mean("Average", tasks, size * len(lengths))] if len(lengths) > 1 else []
    averages = [about | {name: part[name] for name in ("name", VALUE, "stderr")} for part in lengths + every]
    longest = effective_length({length["length"]: length[VALUE] for length in lengths})
    effective = {"length": longest, "low": low, "high": high}
    return {"tasks": tasks, "averages": averages, "effective": effective}


def _is_sure(means: Floats, sources: int) -> bool:
    """Return whether resampled means show on which side of the threshold a length is, or what they leave open.

    Those of samples that are all alike do not vary. With 95 % confidence, n sources without another outcome exclude one
    whose probability is above 1 - 0.025^(1/n).
    """
    return bool(np.ptp(means) > 1e-9 or abs(means[0] - THRESHOLD) > 1 - 0.025 ** (1 / sources))


def lengths_of(tasks: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the mean scores of each length, from the tasks of results.json; `size` as of `results_of`."""
    lengths = dict.fromkeys(task["length"] for task in tasks)
    return [_mean(short(length), [task for task in tasks if task["length"] == length], size) for length in lengths]


def size_of(kind: str) -> int:
    """Return the number of tasks at a length: RULER's, or the needle test's only one."""
    return len(TASKS) if kind == RULER else 1


def _lengths(run: Run) -> list[dict[str, Any]]:
    return lengths_of(run.stored["tasks"], size_of(run.kind))


def _mean(name: str, tasks: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    part: dict[str, Any] = {"name": part_name(name, len(tasks), size), "length": tasks[0]["length"]}
    part["is_whole"] = len(tasks) == size
    samples = [sample_of(task["task"]) for task in tasks]
    for key, score in SCORES.items():
        part[key] = sum(task[key] for task in tasks) / len(tasks)
        part[score.error] = error_of_average([task[score.error] for task in tasks], samples)
    return part


def effective_length(scores: Mapping[int, float]) -> int:
    """Return the longest length with a mean score of at least 85.6 %; 0 if there is none. Scores are fractions."""
    return max((length for length, score in scores.items() if score >= THRESHOLD), default=0)


def weighted(scores: Mapping[int, float], increasing: bool) -> float:
    """Return the mean over lengths, weighted by their rank from the shortest (`increasing`) or from the longest."""
    values = [scores[length] for length in sorted(scores, reverse=not increasing)]
    return float(np.average(values, weights=range(1, len(values) + 1)))


def run_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return the tables of a run under a rule, or under all of them; and the summary of lengths."""
    if rule not in (None, *(rules := {run.kind: VALUE, CHOICE: CHOICE, BITS: BITS})):
        raise UnknownNameError(f"rule of run {run.folder}", str(rule), rules)
    parts = []
    for name, score in rules.items():
        if rule in (None, run.kind, name):
            is_grid = score == VALUE and run.kind != RULER
            parts.append(_by_depth(run) if is_grid else Report((_by_task(run, score),), verdict=(SCORES[score].title,)))
    if rule in (None, run.kind):
        parts.append(lengths_report([run], [run.model]))
    counts = sorted({task["n"] for task in run.stored["tasks"]})
    samples = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    sources = {document["source"]: None for document in run.manifest["documents"].values()}
    notes = (*run.manifest.get("not_built", ()), f"{samples} samples a task and length, {', '.join(sources)}")
    notes += about_run(run)
    parts[-1] = parts[-1].with_notes(notes)
    records = [dict(task) for task in run.stored["tasks"]]
    return Report((), content=run_content(run), records=records, parts=tuple(parts))


def _with_error(part: Mapping[str, Any], score: str) -> str:
    form = _FORMATS[score]
    mark = "*" * (not part.get("is_whole", True))
    return form.value(part.get(score)) + mark + following(form.spread(part.get(SCORES[score].error)))


def _by_task(run: Run, score: str) -> Table:
    """Return a table of a run: a line for each task, and of means with standard errors; a column for each length."""
    scores, lengths = {task["task"]: task for task in run.stored["tasks"]}, _lengths(run)
    form = _FORMATS[score]
    names = list(dict.fromkeys(name.rpartition("@")[0] for name in scores))
    columns = [short(length["length"]) for length in lengths]
    rows = [
        [name, *(form.value(scores.get(f"{name}@{column}", {}).get(score)) for column in columns)] for name in names
    ]
    rows += [["mean", *(form.value(length[score]) for length in lengths)]] * (len(names) > 1)
    rows.append(["± SE", *(form.error(length[SCORES[score].error]) for length in lengths)])
    return simple_table(score, ["task", *columns], rows, ruled={len(names)})


def _by_depth(run: Run) -> Report:
    """Return a table of the needles that were found, a line for each depth, a column for each length."""
    grid = _grid(run)
    rows = [[f"{depth:g} %", *(percent(share, 0) for share in shares)] for depth, shares in grid.iterrows()]
    table = simple_table("depths", ["depth", *(short(int(length)) for length in grid.columns)], rows)
    return Report((table,), verdict=("needles found in %, by their depth in the text and its length in tokens",))


def lengths_report(runs: Sequence[Run], names: Sequence[str], rule: str = RULER) -> Report:
    """Return a table with a line for each run: means at each length, weighted means, RULER's effective length."""
    score = rule if rule in (CHOICE, BITS) else VALUE
    of_runs = [{length["length"]: length for length in _lengths(run)} for run in runs]
    every = sorted({length for of in of_runs for length in of})
    rows, records, notes = [], [], list[str]()
    for run, name, of in zip(runs, names, of_runs, strict=True):
        scores = {length: part[score] for length, part in of.items()}
        is_whole = len(scores) == len(every)
        means = [weighted(scores, increasing) if is_whole else None for increasing in (True, False)]
        row = [
            name,
            *(_with_error(of.get(length, {}), score) for length in every),
            *map(_FORMATS[score].value, means),
        ]
        record = {"name": name, "run": run.manifest["id"], **{short(length): scores.get(length) for length in every}}
        record |= {"wavg_inc": means[0], "wavg_dec": means[1]}
        if score == VALUE:
            effective = [run.stored["effective"][key] for key in ("length", "low", "high")]
            shown = [short(length) if length else f"<{short(min(scores))}" for length in effective]
            row += [shown[0], UNKNOWN if effective[1] is None else f"{shown[1]} to {shown[2]}"]
            record |= dict(zip(("effective_length", "low", "high"), effective, strict=True))
        rows.append(row)
        records.append(record)
        notes += [f"{name}: {part['name']}, a mean of fewer tasks" for part in of.values() if not part["is_whole"]]
    title = f"Means over tasks: {SCORES[score].title}" + "; *: of fewer tasks" * bool(notes)
    headers = ["model", *map(short, every), "wAvg (inc)", "wAvg (dec)"]
    if score == VALUE:
        headers += ["effective", "95 % interval"]
        notes.append(f"effective: the longest length with a mean of at least {100 * THRESHOLD:.1f} %")
    notes.append("wAvg: means over lengths, weighted by their rank from the shortest (inc) and from the longest (dec)")
    table = simple_table("lengths", headers, rows)
    return Report((table,), verdict=(title,), notes=notes, records=records)


def run_figures(runs: Sequence[Run], names: Sequence[str], models: Sequence[str]) -> list[RunFigure]:
    kind = runs[0].kind
    words = "Scores by length, means over tasks with standard errors."
    figures = [RunFigure(f"{kind}-lengths", words, partial(draw_lengths, runs, names))]
    for run, name in zip(runs, names, strict=True):
        if len(_grid(run)):
            shown = (
                f"Needles found in %, by length of the text and depth in it, of tasks with one right answer: {name}."
            )
            figures.append(RunFigure(f"{kind}-depths-{run.manifest['id']}", shown, partial(draw_depths, run)))
    return figures


def _grid(run: Run) -> pd.DataFrame:
    """Return the shares of needles that were found: index depth in percent, columns lengths; without needles, empty.

    RULER's tasks have needles at random depths, which are put into bands.
    """
    table = run.table(ANSWERS, ("length", "depth", "score")).dropna(subset="depth")
    depths = table["depth"]
    if run.kind == RULER:
        depths = (depths // (100 / _BANDS)).clip(upper=_BANDS - 1) * (100 / _BANDS) + 50 / _BANDS
    return table.pivot_table(index=depths, columns="length", values="score", aggfunc="mean")


def draw_depths(run: Run, path: Path) -> None:
    """Draw the shares of needles that were found, by depth and length, into a .png, .pdf or .svg file."""
    grid = _grid(run)
    shares = grid.to_numpy(float)
    figure = new_figure(max(3.4, 2.2 + 0.62 * len(grid.columns)), max(3.2, 1.5 + 0.36 * len(grid)))
    axes = figure.subplots()
    image = axes.imshow(100 * shares, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(grid.columns)), [f"{length:,}" for length in grid.columns], rotation=45, ha="right")
    axes.set_yticks(range(len(grid)), [f"{depth:g}" for depth in grid.index])
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
    for key, score in SCORES.items():
        points = [
            {"run": name, "length": part["length"], "value": part[key], "spread": part[score.error]}
            for run, name in zip(runs, names, strict=True)
            for part in _lengths(run)
        ]
        panels.append(
            FigurePanel(
                key, pd.DataFrame(points), "length", score.label, x_label="length in tokens",
                percent=score.scale.is_fraction, ticks="doubling", reference=score.chance,
            )
        )  # fmt: skip
    draw_panels(panels, legend_texts(names), 3, "", path)
