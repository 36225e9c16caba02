"""Outcomes of documents: right or wrong, by how much, tied, truncated.

In: a finished run, by its benchmark's views. Out: `TaskOutcomes`, with a `DocumentOutcome` for each document, whether
choices of it were scored or it was answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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

    def of(self, number: int) -> dict[str, Any]:
        """Return the decision about one document as plain data."""
        return {
            "prediction": int(self.prediction[number]),
            "right": bool(self.right[number]),
            "tie": bool(self.tie[number]),
            "margin": float(self.margin[number]),
        }


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


class TaskOutcomes(NamedTuple):
    """A task in one run, with the outcomes of its documents."""

    run: Run
    view: TaskView
    documents: dict[DocumentName, DocumentOutcome]
    decided: Decisions | None = None
    """None for answers, as the rule."""
    rule: str | None = None


@dataclass(frozen=True, eq=False)
class DocumentOutcome:
    """One document in one run."""

    task: TaskOutcomes
    number: int
    """Its place among the task's documents."""
    key: DocumentName
    right: bool | None
    """Whether the prediction is the gold choice; whether an answer's score is the best one, None without a score."""
    value: float
    """Margin of choices (see `Decisions`), score of answers; NaN for an answer without a score."""
    truncated: bool

    @property
    def name(self) -> str:
        """Name on the command line: "arc_easy/17", "mmlu/mmlu_astronomy/3"."""
        return "/".join([*dict.fromkeys((self.task.view.task, self.key[0])), self.key[1]])

    @property
    def answer(self) -> AnsweredDocument | None:
        """None of a document with choices."""
        return self.task.view.documents[self.number] if isinstance(self.task.view, AnswerView) else None

    @property
    def text(self) -> ChoiceText | None:
        """None of an answer, and of choices without texts."""
        view, (subtask, identity) = self.task.view, self.key
        return view.texts.get((subtask, int(identity))) if isinstance(view, ChoiceView) else None

    @property
    def gold(self) -> int:
        assert self.task.decided is not None
        return int(self.task.decided.gold[self.number])

    @property
    def tie(self) -> bool:
        return self.task.decided is not None and bool(self.task.decided.tie[self.number])

    @property
    def rows(self) -> list[dict[Any, Any]]:
        """The rows of the choices in the score table; none of an answer."""
        if self.task.decided is None or not isinstance(self.task.view, ChoiceView):
            return []
        scores, start = self.task.view.scores, int(self.task.decided.starts[self.number])
        return scores.iloc[start : start + int(scores["choices"].iloc[start])].to_dict("records")

    def outcome(self) -> dict[str, Any]:
        """Return the outcome as plain data: of choices the prediction, of an answer its text and score."""
        known = {"right": self.right, "truncated": self.truncated}
        if self.task.decided is not None:
            return {"gold": self.gold} | self.task.decided.of(self.number) | known
        view, answer = self.task.view, self.answer
        assert isinstance(view, AnswerView) and answer is not None
        about = {"answer": answer.answer, "references": list(answer.references), "metric": view.metric}
        return about | {"score": answer.score} | known | dict(answer.facts)

    def record(self) -> dict[str, Any]:
        """Return the outcome with its run, and the scores of the choices by segment, as plain data."""
        record = {"run": self.task.run.manifest["id"], "rule": self.task.rule} | self.outcome()
        choices = list(map(_segment_scores, self.rows))
        return record | ({"choices": choices} if choices else {})


def run_outcomes(run: Run, tasks: Collection[str], rule: str | None, say: Say) -> Iterator[TaskOutcomes]:
    """Yield the tasks (none named: all) of a finished run with the outcomes of their documents.

    `rule` is the rule that chooses, by default the run's own; a rule for answers raises `UsageError`.
    """
    run.require_finished()
    if rule is not None:
        run.require_choices()
    rule = rule or str(run.rule)
    for view in benchmark_of(run).views(run, tasks, say):
        if isinstance(view, ChoiceView):
            made = decisions(view, rule)
            first = view.scores.iloc[made.starts]
            keys = list(zip(first["subtask"].astype(str), first["doc_id"].astype(str), strict=True))
            truncated = np.maximum.reduceat(view.scores["truncated"].to_numpy(), made.starts) > 0
            task, right, values = TaskOutcomes(run, view, {}, made, rule), made.right, made.margin
        else:
            keys = [(document.subtask, document.id) for document in view.documents]
            truncated = np.array([CUT in document.facts for document in view.documents], bool)
            # A score of None becomes NaN
            values = np.array([document.score for document in view.documents], float)
            task, right = TaskOutcomes(run, view, {}), values >= BEST
        for number, (key, value) in enumerate(zip(keys, values.tolist(), strict=True)):
            known = None if np.isnan(value) else bool(right[number])
            task.documents[key] = DocumentOutcome(task, number, key, known, value, bool(truncated[number]))
        yield task


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
