"""Figures of the replication's page, from its tables."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib import pyplot
from reading import NAMES, SOURCES, Row, chosen

matplotlib.use("agg")
COLOURS = {"vanilla": "#444444", "cog": "#d95f02", "diff": "#7570b3", "intg": "#1b9e77"}


def draw_losses(rows: list[Row], path: Path) -> None:
    """Held-out loss by update, a line for each seed."""
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for model, name in NAMES.items():
        of = [row for row in chosen(rows, model=model) if row["held_out_loss"]]
        for number, seed in enumerate(sorted({row["seed"] for row in of})):
            points = [(int(row["step"]), float(row["held_out_loss"])) for row in chosen(of, seed=seed)]
            axes.plot(*zip(*points, strict=True), color=COLOURS[model], lw=1, label=None if number else name)
    axes.set(xlabel="update", ylabel="held-out loss, nats per token")
    axes.legend(frameon=False)
    _save(figure, path)


def draw_differences(rows: list[Row], path: Path) -> None:
    """Differences of bits per byte by source and on average."""
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    tasks = [*SOURCES, "Average"]
    for number, model in enumerate(list(NAMES)[1:]):
        of = {row["task"]: row for row in chosen(rows, benchmark="held_out", model=model)}
        places = [task + 0.2 * (number - 1) for task in range(len(tasks))]
        middles = [float(of[task]["difference"]) for task in tasks]
        errors = [
            [abs(float(of[task][end]) - value) for task, value in zip(tasks, middles, strict=True)]
            for end in ("low", "high")
        ]
        axes.errorbar(middles, places, xerr=errors, fmt="o", ms=4, color=COLOURS[model], label=NAMES[model])
    axes.axvline(0, color="#888888", lw=0.8)
    axes.set(yticks=range(len(tasks)), yticklabels=[SOURCES.get(task, task) for task in tasks])
    axes.set_xlabel("bits per byte more than Vanilla (left is better)")
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    _save(figure, path)


def draw_attention(rows: list[Row], path: Path) -> None:
    """Four measures by layer, seeds as points, their means as lines."""
    titles = {
        "bos_abs": "share on BOS",
        "entropy_shifted": "entropy, nats",
        "rank": "effective rank",
        "similarity": "similarity of heads",
    }
    figure, grid = pyplot.subplots(1, 4, figsize=(11, 2.9), layout="constrained")
    for axes, (measure, title) in zip(grid, titles.items(), strict=True):
        for model, name in NAMES.items():
            of = chosen(rows, measure=measure, model=model)
            layers = sorted({int(row["layer"]) for row in of})
            values = [[float(row["value"]) for row in chosen(of, layer=str(layer))] for layer in layers]
            axes.plot(layers, [mean(some) for some in values], color=COLOURS[model], lw=1.2, label=name)
            for layer, some in zip(layers, values, strict=True):
                axes.plot([layer] * len(some), some, ".", ms=4, color=COLOURS[model])
        axes.set(title=title, xlabel="layer", xticks=layers)
    grid[0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: pyplot.Figure, path: Path) -> None:
    """Write a figure; the same table gives the same file."""
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
