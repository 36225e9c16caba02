"""Differences by subject of a task. In: a `Pairing` and one of its tasks. Out: a difference for each subject."""

from __future__ import annotations

import numpy as np

from evalkit.comparison.comparison import task_difference
from evalkit.comparison.differences import TaskDifference
from evalkit.comparison.line import ScoredLine
from evalkit.comparison.pairing import PairedTask, Pairing
from evalkit.stats.significance import holm


def subject_differences(pairing: Pairing, task: PairedTask, rule: str) -> tuple[TaskDifference, ...]:
    """Return the difference of each subject of a task, named by the subject, in the order of the documents.

    p values are corrected by Holm's method over the task's subjects; intervals are not. For a measure of several
    layers the score of a document is the mean over them.

    Args:
        pairing: the sides.
        task: one of its tasks, with subjects.
        rule: a rule that all runs support.

    Raises:
        UsageError: a run does not support the rule.
    """
    measure = pairing.measure(rule)
    lines = [ScoredLine(one, *pairing.scores(one, rule), measure) for one in _subjects(pairing, task)]
    corrected = holm([1.0 if one.p is None else one.p for one in lines])
    return tuple(task_difference(one, p, measure, with_power=False) for one, p in zip(lines, corrected, strict=True))


def _subjects(pairing: Pairing, task: PairedTask) -> list[PairedTask]:
    """Return the documents of each subject as a task of its own."""
    assert task.strata is not None, f"{task.task} has no subjects"
    names = pairing.graded[0].documents["subtask"].to_numpy()[task.rows[0]]
    found = []
    for number in range(int(task.strata.max()) + 1):
        places = np.flatnonzero(task.strata == number)
        found.append(
            PairedTask(
                task=str(names[places[0]]),
                clusters=None if task.clusters is None else task.clusters[places],
                strata=None,
                rows=tuple(rows[places] for rows in task.rows),
                dropped=0,
                official=task.official,
            )
        )
    return found
