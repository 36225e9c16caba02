"""Differences by subject of a task. In: a `Pairing` and one of its tasks. Out: a difference for each subject."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalkit.comparison.comparison import task_difference
from evalkit.comparison.differences import DOWN, UP, Comparison, RuleVerdict, TaskDifference, p_text
from evalkit.comparison.line import ScoredLine
from evalkit.comparison.pairing import PairedTask, Pairing
from evalkit.errors import UsageError
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


PROMPT_NOTES = (
    "mean over prompts: of each document the mean of its values under its prompts (1 or 0: right or wrong)",
    "prompts one by one: a task that lacks a prompt (an order of options that it does not list) counts with the run's "
    "own prompt; p and intervals of single prompts are not corrected for their number",
    "under all prompts: intersection-union test, whose p is the largest of the prompts' and needs no correction "
    "(Berger 1982); the claim is about these prompts, not about others",
)
_MEAN = "mean over prompts"


def prompt_of(rule: str) -> str:
    """Return the prompt of "RULE@PROMPT"; of a rule alone, that it is the mean over them."""
    return rule.partition("@")[2] or _MEAN


def single_prompts(found: Comparison) -> list[RuleVerdict]:
    """Return the verdict under each prompt, without that on the mean."""
    return [one for one in found.rules if "@" in one.rule]


def prompts_sentence(found: Comparison) -> str:
    """Return whether B is better, or worse, than A under all prompts."""
    single = single_prompts(found)
    up, down = (sum(one.average.verdict in verdicts for one in single) for verdicts in (UP, DOWN))
    count, on = len(single), " on average over the tasks" if len(found.tasks) > 1 else ""
    better, worse = found.verdicts
    if count in (up, down):
        last = max(single, key=_p)
        said = f"{found.b} is {better if up else worse} than {found.a} under all {count} prompts{on}"
        return f"{said} (intersection-union test: the largest p is {p_text(last.average.p)}, {prompt_of(last.rule)})."
    if not up and not down:
        sign = -1 if found.measure.higher_is_better is False else 1
        ahead, behind = (sum(sign * side * one.average.difference > 0 for one in single) for side in (1, -1))
        said = f"No difference between {found.b} and {found.a} is shown under any of {count} prompts{on}"
        return f"{said}; {found.b} is ahead under {ahead}, {found.a} under {behind}."
    counts = {better: up, worse: down, "undecided": count - up - down}
    said = ", ".join(f"{verdict} under {number}" for verdict, number in counts.items() if number)
    return (
        f"Of {count} prompts{on}, {found.b} against {found.a} is {said}: neither is shown to be {better} under all of "
        "them."
    )


def _p(one: RuleVerdict) -> float:
    return 1.0 if one.average.p is None else one.average.p


@dataclass(frozen=True)
class Agreement:
    """Documents of a task by the scores of two runs, A and B."""

    task: str
    n: int
    a_higher: int
    """Scores that are right or wrong: A is right and B is wrong."""
    b_higher: int
    """Scores that are right or wrong: A is wrong and B is right."""
    both_right: int | None
    """None for scores between right and wrong."""
    both_wrong: int | None

    @property
    def equal(self) -> int:
        """Number of documents with the same score."""
        return self.n - self.a_higher - self.b_higher


def agreements(pairing: Pairing, rule: str) -> tuple[Agreement, ...]:
    """Return the agreement of two runs on each task.

    For a measure of several layers the score of a document is the mean over them.

    Args:
        pairing: two sides of one run each.
        rule: a rule that both support.

    Raises:
        UsageError: a side has several runs, or a run does not support the rule.
    """
    if len(pairing.graded) > 2:
        raise UsageError("agreement by document is of two runs; a side has several")
    graded, found = pairing.measure(rule).graded, []
    for task in pairing.tasks:
        [a], [b] = pairing.scores(task, rule)
        both = None if graded else int(((a == 1) & (b == 1)).sum())
        neither = None if graded else int(((a == 0) & (b == 0)).sum())
        found.append(Agreement(task.task, task.n, int((a > b).sum()), int((b > a).sum()), both, neither))
    return tuple(found)
