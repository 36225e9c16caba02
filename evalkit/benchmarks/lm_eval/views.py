"""A finished run of lm-eval's tasks as people read it: the report of its metrics, and its documents.

In: a run; texts and answers are in its sample files. Out: a `Report`, texts of choices, or answered documents.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from evalkit.benchmarks.document_views import (
    AnsweredDocument,
    AnswerView,
    ChoiceText,
    ChoiceView,
    DocumentKey,
    Piece,
    TaskView,
    choice_text,
)
from evalkit.benchmarks.lm_eval.log_format import texts_of_requests
from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, run_content
from evalkit.display import Say
from evalkit.escape import printable
from evalkit.inputs.reading import parse_json
from evalkit.models.context.extension import Extension
from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run
from evalkit.runs.traits import mixture, origin_notes

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.lm_eval.plan import TaskPlan


NO_SAMPLES = "the run has no sample files, which store the texts; repeat its command with --log-samples"


def stored_texts(run: Run, table: pd.DataFrame) -> dict[DocumentKey, ChoiceText]:
    """Return the texts of a task's documents, in its rows of the score table, from the run's sample files, if any."""
    texts: dict[DocumentKey, ChoiceText] = {}
    for subtask, rows in table[table["choice"] == 0].groupby("subtask", sort=False):
        choices = dict(zip(rows["doc_id"].tolist(), rows["choices"].tolist(), strict=True))
        for sample in _samples(run, str(subtask)):
            # For tasks that measure mutual information, lm-eval appends the choices without their context
            pairs = list(islice(texts_of_requests(sample["arguments"]), choices.get(sample["doc_id"], 0)))
            options = [continuation.strip() for _, continuation in pairs]
            sequences = [_pieces(*pair) for pair in pairs]
            texts.setdefault((str(subtask), sample["doc_id"]), choice_text(sequences, options))
    return texts


def task_views(run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
    """Yield the tasks of a finished run; texts and generated answers are in the sample files. See `Benchmark.views`."""
    from evalkit.runs.accuracies import available_rules

    with_choices = {task for members in run.manifest["groups"].values() for task in members}
    for entry in run.stored["tasks"]:
        task = entry["task"]
        if tasks and task not in tasks:
            continue
        if task in with_choices:
            table = run.scores[run.scores["task"] == task].reset_index(drop=True)
            texts = stored_texts(run, table)
            yield ChoiceView(task, table, tuple(available_rules(run.scores)), texts, "" if texts else NO_SAMPLES)
        else:
            # With the first metric that lm-eval computed
            first = next(iter(entry["metrics"]), {"metric": "", "filter": "none"})
            samples = [sample for sample in _samples(run, task) if sample["filter"] == first["filter"]]
            documents = [_answered(task, sample, first["metric"]) for sample in samples]
            yield AnswerView(task, first["metric"], documents, "" if documents else NO_SAMPLES)


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
        prompt=_pieces(context, *(rest or [""])),
    )


def _pieces(context: str, continuation: str) -> tuple[Piece, ...]:
    both = (Piece("context", context), Piece("continuation", continuation))
    return tuple(piece for piece in both if piece.text)


def _samples(run: Run, task: str) -> Iterator[dict[str, Any]]:
    pattern = re.compile(rf"lm_eval/samples_{re.escape(task)}_\d{{4}}-[\dT.-]+\.jsonl")
    for name in filter(pattern.fullmatch, run.files):
        for line in run.read(name).splitlines():
            yield parse_json(line)


def shown_requests(plan: TaskPlan, count: int, say: Say) -> Iterator[str]:
    """Yield the first requests of each task as lm-eval builds them; see `Benchmark.prompts`."""
    from evalkit.benchmarks.lm_eval.plan import first_requests

    for task in plan.tasks.tasks.values():
        lines = []
        for request in first_requests(task, count):
            name = f"{request.task_name} document {request.doc_id}, {request.request_type}"
            context, rest = ("", request.args[0]) if len(request.args) == 1 else request.args
            shown = rest if isinstance(rest, str) else f"  generated: {rest}"
            parts = [
                click.style(printable(context, "\n\t"), fg="cyan"),
                click.style(printable(shown, "\n\t"), fg="green"),
            ]
            lines += [click.style(printable(name), bold=True), "".join(parts), ""]
        yield "\n".join(lines)


def metrics_report(run: Run, rule: str | None = None, detail: bool = False) -> Report:
    """Return a report of every metric of every task and group, as lm-eval computed it; see `Benchmark.report`."""
    stored, manifest = run.stored, run.manifest
    entries = [*stored["tasks"], *stored["groups"]]
    filters = {metric["filter"] for entry in entries for metric in entry["metrics"]}
    unofficial = {name for name, source in manifest["documents"].items() if not source["official"]}
    rows = [row for entry in entries for row in _rows(entry, len(filters) > 1, entry["task"] in unofficial)]
    texts = ["task", *(["filter"] if len(filters) > 1 else []), "metric"]
    headers = [*texts, "n", "n-shot", "value", "± SE", "seconds"]
    notes = ["metrics as lm-eval " + str(manifest["versions"]["lm-eval"]) + " computes them"]
    if extension := manifest["specification"].get("context_extension"):
        notes.append(Extension(**extension).describe())
    notes += [*origin_notes(manifest), *mixture(manifest)]
    if any(metric["higher_is_better"] is False for entry in entries for metric in entry["metrics"]):
        notes.append(LOWER_NOTE)
    sources = sorted({source["source"] for source in manifest["documents"].values()})
    notes.append("documents: " + "; ".join(sources[:5]) + ("; …" if len(sources) > 5 else ""))
    if unofficial:
        notes.append("*: not the official documents of the task")
    return Report(
        (simple_table("lm_eval", headers, rows, texts=len(texts)),),
        notes=tuple(notes),
        content=run_content(run, documents=manifest["documents"]),
        records=[
            {"task": entry["task"], "n": entry["n"], "num_fewshot": entry["num_fewshot"]}
            | metric
            | {"official": entry["task"] not in unofficial}
            for entry in entries
            for metric in entry["metrics"]
        ],
    )


def headline(run: Run, rule: str | None = None) -> tuple[float | None, str]:
    """Return the first metric of the first group, or of the first task if there are no groups."""
    if not (entries := run.stored["groups"] or run.stored["tasks"]):
        return None, ""
    first, *others = entries
    values = [metric["value"] for entry in entries for metric in entry["metrics"]]
    shown = [f"{metric['metric']} {_number(metric['value'])}" for metric in first["metrics"][:1]]
    summary = " ".join([first["task"], *shown, *([f"and {len(others)} more"] if others else [])])
    return next((value for value in values if isinstance(value, float)), None), summary


def _number(value: Any) -> str:
    return fixed(value, 4) if isinstance(value, (int, float)) else str(value)


def _rows(entry: Mapping[str, Any], with_filter: bool, unofficial: bool) -> Iterator[list[str]]:
    shots = "" if entry["num_fewshot"] is None else str(entry["num_fewshot"])
    for index, metric in enumerate(entry["metrics"]):
        first = index == 0
        yield [
            entry["task"] + "*" * unofficial if first else "",
            *([metric["filter"]] if with_filter else []),
            metric["metric"] + (LOWER_IS_BETTER if metric["higher_is_better"] is False else ""),
            str(entry["n"]) if first else "",
            shots if first else "",
            _number(metric["value"]),
            "–" if metric["stderr"] is None else f"± {fixed(metric['stderr'], 4)}",
            fixed(entry["seconds"], 1) if first and entry.get("seconds") is not None else "",
        ]
