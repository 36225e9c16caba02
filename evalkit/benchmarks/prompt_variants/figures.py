"""Figures of runs under several prompts: the accuracies of each task by prompt, with 95 % intervals over documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evalkit.benchmarks.multiple_choice.suites import label
from evalkit.benchmarks.prompt_variants.results import VariedAccuracy, VariedResults, varied_results
from evalkit.benchmarks.prompt_variants.tables import prompt_tables
from evalkit.benchmarks.run_figures import RunFigure
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NORMAL = 1.96
_HEIGHT = 0.13
"""Inches of a prompt."""


def prompt_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return the figure of each run, under its own rule.

    Raises:
        EvalkitError: a run is damaged.
    """
    found = []
    for run, name in zip(runs, names, strict=True):
        results = varied_results(prompt_tables(run), run.manifest, run.manifest["rule"])
        words = f"Accuracy of {name} under each prompt, with 95 % intervals over documents; the line is the mean."
        labels = [label(one.name, run.manifest.get("labels")) for one in results.tasks]
        found.append(RunFigure(f"prompts-{run.manifest['id']}", words, partial(draw_prompts, results, labels)))
    return found


def draw_prompts(results: VariedResults, labels: Sequence[str], path: Path) -> None:
    """Draw the accuracies of each task by prompt.

    Args:
        results: of a run.
        labels: of its tasks.
        path: a .png, .pdf or .svg file.

    Raises:
        RunError: the file cannot be written.
    """
    from evalkit.reporting.figure_style import style_axes
    from evalkit.reporting.figures import new_figure, save_figure

    prompts = list(dict.fromkeys(one.prompt for task in results.tasks for one in task.prompts))
    rows = [*zip(labels, results.tasks, strict=True)]
    if len(rows) > 1:
        rows.append((results.average.name, results.average))
    figure = new_figure(7.2, 0.9 + len(rows) * (0.2 + _HEIGHT * len(prompts)))
    axes = figure.subplots()
    for place, (_, one) in enumerate(rows):
        _draw_row(axes, place, one, prompts)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlabel(f"accuracy in %, rule {results.rule}", fontsize=8)
    style_axes(axes)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path)


def _draw_row(axes: Axes, place: int, one: VariedAccuracy, prompts: Sequence[str]) -> None:
    from evalkit.reporting.figure_style import GREY, line_look

    axes.vlines(100 * one.accuracy, place - 0.42, place + 0.42, color=GREY, lw=1, zorder=1)
    for found in one.prompts:
        number = prompts.index(found.prompt)
        height = place + 0.8 * ((number + 0.5) / len(prompts) - 0.5)
        reach = None if found.stderr is None else 100 * _NORMAL * found.stderr
        shown = None if found.prompt in axes.get_legend_handles_labels()[1] else found.prompt
        axes.errorbar(100 * found.accuracy, height, xerr=reach, ms=4, lw=1, label=shown, **line_look(number))
