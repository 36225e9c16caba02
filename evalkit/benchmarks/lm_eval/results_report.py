"""Report of a run of lm-eval's tasks.

In: a finished run. Out: a `Report`. Neither torch nor lm-eval is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.results_report import LOWER_IS_BETTER, LOWER_NOTE, run_content
from evalkit.models.context import Extension
from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import mixture
from evalkit.runs.traits import origin_notes

if TYPE_CHECKING:
    from evalkit.runs.folder import Run

Entry = Mapping[str, Any]
"""The entry of a task or a group in results.json."""


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


def _rows(entry: Entry, with_filter: bool, unofficial: bool) -> Iterator[list[str]]:
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
