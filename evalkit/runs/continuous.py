"""Continuous outcomes: from the score table to one number for each document, by pure functions without a model.

An outcome is declared whole by its entry in `OUTCOMES`: its scale, its function, and the documents that it is of.
Another package adds an outcome by an entry point of the group `evalkit.outcomes`: its name is the outcome's, its object
a `ContinuousOutcome`. A key names an outcome ("brier"), or an outcome of a rule ("margin:acc").
Notation: L(k) is the log-likelihood of choice k's continuation in nats, g the gold choice, p the softmax of L over the
choices, s a rule's score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from evalkit.errors import RunError, UsageError
from evalkit.plugins import added, all_entries, call_added, load_entry
from evalkit.runs.rules import RULES, Floats, find_rule, row_scores, single_answers
from evalkit.runs.scales import ACCURACY, FRACTION, Scale
from evalkit.runs.score_table import why_unsized

if TYPE_CHECKING:
    import pandas as pd

GROUP = "evalkit.outcomes"
BITS_PER_BYTE = "bits_per_byte"
"""Outcome of documents with one gold answer, and the outcome that is named beside an accuracy."""


class ScoredDocuments:
    """Documents of a score table, as functions of outcomes read them.

    Args:
        table: a document's rows are adjacent, its choices in order.
        rule: name of the rule of an outcome that is a rule's.

    Raises:
        RunError: a gold answer is not one of its document's choices.
    """

    def __init__(self, table: pd.DataFrame, rule: str | None = None) -> None:
        self.table = table
        self.rule = rule
        self.starts = np.flatnonzero(table["choice"].to_numpy() == 0)
        """[documents] first row of each document."""
        self.counts = np.diff(np.append(self.starts, len(table)))
        """[documents] number of choices."""
        number = table["gold"].to_numpy()[self.starts]
        if (number >= self.counts).any():
            raise RunError("the score table is damaged: a gold answer is not one of its document's choices")
        self.gold = self.starts + number
        """[documents] row of the gold answer."""

    @cached_property
    def likelihoods(self) -> Floats:
        """[rows] log-likelihoods of the continuations, in nats."""
        likelihoods: Floats = self.table["ll_continuation"].to_numpy(float)
        if not np.isfinite(likelihoods).all():
            raise RunError("the score table is damaged: a continuation has no finite log-likelihood")
        return likelihoods

    @cached_property
    def log_probabilities(self) -> Floats:
        """[rows] logarithms of the choices' probabilities: of the softmax of a document's log-likelihoods."""
        shifted = self.likelihoods - np.repeat(self.highest(self.likelihoods), self.counts)
        log_probabilities: Floats = shifted - np.repeat(np.log(self.sums(np.exp(shifted))), self.counts)
        return log_probabilities

    @cached_property
    def scores(self) -> Floats:
        """[rows] scores under the rule."""
        return row_scores(self.table, find_rule(str(self.rule)))

    def sums(self, values: Floats) -> Floats:
        """Return [documents] sums over the choices of [rows] values."""
        return np.asarray(np.add.reduceat(values, self.starts))

    def highest(self, values: Floats) -> Floats:
        """Return [documents] largest of the choices' [rows] values."""
        return np.asarray(np.maximum.reduceat(values, self.starts))

    def of_gold(self, column: str) -> Floats:
        """Return [documents] values of a column for the gold answers."""
        return np.asarray(self.table[column].to_numpy(float)[self.gold])


@dataclass(frozen=True)
class ContinuousOutcome:
    """A number for each document: more than right or wrong."""

    name: str
    scale: Scale
    """Its name is the outcome's in reports."""
    description: str
    formula: str
    values: Callable[[ScoredDocuments], Floats]
    """Scored documents → [documents] values."""
    documents: Literal["all", "choices", "single"] = "all"
    """Documents that have the outcome: "choices": it compares choices with each other; "single": those with one gold
    answer only."""
    columns: tuple[str, ...] = ()
    """Columns of the score table that must be known of every row; beside `ll_continuation`, which always is."""
    of_rule: bool = False
    """Whether it is computed from the scores of a rule, which its key names: "margin:acc"."""
    beside: bool = False
    """Whether it is reported beside a rule's accuracy, in plans and in the noise of studies."""
    without_letters: bool = False
    """Whether tasks whose answers are letters are then left out: there it mostly measures the answer's format."""
    least_documents: int = 0
    """See `benchmarks.outcomes.Measure`."""
    resolution: float = 1e-4
    """See `benchmarks.outcomes.Measure`; the default is the tolerance of a log-likelihood in float32."""

    def key(self, rule: str) -> str:
        """Return the outcome's key, under a rule if it is of one."""
        return f"{self.name}:{rule}" if self.of_rule else self.name


def _bits_per_byte(documents: ScoredDocuments) -> Floats:
    sizes = documents.of_gold("bytes")
    if not (sizes > 0).all():
        raise RunError("the score table is damaged: a gold answer has no bytes")
    return np.asarray(-documents.likelihoods[documents.gold] / (math.log(2) * sizes))


def _brier(documents: ScoredDocuments) -> Floats:
    distances = np.exp(documents.log_probabilities)
    distances[documents.gold] -= 1
    return documents.sums(distances**2)


def _margin(documents: ScoredDocuments) -> Floats:
    others = documents.scores.copy()
    others[documents.gold] = -np.inf
    with np.errstate(invalid="ignore"):
        margins: Floats = documents.scores[documents.gold] - documents.highest(others)
    if (missing := np.flatnonzero(~np.isfinite(margins))).size:
        row = documents.table.iloc[documents.starts[missing[0]]]
        where = f"{row['subtask']} document {row['doc_id']}"
        raise UsageError(f"{where} has a single choice, or one without a finite {documents.rule}, and so no margin")
    return margins


_LEAST_DOCUMENTS = 200
"""Fewer documents often lack the rare likelihoods that decide the mean (docs/measurements)."""

OUTCOMES: dict[str, ContinuousOutcome] = {
    outcome.name: outcome
    for outcome in (
        ContinuousOutcome(
            BITS_PER_BYTE,
            Scale("bits per byte", "bits per byte", higher_is_better=False),
            "negative log-likelihood of the gold answer in bits per UTF-8 byte of it",
            "-L(g) / (ln 2 bytes(g))",
            _bits_per_byte,
            columns=("bytes",),
            beside=True,
            without_letters=True,
            least_documents=_LEAST_DOCUMENTS,
        ),
        ContinuousOutcome(
            "log_loss",
            Scale("log loss", "nats", higher_is_better=False),
            "negative logarithm, in nats, of the gold answer's probability among the choices",
            "-ln p(g)",
            lambda documents: -documents.log_probabilities[documents.gold],
            documents="choices",
            beside=True,
            least_documents=_LEAST_DOCUMENTS,
        ),
        ContinuousOutcome(
            "brier",
            Scale("Brier score", "squared probability", higher_is_better=False, bounds=(0.0, 2.0)),
            "squared distance of the choices' probabilities from right and wrong, summed over the choices",
            "sum_k (p(k) - [k = g])^2",
            _brier,
            documents="choices",
            beside=True,
        ),
        ContinuousOutcome(
            "log_likelihood",
            Scale("log-likelihood", "nats"),
            "log-likelihood of the gold answer, in nats",
            "L(g)",
            lambda documents: documents.likelihoods[documents.gold],
            least_documents=_LEAST_DOCUMENTS,
        ),
        ContinuousOutcome(
            "greedy_match",
            Scale("greedy match", FRACTION),
            "whether greedy decoding gives the single gold answer: each of its tokens is the argmax",
            "[g is the argmax, token by token]",
            lambda documents: documents.of_gold("greedy"),
            documents="single",
        ),
        ContinuousOutcome(
            "margin",
            Scale("margin", "the rule's score"),
            "the rule's score of the gold answer less that of the best other choice; positive where the rule is right",
            "s(g) - max_{k != g} s(k)",
            _margin,
            documents="choices",
            of_rule=True,
            beside=True,
            least_documents=_LEAST_DOCUMENTS,
        ),
    )
}
"""Sources: Brier (1950) in its original form, the sum over all choices, as lm-eval's `brier_score`; log loss, Good
(1952)."""


@cache
def find_outcome(name: str) -> ContinuousOutcome:
    """Return an outcome by name; `UnknownNameError`, or `UsageError` if that of another package is invalid."""
    return load_entry(GROUP, name, "outcome", ContinuousOutcome, OUTCOMES, (ACCURACY,))


def all_outcomes() -> list[ContinuousOutcome]:
    """Return evalkit's own outcomes, then those of other packages that can be loaded, sorted by name."""
    return all_entries(GROUP, OUTCOMES, find_outcome)[0]


def invalid_outcomes() -> list[str]:
    """Return the reason for each outcome of another package that cannot be loaded."""
    return all_entries(GROUP, OUTCOMES, find_outcome)[1]


def keys_beside(rule: str) -> list[str]:
    """Return the keys of the outcomes that are reported beside a rule's accuracy."""
    return [outcome.key(rule) for outcome in all_outcomes() if outcome.beside]


def available_outcomes(scores: pd.DataFrame) -> list[ContinuousOutcome]:
    """Return the outcomes that every document of a score table has."""
    return [outcome for outcome in all_outcomes() if _other_documents(outcome, scores) is None]


def document_outcomes(table: pd.DataFrame, outcome: ContinuousOutcome, rule: str | None = None) -> Floats:
    """Return each document's outcome, [documents]. A document's rows are adjacent, its choices in order.

    `rule` is the name of the rule of an outcome that is a rule's. Raises `UsageError` if a document has no such
    outcome.
    """
    if message := _other_documents(outcome, table) or _unknown_column(outcome, table):
        raise UsageError(message)
    documents = ScoredDocuments(table, rule)
    if OUTCOMES.get(outcome.name) is outcome:
        return outcome.values(documents)
    values = call_added(f"outcome {outcome.name}", lambda: np.asarray(outcome.values(documents), float))
    count = len(documents.starts)
    if np.shape(values) != (count,) or not np.isfinite(values).all():
        raise UsageError(
            f"outcome {outcome.name} returns no finite number for some documents; it must return one for each of "
            f"{count:,}"
        )
    return values


def _other_documents(outcome: ContinuousOutcome, table: pd.DataFrame) -> str | None:
    """Return why an outcome is not one of all documents of a score table; None if it is."""
    if outcome.documents == "choices" and (single := single_answers(table)):
        return f"outcome {outcome.name} compares choices, and documents of {single[0]} have one answer"
    # Whether a token is the argmax is only stored for documents with one gold answer
    if outcome.documents == "single" and (unknown := table["greedy"].isna()).any():
        task = table["task"][unknown].iloc[0]
        return f"outcome {outcome.name} is of documents with one gold answer, which {task} does not have"
    return None


def _unknown_column(outcome: ContinuousOutcome, table: pd.DataFrame) -> str | None:
    for column in outcome.columns:
        if not table[column].isna().any():
            continue
        if column in ("bytes", "chars"):
            return f"outcome {outcome.name} needs {why_unsized(table)}, or use log_loss, brier or margin"
        return f"outcome {outcome.name} needs {column}, which the run does not have of every answer"
    return None


@cache
def _is_outcome(name: str) -> bool:
    """Whether a name is an outcome's: first evalkit's own, then its rules, then another package's."""
    return name in OUTCOMES or (name not in RULES and name in added(GROUP))


def outcome_of(key: str) -> tuple[ContinuousOutcome, str | None] | None:
    """Return a key's outcome, and the rule of "margin:RULE" if the key has one; None if the key names a rule."""
    name, colon, rule = key.partition(":")
    if not _is_outcome(name):
        return None
    outcome = find_outcome(name)
    return None if colon and not outcome.of_rule else (outcome, rule or None)


def lacks_rule(key: str | None) -> bool:
    """Return whether a key needs a rule and names none: None, which is accuracy under a rule, or "margin"."""
    if key is None:
        return True
    outcome_and_rule = outcome_of(key)
    return outcome_and_rule is not None and outcome_and_rule[0].of_rule and outcome_and_rule[1] is None


def outcome_key(outcome: str | None, rule: str | None) -> str | None:
    """Return the key of an outcome under a rule; accuracy's is the rule, None without a rule."""
    if outcome in (None, ACCURACY):
        return rule
    if find_outcome(str(outcome)).of_rule:
        return with_default_rule(outcome, rule)
    if rule:
        raise UsageError(f"--outcome {outcome} does not depend on a rule; leave out --rule {rule}")
    return outcome


def with_default_rule(key: str | None, rule: str | None) -> str | None:
    """Return a key under a default rule: that of accuracy, or of a margin without a rule.

    The margin of runs with an outcome of their own is that of rule acc.
    """
    if key is None:
        return rule
    if rule is None or not lacks_rule(key):
        return key
    return f"{key}:{rule if outcome_of(rule) is None else 'acc'}"
