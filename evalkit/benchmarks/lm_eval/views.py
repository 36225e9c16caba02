"""A finished run of lm-eval's tasks as people read it: the report of its metrics, and its documents.

In: a run; texts and answers are in its sample files. Out: a `Report`, texts of choices, or answered documents.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from evalkit.benchmarks.outcomes import LOWER_IS_BETTER, LOWER_NOTE, run_content
from evalkit.escape import printable
from evalkit.inputs.reading import parse_json
from evalkit.models.context.extension import Extension
from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.folder import Run
from evalkit.runs.traits import origin_notes

if TYPE_CHECKING:
    import pandas as pd


NO_SAMPLES = "the run has no sample files, which store the texts; repeat its command with --log-samples"
"""Why texts are missing."""


def stored_texts(run: Run, table: pd.DataFrame) -> dict[DocumentKey, ChoiceText]:
    """Return the texts of a task's documents from the run's sample files; empty without these.

    Args:
        run: a finished run.
        table: the task's rows of the score table.

    Raises:
        RunError: a sample file is damaged.
    """
    found: dict[DocumentKey, ChoiceText] = {}
    for subtask, rows in table[table["choice"] == 0].groupby("subtask", sort=False):
        counts = dict(zip(rows["doc_id"].tolist(), rows["choices"].tolist(), strict=True))
        found |= _subtask_texts(run, str(subtask), counts)
    return found


def _subtask_texts(run: Run, task: str, choices: Mapping[int, int]) -> dict[DocumentKey, ChoiceText]:
    """Return the texts of a multiple-choice task of lm-eval: each choice's context and continuation, as lm-eval's."""
    found: dict[DocumentKey, ChoiceText] = {}
    for sample in _samples(run, task):
        # For tasks that measure mutual information, lm-eval appends the choices without their context
        pairs = islice(_arguments(sample), choices.get(sample["doc_id"], 0))
        found.setdefault((task, sample["doc_id"]), _choice_text(list(pairs)))
    return found


def answer_view(run: Run, entry: Mapping[str, Any]) -> AnswerView:
    """Return a task's answered documents, with the first metric that lm-eval computed."""
    task = entry["task"]
    first = next(iter(entry["metrics"]), {"metric": "", "filter": "none"})
    samples = [one for one in _samples(run, task) if one["filter"] == first["filter"]]
    documents = [_answered(task, sample, first["metric"]) for sample in samples]
    return AnswerView(task, first["metric"], documents, "" if documents else NO_SAMPLES)


def _choice_text(pairs: list[tuple[str, ...]]) -> ChoiceText:
    options = tuple(continuation.strip() for _, continuation in pairs)
    return choice_text([_pieces(*pair) for pair in pairs], options)


def _pieces(context: str, continuation: str) -> tuple[Piece, ...]:
    both = (Piece("context", context), Piece("continuation", continuation))
    return tuple(piece for piece in both if piece.text)


def _answered(task: str, sample: Mapping[str, Any], metric: str) -> AnsweredDocument:
    score = sample.get(metric)
    context, *rest = next(_arguments(sample), ("",))
    return AnsweredDocument(
        subtask=task,
        id=str(sample["doc_id"]),
        references=(str(sample["target"]),),
        answer=" | ".join(map(_text, sample["filtered_resps"])),
        score=float(score) if isinstance(score, (int, float)) else None,
        prompt=_pieces(context, *(rest or [""])),
    )


def _text(answer: Any) -> str:
    """Return an answer as text; one of several values is a log-likelihood and whether it is greedy."""
    return ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)


def _arguments(sample: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each request, in order, without generation_kwargs."""
    for number in range(len(sample["arguments"])):
        request = sample["arguments"][f"gen_args_{number}"]
        yield tuple(part for part in request.values() if isinstance(part, str))


def _samples(run: Run, task: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a task's sample file; none if the run does not have it."""
    pattern = re.compile(rf"lm_eval/samples_{re.escape(task)}_\d{{4}}-[\dT.-]+\.jsonl")
    for name in filter(pattern.fullmatch, run.files):
        for line in run.read(name).splitlines():
            yield parse_json(line)


def task_views(run: Run, tasks: Collection[str]) -> Iterator[TaskView]:
    """Yield the tasks of a finished run. Arguments and errors: see `Benchmark.views`."""
    with_choices = {task for members in run.manifest["groups"].values() for task in members}
    for entry in run.stored["tasks"]:
        if tasks and entry["task"] not in tasks:
            continue
        yield _choice_view(run, entry["task"]) if entry["task"] in with_choices else answer_view(run, entry)


def _choice_view(run: Run, task: str) -> ChoiceView:
    from evalkit.runs.accuracies import available_rules

    table = run.scores[run.scores["task"] == task].reset_index(drop=True)
    texts = stored_texts(run, table)
    return ChoiceView(task, table, tuple(available_rules(run.scores)), texts, "" if texts else NO_SAMPLES)


def requests_text(requests: Sequence[Any]) -> str:
    """Return requests as text: context, and continuation or generation_kwargs."""
    lines = []
    for request in requests:
        name = f"{request.task_name} document {request.doc_id}, {request.request_type}"
        context, rest = ("", request.args[0]) if len(request.args) == 1 else request.args
        shown = rest if isinstance(rest, str) else f"  generated: {rest}"
        texts = click.style(printable(context, "\n\t"), fg="cyan") + click.style(printable(shown, "\n\t"), fg="green")
        lines += [click.style(printable(name), bold=True), texts, ""]
    return "\n".join(lines)


def metrics_report(run: Run) -> Report:
    """Return a report of every metric of every task and group, as lm-eval computed it."""
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


def summary_of(stored: Mapping[str, Any]) -> str:
    """Return a short summary of a finished run, for a list of runs."""
    if not (entries := stored["groups"] or stored["tasks"]):
        return ""
    first, *others = entries
    shown = [f"{metric['metric']} {number(metric['value'])}" for metric in first["metrics"][:1]]
    return " ".join([first["task"], *shown, *([f"and {len(others)} more"] if others else [])])


def number(value: Any) -> str:
    """Return a metric's value with four decimals, as in lm-eval; a value that is not a number as text."""
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
            number(metric["value"]),
            "–" if metric["stderr"] is None else f"± {fixed(metric['stderr'], 4)}",
            fixed(entry["seconds"], 1) if first and entry.get("seconds") is not None else "",
        ]
