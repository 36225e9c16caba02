"""Finished analyses of attention with given effective ranks, without a model or documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.runs.folder import Run
from tests.attention.made import sequence, write_analysis
from tests.tables.runs import loaded

TASKS = {"piqa": 3, "boolq": 2}
"""Task → documents of the runs made here, unless others are given."""


def made_ranks(
    root: Path,
    model: str,
    ranks: Mapping[int, NDArray[np.float64]],
    *,
    tasks: Mapping[str, int] | None = None,
    first: int = 0,
    name: str = "",
    manifest: Mapping[str, Any] | None = None,
    **specification: Any,
) -> Run:
    """Write a finished run that measured the rank: layer → [documents, heads], of all tasks' documents in turn.

    `model` is a named model, whose sizes the manifest has; `name` the checkpoint, if it is called otherwise, and its
    weights. `tasks` has the number of documents of each task, and `first` is the number of each task's first one.
    `manifest` and `specification` are further entries.
    """
    analysed: dict[str, Any] = {}
    start = 0
    for task, count in (tasks or TASKS).items():
        numbers = range(count)
        by_layer = [{layer: {"rank": values[start + n]} for layer, values in ranks.items()} for n in numbers]
        analysed[task] = [[(sequence(task, first + n, np.arange(10 + first + n)), by_layer[n]) for n in numbers]]
        start += count
    about = loaded(model)
    layers = about["shape"]["num_hidden_layers"]
    content = {"loaded": about | {"attention": "eager"}} | dict(manifest or {})
    settings = {"measures": ["rank"], "template": "hash of inst"} | specification
    subtasks = {task: [task] for task in analysed}
    return write_analysis(root, name or model, subtasks, analysed, layers, content, **settings)
