"""Outcomes of documents: right or wrong, by how much, tied, truncated.

In: a finished run, by its benchmark's views. Out: `TaskOutcomes`, with the same arrays for choices and for answers, and
a `DocumentOutcome` for each document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import CUT, AnsweredDocument, AnswerView, ChoiceText, ChoiceView, TaskView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.display import Say
from evalkit.runs.folder import Run
from evalkit.runs.rules import Floats, best_choices, find_rule, row_scores
from evalkit.runs.score_table import SEGMENTS

Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Decisions:
    """Decisions of a rule, [documents] each, in the order of the task's score table."""

    starts: Indices
    """The document's first row in the table."""
    gold: Indices
    prediction: Indices
    """The first choice in a tie, as in lm-eval."""
    tie: Flags
    """Whether several choices have the highest score."""
    right: Flags
    margin: Floats
    """Score of the gold choice less the highest score of another choice, in the rule's unit: negative where the
    prediction is wrong, 0 in a tie with the gold choice, inf for a document with one choice."""


def decisions(view: ChoiceView, rule: str) -> Decisions:
    """Return the decisions of a rule about a task's documents; a run without the rule's scores raises `UsageError`."""
    table = view.scores
    scores = row_scores(table, find_rule(rule))
    starts, prediction, tie = best_choices(scores, table["choice"].to_numpy())
    gold = table["gold"].to_numpy()[starts]
    margin: Floats = np.empty(0)
    if len(starts):
        of_gold, others = scores[starts + gold], scores.copy()
        others[starts + gold] = -np.inf
        best = np.maximum.reduceat(others, starts)
        # Of two infinities, whose difference is no number, both are the worst possible score: a tie
        margin = np.subtract(of_gold, best, out=np.zeros(len(gold)), where=of_gold != best)
        margin = np.where(np.diff(np.append(starts, len(scores))) == 1, np.inf, margin)
    return Decisions(starts, gold, prediction, tie, prediction == gold, margin)


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
    truncated: Flags
    decided: Decisions | None = None
    """None for answers, as the rule."""
    rule: str | None = None

    @property
    def wrong(self) -> Flags:
        """Neither right nor without a score."""
        return ~self.right & ~np.isnan(self.value)

    @cached_property
    def indices(self) -> dict[DocumentName, int]:
        return {key: index for index, key in enumerate(self.keys)}


def run_outcomes(run: Run, tasks: Collection[str], rule: str | None, say: Say) -> Iterator[TaskOutcomes]:
    """Yield the tasks (none named: all) of a finished run with the outcomes of their documents.

    `rule` is the rule that chooses, by default the run's own; a rule for answers raises `UsageError`.
    """
    run.require_finished()
    if rule is not None:
        run.require_choices()
    for view in benchmark_of(run).views(run, tasks, say):
        if isinstance(view, ChoiceView):
            made = decisions(view, rule or str(run.rule))
            first = view.scores.iloc[made.starts]
            keys = zip(first["subtask"].astype(str).tolist(), first["doc_id"].astype(str).tolist(), strict=True)
            cut = np.maximum.reduceat(view.scores["truncated"].to_numpy(), made.starts) > 0
            yield TaskOutcomes(run, view, tuple(keys), made.right, made.margin, cut, made, rule or str(run.rule))
        else:
            documents = view.documents
            scores = np.array([np.nan if each.score is None else each.score for each in documents], float)
            cut = np.array([CUT in each.facts for each in documents], bool)
            named = tuple((each.subtask, each.id) for each in documents)
            yield TaskOutcomes(run, view, named, scores >= BEST, scores, cut)


class DocumentOutcome(NamedTuple):
    """One document in one run."""

    task: TaskOutcomes
    number: int

    @property
    def key(self) -> DocumentName:
        return self.task.keys[self.number]

    @property
    def name(self) -> str:
        """Name on the command line: "arc_easy/17", "mmlu/mmlu_astronomy/3"."""
        (subtask, identity), task = self.key, self.task.view.task
        return f"{task}/{identity}" if subtask == task else f"{task}/{subtask}/{identity}"

    @property
    def value(self) -> float:
        return float(self.task.value[self.number])

    @property
    def answer(self) -> AnsweredDocument | None:
        """None of a document with choices."""
        return self.task.view.documents[self.number] if isinstance(self.task.view, AnswerView) else None

    @property
    def text(self) -> ChoiceText | None:
        """None of an answer, and of choices without texts."""
        if not isinstance(self.task.view, ChoiceView):
            return None
        subtask, identity = self.key
        return self.task.view.texts.get((subtask, int(identity)))

    @property
    def gold(self) -> int:
        assert self.task.decided is not None
        return int(self.task.decided.gold[self.number])

    @property
    def rows(self) -> list[dict[Any, Any]]:
        """The rows of the choices in the score table; none of an answer."""
        if self.task.decided is None or not isinstance(self.task.view, ChoiceView):
            return []
        scores, start = self.task.view.scores, int(self.task.decided.starts[self.number])
        return scores.iloc[start : start + int(scores["choices"].iloc[start])].to_dict("records")

    def decision(self, made: Decisions) -> dict[str, Any]:
        """Return what a rule chooses, as plain data."""
        return {
            "prediction": int(made.prediction[self.number]),
            "right": bool(made.right[self.number]),
            "tie": bool(made.tie[self.number]),
            "margin": float(made.margin[self.number]),
        }

    def outcome(self) -> dict[str, Any]:
        """Return the outcome as plain data: of choices the prediction, of an answer its text and score."""
        task, number = self.task, self.number
        known: dict[str, Any] = {
            "right": bool(task.right[number]) if task.right[number] or task.wrong[number] else None
        }
        known |= {"truncated": bool(task.truncated[number])}
        if isinstance(task.view, AnswerView):
            answer = task.view.documents[number]
            about = {"answer": answer.answer, "references": list(answer.references), "metric": task.view.metric}
            return about | {"score": answer.score} | known | dict(answer.facts)
        assert task.decided is not None
        return {"gold": self.gold} | self.decision(task.decided) | known

    def record(self) -> dict[str, Any]:
        """Return the outcome with its run, and the scores of the choices by segment, as plain data."""
        record = {"run": self.task.run.manifest["id"], "rule": self.task.rule} | self.outcome()
        choices = list(map(_segment_scores, self.rows))
        return record | ({"choices": choices} if choices else {})


def _segment_scores(row: Mapping[Any, Any]) -> dict[str, dict[str, float | None]]:
    """Return segment → log-likelihood, tokens and perplexity of a row of the score table, for segments with tokens.

    "unconditional" is the continuation without the context, "whole" the whole sequence, where several segments are
    scored. A log-likelihood that the run does not have is None.
    """
    # Token counts of an imported log are not known
    known = [segment for segment in SEGMENTS if not np.isnan(row[f"ll_{segment}"])]
    present = [segment for segment in SEGMENTS if row[f"n_{segment}"] > 0] or known
    scores = {segment: _numbers(row[f"ll_{segment}"], row[f"n_{segment}"]) for segment in present}
    if not np.isnan(row["ll_unconditional"]):
        scores["unconditional"] = _numbers(row["ll_unconditional"], row["n_continuation"])
    scored = [segment for segment in present if segment in known]
    if len(scored) > 1:
        scores["whole"] = _numbers(*(sum(row[f"{kind}_{segment}"] for segment in scored) for kind in ("ll", "n")))
    return scores


def _numbers(likelihood: float, count: float) -> dict[str, float | None]:
    tokens = None if np.isnan(count) else int(count)
    known = None if np.isnan(likelihood) else float(likelihood)
    perplexity = None
    if known is not None and tokens:
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(-likelihood / tokens))
    return {"log_likelihood": known, "tokens": tokens, "perplexity": perplexity}
