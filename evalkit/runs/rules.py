"""Scoring rules: from the score table to predictions, by pure functions without a model and without torch.

A rule scores every row; the prediction is the argmax over a document's choices, the first in a tie, as in lm-eval.
Another package adds a rule by an entry point of the group `evalkit.rules`: its name is the rule's, its object a `Rule`.
Notation: L(s) is the log-likelihood and n(s) the token count of segment s; the continuation is c, the end token e.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import RunError, UsageError
from evalkit.plugins import all_entries, call_added, load_entry
from evalkit.runs.score_table import CLUSTER, SEGMENTS, why_unsized

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
GROUP = "evalkit.rules"


class RuleChoices(NamedTuple):
    """Predictions of a rule, one entry per document."""

    starts: NDArray[np.int64]
    """First row of the document in the table."""
    prediction: NDArray[np.int64]
    tie: NDArray[np.bool_]
    """Whether several choices have the highest score."""


def best_choices(scores: Floats, choice: NDArray[np.int64]) -> RuleChoices:
    """Return each document's choice of the highest score, the first in a tie. Both [rows]; choice 0 begins one."""
    starts = np.flatnonzero(choice == 0)
    if not len(starts):
        return RuleChoices(starts, np.empty(0, np.int64), np.empty(0, bool))
    at_best = scores == np.repeat(np.maximum.reduceat(scores, starts), np.diff(np.append(starts, len(scores))))
    # The first row at the maximum, for each document
    position = np.where(at_best, choice, np.iinfo(np.int64).max)
    return RuleChoices(starts, np.minimum.reduceat(position, starts), np.add.reduceat(at_best.astype(int), starts) > 1)


@dataclass(frozen=True)
class Rule:
    name: str
    description: str
    formula: str
    score: Callable[[pd.DataFrame], Floats]
    """Score table → [rows] scores, higher is better."""
    segments: tuple[str, ...] = ("continuation",)
    """Required log-likelihoods: segments, or "unconditional"."""
    per_token: bool = False
    """Whether it reads token counts, which imported logs do not have."""
    per_length: bool = False
    """Whether it reads the lengths of the answer options, which some imported logs do not say."""
    chooses_as: str = ""
    """Rule that makes the same choice by definition; empty: none."""
    by_task: Callable[[str], str] | None = None
    """Task → name of the rule that is applied to it, or empty; None for a rule that is the same for all tasks."""


def _ll(table: pd.DataFrame, *segments: str) -> Floats:
    return sum((table[f"ll_{s}"].to_numpy(float) for s in segments), np.zeros(len(table)))


def _per_token(table: pd.DataFrame, *segments: str) -> Floats:
    count = sum((table[f"n_{s}"].to_numpy(float) for s in segments), np.zeros(len(table)))
    return _per(_ll(table, *segments), count)


def _per(total: Floats, count: Floats) -> Floats:
    """Divide log-likelihoods by counts; -inf where the count is 0, so that such a choice never wins."""
    quotient: Floats = np.divide(total, count, out=np.full(len(total), -np.inf), where=count > 0)
    return quotient


def _of_tasks(name: str, description: str, by_task: Callable[[str], str]) -> Rule:
    def score(table: pd.DataFrame) -> Floats:
        scores = np.empty(len(table))
        for task, rows in table.groupby("task").indices.items():
            scores[rows] = find_rule(by_task(str(task))).score(table.iloc[rows])
        return scores

    return Rule(name, description, "that of each task's own rule", score, by_task=by_task)


def _fixed_rule(task: str, in_loop: bool = False) -> str:
    from evalkit.data.requests import request_tasks

    about = request_tasks().get(task)
    return "" if about is None else (in_loop and about.in_loop) or about.rule


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "ppl",
            "lowest perplexity of the whole sequence, every token after BOS (the paper's rule)",
            "exp(-sum_s L(s) / sum_s n(s)), lowest",
            lambda t: _per_token(t, *SEGMENTS),
            SEGMENTS,
            per_token=True,
        ),
        Rule(
            "ppl_continuation",
            "lowest perplexity of the continuation",
            "exp(-L(c) / n(c)), lowest",
            lambda t: _per_token(t, "continuation"),
            per_token=True,
        ),
        Rule(
            "ppl_continuation_end",
            "lowest perplexity of the continuation and the end token",
            "exp(-(L(c) + L(e)) / (n(c) + n(e))), lowest",
            lambda t: _per_token(t, "continuation", "end"),
            ("continuation", "end"),
            per_token=True,
        ),
        Rule(
            "acc",
            "highest summed log-likelihood of the continuation (lm-eval's acc)",
            "L(c), highest",
            lambda t: _ll(t, "continuation"),
        ),
        Rule(
            "acc_norm",
            "highest log-likelihood of the continuation per character (lm-eval's acc_norm)",
            "L(c) / characters, highest",
            lambda t: _per(_ll(t, "continuation"), t["chars"].to_numpy(float)),
            per_length=True,
        ),
        Rule(
            "acc_bytes",
            "highest log-likelihood of the continuation per UTF-8 byte (lm-eval's acc_bytes)",
            "L(c) / bytes, highest",
            lambda t: _per(_ll(t, "continuation"), t["bytes"].to_numpy(float)),
            per_length=True,
        ),
        Rule(
            "acc_token",
            "highest log-likelihood of the continuation per token; chooses as ppl_continuation does",
            "L(c) / n(c), highest",
            lambda t: _per_token(t, "continuation"),
            per_token=True,
            chooses_as="ppl_continuation",
        ),
        Rule(
            "pmi",
            "log-likelihood gained by the context (pointwise mutual information; needs an unconditional pass)",
            "L(c | context) - L(c), highest",
            lambda t: _ll(t, "continuation") - _ll(t, "unconditional"),
            ("continuation", "unconditional"),
        ),
        _of_tasks(
            "olmes",
            "the rule that OLMES fixes for each task: pmi, acc_norm, acc_token or acc",
            _fixed_rule,
        ),
        _of_tasks(
            "olmo_core",
            "the rule by which OLMo-core scores each task during training",
            partial(_fixed_rule, in_loop=True),
        ),
    )
}


def lm_eval_metric(rule: str) -> str:
    """Return a rule's metric in lm-eval's files, with a prefix that shows the accuracies of all rules as accuracies."""
    return {"pmi": "acc_mutual_info"}.get(rule, rule if rule.startswith("acc") else f"acc_{rule}")


@cache
def find_rule(name: str) -> Rule:
    """Return a rule by name, of evalkit or another package; `UnknownNameError`, or `UsageError` if it is invalid."""
    rule = load_entry(GROUP, name, "rule", Rule, RULES)
    known = (*SEGMENTS, "unconditional")
    if unknown := [segment for segment in rule.segments if segment not in known]:
        raise UsageError(f"rule {name} needs the segment '{unknown[0]}', which is not one of {', '.join(known)}")
    return rule


def all_rules() -> list[Rule]:
    """Return evalkit's own rules, then those of other packages that can be loaded, sorted by name."""
    return all_entries(GROUP, RULES, find_rule)[0]


def distinct(names: Sequence[str], chosen: str) -> list[str]:
    """Leave out rules that make the same choices as another one of them by definition; `chosen` stays."""
    kept: dict[str, str] = {}
    for name in names:
        choice = find_rule(name).chooses_as or name
        if choice not in kept or name == chosen:
            kept[choice] = name
    return [name for name in names if name in kept.values()]


def invalid_rules() -> list[str]:
    """Return the reason for each rule of another package that cannot be loaded."""
    return all_entries(GROUP, RULES, find_rule)[1]


def why_unusable(rule: Rule, table: pd.DataFrame) -> str | None:
    """Return why a rule cannot be applied to a score table; None if it can. A rule of another package is tried."""
    try:
        if rule.name in RULES:
            return _lacking(rule, table)
        choose(table, rule)
    except UsageError as error:
        return str(error)
    return None


def of_task(rule: Rule, task: str) -> Rule:
    """Return the rule that is applied to a task; `UsageError` if the rule fixes none for it."""
    if rule.by_task is None:
        return rule
    if not (name := rule.by_task(task)):
        raise UsageError(f"rule {rule.name} fixes no rule for task {task}; use another rule")
    return find_rule(name)


def single_answers(table: pd.DataFrame) -> list[str]:
    """Return the tasks of a score table whose documents have one gold answer and no choices."""
    if not (table["choices"] < 2).any():
        return []
    most = table.groupby("task", sort=False)["choices"].max()
    return list(map(str, most.index[most < 2]))


def _lacking(rule: Rule, table: pd.DataFrame) -> str | None:
    if single := single_answers(table):
        return (
            f"rule {rule.name} chooses between several answers, and documents of {single[0]} have one; use an outcome, "
            "such as bits_per_byte"
        )
    if rule.by_task:
        rules = {task: of_task(rule, str(task)) for task in table["task"].unique()}
        parts = table.groupby("task", sort=False)
        return next(filter(None, (_lacking(rules[task], part) for task, part in parts)), None)
    is_counted, unsized = not table["n_continuation"].isna().any(), why_unsized(table)
    if rule.per_token and not is_counted:
        others = "acc" if unsized else "acc, acc_norm or acc_bytes"
        return f"rule {rule.name} needs token counts, which the imported log does not have; use {others}"
    if rule.per_length and unsized:
        return f"rule {rule.name} needs {unsized}, or use acc"
    missing = []
    for segment in rule.segments:
        absent = table[f"ll_{segment}"].isna()
        # The unconditional pass is made for whole tasks
        by_task = segment == "unconditional"
        shares = absent.groupby(table["task"], sort=False).mean() if by_task else [absent.mean()]
        if any(0 < share < 1 for share in shares):
            raise RunError(f"the score table is damaged: {int(absent.sum())} of its rows have no ll_{segment}")
        # A segment that occurs in no sequence, such as no end token, is not missing; an unknown count may be any number
        if absent.any() and (by_task or not (table[f"n_{segment}"] <= 0).all()):
            missing.append(segment)
    if not missing:
        return None
    if is_counted and "unconditional" in missing:
        return (
            f"rule {rule.name} needs the unconditional pass, which this run did not make; repeat the run's command "
            f"with --rule {rule.name}"
        )
    unscored = "the run's template does not score; run with --template inst"
    which = unscored if is_counted else "the imported log does not have"
    return f"rule {rule.name} needs the log-likelihood of {', '.join(missing)}, which {which}"


def row_scores(table: pd.DataFrame, rule: Rule) -> Floats:
    """Return the score of each row under a rule, higher is better.

    The rows of a document are adjacent in the table, its choices in order.

    Raises:
        UsageError: the table lacks a segment that the rule needs, or the rule returns no number for a row.
    """
    if message := _lacking(rule, table):
        raise UsageError(message)
    filled = table.fillna({f"ll_{s}": 0.0 for s in SEGMENTS})
    if rule.name in RULES:
        scores = rule.score(filled)
    else:
        scores = call_added(f"rule {rule.name}", lambda: np.asarray(rule.score(filled), float))
    if np.shape(scores) != (len(table),) or np.isnan(scores).any():
        raise UsageError(
            f"rule {rule.name} returns no number for some rows; it must return one for each of {len(table):,}"
        )
    return scores


def choose(table: pd.DataFrame, rule: Rule) -> RuleChoices:
    """Apply a rule. Errors: as `row_scores`."""
    return best_choices(row_scores(table, rule), table["choice"].to_numpy())


def decide(table: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Apply a rule and return its decisions with the documents they are about. Errors: as `row_scores`.

    One row per document, in the table's order: task, subtask, doc_id, cluster, choices, gold, prediction (index of the
    choice), correct (0 or 1), tie (whether several choices have the highest score), truncated.
    """
    import pandas as pd

    starts, prediction, tie = choose(table, rule)
    documents = table.iloc[starts]
    columns = ["task", "subtask", "doc_id", *[CLUSTER] * (CLUSTER in documents), "choices", "gold"]
    return pd.DataFrame(
        {column: documents[column].to_numpy() for column in columns}
        | {
            "prediction": prediction,
            "correct": (prediction == documents["gold"].to_numpy()).astype(int),
            "tie": tie,
            "truncated": np.maximum.reduceat(table["truncated"].to_numpy(), starts) if len(starts) else [],
        }
    )
