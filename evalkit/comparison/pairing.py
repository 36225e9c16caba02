"""Two sides, document by document.

In: two `Side`s of runs of one benchmark. Out: a `Pairing`, which gives the scores of
both on the same documents under any rule. What cannot be paired is refused by name, what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from evalkit.benchmarks.alike import document_difference
from evalkit.benchmarks.outcomes import Comparable, Label, Measure
from evalkit.benchmarks.registry import benchmark_of
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.runs.traits import unofficial
from evalkit.scores.table import CLUSTER
from evalkit.stats.estimates import Codes, Floats

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PairedTask:
    """A task's documents that every run of both sides has."""

    task: str
    clusters: Codes | None
    """[n] documents of one source have the same number; None where each is its own."""
    strata: Codes | None
    """[n] MMLU's subjects; None for a task without subjects."""
    rows: tuple[Codes, ...]
    """For each run of A, then of B: [n] places of the documents among the run's own."""
    dropped: int
    """Documents that only some of the runs have."""
    official: bool

    @property
    def n(self) -> int:
        """How many documents are paired."""
        return len(self.rows[0])

    @property
    def sources(self) -> int:
        """How many sources they come from."""
        return self.n if self.clusters is None else len(np.unique(self.clusters))


@dataclass(frozen=True)
class Pairing:
    """Two sides on the same documents."""

    a: Side
    b: Side
    tasks: tuple[PairedTask, ...]
    left_out: Mapping[str, str]
    """Tasks that are not compared, and why."""
    graded: tuple[Comparable, ...]
    """The runs of A, then of B."""

    def label(self, task: str) -> Label:
        """How a task is printed."""
        first = self.graded[0].run
        return benchmark_of(first).label(first, task)

    @property
    def rules(self) -> list[str]:
        """The rules that all runs can answer."""
        return [rule for rule in self.graded[0].rules if all(rule in other.rules for other in self.graded)]

    def measure(self, rule: str) -> Measure:
        """How documents are scored under a rule, in all runs.

        Raises:
            UsageError: a run cannot answer it, or their models have other layers.
        """
        first, *others = (one.measure(rule) for one in self.graded)
        for one, other in zip(self.graded[1:], others, strict=True):
            if other.layers != first.layers:
                raise UsageError(
                    f"{first.name} is of {len(first.layers)} layers in run {self.graded[0].run.folder.name} and of "
                    f"{len(other.layers)} in run {one.run.folder.name}; compare models with the same layers"
                )
        return first

    def scores(self, task: PairedTask, rule: str, layer: int | None = None) -> tuple[Floats, Floats]:
        """([runs of A, n], [runs of B, n]) scores of a task's documents.

        Args:
            task: one of `tasks`.
            rule: one of `rules`.
            layer: place of one in the measure's layers; None: each document's mean over them.
        """
        found = [one.by_rule(rule)[rows] for one, rows in zip(self.graded, task.rows, strict=True)]
        found = [one if one.ndim == 1 else one.mean(axis=1) if layer is None else one[:, layer] for one in found]
        count = len(self.a.runs)
        return np.stack(found[:count]), np.stack(found[count:])


def pair(a: Side, b: Side, graded: dict[str, Comparable]) -> Pairing:
    """Put two sides' runs beside each other.

    Args:
        a: the baseline.
        b: what is compared with it.
        graded: runs read before, by their folder; those read now are added.

    Raises:
        UsageError: they are of different suites or documents, or have no task in common.
        RunError: a table is damaged or too old.
    """
    runs = (*a.runs, *b.runs)
    _refuse_other_suites(runs)
    for run in runs:
        if str(run.folder) not in graded:
            graded[str(run.folder)] = benchmark_of(run).comparable(run)
    found = tuple(graded[str(run.folder)] for run in runs)
    held = [list(dict.fromkeys(one.documents["task"])) for one in found]
    shared = [task for task in held[0] if all(task in tasks for tasks in held)]
    left_out = {task: "not in every run" for task in dict.fromkeys(chain(*held)) if task not in shared}
    for one in found:
        measured = [task["task"] for task in one.run.stored["tasks"]]
        left_out |= {task: one.lacking for task in measured if not any(task in tasks for tasks in held)}
    if not shared:
        listed = "; ".join(f"{run.folder.name}: {', '.join(tasks)}" for run, tasks in zip(runs, held, strict=True))
        raise UsageError(f"the runs have no task in common ({listed})")
    for task in shared:
        _refuse_other_documents(task, runs)
    return Pairing(a, b, tuple(_paired(found, shared)), left_out, found)


def _refuse_other_suites(runs: tuple[Run, ...]) -> None:
    for run in runs:
        if run.suite != runs[0].suite:
            raise UsageError(
                f"run {runs[0].folder.name} is of suite {runs[0].suite} and run {run.folder.name} of {run.suite}, "
                "which ask in different ways; compare runs of one suite"
            )


def _refuse_other_documents(task: str, runs: tuple[Run, ...]) -> None:
    for run in runs[1:]:
        if found := document_difference(runs[0], run, task):
            what, mine, theirs = found
            raise UsageError(
                f"task {task}: the {what} of run {run.folder.name} ({theirs[:12]}) is not that of run "
                f"{runs[0].folder.name} ({mine[:12]}), so their documents cannot be paired; run both on the same"
            )


def _paired(graded: tuple[Comparable, ...], tasks: list[str]) -> Iterator[PairedTask]:
    for task in tasks:
        tables = [_of_task(one.documents, task) for one in graded]
        places, dropped = _places(tables)
        if not len(places[0]):
            raise UsageError(f"task {task}: the runs have no document in common")
        chosen = [table.iloc[place] for table, place in zip(tables, places, strict=True)]
        _refuse_other_answers(task, graded, chosen)
        yield PairedTask(
            task=task,
            clusters=_clusters(chosen[0]),
            strata=_strata(chosen[0]),
            rows=tuple(np.asarray(table.index, np.int64) for table in chosen),
            dropped=dropped,
            official=not any(task in tasks for one in graded for tasks in unofficial(one.run.manifest).values()),
        )


def _places(tables: list[pd.DataFrame]) -> tuple[list[Codes], int]:
    """Where each table has the documents that all have, in the first one's order; how many only some have."""
    names = ["subtask", "doc_id"]
    first, *others = ([table[name].to_numpy() for name in names] for table in tables)
    if all(map(np.array_equal, first * len(others), chain(*others))):
        return [np.arange(len(table)) for table in tables], 0
    keys = [table.set_index(names).index for table in tables]
    common = keys[0]
    for key in keys[1:]:
        common = common[common.isin(key)]
    every = keys[0].append(keys[1:]).unique()
    return [np.asarray(key.get_indexer(common), np.int64) for key in keys], len(every) - len(common)


def _of_task(documents: pd.DataFrame, task: str) -> pd.DataFrame:
    return documents[documents["task"] == task]


def _refuse_other_answers(task: str, graded: tuple[Comparable, ...], chosen: list[pd.DataFrame]) -> None:
    """Documents of equal hashes have equal answers, unless a table was changed since."""
    first = chosen[0]
    for one, table in zip(graded[1:], chosen[1:], strict=True):
        for column in one.checked:
            if (wrong := np.flatnonzero(first[column].to_numpy() != table[column].to_numpy())).size:
                row = first.iloc[int(wrong[0])]
                raise UsageError(
                    f"task {task}: {row['subtask']} document {row['doc_id']} has another '{column}' in run "
                    f"{one.run.folder.name} than in run {graded[0].run.folder.name}, so it is not the same document"
                )


def _clusters(documents: pd.DataFrame) -> Codes | None:
    """Sources are numbered within a subtask; here no two subtasks share a number."""
    alone = documents[CLUSTER].to_numpy() == documents["doc_id"].to_numpy()
    if alone.all():
        return None
    pairs = documents.groupby(["subtask", CLUSTER], sort=False).ngroup()
    return np.asarray(pairs, np.int64)


def _strata(documents: pd.DataFrame) -> Codes | None:
    codes, subjects = documents["subtask"].factorize()
    return np.asarray(codes, np.int64) if len(subjects) > 1 else None
