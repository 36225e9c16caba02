"""Suites under several prompts (`--vary`): the spread of accuracies over prompts beside their standard error.

In: a `SuiteRequest` with `vary`. Out: a run folder with

prompts.parquet  the score table of every prompt
scores.parquet   that of the run's own prompt, as in an ordinary run
results.json     accuracies by prompt, means and spreads under every rule

The journal has the documents by task and template; a document whose options are listed in several orders has the
choices of all orders, one order after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import ListedSuite, lazy
from evalkit.benchmarks.multiple_choice.benchmark import MultipleChoice
from evalkit.benchmarks.prompt_variants import PROMPT, PROMPT_VARIANTS, PROMPTS
from evalkit.benchmarks.prompt_variants.prompt_sets import order_name
from evalkit.benchmarks.prompt_variants.results import PromptTables, VariedResultsFile, varied_results
from evalkit.runs.folder import SCORES

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.multiple_choice.plan import TaskPart
    from evalkit.runs.journal import FinishedRows
    from evalkit.runs.writing import RunWriter


class PromptVariants(MultipleChoice):
    """Benchmark of suites under several prompts; `MultipleChoice` makes its plans."""

    kind = PROMPT_VARIANTS
    results_form = VariedResultsFile

    read = lazy("evalkit.benchmarks.prompt_variants.results:FinishedPrompts")

    def finish(self, plan: Any, finished: FinishedRows, writer: RunWriter) -> None:
        import pandas as pd

        by_prompt: dict[str, list[pd.DataFrame]] = {prompt: [] for prompt in plan.prompts.templates}
        seconds = dict.fromkeys(plan.suite.tasks, 0.0)
        for part in plan.parts:
            for prompt, scores in _by_order(part.scores(finished), part):
                by_prompt.setdefault(prompt, []).append(scores.assign(**{PROMPT: prompt}))
            seconds[part.task] += finished.seconds.get(part.journal, 0.0)
        scores = pd.concat([table for tables in by_prompt.values() for table in tables], ignore_index=True)
        writer.save_table(PROMPTS, scores)
        own = scores[scores[PROMPT] == plan.template.name]
        writer.save_table(SCORES, own.drop(columns=PROMPT).reset_index(drop=True))
        if plan.caveats:
            writer.save_manifest(caveats=plan.caveats)
        tables = PromptTables(scores)
        rules = {rule: varied_results(tables, writer.manifest, rule).to_json() for rule in tables.rules}
        content = dict(rules[writer.manifest["rule"]])
        content["tasks"] = [task | {"seconds": round(seconds[task["task"]], 3)} for task in content["tasks"]]
        writer.save_results(content | {"rules": rules, "samples": False})

    def suites(self) -> dict[str, ListedSuite]:
        """Return none: the suites are those of multiple choice, with `vary`."""
        return {}


def _by_order(table: pd.DataFrame, part: TaskPart) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the scores under each order of the options, under the prompt's name in the original one."""
    import numpy as np

    number, choice = np.divmod(table["choice"].to_numpy(), len(part.orders[0]))
    for index, order in enumerate(part.orders):
        chosen = number == index
        gold = np.argsort(order)[table["gold"].to_numpy()[chosen]]
        about = {"choice": choice[chosen], "choices": len(order), "gold": gold}
        scores = table[chosen].assign(**about) if len(part.orders) > 1 else table
        yield order_name(order) if index else part.prompt, scores
