"""The LongBench benchmark, scored as in its official code.

In: a `LongBenchRequest`. Out: a run folder with these files:

generations.parquet   a row for each (task, document): prompt hash, tokens, prediction, score,
                      seconds, and a hash of its context
results.json          scores of tasks, groups and means
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from evalkit.benchmarks import generated
from evalkit.benchmarks.base import ListedSuite, lazy
from evalkit.benchmarks.generated import DocumentPlan, TaskDocuments, answer_columns
from evalkit.benchmarks.outcomes import Measure, Metric
from evalkit.benchmarks.request import DocumentRequest
from evalkit.data import HubSplit
from evalkit.display import Say, doing
from evalkit.errors import DataError, UsageError, check_known
from evalkit.inputs.settings import setting
from evalkit.inputs.values import text_digest, with_matches
from evalkit.longcontext.longbench import results
from evalkit.longcontext.longbench.data import LongBenchDocument, load_rows
from evalkit.longcontext.longbench.official import generation_requests, score_prediction
from evalkit.longcontext.longbench.protocol import GROUPS, LONGBENCH, SUITES, TASKS, SuiteName, find_task, suite_tasks
from evalkit.models.context.extension import configured_window
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.loading.spec import ModelSpec, config_of, context_settings
from evalkit.requests.requests import Generate
from evalkit.requests.rows import GeneratedRow
from evalkit.runs.scales import FRACTION, PERCENT, Scale, stored_scale
from evalkit.suites.suites import Label

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.reporting.report import Report

_PAPER_CONTEXT = 8192
"""Context window in tokens to which the paper extends shorter ones by YaRN; its appendix "Long Context Evaluation"."""
_OFFICIAL = {4096: 3500, 8192: 7500, 16384: 15500, 32768: 31500}
"""Context window → most prompt tokens in the official `model2maxlen.json`."""
_MARGIN = 692
"""8192 − 7500, the tokens for the answer; used for other context windows too."""


@dataclass(frozen=True)
class LongBenchRequest(DocumentRequest):
    """Settings of a LongBench run. For the default context window, see `_paper_context`."""

    suite: SuiteName = setting("longbench", "16 tasks, or the 13 of LongBench-E with scores by length.")
    tasks: tuple[str, ...] = setting((), "Only these, separated by commas.", "all")
    data_dir: Path | None = setting(
        None, "Folder of <task>.jsonl files, searched before other sources.", names="folder"
    )
    max_prompt_tokens: int | None = setting(
        None, "Tokens above which a prompt loses its middle.", "7500 of a context of 8192"
    )
    chat: bool = setting(False, "Put prompts into the tokenizer's chat template, for models tuned to chat.")

    default_texts: ClassVar[Mapping[str, str]] = {"context": "8192, as in the paper, where it was trained on fewer"}


class FinishedLongBench(generated.FinishedAnswers):
    checked = ("answers",)
    # Truncation at another length makes another prompt
    prompt_settings: ClassVar = {"prompt tokens": "max_prompt_tokens"}
    figures = lazy("evalkit.longcontext.longbench.results:run_figures")

    def metrics(self, rule: str | None = None) -> list[Metric]:
        self.refuse_rule(rule)
        metrics = []
        for task in self.run.stored["tasks"]:
            of_all = task["all"]
            scored = (Scale(task["metric"], PERCENT), task["task"], of_all["n"], of_all["value"], of_all["stderr"])
            about = {"truncated": task["truncated"], "official": task["official"]}
            metrics.append(Metric(*scored, **about))
        return metrics

    def measures(self) -> Mapping[str, Measure]:
        words = "LongBench's own score of each task (F1, ROUGE-L, accuracy, edit similarity) in %, averaged over tasks"
        return {LONGBENCH: Measure(Scale("score", FRACTION), words, graded=True)}

    def groups(self) -> dict[str, tuple[str, ...]]:
        return _groups(self.run.suite)

    def answers(self) -> pd.DataFrame:
        table = self.run.table(results.GENERATIONS, ("answers", "source"))
        return table.assign(references=table["answers"].map(json.loads)).rename(columns={"prediction": "answer"})

    def report(self, rule: str | None = None, detail: bool = False) -> Report:
        self.refuse_rule(rule)
        return results.report_of(self.run)

    def label(self, task: str) -> Label:
        return Label(*[find_task(task).label] * 2)

    def dataset(self, task: str) -> HubSplit:
        e = "_e" * (self.run.suite == "longbench-e")
        return HubSplit(path="THUDM/LongBench", config=f"{task}{e}", split="test")


class LongBench(generated.GeneratedBenchmark):
    kind = LONGBENCH
    request = LongBenchRequest
    files = (results.GENERATIONS,)
    read = FinishedLongBench

    def plan(self, request: LongBenchRequest, say: Say) -> DocumentPlan:
        """Make the plan; its manifest's optional "left_out" has a line for each reason why tasks are left out."""
        checkpoint = request.model.locate(say)
        known = {task.name: task for task in suite_tasks(request.suite)}
        request = replace(request, tasks=with_matches(request.tasks, known))
        check_known(f"{request.suite} task", request.tasks, known)
        loaded: dict[str, TaskDocuments] = {}
        tasks_by_error: dict[str, list[str]] = {}
        for name in (name for name in known if not request.tasks or name in request.tasks):
            try:
                with doing("reading documents"):
                    loaded[name] = load_rows(known[name], request.data_dir, request.selection, request.suite, say)
            except DataError as error:
                tasks_by_error.setdefault(str(error), []).append(name)
        left_out = [f"{', '.join(names)}: {error}" for error, names in tasks_by_error.items()]
        if not loaded:
            raise DataError("; ".join(left_out))
        for line in left_out:
            say(f"left out: {line}")
        request = replace(request, model=_paper_context(request.model, checkpoint, say))
        context = generated.context_of(request.model, checkpoint, LONGBENCH)
        most_new = max(known[name].max_new_tokens for name in loaded)
        most = max_prompt_tokens(request.max_prompt_tokens, context, most_new)
        settings = {"suite": request.suite, "max_prompt_tokens": most}
        plan = generated.generated_plan(LONGBENCH, request, checkpoint, context, loaded, settings, say, request.chat)
        return replace(plan, manifest=plan.manifest | ({"left_out": left_out} if left_out else {}))

    def ids(self, plan: DocumentPlan, task: str) -> list[str]:
        return [row.id for row in plan.tasks[task]]

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[Generate]:
        most, context = plan.manifest["specification"]["max_prompt_tokens"], plan.manifest["context"]
        return generation_requests(find_task(task), plan.tasks[task], tokenizer, ends, most, context, plan.request.chat)

    def table_row(self, task: str, document: LongBenchDocument, answer: GeneratedRow) -> dict[str, Any]:
        stored = {"prediction" if name == "text" else name: value for name, value in answer_columns(answer).items()}
        return {
            "task": task,
            "index": document.index,
            **stored,
            "length": document.length,
            # Rows with several questions on one document are not independent
            results.SOURCE: text_digest(document.context)[:16],
            "answers": json.dumps(document.answers, ensure_ascii=False),
            "all_classes": json.dumps(document.all_classes, ensure_ascii=False),
            "score": score_prediction(TASKS[task], answer.text, document.answers, document.all_classes),
        }

    def results(self, plan: DocumentPlan, table: pd.DataFrame) -> dict[str, Any]:
        scores = results.score_generations(table, plan.request.suite, documents=plan.manifest["documents"])
        averages = []
        for mean in (scores["plain_mean"], scores["mean_of_groups"]):
            of_all = mean["all"]
            about = stored_scale(mean).stored(of_all["value"] or 0.0, of_all["stderr"])
            averages.append({"name": mean["name"]} | about)
        return scores | {"averages": averages}

    def suites(self) -> dict[str, ListedSuite]:
        return {suite: ListedSuite(what, partial(_averages, suite)) for suite, what in SUITES.items()}


def _averages(suite: SuiteName) -> dict[str, tuple[str, ...]]:
    return {**_groups(suite), "Average": tuple(task.name for task in suite_tasks(suite))}


def _groups(suite: str) -> dict[str, tuple[str, ...]]:
    tasks = suite_tasks(suite)
    return {group: tuple(task.name for task in tasks if task.group == group) for group in GROUPS}


def _paper_context(model: ModelSpec, checkpoint: Checkpoint, say: Say) -> ModelSpec:
    """Extend a shorter window to the paper's context by YaRN if the user gives none.

    A window that is not in the config is left as it is. One that cannot be extended is a `CheckpointError`: unchanged,
    its scores would not be comparable with others'.
    """
    if model.context is not None:
        return model
    given = model.context_method, model.context_original, model.context_config
    if given == (None, None, None):
        _, window = configured_window(config_of(checkpoint, say))
        if window is None or window >= _PAPER_CONTEXT:
            return model
    extended = replace(model, context=context_settings(None, *given, default=_PAPER_CONTEXT).context)
    if model.context_config is not None:  # which sets the context itself, or was written for this one
        return extended
    default = (
        f"--context {_PAPER_CONTEXT} is LongBench's default, as in the paper; --context none leaves the model as it is"
    )
    if (extension := extended.extension(checkpoint)) is not None:
        say(f"{extension.describe()} ({default})")
    return extended


def max_prompt_tokens(requested: int | None, context: int, most_new: int) -> int:
    """Return the most tokens of a prompt in a context window, with room for an answer of `most_new` tokens.

    By default the official number. A window without one has the same margin for the answer, or half of a short window.
    """
    least, most = 2, context - most_new
    if most < least:
        raise UsageError(f"answers have up to {most_new} tokens and the model takes {context}; give a longer --context")
    if requested is None:
        # The margin would leave almost nothing of a short window
        return _OFFICIAL.get(context, max(context - _MARGIN, min(context // 2, most)))
    if not least <= requested <= most:
        raise UsageError(f"--max-prompt-tokens {requested}: give {least} to {most}, or a longer --context")
    return requested
