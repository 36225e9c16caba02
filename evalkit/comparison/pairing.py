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

from evalkit.benchmarks.differences import document_difference
from evalkit.benchmarks.outcomes import CONTENT, Comparable, Measure
from evalkit.benchmarks.registry import results_of
from evalkit.comparison.sides import Side, check_pairs
from evalkit.errors import UsageError
from evalkit.runs.continuous import lacks_rule, with_default_rule
from evalkit.runs.folder import LM_EVAL, Run
from evalkit.runs.score_table import sources_of, weighted
from evalkit.runs.traits import caveats, is_imported, unofficial
from evalkit.stats.estimates import Codes, Floats
from evalkit.stats.sequential import ONCE, Looks
from evalkit.suites.suites import Label

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
    """Documents that only some of the runs have."""
    official: bool
    total: int = 0
    """Documents that the benchmark has; 0: unknown."""
    sample: str = ""
    """Common name of tasks that ask the same questions, whose errors are not independent; empty if there are none."""
    has_caveats: bool = False

    @property
    def n(self) -> int:
        return len(self.rows[0])

    @property
    def sources(self) -> int:
        return self.n if self.clusters is None else len(np.unique(self.clusters))


def sample_names(tasks: Sequence[PairedTask]) -> list[str]:
    """Return a name for each task's sample, as `average` takes them: a common one, or the task's number."""
    return [task.sample or str(number) for number, task in enumerate(tasks)]


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
    in_pairs: bool = False
    """Whether the n-th runs of both sides have the same seed, declared before their results were seen."""
    looks: Looks = ONCE
    """Those at which intervals and p values hold."""

    @property
    def names(self) -> list[str]:
        return [paired.task for paired in self.tasks]

    def label(self, task: str) -> Label:
        first = self.graded[0].run
        return results_of(first).label(task)

    def key(self, rule: str | None) -> str:
        """Return the key of a rule or outcome (`outcome_key`), by default and for a margin of the runs' own rule."""
        return common_key(self.graded, rule)

    def alternatives(self, rule: str) -> list[str]:
        """Return the rules that all runs support and that measure the same as `rule`."""
        return _common([graded.alternatives(rule) for graded in self.graded])

    def measure(self, rule: str) -> Measure:
        """Return the measure of documents under a rule; runs that measured different layers raise `UsageError`."""
        measures = [graded.measure(rule) for graded in self.graded]
        first = measures[0]
        for graded, other in zip(self.graded, measures, strict=True):
            if (other.layers, other.averaged) != (first.layers, first.averaged):
                mine, theirs = (measure.averaged or f"{len(measure.layers)} layers" for measure in (first, other))
                name = rule.partition("@")[0]
                differ = f"is of {mine} in run {self.graded[0].run.folder.name} and of {theirs} in run"
                raise UsageError(f"{first.name} {differ} {graded.run.folder.name}; compare one layer: --rule {name}@-1")
        # An imported log may not say which direction is better, where another run does
        return next((measure for measure in measures if measure.higher_is_better is not None), first)

    def scores(self, task: PairedTask, rule: str, layer: int | None = None) -> tuple[Floats, Floats]:
        """Return ([runs of A, n], [runs of B, n]) scores of a task's documents.

        Their mean is the task's score (`weighted`). Of sides with several checkpoints of each training, a run is their
        mean. `layer` is the index of one of the measure's layers; None: each document's mean over them.
        """
        a, b = (scores.mean(axis=1) for scores in self._by_checkpoint(task, rule, layer))
        return a, b

    def windows(self, rule: str) -> Floats:
        """Return [trainings of A and B, checkpoints] of scores, averaged over documents and tasks."""
        by_task = [np.concatenate(self._by_checkpoint(task, rule, None)).mean(axis=2) for task in self.tasks]
        windows: Floats = np.mean(by_task, axis=0)
        return windows

    def _by_checkpoint(self, task: PairedTask, rule: str, layer: int | None) -> list[Floats]:
        """Return of A and of B [trainings, checkpoints, n] scores."""
        scores = [graded.by_rule(rule)[rows] for graded, rows in zip(self.graded, task.rows, strict=True)]
        scores = [of if of.ndim == 1 else of.mean(axis=1) if layer is None else of[:, layer] for of in scores]
        documents = self.graded[0].documents.iloc[task.rows[0]]
        scores = [weighted(of, documents) for of in scores]
        count, n = len(self.a.runs), task.n
        sides = zip((self.a, self.b), (scores[:count], scores[count:]), strict=True)
        return [np.stack(of_side).reshape(side.trainings, side.each, n) for side, of_side in sides]


def own_rules(graded: Sequence[Comparable]) -> list[str]:
    return list(dict.fromkeys(str(run.run.manifest["rule"]) for run in graded))


def common_key(graded: Sequence[Comparable], rule: str | None) -> str:
    """Return the key of a rule or outcome, by default and for a margin of the runs' own rule.

    Of several own rules it is the first that all runs support. Raises `UsageError` if they have none in common.
    """
    if rule is not None and not lacks_rule(rule):
        return rule
    rules = own = own_rules(graded)
    if len(own) > 1:
        common = _common([run.rules for run in graded])
        rules = [name for name in own if name in common] or common
    if not rules:
        raise UsageError(f"the runs have different rules ({', '.join(own)}), and none in common")
    return str(with_default_rule(rule, rules[0]))


def _common(names: Sequence[Sequence[str]]) -> list[str]:
    return [name for name in names[0] if all(name in other for other in names)]


def pair(a: Side, b: Side, graded: dict[str, Comparable], in_pairs: bool = False) -> Pairing:
    """Pair the runs of two sides by document; runs that are read are added to `graded`, by their folder.

    `in_pairs`: the n-th runs of both sides have the same seed. Of two single runs this has no effect.

    Runs of different suites or documents, without a common task, or seeds that are no pairs, raise `UsageError`.
    """
    runs = (*a.runs, *b.runs)
    if in_pairs:
        check_pairs(a, b)
    for run in runs:
        if run.suite != runs[0].suite:
            suites = f"suite {runs[0].suite} and run {run.folder.name} of {run.suite}"
            advice = "; with --template plain, lm-eval's prompt, a task is of suite tasks, too"
            advice *= {run.suite, runs[0].suite} == {LM_EVAL, "tasks"}
            raise UsageError(f"run {runs[0].folder.name} is of {suites}; compare runs of one suite{advice}")
        if str(run.folder) not in graded:
            graded[str(run.folder)] = results_of(run).comparable()
    of_runs = tuple(graded[str(run.folder)] for run in runs)
    for other in of_runs[1:]:
        of_runs[0].check_alike(other)
        other.check_alike(of_runs[0])
    by_run = [list(dict.fromkeys(of_run.documents["task"])) for of_run in of_runs]
    shared, every = _common(by_run), dict.fromkeys(chain(*by_run))
    left_out = {task: "not in every run" for task in every if task not in shared}
    for of_run in of_runs:
        left_out |= {task["task"]: of_run.lacking for task in of_run.run.stored["tasks"] if task["task"] not in every}
    if not shared:
        reasons = ", ".join(f"{task}: {reason}" for task, reason in left_out.items())
        raise UsageError(f"the runs have no task in common ({reasons}); compare runs with a common task")
    for task in shared:
        for run in runs[1:]:
            check_same_documents(runs[0], run, task, all(of_run.has_contents for of_run in of_runs))
    return Pairing(a, b, tuple(_paired(of_runs, shared)), left_out, of_runs, in_pairs and len(a.runs) > 1)


def check_same_documents(a: Run, b: Run, task: str, by_content: bool = False) -> None:
    """Raise a `UsageError` if the documents of a task differ between two runs (`document_difference`)."""
    if difference := document_difference(a, b, task, by_content):
        what, mine, theirs = difference
        differ = f"of run {b.folder.name} ({theirs[:12]}) is not that of run {a.folder.name} ({mine[:12]})"
        raise UsageError(f"task {task}: the {what} {differ}; run both on the same documents")


def _paired(graded: tuple[Comparable, ...], tasks: list[str]) -> Iterator[PairedTask]:
    for task in tasks:
        tables = [of_run.documents[of_run.documents["task"] == task] for of_run in graded]
        indices, dropped = _indices(tables, _identity_of(task, tables, graded))
        if not len(indices[0]):
            raise UsageError(f"task {task}: the runs have no document in common; run both on the same documents")
        first, *others = chosen = [table.iloc[index] for table, index in zip(tables, indices, strict=True)]
        for of_run, table in zip(graded[1:], others, strict=True):
            for column in of_run.checked:  # equal, unless a table was modified
                if (wrong := np.flatnonzero(first[column].to_numpy() != table[column].to_numpy())).size:
                    subtask, identity = first[["subtask", "doc_id"]].iloc[int(wrong[0])]
                    runs = f"{of_run.run.folder.name} than in run {graded[0].run.folder.name}"
                    raise UsageError(f"task {task}: {subtask} document {identity} has another '{column}' in run {runs}")
        clusters, strata = sources_of(first)
        rows = tuple(np.asarray(table.index, np.int64) for table in chosen)
        official = not any(task in marked for run in graded for marked in unofficial(run.run.manifest).values())
        known = graded[0].run.manifest["documents"].get(task, {})
        total = known.get("total") or 0 if isinstance(known, dict) else 0
        doubtful = any(task in caveats(run.run.manifest) for run in graded)
        sample = graded[0].sample_of(task)
        yield PairedTask(task, clusters, strata, rows, dropped, official, total, sample, doubtful)


def _identity_of(task: str, tables: list[pd.DataFrame], graded: tuple[Comparable, ...]) -> str:
    """Return the column that identifies a document: its content where all runs have it, else its number."""
    having = [CONTENT in table for table in tables]
    if any(having) and not all(having) and any(is_imported(of_run.run.manifest) for of_run in graded):
        lacking = f"run {graded[having.index(False)].run.folder.name} has no hashes of its documents' content"
        raise UsageError(f"task {task}: {lacking}, by which an imported run is paired; run its command again")
    return CONTENT if all(having) else "doc_id"


def _indices(tables: Sequence[pd.DataFrame], identity: str) -> tuple[list[Codes], int]:
    """Return the indices of the common documents in each table, in the first one's order, and the number of others."""
    keys = [table.set_index(["subtask", identity]).index for table in tables]
    # Without a value there is no identity
    if all(keys[0].equals(key) for key in keys) and not tables[0][identity].isna().any():
        return [np.arange(len(table)) for table in tables], 0
    common = keys[0]
    for key in keys[1:]:
        common = common[common.isin(key)]
    every = keys[0].append(keys[1:]).unique()
    return [np.asarray(key.get_indexer(common), np.int64) for key in keys], len(every) - len(common)
