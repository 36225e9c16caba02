"""The score table of a run under several prompts, and what it says of each document.

In: the score tables of the parts of a plan. Out: one table with the columns of a score table and `prompt`; from it the
decisions of every prompt under a rule. No torch.

A task's prompts are those that it has rows for: orders of the options only where its prompts list them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from evalkit.benchmarks.prompt_variants import PROMPTS
from evalkit.benchmarks.prompt_variants.orders import Order, order_name, places_of
from evalkit.errors import RunError
from evalkit.runs.accuracies import available_rules
from evalkit.runs.outcome_values import document_outcomes
from evalkit.runs.outcomes import outcome_of
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.score_table import CLUSTER, ScoreRow

if TYPE_CHECKING:
    from evalkit.runs.folder import Run
    from evalkit.stats.estimates import Floats

PROMPT = "prompt"
"""Column with the prompt's name."""
_DOCUMENT = ["task", "subtask", "doc_id"]


def by_order(table: pd.DataFrame, orders: Sequence[Order], base: str) -> dict[str, pd.DataFrame]:
    """Return prompt → scores, from those of documents that have the choices of several orders.

    Args:
        table: the choices of all orders, one order after the other in each document.
        orders: the original order first.
        base: name of the prompt with the original order.
    """
    if len(orders) == 1:
        return {base: table}
    number, choice = np.divmod(table["choice"].to_numpy(), len(orders[0]))
    gold = table["gold"].to_numpy()
    found = {}
    for place, order in enumerate(orders):
        own = number == place
        about = {"choice": choice[own], "choices": len(order), "gold": places_of(gold[own], order)}
        found[order_name(order) if place else base] = table[own].assign(**about)
    return found


def joined(parts: Iterable[Mapping[str, pd.DataFrame]], prompts: Sequence[str]) -> pd.DataFrame:
    """Return one table of scores by prompt: the named prompts in their order, then the others."""
    by_prompt: dict[str, list[pd.DataFrame]] = {name: [] for name in prompts}
    for part in parts:
        for name, table in part.items():
            by_prompt.setdefault(name, []).append(table)
    tables = (table.assign(**{PROMPT: name}) for name, found in by_prompt.items() for table in found)
    return pd.concat(tables, ignore_index=True)


class PromptTables:
    """Score tables of a run by prompt.

    Args:
        table: with the column `PROMPT`; the first prompt is the run's own, which every document has.

    Raises:
        RunError: a prompt lacks documents of a task.
    """

    def __init__(self, table: pd.DataFrame) -> None:
        self.by_prompt = {str(name): rows for name, rows in table.groupby(PROMPT, sort=False)}
        self.prompts = tuple(self.by_prompt)
        base = next(iter(self.by_prompt.values()))
        self.documents = base.loc[base["choice"] == 0, [*_DOCUMENT, "choices", CLUSTER]].reset_index(drop=True)
        self._keys = pd.MultiIndex.from_frame(self.documents[_DOCUMENT])
        self._places = {name: self._places_of(name, rows) for name, rows in self.by_prompt.items()}
        self.graded = lru_cache(maxsize=None)(self._graded)

    @property
    def rules(self) -> list[str]:
        """The rules that every prompt has the scores for."""
        first, *others = (available_rules(rows) for rows in self.by_prompt.values())
        return [rule for rule in first if all(rule in other for other in others)]

    def prompts_of(self, task: str) -> list[str]:
        """Return the prompts of a task."""
        own = (self.documents["task"] == task).to_numpy()
        return [name for name, places in self._places.items() if own[places].any()]

    def _graded(self, rule: str) -> dict[str, Floats]:
        """Return prompt → [documents] 1 where the rule predicts the gold choice, else 0; NaN without that prompt.

        Of a continuous outcome (`scores.outcomes.outcome_of`), its values."""
        found = {}
        for name, rows in self.by_prompt.items():
            values = np.full(len(self.documents), np.nan)
            values[self._places[name]] = _values(rows, rule)
            found[name] = values
        return found

    def mean(self, rule: str) -> Floats:
        """Return [documents] shares of the document's prompts under which the rule predicts the gold choice."""
        found: Floats = np.nanmean(np.stack([*self.graded(rule).values()]), axis=0)
        return found

    def under(self, rule: str, prompt: str) -> Floats:
        """Return [documents] of `graded` under a prompt; the run's own prompt stands in where a task lacks it.

        An order of the options changes no prompt without a list of them, so that the prompt is the same.
        """
        graded = self.graded(rule)
        own = graded[prompt]
        return np.where(np.isnan(own), graded[self.prompts[0]], own)

    def truncated(self, own: NDArray[np.bool_]) -> int:
        """Return how many of some documents, [documents], have a truncated context under some prompt."""
        cut = np.zeros(len(self.documents), bool)
        for name, rows in self.by_prompt.items():
            starts = np.flatnonzero(rows["choice"].to_numpy() == 0)
            cut[self._places[name]] |= np.maximum.reduceat(rows["truncated"].to_numpy(), starts) > 0
        return int((cut & own).sum())

    def _places_of(self, prompt: str, rows: pd.DataFrame) -> NDArray[np.int64]:
        keys = pd.MultiIndex.from_frame(rows.loc[rows["choice"] == 0, _DOCUMENT])
        places = np.asarray(self._keys.get_indexer(keys), np.int64)
        tasks = self.documents["task"].isin(rows["task"].unique()).sum()
        if (places < 0).any() or len(np.unique(places)) != tasks or len(places) != tasks:
            raise RunError(f"the table of prompts is damaged: prompt {prompt} has other documents than the first")
        return places


def _values(rows: pd.DataFrame, rule: str) -> Floats:
    if (found := outcome_of(rule)) is not None:
        return document_outcomes(rows, found[0], find_rule(found[1] or "acc"))
    right: Floats = decide(rows, find_rule(rule))["correct"].to_numpy(float)
    return right


def prompt_tables(run: Run) -> PromptTables:
    """Return the tables of a finished run.

    Raises:
        RunError: the file is damaged.
    """
    columns = [*ScoreRow._fields, CLUSTER, PROMPT]
    return PromptTables(run.table(PROMPTS, columns)[columns])
