"""A finished run of lm-eval's tasks as it is read: the report of its metrics, its documents, and their comparison.

In: a run; texts and answers are in its sample files. Out: a `Report`, texts of choices, or answered documents; or a
`Comparable`: of a run with multiple-choice tasks, their choices under evalkit's rules; of any other run, the value of
each task's own metric.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import click

from evalkit.benchmarks.choices import ComparableChoices
from evalkit.benchmarks.document_views import AnsweredDocument, AnswerView, ChoiceView, TaskView, Texts
from evalkit.benchmarks.lm_eval.requests import GENERATED, group_by_task
from evalkit.benchmarks.lm_eval_files import (
    NO_SAMPLES,
    caveats_below,
    pieces_of,
    samples_of,
    stored_texts,
    texts_of_requests,
)
from evalkit.benchmarks.lm_eval_tables import DOCUMENTS, DocumentScore, logged_metrics
from evalkit.benchmarks.outcomes import CONTENT, Comparable, GradedAnswers, Measure, Metric, run_content
from evalkit.display import Say
from evalkit.escape import printable
from evalkit.models.loading.spec import tokenizer_alone, window_of
from evalkit.models.loading.tokenizer import fed_text
from evalkit.reporting.decimals import fixed
from evalkit.reporting.numbers import METRICS
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.requests.requests import Encoder, Facts
from evalkit.runs.folder import LM_EVAL, Run
from evalkit.runs.notes import direction_mark, notes_below
from evalkit.runs.scales import FRACTION, Scale, stored_scale
from evalkit.runs.traits import documents_read, is_imported

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.lm_eval.encoding import Encoding
    from evalkit.benchmarks.lm_eval.plan import TaskPlan
    from evalkit.benchmarks.lm_eval.requests import ModelRequest


_NO_METRIC: Mapping[str, Any] = {"metric": "", "filter": "none", "unit": None, "higher_is_better": None}


def _stored(run: Run, table: pd.DataFrame) -> tuple[Texts, str]:
    texts = stored_texts(run, table)
    return texts, "" if texts else NO_SAMPLES


def task_views(run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
    """Yield the tasks of a finished run (`FinishedResults.views`); texts and answers are in the sample files."""
    from evalkit.runs.accuracies import available_rules

    with_choices = {task for members in run.manifest["groups"].values() for task in members}
    for entry in run.stored["tasks"]:
        task = entry["task"]
        if tasks and task not in tasks:
            continue
        if task in with_choices:
            table = run.scores[run.scores["task"] == task].reset_index(drop=True)
            yield ChoiceView(task, table, tuple(available_rules(run.scores)), partial(_stored, run, table))
        else:
            # With the first metric that lm-eval computed
            first = next(iter(entry["metrics"]), _NO_METRIC)
            samples = [sample for sample in samples_of(run, task) if sample["filter"] == first["filter"]]
            documents = [_answered(task, sample, first["metric"]) for sample in samples]
            problem = "" if documents else NO_SAMPLES
            yield AnswerView(task, stored_scale(first), documents, problem)


def _answered(task: str, sample: Mapping[str, Any], metric: str) -> AnsweredDocument:
    score = sample.get(metric)
    context, *rest = next(texts_of_requests(sample["arguments"]), ("",))
    # One of several values is a log-likelihood and whether it is greedy
    answers = [", ".join(map(str, a)) if isinstance(a, list) else str(a) for a in sample["filtered_resps"]]
    return AnsweredDocument(
        subtask=task,
        id=str(sample["doc_id"]),
        references=(str(sample["target"]),),
        answer=" | ".join(answers),
        score=float(score) if isinstance(score, (int, float)) else None,
        prompt=pieces_of(context, *(rest or [""])),
    )


def shown_requests(plan: TaskPlan, count: int, say: Say) -> Iterator[str]:
    """Yield the tokens of the first requests of each task, as text; see `Plan.shown_prompts`."""
    from evalkit.benchmarks.lm_eval.encoding import encoding_of
    from evalkit.benchmarks.lm_eval.requests import build_requests

    tokenizer = tokenizer_alone(plan.checkpoint, say)
    facts = Facts(window_of(plan.request.model, plan.checkpoint, tokenizer, say))
    encoding = encoding_of(Encoder(tokenizer, facts, say))
    for task in plan.tasks.tasks.values():
        lines: list[str] = []
        for requests in group_by_task(build_requests(task, count)).values():
            for name, counts, context, rest in _fed(requests, encoding, facts, say):
                text = click.style(printable(context, "\n\t"), fg="cyan")
                text += click.style(printable(rest, "\n\t"), fg="green")
                lines += [click.style(printable(name), bold=True), counts, text, ""]
        yield "\n".join(lines)


def _fed(
    requests: Sequence[ModelRequest], encoding: Encoding, facts: Facts, say: Say
) -> Iterator[tuple[str, str, str, str]]:
    """Yield of requests of one kind: name, numbers of tokens, context, and what is scored or how text is generated."""
    from evalkit.benchmarks.lm_eval.encoding import continuations_of, prompts_of

    kind = requests[0].kind
    if kind == GENERATED:
        for request, (prompt, _) in zip(requests, prompts_of(requests, encoding, facts), strict=True):
            tokens = prompt.tokens.tolist()
            rest = f"  generated: {request.arguments[1]}"
            yield f"{request.label}, {kind}", f"{len(tokens)} tokens", fed_text(encoding.tokenizer, tokens), rest
        return
    for part in continuations_of(requests, encoding, say):
        window = f", window {part.window}" if part.windows > 1 else ""
        cut = f", {part.truncated} context tokens cut" if part.truncated else ""
        before = len(part.context)
        after = len(part.tokens)
        counts = f"{before + after} tokens: context {before}, continuation {after}{cut}"
        context = fed_text(encoding.tokenizer, part.context)
        rest = fed_text(encoding.tokenizer, part.tokens)
        yield f"{part.request.label}, {kind}{window}", counts, context, rest


def metrics_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return a report of every metric of every task and group, as lm-eval computed it; under a rule, of the choices."""
    if rule not in (None, LM_EVAL):
        from evalkit.benchmarks.choices_report import choices_report

        return choices_report(run, rule, detail)
    manifest, documents = run.manifest, run.manifest["documents"]
    entries = [*run.stored["tasks"], *run.stored["groups"]]
    members = {group["task"]: group["tasks"] for group in run.stored["groups"]}
    marked = {entry["task"] for entry in entries if caveats_below(entry["task"], members, manifest)}
    rows = [row for entry in entries for row in _rows(entry, entry["task"] in marked)]
    metrics = [metric for entry in entries for metric in entry["metrics"]]
    headers = ["task", "filter", "metric", "n", "n-shot", "value", "± SE", "seconds"]
    if shared := len({metric["filter"] for metric in metrics}) < 2:
        rows, headers = [[row[0], *row[2:]] for row in rows], [headers[0], *headers[2:]]
    sources = sorted({source["source"] for source in documents.values()})
    lines = [
        f"metrics as lm-eval {manifest['versions']['lm-eval']} computes them",
        f"documents: {'; '.join(sources[:5])}" + "; …" * (len(sources) > 5),
    ]
    return Report(
        (simple_table("lm_eval", headers, rows, texts=2 if shared else 3),),
        notes=notes_below(manifest, lines, (metric["higher_is_better"] for metric in metrics)),
        content=run_content(run, documents=documents),
        records=[
            {name: entry[name] for name in ("task", "n", "num_fewshot")}
            | metric
            | {"official": documents.get(entry["task"], {}).get("official", True)}
            for entry in entries
            for metric in entry["metrics"]
        ],
    )


def headline(run: Run, rule: str | None = None) -> tuple[Metric | None, str]:
    """Return the first metric of the first group, or of the first task if there are no groups."""
    entries = run.stored["groups"] or run.stored["tasks"]
    metrics = [metric for entry in entries for metric in logged_metrics(entry)]
    first = [f"{metric['metric']} {_number(metric['value'])}" for metric in entries[0]["metrics"][:1]]
    more = [f"and {len(entries) - 1} more"] if len(entries) > 1 else []
    summary = " ".join([entries[0]["task"], *first, *more])
    return next(iter(metrics), None), summary


def _number(value: Any) -> str:
    return METRICS.value(value) if value is None or isinstance(value, (int, float)) else str(value)


def _rows(entry: Mapping[str, Any], marked: bool) -> Iterator[list[str]]:
    shots, seconds = entry["num_fewshot"], entry.get("seconds")
    of_task = [
        entry["task"] + "*" * marked,
        str(entry["n"]),
        "" if shots is None else str(shots),
        "" if seconds is None else fixed(seconds, 1),
    ]
    for metric in entry["metrics"]:
        name = metric["metric"] + direction_mark(metric["higher_is_better"])
        error = METRICS.plus_minus(metric["stderr"])
        task, n, shown_shots, shown_seconds = of_task
        yield [task, metric["filter"], name, n, shown_shots, _number(metric["value"]), error, shown_seconds]
        of_task = [""] * 4


def task_outcomes(run: Run) -> Comparable:
    if not run.manifest["groups"] and any(task.get("compared") for task in run.stored["tasks"]):
        return TaskMetrics(run)
    return TaskChoices(run)


class _TaskDocuments(Comparable):
    """Documents of lm-eval's tasks; those without a metric have no content hashes and are paired by number."""

    @property
    def has_contents(self) -> bool:
        return DOCUMENTS in self.run.files

    def must_agree(self, task: str) -> dict[str, str]:
        """See `Comparable`; an imported run's documents are paired by content, whatever their order and number."""
        specification = self.run.manifest["specification"]
        about = specification["tasks"][task]
        shots = about["num_fewshot"]
        if is_imported(self.run.manifest):
            known = {"number of examples": "" if shots is None else str(shots)}
            return {"limit": "", **known, "documents": "", "examples": "", "task's definition": ""}
        return {
            "limit": documents_read(specification) or "none",
            "number of examples": str(shots),
            "documents": str(about["documents"]),
            "examples": str(about.get("examples") or "") if shots else "none",
            "task's definition": str(about["config"]),
        }


class TaskChoices(_TaskDocuments, ComparableChoices):
    """The multiple-choice scores of a run of lm-eval's tasks."""

    lacking = "no multiple-choice scores; run it without multiple-choice tasks to compare its own metric"

    @cached_property
    def documents(self) -> pd.DataFrame:
        """One row for each document, with its content hash if the run has it."""
        documents = super().documents
        if not self.has_contents:
            return documents
        names = ["task", "doc_id"]
        table = self.run.table(DOCUMENTS, DocumentScore._fields).drop_duplicates(names)
        return documents.merge(table[[*names, CONTENT]], "left", names)


class TaskMetrics(_TaskDocuments, GradedAnswers):
    """The value of each task's own metric, between 0 and 1, of a run without multiple-choice tasks."""

    lacking = "no metric that is a share of each document"

    def __init__(self, run: Run) -> None:
        compared = {task["task"]: task for task in run.stored["tasks"] if task.get("compared")}
        self._metrics = {name: task["compared"] for name, task in compared.items()}
        shown = "; ".join(f"{metric.replace(',none', '')} of {task}" for task, metric in self._metrics.items())
        # A metric of which lower is better is never compared, but an imported log may not say it
        directions = {
            (name, f"{metric['metric']},{metric['filter']}"): metric["higher_is_better"]
            for name, task in compared.items()
            for metric in task["metrics"]
        }
        known = all(directions.get(task) is True for task in self._metrics.items())
        unknown = "" if known else "; whether higher or lower is better is not known, so neither is"
        words = f"each task's own metric ({shown}), in %{unknown}"
        measure = Measure(Scale("score", FRACTION, True if known else None), words, True)
        super().__init__(run, self._scores, (CONTENT,), {"Average": list(compared)}, {LM_EVAL: measure})

    def must_agree(self, task: str) -> dict[str, str]:
        return {**super().must_agree(task), "metric": self._metrics.get(task, "")}

    def _scores(self) -> pd.DataFrame:
        table = self.run.table(DOCUMENTS, DocumentScore._fields)
        chosen = table["metric"] + "," + table["filter"] == table["task"].map(self._metrics)
        names = {"doc_id": "id", "value": "score"}
        return table[chosen].rename(columns=names).assign(source=lambda scores: scores["id"]).reset_index(drop=True)
