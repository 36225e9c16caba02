"""All figures of finished analyses with their default options. In: runs and names. Out: `RunFigure`s."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from evalkit.benchmarks.attention.figures.kinds import KINDS, FigureRequest
from evalkit.benchmarks.attention.figures.making import draw, make
from evalkit.benchmarks.attention.figures.runs import AnalysedRun
from evalkit.benchmarks.run_figures import RunFigure
from evalkit.errors import UsageError
from evalkit.runs.folder import Run


def run_figures(runs: Sequence[Run], names: Sequence[str]) -> list[RunFigure]:
    """Return the figures that all runs have the measures of.

    Args:
        runs: finished analyses; their order is that of colours and panels.
        names: a unique name for each.

    Raises:
        RunError: a table is damaged.
    """
    analysed = [AnalysedRun(name, run) for name, run in zip(names, runs, strict=True)]
    found = []
    for name, kind in KINDS.items():
        try:
            figure = make(name, analysed, FigureRequest())
        except UsageError:  # a run lacks its measure
            continue
        measure = f" ({FigureRequest().measure_of(name)})" if kind.measures else ""
        words = f"{kind.words[:1].upper()}{kind.words[1:]}{measure}: {', '.join(names)}."
        found.append(RunFigure(name, words, partial(draw, figure, analysed)))
    return found
