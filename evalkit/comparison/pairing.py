"""Pairing of two sides by document.

In: two `Side`s of runs of one benchmark. Out: a `Pairing` with the scores of both on the same documents under any rule.
Runs that cannot be paired raise an error that names them; documents that are dropped are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from evalkit.benchmarks.outcomes import CONTENT, Comparable, Label, Measure
from evalkit.benchmarks.registry import benchmark_of, document_difference
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.runs.score_table import CLUSTER
from evalkit.runs.traits import is_imported, unofficial
from evalkit.stats.estimates import Codes, Floats

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PairedTask:
    """Documents of a task that every run of both sides has."""

    task: str
    clusters: Codes | None
    """[n] cluster numbers, the same for documents of one source; None if each document is its own cluster."""
    strata: Codes | None
    """[n] subject numbers (MMLU); None for a task without subjects."""
    rows: tuple[Codes, ...]
    """For each run of A, then of B: [n] indices of the documents in the run's own table."""
    dropped: int
    """Number of documents that only some of the runs have."""
    official: bool

    @property
    def n(self) -> int:
        """Number of paired documents."""
        return len(self.rows[0])

    @property
    def sources(self) -> int:
        """Number of sources of the documents."""
        return self.n if self.clusters is None else len(np.unique(self.clusters))


@dataclass(frozen=True)
class Pairing:
    """Two sides, paired on the same documents."""

    a: Side
    b: Side
    tasks: tuple[PairedTask, ...]
    left_out: Mapping[str, str]
    """Task that is not compared → reason."""
    graded: tuple[Comparable, ...]
    """Runs of A, then of B."""

    def label(self, task: str) -> Label:
        """Return the printed label of a task."""
        first = self.graded[0].run
        return benchmark_of(first).label(first, task)

    @property
    def rules(self) -> list[str]:
        """Rules that all runs support."""
        return [rule for rule in self.graded[0].rules if all(rule in other.rules for other in self.graded)]

    def alternatives(self, rule: str) -> list[str]:
        """Return the rules that all runs support and that measure the same as `rule`."""
        first, *others = (one.alternatives(rule) for one in self.graded)
        return [name for name in first if all(name in other for other in others)]

    def measure(self, rule: str) -> Measure:
        """Return the measure of documents under a rule, the same in all runs.

        Raises:
            UsageError: a run does not support the rule, or the runs measured different layers.
        """
        first, *others = (one.measure(rule) for one in self.graded)
        for one, other in zip(self.graded[1:], others, strict=True):
            if other.layers != first.layers:
                raise UsageError(
                    f"{first.name} has {len(first.layers)} layers in run {self.graded[0].run.folder.name} and "
                    f"{len(other.layers)} in run {one.run.folder.name}; compare models with the same layers"
                )
            if other.averaged != first.averaged:
                raise UsageError(
                    f"{rule} is a mean over {first.averaged} in run {self.graded[0].run.folder.name}, and over "
                    f"{other.averaged} in run {one.run.folder.name}; compare one layer: --rule {rule}@-1"
                )
        # An imported log may not say which direction is better, where another run does
        return next((one for one in (first, *others) if one.higher_is_better is not None), first)

    def scores(self, task: PairedTask, rule: str, layer: int | None = None) -> tuple[Floats, Floats]:
        """Return ([runs of A, n], [runs of B, n]) scores of a task's documents.

        `layer` is the index of one of the measure's layers; None: each document's mean over them.
        """
        found = [one.by_rule(rule)[rows] for one, rows in zip(self.graded, task.rows, strict=True)]
        found = [one if one.ndim == 1 else one.mean(axis=1) if layer is None else one[:, layer] for one in found]
        count = len(self.a.runs)
        return np.stack(found[:count]), np.stack(found[count:])


def pair(a: Side, b: Side, graded: dict[str, Comparable]) -> Pairing:
    """Pair the runs of two sides by document; runs that are read are added to `graded`, by their folder.

    Raises:
        UsageError: the runs are of different suites or documents, or have no task in common.
        RunError: a table is damaged or too old.
    """
    runs = (*a.runs, *b.runs)
    for run in runs:
        if run.suite != runs[0].suite:
            raise UsageError(
                f"run {runs[0].folder.name} is of suite {runs[0].suite} and run {run.folder.name} of {run.suite}, "
                "which use different prompts; compare runs of one suite"
            )
    for run in runs:
        if str(run.folder) not in graded:
            graded[str(run.folder)] = benchmark_of(run).comparable(run)
    found = tuple(graded[str(run.folder)] for run in runs)
    for one in found[1:]:
        found[0].check_alike(one)
        one.check_alike(found[0])
    by_run = [list(dict.fromkeys(one.documents["task"])) for one in found]
    shared = [task for task in by_run[0] if all(task in tasks for tasks in by_run)]
    left_out = {task: "not in every run" for task in dict.fromkeys(chain(*by_run)) if task not in shared}
    for one in found:
        measured = [task["task"] for task in one.run.stored["tasks"]]
        left_out |= {task: one.lacking for task in measured if not any(task in tasks for tasks in by_run)}
    if not shared:
        listed = "; ".join(map(_listed, found, by_run))
        raise UsageError(f"the runs have no task in common ({listed}); compare runs with a common task")
    for task in shared:
        _check_documents(task, runs, all(one.has_contents for one in found))
    return Pairing(a, b, tuple(_paired(found, shared)), left_out, found)


def _listed(one: Comparable, tasks: Sequence[str]) -> str:
    """Return a run's tasks with documents, and those without, for a message."""
    lacking = [task["task"] for task in one.run.stored["tasks"] if task["task"] not in tasks]
    more = f", and {', '.join(lacking)} with {one.lacking}" if lacking else ""
    return f"{one.run.folder.name}: {', '.join(tasks)}{more}"


def _check_documents(task: str, runs: tuple[Run, ...], by_content: bool) -> None:
    for run in runs[1:]:
        if found := document_difference(runs[0], run, task, by_content):
            what, mine, theirs = found
            raise UsageError(
                f"task {task}: the {what} of run {run.folder.name} ({theirs[:12]}) is not that of run "
                f"{runs[0].folder.name} ({mine[:12]}), so the documents cannot be paired; run both on the same"
            )


def _paired(graded: tuple[Comparable, ...], tasks: list[str]) -> Iterator[PairedTask]:
    for task in tasks:
        tables = [one.documents[one.documents["task"] == task] for one in graded]
        places, dropped = _places(tables, _identity(task, tables, graded))
        if not len(places[0]):
            raise UsageError(f"task {task}: the runs have no document in common; run both on the same documents")
        chosen = [table.iloc[place] for table, place in zip(tables, places, strict=True)]
        _check_answers(task, graded, chosen)
        yield PairedTask(
            task=task,
            clusters=_clusters(chosen[0]),
            strata=_strata(chosen[0]),
            rows=tuple(np.asarray(table.index, np.int64) for table in chosen),
            dropped=dropped,
            official=not any(task in tasks for one in graded for tasks in unofficial(one.run.manifest).values()),
        )


def _identity(task: str, tables: list[pd.DataFrame], graded: tuple[Comparable, ...]) -> str:
    """Return the column that identifies a document: its content where all runs have it, else its number."""
    having = [CONTENT in table for table in tables]
    if any(having) and not all(having) and any(is_imported(one.run.manifest) for one in graded):
        without = graded[having.index(False)].run.folder.name
        raise UsageError(
            f"task {task}: run {without} has no hashes of its documents' content, by which an imported run is paired: "
            "an earlier version made it; run its command again with a new --output"
        )
    return CONTENT if all(having) else "doc_id"


def _places(tables: list[pd.DataFrame], identity: str) -> tuple[list[Codes], int]:
    """Return the indices of the common documents in each table, in the first one's order, and the number of others."""
    names = ["subtask", identity]
    first, *others = ([table[name].to_numpy() for name in names] for table in tables)
    if all(map(np.array_equal, first * len(others), chain(*others))):
        return [np.arange(len(table)) for table in tables], 0
    keys = [table.set_index(names).index for table in tables]
    common = keys[0]
    for key in keys[1:]:
        common = common[common.isin(key)]
    every = keys[0].append(keys[1:]).unique()
    return [np.asarray(key.get_indexer(common), np.int64) for key in keys], len(every) - len(common)


def _check_answers(task: str, graded: tuple[Comparable, ...], chosen: list[pd.DataFrame]) -> None:
    """Raise `UsageError` if paired documents have different answers, as in a table that was modified."""
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
    """Return cluster numbers that are unique across subtasks; None if each document is its own cluster."""
    alone = documents[CLUSTER].to_numpy() == documents["doc_id"].to_numpy()
    if alone.all():
        return None
    pairs = documents.groupby(["subtask", CLUSTER], sort=False).ngroup()
    return np.asarray(pairs, np.int64)


def _strata(documents: pd.DataFrame) -> Codes | None:
    codes, subjects = documents["subtask"].factorize()
    return np.asarray(codes, np.int64) if len(subjects) > 1 else None
