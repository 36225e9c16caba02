"""Scoring rules: from the score table to predictions.

A rule gives every row a score, the higher the better; a document's prediction is the choice with the highest, ties
going to the first, as in lm-eval. Pure functions of a stored table: no model, no torch.

A package adds a rule by an entry point of the group `evalkit.rules`, whose name is the rule's and whose object is a
`Rule`.

Notation: L(s) is the log-likelihood and n(s) the token count of segment s; the continuation is c, the end token e.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import RunError, UsageError
from evalkit.plugins import added, load_added
from evalkit.scores.table import SEGMENTS

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
GROUP = "evalkit.rules"


@dataclass(frozen=True)
class Rule:
    """One way to choose."""

    name: str
    description: str
    formula: str
    score: Callable[[pd.DataFrame], Floats]
    """Score table → [rows], the higher the better."""
    segments: tuple[str, ...] = ("continuation",)
    """What must have been scored: segments, or "unconditional"."""


def _ll(table: pd.DataFrame, *segments: str) -> Floats:
    return sum((table[f"ll_{s}"].to_numpy(float) for s in segments), np.zeros(len(table)))


def _n(table: pd.DataFrame, *segments: str) -> Floats:
    return sum((table[f"n_{s}"].to_numpy(float) for s in segments), np.zeros(len(table)))


def _per(total: Floats, count: Floats) -> Floats:
    """Quotient; a choice with nothing to count can never win."""
    quotient: Floats = np.divide(total, count, out=np.full(len(total), -np.inf), where=count > 0)
    return quotient


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "ppl",
            "lowest perplexity of the whole sequence, every token after BOS (the paper's rule)",
            "exp(-sum_s L(s) / sum_s n(s)), lowest",
            lambda t: _per(_ll(t, *SEGMENTS), _n(t, *SEGMENTS)),
            SEGMENTS,
        ),
        Rule(
            "ppl_continuation",
            "lowest perplexity of the continuation",
            "exp(-L(c) / n(c)), lowest",
            lambda t: _per(_ll(t, "continuation"), _n(t, "continuation")),
        ),
        Rule(
            "ppl_continuation_end",
            "lowest perplexity of the continuation and the end token",
            "exp(-(L(c) + L(e)) / (n(c) + n(e))), lowest",
            lambda t: _per(_ll(t, "continuation", "end"), _n(t, "continuation", "end")),
            ("continuation", "end"),
        ),
        Rule(
            "acc",
            "highest summed log-likelihood of the continuation (lm-eval's acc)",
            "L(c), highest",
            lambda t: _ll(t, "continuation"),
        ),
        Rule(
            "acc_norm",
            "the same per character (lm-eval's acc_norm)",
            "L(c) / characters, highest",
            lambda t: _per(_ll(t, "continuation"), t["chars"].to_numpy(float)),
        ),
        Rule(
            "acc_bytes",
            "the same per UTF-8 byte (lm-eval's acc_bytes)",
            "L(c) / bytes, highest",
            lambda t: _per(_ll(t, "continuation"), t["bytes"].to_numpy(float)),
        ),
        Rule(
            "acc_token",
            "the same per token; chooses as ppl_continuation does, on a scale of log-likelihood",
            "L(c) / n(c), highest",
            lambda t: _per(_ll(t, "continuation"), _n(t, "continuation")),
        ),
        Rule(
            "pmi",
            "log-likelihood gained by the context (pointwise mutual information; needs an unconditional pass)",
            "L(c | context) - L(c), highest",
            lambda t: _ll(t, "continuation") - _ll(t, "unconditional"),
            ("continuation", "unconditional"),
        ),
    )
}


@cache
def find_rule(name: str) -> Rule:
    """A rule by name, evalkit's own or another package's.

    Raises:
        UnknownNameError: there is no such rule.
        UsageError: it is of a package that cannot be imported, or that names something else.
    """
    if name in RULES:
        return RULES[name]
    found = load_added(GROUP, name, "rule", tuple(RULES))
    if not isinstance(found, Rule) or found.name != name:
        raise UsageError(f"entry point '{name}' of {GROUP} is {found!r:.60}; it must name a Rule called '{name}'")
    return found


def all_rules() -> Iterator[Rule]:
    """evalkit's own rules, then those of other packages that can be loaded, by name."""
    yield from RULES.values()
    for name in sorted(added(GROUP).keys() - RULES.keys()):
        with suppress(UsageError):
            yield find_rule(name)


def missing_segments(rule: Rule, table: pd.DataFrame) -> list[str]:
    """What the rule needs that the table's template did not score.

    Raises:
        RunError: a segment is scored in some rows and not in others.
    """
    missing = []
    for segment in rule.segments:
        absent = table[f"ll_{segment}"].isna()
        if absent.all() and _needed(segment, table):
            missing.append(segment)
        elif absent.any() and not absent.all():
            raise RunError(f"the score table is damaged: {int(absent.sum())} of its rows have no ll_{segment}")
    return missing


def _needed(segment: str, table: pd.DataFrame) -> bool:
    """A segment that no sequence has (no end token, say) is not missed."""
    return segment == "unconditional" or bool((table[f"n_{segment}"] > 0).any())


class RuleChoices(NamedTuple):
    """What a rule chooses, one entry a document."""

    starts: NDArray[np.int64]
    """The document's first row in the table."""
    prediction: NDArray[np.int64]
    """Index of the choice."""
    tie: NDArray[np.bool_]
    """Whether the highest score was shared."""


def choose(table: pd.DataFrame, rule: Rule) -> RuleChoices:
    """Apply a rule.

    Args:
        table: a score table; rows of a document stand together, its choices in order.
        rule: see `find_rule`.

    Raises:
        UsageError: the table lacks what the rule needs, or the rule gives no number for a row.
    """
    if missing := missing_segments(rule, table):
        raise UsageError(_cannot(rule, missing))
    scores = rule.score(table.fillna({f"ll_{s}": 0.0 for s in SEGMENTS}))
    if np.shape(scores) != (len(table),) or np.isnan(scores).any():
        raise UsageError(
            f"rule {rule.name} gives no number for some rows; it must return one for each of {len(table):,}"
        )
    choice = table["choice"].to_numpy()
    starts = np.flatnonzero(choice == 0)
    if not len(starts):
        return RuleChoices(starts, np.empty(0, np.int64), np.empty(0, bool))
    at_best = scores == np.repeat(np.maximum.reduceat(scores, starts), np.diff(np.append(starts, len(table))))
    # The first row at the maximum, for each document
    position = np.where(at_best, choice, np.iinfo(np.int64).max)
    return RuleChoices(starts, np.minimum.reduceat(position, starts), np.add.reduceat(at_best.astype(int), starts) > 1)


def decide(table: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Apply a rule and say what it was applied to.

    Args:
        table: as `choose` takes it.
        rule: see `find_rule`.

    Returns:
        One row a document, in the table's order: task, subtask, doc_id, choices, gold, prediction (index of the
        choice), correct (0 or 1), tie (whether the highest score was shared), truncated.

    Raises:
        UsageError: the table lacks what the rule needs.
    """
    import pandas as pd

    starts, prediction, tie = choose(table, rule)
    documents = table.iloc[starts]
    return pd.DataFrame(
        {
            "task": documents["task"].to_numpy(),
            "subtask": documents["subtask"].to_numpy(),
            "doc_id": documents["doc_id"].to_numpy(),
            "choices": documents["choices"].to_numpy(),
            "gold": documents["gold"].to_numpy(),
            "prediction": prediction,
            "correct": (prediction == documents["gold"].to_numpy()).astype(int),
            "tie": tie,
            "truncated": np.maximum.reduceat(table["truncated"].to_numpy(), starts) if len(starts) else [],
        }
    )


def _cannot(rule: Rule, missing: list[str]) -> str:
    if "unconditional" in missing:
        return (
            f"rule {rule.name} needs the unconditional pass, which this run did not make; run with --rule {rule.name}"
        )
    return (
        f"rule {rule.name} needs the log-likelihood of {', '.join(missing)}, which the run's template does not score; "
        "run with --template inst"
    )
