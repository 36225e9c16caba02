"""Outcomes of documents: right or wrong, by how much, tied, truncated.

In: a finished run, by its benchmark's views. Out: `TaskOutcomes`, with the same arrays for choices and for answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import CUT, AnswerView, ChoiceView, TaskView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.runs.rules import Floats, best_choices, find_rule, row_scores

Flags = NDArray[np.bool_]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Decisions:
    """Decisions of a rule, [documents] each, in the order of the task's score table."""

    starts: Places
    """The document's first row in the table."""
    prediction: Places
    """Index of the predicted choice; the first one in a tie, as in lm-eval."""
    tie: Flags
    """Whether several choices have the highest score."""
    right: Flags
    """Whether the prediction is the gold choice."""
    margin: Floats
    """Score of the gold choice less the highest score of another choice, in the rule's unit: negative where the
    prediction is wrong, 0 in a tie with the gold choice, inf for a document with one choice."""


def decisions(view: ChoiceView, rule: str) -> Decisions:
    """Return the decisions of a rule about the documents of a task.

    Raises:
        UnknownNameError: there is no such rule.
        UsageError: the run lacks the scores that the rule needs.
    """
    table = view.scores
    scores = row_scores(table, find_rule(rule))
    starts, prediction, tie = best_choices(scores, table["choice"].to_numpy())
    gold = table["gold"].to_numpy()[starts]
    margin = _margins(scores, starts, starts + gold)
    return Decisions(starts, prediction, tie, prediction == gold, margin)


def _margins(scores: Floats, starts: Places, gold_rows: Places) -> Floats:
    if not len(starts):
        return np.empty(0)
    others = scores.copy()
    others[gold_rows] = -np.inf
    best = np.maximum.reduceat(others, starts)
    gold = scores[gold_rows]
    # Of two infinities, whose difference is no number, both are the worst possible score: a tie
    margin = np.subtract(gold, best, out=np.zeros(len(gold)), where=gold != best)
    return np.where(np.diff(np.append(starts, len(scores))) == 1, np.inf, margin)


BEST = 1.0
"""Best score of an answer."""

DocumentName = tuple[str, str]
"""Subtask and id."""


@dataclass(frozen=True)
class TaskOutcomes:
    """The documents of a task with their outcomes in one run, [documents] each."""

    run: Run
    view: TaskView
    keys: tuple[DocumentName, ...]
    right: Flags
    """Whether the prediction is the gold choice; of an answer, whether its score is the best one."""
    value: Floats
    """Margin of choices (see `Decisions`), score of answers; NaN for an answer without a score."""
    tie: Flags
    truncated: Flags
    decided: Decisions | None
    """Decisions about choices; None for answers."""
    rule: str | None = None
    """The rule that chose; None for answers."""

    @property
    def wrong(self) -> Flags:
        """Whether a document is neither right nor without a score."""
        return ~self.right & ~np.isnan(self.value)

    @cached_property
    def places(self) -> dict[DocumentName, int]:
        """Return subtask and id → index of the document."""
        return {key: place for place, key in enumerate(self.keys)}

    def name(self, place: int) -> str:
        """Return a document's name on the command line: "arc_easy/17", "mmlu/mmlu_astronomy/3"."""
        subtask, identity = self.keys[place]
        task = self.view.task
        return f"{task}/{identity}" if subtask == task else f"{task}/{subtask}/{identity}"


def run_outcomes(run: Run, tasks: Collection[str], rule: str | None, say: Say) -> Iterator[TaskOutcomes]:
    """Yield the tasks of a finished run with the outcomes of their documents.

    Args:
        run: a finished run.
        tasks: names of tasks; empty: all.
        rule: the rule that chooses; None: the run's own.
        say: called with messages for the user.

    Raises:
        UsageError: a rule is given for answers, or the run lacks its scores.
        EvalkitError: the run is not finished, or damaged.
    """
    run.require_finished()
    if rule is not None:
        run.require_choices()
    for view in benchmark_of(run).views(run, tasks, say):
        yield _choices(run, view, rule) if isinstance(view, ChoiceView) else _answers(run, view)


def gold_of(found: TaskOutcomes, place: int) -> int:
    """Return the index of the gold choice of a document with choices."""
    assert isinstance(found.view, ChoiceView) and found.decided is not None
    return int(found.view.scores["gold"].iloc[found.decided.starts[place]])


def check_scores(found: TaskOutcomes) -> None:
    """Raise a `UsageError` if scores of a task's answers have other bounds than 0 and 1, so that none is right."""
    if found.decided is None and ((found.value < 0) | (found.value > BEST)).any():
        raise UsageError(
            f"task {found.view.task}: its metric is not between 0 and 1, so that no document is right or wrong; "
            "leave out --wrong, --right, --won and --lost"
        )


def _choices(run: Run, view: ChoiceView, rule: str | None) -> TaskOutcomes:
    rule = rule or str(run.rule)
    found = decisions(view, rule)
    first = view.scores.iloc[found.starts]
    keys = zip(first["subtask"].astype(str).tolist(), first["doc_id"].astype(str).tolist(), strict=True)
    cut = np.maximum.reduceat(view.scores["truncated"].to_numpy(), found.starts) > 0
    return TaskOutcomes(run, view, tuple(keys), found.right, found.margin, found.tie, cut, found, rule)


def _answers(run: Run, view: AnswerView) -> TaskOutcomes:
    documents = view.documents
    scores = np.array([np.nan if one.score is None else one.score for one in documents], dtype=float)
    return TaskOutcomes(
        run,
        view,
        tuple((one.subtask, one.id) for one in documents),
        scores >= BEST,
        scores,
        np.zeros(len(documents), bool),
        np.array([CUT in one.facts for one in documents], dtype=bool),
        None,
    )
