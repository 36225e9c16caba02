"""Sources and licences of the documents of a page. In: finished runs. Out: a `Panel` with a line for each task."""

from __future__ import annotations

from collections.abc import Sequence

from evalkit.benchmarks.registry import benchmark_of
from evalkit.data.licences import LICENCES
from evalkit.data.schema import HubSplit
from evalkit.errors import UsageError
from evalkit.pages.panels import Panel
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.runs.traits import caveats

_UNKNOWN, _NO_DATASET = "see the dataset's page", "see the source"
_HUB = "https://huggingface.co/datasets"
"""Address of a dataset's page, before its repository."""


def sources_panel(runs: Sequence[Run]) -> Panel:
    """Return the panel that names dataset, source and licence of every task, for those whose licence asks for it."""
    rows: dict[tuple[str, ...], None] = {}
    for run in runs:
        for task, found in run.manifest["documents"].items():
            label = benchmark_of(run).label(run, task).full + "*" * bool(caveats(run.manifest, task))
            rows[label, *_dataset(run, task), str(found["source"])] = None
    headers = ["task", "dataset", "authors", "licence", "page", "source used"]
    table = simple_table("sources", headers, list(rows), texts=len(headers))
    notes = ("*: not the official documents of the task",) * any(label.endswith("*") for label, *_ in rows)
    return Panel("sources", "Sources and licences of the documents", (Report((table,), notes=notes),))


def _dataset(run: Run, task: str) -> tuple[str, str, str, str]:
    """Return a task's dataset, its authors, its licence, and the licence's page."""
    try:
        split = benchmark_of(run).dataset(run, task)
    except UsageError:  # of lm-eval's tasks the dataset is not known
        split = None
    if split is None:
        return "–", "–", _NO_DATASET, "–"
    if (licence := LICENCES.get(split.path)) is None:
        return _described(split), "–", _UNKNOWN, f"{_HUB}/{split.path}"
    name = f"{licence.name} ({licence.limits})" if licence.limits else licence.name
    return _described(split), licence.authors, name, licence.url


def _described(split: HubSplit) -> str:
    """Return a split in words: repository, configuration, split."""
    return ", ".join(part for part in (split.path, split.config, split.split) if part)
