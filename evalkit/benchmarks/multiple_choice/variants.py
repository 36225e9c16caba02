"""Suites under several prompts (`--vary`): the spread of accuracies over prompts beside their standard error.

In: a `SuiteRequest` with `vary`. Out: a run folder with

scores.parquet   the score table of every prompt, with the column `prompt`, the run's own first
results.json     accuracies by prompt, means and spreads under every rule

The journal has the documents by task and template; a document whose options are listed in several orders has the
choices of all orders, one order after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import ListedSuite, lazy
from evalkit.benchmarks.document_views import ChoiceView
from evalkit.benchmarks.multiple_choice.benchmark import FinishedChoices, MultipleChoice
from evalkit.benchmarks.multiple_choice.varied_results import PromptTables, VariedResultsFile, varied_results
from evalkit.benchmarks.results import of_run
from evalkit.display import Say
from evalkit.reporting.decimals import percent
from evalkit.runs.folder import SCORES
from evalkit.runs.score_table import PROMPT
from evalkit.suites.prompt_sets import order_name

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView, Texts
    from evalkit.benchmarks.outcomes import Metric
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter
    from evalkit.suites.choice_requests import ChoiceRequests


class FinishedPrompts(FinishedChoices):
    metrics = of_run("evalkit.benchmarks.multiple_choice.varied_results:varied_metrics")
    comparable = of_run("evalkit.benchmarks.multiple_choice.varied_results:ComparablePrompts")
    report = of_run("evalkit.benchmarks.multiple_choice.varied_report:varied_report")
    figures = lazy("evalkit.benchmarks.multiple_choice.varied_report:prompt_figures")

    def headline(self, rule: str | None = None) -> tuple[Metric | None, str]:
        headline, text = super().headline(rule)
        average = self.averages(rule)[-1]
        spread = "" if average["spread"] is None else f", SD {percent(average['spread'])}"
        return headline, f"{text} over {len(average['prompts'])} prompts{spread}"

    def views(self, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        """Yield the documents of each task under the run's own prompt, and say so."""
        alone = f"this shows the run's own prompt, {self.run.template}; its other prompts are in {SCORES}"
        for view in super().views(tasks, say):
            assert isinstance(view, ChoiceView)
            yield replace(view, read=partial(_with_problem, view, alone))


class PromptVariants(MultipleChoice):
    """Benchmark of suites under several prompts; `MultipleChoice` makes its plans."""

    kind = "prompt_variants"
    results_form = VariedResultsFile

    read = FinishedPrompts

    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        import pandas as pd

        by_prompt: dict[str, list[pd.DataFrame]] = {prompt: [] for prompt in plan.prompts.templates}
        seconds = dict.fromkeys(plan.suite.tasks, 0.0)
        for part in plan.parts:
            for prompt, scores in _by_order(part.scores(finished), part):
                by_prompt.setdefault(prompt, []).append(scores.assign(**{PROMPT: prompt}))
            seconds[part.task] += finished.seconds.get(part.journal, 0.0)
        scores = pd.concat([table for tables in by_prompt.values() for table in tables], ignore_index=True)
        writer.save_table(SCORES, scores)
        writer.save_caveats(plan.caveats)
        tables = PromptTables(scores)
        rules = {rule: varied_results(tables, writer.manifest, rule).to_json() for rule in tables.rules}
        content = dict(rules[writer.manifest["rule"]])
        content["tasks"] = [task | {"seconds": round(seconds[task["task"]], 3)} for task in content["tasks"]]
        writer.save_results(content | {"rules": rules, "samples": False})

    def suites(self) -> dict[str, ListedSuite]:
        """Return none: the suites are those of multiple choice, with `vary`."""
        return {}


def _with_problem(view: ChoiceView, problem: str) -> tuple[Texts, str]:
    return view.texts, "; ".join(filter(None, (view.problem, problem)))


def _by_order(table: pd.DataFrame, part: ChoiceRequests) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the scores under each order of the options, under the prompt's name in the original one."""
    import numpy as np

    number, choice = np.divmod(table["choice"].to_numpy(), len(part.orders[0]))
    for index, order in enumerate(part.orders):
        chosen = number == index
        gold = np.argsort(order)[table["gold"].to_numpy()[chosen]]
        about = {"choice": choice[chosen], "choices": len(order), "gold": gold}
        scores = table[chosen].assign(**about) if len(part.orders) > 1 else table
        yield order_name(order) if index else part.prompt, scores
