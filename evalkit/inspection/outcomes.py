"""Outcomes of documents: right or wrong, by how much, tied, truncated.

In: a finished run, by its benchmark's views. Out: `TaskOutcomes`, with the same arrays for choices and for answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import CUT, AnsweredDocument, AnswerView, ChoiceText, ChoiceView, TaskView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.runs.folder import Run
from evalkit.runs.rules import Floats, best_choices, find_rule, row_scores
from evalkit.runs.score_table import SEGMENTS

Flags = NDArray[np.bool_]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Decisions:
    """Decisions of a rule, [documents] each, in the order of the task's score table."""

    starts: Places
    """The document's first row in the table."""
    gold: Places
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
    return Decisions(starts, gold, prediction, tie, prediction == gold, margin)


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


_BEST = 1.0
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
        """Subtask and id → index of the document."""
        return {key: place for place, key in enumerate(self.keys)}

    def name(self, place: int) -> str:
        """Return a document's name on the command line: "arc_easy/17", "mmlu/mmlu_astronomy/3"."""
        subtask, identity = self.keys[place]
        task = self.view.task
        return f"{task}/{identity}" if subtask == task else f"{task}/{subtask}/{identity}"

    def rows(self, place: int) -> list[dict[Any, Any]]:
        """Return the rows of a document's choices in the score table; none of an answer."""
        if self.decided is None or not isinstance(self.view, ChoiceView):
            return []
        start = int(self.decided.starts[place])
        count = int(self.view.scores["choices"].iloc[start])
        return self.view.scores.iloc[start : start + count].to_dict("records")

    def choice_text(self, place: int) -> ChoiceText | None:
        """Return the texts of a document with choices; None if there are none."""
        if not isinstance(self.view, ChoiceView):
            return None
        subtask, identity = self.keys[place]
        return self.view.texts.get((subtask, int(identity)))

    def answer(self, place: int) -> AnsweredDocument | None:
        """Return a document that was answered; None of one with choices."""
        return self.view.documents[place] if isinstance(self.view, AnswerView) else None


def run_outcomes(run: Run, tasks: Collection[str], rule: str | None, say: Say) -> Iterator[TaskOutcomes]:
    """Yield the tasks (none named: all) of a finished run with the outcomes of their documents.

    `rule` is the rule that chooses, by default the run's own.

    Raises:
        UsageError: a rule is given for answers, or the run lacks its scores.
        EvalkitError: the run is not finished, or damaged.
    """
    run.require_finished()
    if rule is not None:
        run.require_choices()
    for view in benchmark_of(run).views(run, tasks, say):
        yield _of_choices(run, view, rule or str(run.rule)) if isinstance(view, ChoiceView) else _of_answers(run, view)


def check_scores(outcomes: TaskOutcomes) -> None:
    """Raise a `UsageError` if scores of a task's answers have other bounds than 0 and 1, so that none is right."""
    if outcomes.decided is None and ((outcomes.value < 0) | (outcomes.value > _BEST)).any():
        raise UsageError(
            f"task {outcomes.view.task}: its metric is not between 0 and 1, so that no document is right or wrong; "
            "leave out --wrong, --right, --won and --lost"
        )


def _of_choices(run: Run, view: ChoiceView, rule: str) -> TaskOutcomes:
    made = decisions(view, rule)
    first = view.scores.iloc[made.starts]
    keys = zip(first["subtask"].astype(str).tolist(), first["doc_id"].astype(str).tolist(), strict=True)
    cut = np.maximum.reduceat(view.scores["truncated"].to_numpy(), made.starts) > 0
    return TaskOutcomes(run, view, tuple(keys), made.right, made.margin, made.tie, cut, made, rule)


def _of_answers(run: Run, view: AnswerView) -> TaskOutcomes:
    scores = np.array([np.nan if document.score is None else document.score for document in view.documents], float)
    keys = tuple((document.subtask, document.id) for document in view.documents)
    cut = np.array([CUT in document.facts for document in view.documents], bool)
    return TaskOutcomes(run, view, keys, scores >= _BEST, scores, np.zeros(len(keys), bool), cut, None)


def run_record(task: TaskOutcomes, place: int) -> dict[str, Any]:
    """Return the outcome of a document in a run, and the scores of its choices, as plain data."""
    record = {"run": task.run.manifest["id"], "rule": task.rule} | outcome_record(task, place)
    choices = [_choice(row) for row in task.rows(place)]
    return record | ({"choices": choices} if choices else {})


def outcome_record(task: TaskOutcomes, place: int) -> dict[str, Any]:
    """Return the outcome of a document: of choices the prediction, of an answer its text and score."""
    right = {"right": bool(task.right[place]) if task.right[place] or task.wrong[place] else None}
    truncated = {"truncated": bool(task.truncated[place])}
    if isinstance(task.view, AnswerView):
        document = task.view.documents[place]
        given = {"answer": document.answer, "references": list(document.references)}
        return given | {"metric": task.view.metric, "score": document.score} | right | truncated | dict(document.facts)
    assert task.decided is not None
    chosen = {"gold": int(task.decided.gold[place]), "prediction": int(task.decided.prediction[place])}
    return chosen | right | {"tie": bool(task.tie[place]), "margin": float(task.value[place])} | truncated


def _choice(row: Mapping[Any, Any]) -> dict[str, dict[str, float | None]]:
    """Return segment → log-likelihood, tokens and perplexity of a row of the score table, for segments with tokens.

    "unconditional" is the continuation without the context, "whole" the whole sequence, where several segments are
    scored. A log-likelihood that the run does not have is None.
    """
    # Token counts of an imported log are not known
    counted = [segment for segment in SEGMENTS if row[f"n_{segment}"] > 0]
    present = counted or [segment for segment in SEGMENTS if not np.isnan(row[f"ll_{segment}"])]
    scores = {segment: _numbers(row[f"ll_{segment}"], row[f"n_{segment}"]) for segment in present}
    if not np.isnan(row["ll_unconditional"]):
        scores["unconditional"] = _numbers(row["ll_unconditional"], row["n_continuation"])
    scored = [segment for segment in present if not np.isnan(row[f"ll_{segment}"])]
    if len(scored) > 1:
        scores["whole"] = _numbers(*(sum(row[f"{kind}_{segment}"] for segment in scored) for kind in ("ll", "n")))
    return scores


def _numbers(likelihood: float, count: float) -> dict[str, float | None]:
    tokens = None if np.isnan(count) else int(count)
    if np.isnan(likelihood) or not tokens:
        known = None if np.isnan(likelihood) else float(likelihood)
        return {"log_likelihood": known, "tokens": tokens, "perplexity": None}
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(-likelihood / tokens))
    return {"log_likelihood": float(likelihood), "tokens": tokens, "perplexity": perplexity}
