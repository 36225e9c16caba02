"""What a run says of every document: scores from 0 to 1, and what tells the document apart.

In: a finished run. Out: a `Graded` for runs with a score table, of which each rule makes right and wrong answers; a
`Generated` for LongBench, whose tasks grade their answers.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from evalkit.errors import UsageError
from evalkit.runs.folder import LONGBENCH, Run
from evalkit.scores.results import available_rules
from evalkit.scores.rules import choose, find_rule
from evalkit.scores.table import CLUSTER
from evalkit.stats.estimates import Floats

if TYPE_CHECKING:
    import pandas as pd


def graded_run(run: Run) -> Graded | Generated:
    """What reads this run."""
    return Generated(run) if run.of_longbench else Graded(run)


class Graded:
    """A run's documents and, by rule, which of them it gets right."""

    checked: ClassVar = ("gold", "choices")
    """Columns that are equal where documents are."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.by_rule = lru_cache(maxsize=None)(self._grade)
        self.groups: dict[str, list[str]] = run.manifest["groups"]
        """Average → its tasks."""
        self.group_sizes: dict[str, int] = run.manifest["group_sizes"]
        """Average → how many tasks it has when none is left out."""

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row a document: task, subtask, doc_id, choices, gold, cluster, in the score table's order."""
        scores = self.run.scores
        columns = ["task", "subtask", "doc_id", "choices", "gold", CLUSTER]
        return scores.loc[scores["choice"] == 0, columns].reset_index(drop=True)

    @cached_property
    def rules(self) -> list[str]:
        """The rules that the run can answer."""
        return available_rules(self.run.scores)

    def _grade(self, rule: str) -> Floats:
        """[documents] 1 where the rule chooses the right answer, else 0."""
        try:
            chosen = choose(self.run.scores, find_rule(rule)).prediction
        except UsageError as error:
            raise UsageError(f"run {self.run.folder.name}: {error}") from error
        right: Floats = (chosen == self.documents["gold"].to_numpy()).astype(np.float64)
        return right


class Generated:
    """A LongBench run's documents and their scores."""

    checked: ClassVar = ("answers",)
    """Columns that are equal where documents are."""
    rules: ClassVar = (LONGBENCH,)

    def __init__(self, run: Run) -> None:
        from evalkit.benchmarks.longbench.protocol import GROUPS, suite_tasks

        self.run = run
        tasks = suite_tasks(run.manifest["specification"]["suite"])
        self.groups = {group: [task.name for task in tasks if task.group == group] for group in GROUPS}
        """Group → its tasks."""
        self.group_sizes = {group: len(members) for group, members in self.groups.items()}

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row a document: task, subtask (the same), doc_id, answers, score, cluster."""
        from evalkit.benchmarks.longbench.benchmark import SOURCE, load_generations

        table = load_generations(self.run, ("task", "id", "answers", "score", SOURCE))
        found = table[["task", "answers", "score"]].assign(subtask=table["task"], doc_id=table["id"])
        found[CLUSTER] = found.groupby([table["task"], table[SOURCE]], sort=False)["doc_id"].transform("first")
        return found

    def by_rule(self, rule: str) -> Floats:
        """[documents] the task's own score of each answer.

        Raises:
            UsageError: it is not LongBench's.
        """
        if rule != LONGBENCH:
            raise UsageError(
                f"run {self.run.folder.name} is of LongBench, whose tasks are scored by metrics of their own: leave "
                f"out --rule {rule}"
            )
        scores: Floats = self.documents["score"].to_numpy(np.float64)
        return scores
