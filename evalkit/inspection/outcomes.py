"""Outcomes of documents: right or wrong, by how much, tied, truncated; and the selection of documents by them.

In: a finished run, by its benchmark's views, or two runs on the same documents. Out: `TaskOutcomes`, with a
`DocumentOutcome` for each document, whether choices of it were scored or it was answered; the selected ones in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.document_views import CUT, AnsweredDocument, AnswerView, ChoiceText, ChoiceView, TaskView
from evalkit.benchmarks.registry import results_of
from evalkit.comparison.pairing import check_same_documents
from evalkit.display import Say
from evalkit.errors import EvalkitError, UnknownNameError, UsageError
from evalkit.runs.accuracies import available_rules, rule_beside, with_choices
from evalkit.runs.continuous import outcome_of
from evalkit.runs.folder import Run
from evalkit.runs.rules import Floats, best_choices, find_rule, row_scores
from evalkit.runs.score_table import SEGMENTS
from evalkit.suites.templates import Piece

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
        return {name: getattr(self, name)[number].item() for name in ("prediction", "right", "tie", "margin")}


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
    def prompts(self) -> list[tuple[Piece, ...]]:
        """The prompt of an answer; of choices what all begin with, then what each ends with; empty if not known."""
        if self.answer:
            return [self.answer.prompt]
        return [self.text.common, *self.text.choices] if self.text else []

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
        about = {"answer": answer.answer, "references": list(answer.references)} | view.scale.entries
        return about | {"score": answer.score} | known | dict(answer.facts)

    def record(self) -> dict[str, Any]:
        """Return the outcome with its run, and the scores of the choices by segment, as plain data."""
        record = {"run": self.task.run.manifest["id"], "rule": self.task.rule} | self.outcome()
        choices = list(map(_segment_scores, self.rows))
        return record | ({"choices": choices} if choices else {})


def own_rule(run: Run) -> str | None:
    """Return the rule that chooses in a run; in a run with an outcome of its own, that of the accuracies beside it."""
    if run.rule is None or outcome_of(run.rule) is None:
        return run.rule
    return rule_beside(available_rules(with_choices(run.scores)))


def run_outcomes(run: Run, tasks: Collection[str], rule: str | None, say: Say) -> Iterator[TaskOutcomes]:
    """Yield the tasks (none named: all) of a finished run with the outcomes of their documents.

    `rule` is the rule that chooses, by default the run's own; a rule for answers raises `UsageError`.
    """
    run.require_finished()
    if rule is not None:
        run.require_choices()
    rule = own_rule(run) if rule in (None, run.rule) else rule
    for view in results_of(run).views(tasks, say):
        if isinstance(view, ChoiceView):
            made = decisions(view, str(rule))
            first = view.scores.iloc[made.starts]
            keys = list(zip(first["subtask"].astype(str), first["doc_id"].astype(str), strict=True))
            truncated = np.maximum.reduceat(view.scores["truncated"].to_numpy(), made.starts) > 0
            task, right, values = TaskOutcomes(run, view, {}, made, rule), made.right, made.margin
        else:
            keys = [(document.subtask, document.id) for document in view.documents]
            truncated = np.array([CUT in document.facts for document in view.documents], bool)
            # A score of None becomes NaN
            values = np.array([document.score for document in view.documents], float)
            task = TaskOutcomes(run, view, {})
            right = np.where((values >= 0) & (values <= BEST), values >= BEST, np.nan)
        for number, (key, value) in enumerate(zip(keys, values.tolist(), strict=True)):
            known = None if np.isnan(right[number]) else bool(right[number])
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


InRuns = tuple[TaskOutcomes, ...]
SelectedDocument = tuple[DocumentOutcome, ...]
"""In one run, or in two."""


CRITERIA: dict[str, Callable[[DocumentOutcome, DocumentOutcome], bool]] = {
    "wrong": lambda a, _: a.right is False,
    "right": lambda a, _: a.right is True,
    "tie": lambda a, _: a.tie,
    "truncated": lambda a, _: a.truncated,
    "won": lambda a, b: a.right is False and b.right is True,
    "lost": lambda a, b: a.right is True and b.right is False,
}
"""What a document can be selected for, by its outcomes in the first and in the last run."""
_OF_TWO, _OF_RIGHT = {"won", "lost"}, {"wrong", "right", "won", "lost"}


class Selection(NamedTuple):
    """The tasks that were searched, the documents that fulfil the criteria, and of how many."""

    tasks: list[InRuns]
    documents: list[SelectedDocument]
    searched: int


def show_list(
    runs: Sequence[Run], task: str | None, rule: str | None, criteria: Collection[str], words: Sequence[str], say: Say
) -> Selection:
    """Select documents of one run or two, sorted by value, the lowest first; right or won ones the highest first.

    `task` is a task or a subtask, by default all; `rule` the rule that chooses, by default the first run's own. A
    selected document fulfils all `criteria`, and its text contains all `words`, in any case. Runs of other documents,
    and criteria that do not apply, raise `UsageError`.
    """
    if len(runs) == 1 and _OF_TWO.intersection(criteria):
        raise UsageError("--won and --lost compare two runs; name both: evalkit show RUN_A RUN_B --won")
    if len(runs) > 1 and not _OF_TWO.issuperset(criteria):
        raise UsageError("--wrong, --right, --tie and --truncated are for one run; of two runs, give --won or --lost")
    name, subtask = (None, None) if task is None else _find_task(runs[0], task)
    tasks = _outcomes(runs, name, rule, say)
    selected, searched = [], 0
    for outcomes in tasks:
        _check_criteria(outcomes, criteria, words)
        for key in outcomes[0].documents:
            if subtask in (None, key[0]):
                searched += 1
                documents = tuple(of_run.documents[key] for of_run in outcomes if key in of_run.documents)
                fulfilled = (CRITERIA[name](documents[0], documents[-1]) for name in criteria)
                if len(documents) == len(runs) and all(fulfilled) and _has_words(documents[0], words):
                    selected.append(documents)
    sign = -1 if {"right", "won"}.intersection(criteria) else 1
    # Documents without a value come last; the sort keeps the order of equal ones
    selected.sort(key=lambda documents: (math.isnan(_value(documents)), sign * _value(documents)))
    return Selection(tasks, selected, searched)


def _check_criteria(outcomes: InRuns, criteria: Collection[str], words: Sequence[str]) -> None:
    view = outcomes[0].view
    if words and isinstance(view, ChoiceView) and not view.texts:
        raise UsageError(f"--text searches texts, which task {view.task} does not have: {view.problem}")
    values = [document.value for of_run in outcomes if not of_run.decided for document in of_run.documents.values()]
    if _OF_RIGHT.intersection(criteria) and any(value < 0 or value > BEST for value in values):
        options = "--wrong, --right, --won and --lost"
        raise UsageError(f"task {view.task}: its metric is not between 0 and 1; leave out {options}")


def show_document(runs: Sequence[Run], name: str, rule: str | None, say: Say) -> SelectedDocument:
    """Return one document in each run, such as "arc_easy/17", "mmlu/mmlu_astronomy/3" or "mmlu_astronomy/3"."""
    head, _, rest = name.partition("/")
    task, subtask = _find_task(runs[0], head)
    [outcomes] = _outcomes(runs, task, rule, say)
    document = _find_document(outcomes[0], subtask, rest)
    if document.key not in outcomes[-1].documents:
        raise UsageError(f"run {runs[-1].folder.name} has no document {document.name}; show the other run alone")
    return tuple(of_run.documents[document.key] for of_run in outcomes)


def _find_task(run: Run, name: str) -> tuple[str, str | None]:
    """Return the task with a name, or the task of a subtask with that name, and the subtask."""
    if name in (tasks := _tasks(run)):
        return name, None
    try:
        documents = results_of(run).comparable().documents
        subtasks = dict(zip(documents["subtask"], documents["task"], strict=True))
    except EvalkitError:  # the run has no table of its documents
        subtasks = {}
    if name in subtasks:
        return subtasks[name], name
    raise UnknownNameError(f"task of run {run.folder.name}", name, {*tasks, *subtasks})


def _tasks(run: Run) -> list[str]:
    return [entry["task"] for entry in run.stored["tasks"]]


def _find_document(task: TaskOutcomes, subtask: str | None, rest: str) -> DocumentOutcome:
    """Return the document with an id, or subtask/id, in a subtask if it is known."""
    head, _, tail = rest.partition("/")
    if (head, tail) in task.documents:
        return task.documents[head, tail]
    of_subtask = [document for document in task.documents.values() if subtask in (None, document.key[0])]
    matches = [document for document in of_subtask if document.key[1] == rest]
    if not matches:
        known = {document.key[1] for document in of_subtask}
        raise UnknownNameError(f"document of {subtask or task.view.task}", rest, known)
    if len(matches) > 1:
        listed = ", ".join(document.name for document in matches[:3]) + ", …" * (len(matches) > 3)
        raise UsageError(f"{len(matches)} subtasks of {task.view.task} have a document {rest}: {listed}; name one")
    return matches[0]


def _outcomes(runs: Sequence[Run], task: str | None, rule: str | None, say: Say) -> list[InRuns]:
    """Return the outcomes of each task that all runs have."""
    chosen = [name for name in _tasks(runs[0]) if task in (None, name) and all(name in _tasks(run) for run in runs)]
    if not chosen:
        lacking = task or "task of the other run"
        raise UsageError(f"run {runs[-1].folder.name} has no {lacking}; compare runs with a common task")
    for name in chosen if len(runs) > 1 else ():
        check_same_documents(runs[0], runs[1], name)
    if rule is None and len(runs) > 1:
        rule = _first_rule(runs[0], runs[1])
    by_run = [{outcomes.view.task: outcomes for outcomes in run_outcomes(run, chosen, rule, say)} for run in runs]
    tasks = [tuple(of_run[name] for of_run in by_run) for name in chosen if all(name in of_run for of_run in by_run)]
    if with_documents := [outcomes for outcomes in tasks if all(of_run.documents for of_run in outcomes)]:
        return with_documents
    problems = dict.fromkeys(of_run.view.problem for outcomes in tasks for of_run in outcomes if of_run.view.problem)
    why = "; ".join(problems) or f"benchmark {runs[0].kind} stores no documents to look at"
    raise UsageError(f"run {runs[0].folder.name}: {why}")


def _first_rule(first: Run, second: Run) -> str | None:
    """Return the first run's rule. Raises `UsageError`, with the rules that both have, if the second lacks it."""
    if second.rule is None or first.rule in (None, second.rule):
        return first.rule
    rule = own_rule(first)
    of_first, of_second = (available_rules(with_choices(run.scores)) for run in (first, second))
    if rule not in of_second:
        common = [f"--rule {name}" for name in of_first if name in of_second]
        both = f"give one that both have: {', '.join(common)}" if common else "none is of both"
        raise UsageError(f"{first.folder.name} and {second.folder.name} have rules {rule} and {second.rule}; {both}")
    return rule


def _value(documents: SelectedDocument) -> float:
    """Return the margin or score in the only run; the second run's less the first's."""
    first, *second = (document.value for document in documents)
    if not second:
        return first
    return 0.0 if second[0] == first else second[0] - first


def _has_words(document: DocumentOutcome, words: Sequence[str]) -> bool:
    if not words:
        return True
    texts = list(document.text.options) if document.text else []
    if answer := document.answer:
        texts = [answer.answer, *answer.references]
    prompts = ["".join(piece.text for piece in prompt) for prompt in document.prompts]
    whole = "\n".join(prompts + texts).casefold()
    return all(word.casefold() in whole for word in words)
