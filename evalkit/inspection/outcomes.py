"""Outcomes of documents: right or wrong, by how much, tied, truncated.

In: a finished run, by its benchmark's views. Out: `TaskOutcomes`, with the same arrays for choices and for answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.document_views import CUT, AnswerView, ChoiceView, TaskView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import UsageError
from evalkit.inspection.decisions import Decisions, Flags, decisions
from evalkit.runs.folder import Run
from evalkit.scores.predictions import Floats

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
