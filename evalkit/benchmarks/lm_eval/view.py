"""The results of lm-eval's tasks as a person reads them on a terminal. Neither torch nor lm-eval is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from evalkit.models.context import Extension
from evalkit.reporting.escape import printable
from evalkit.reporting.page import aligned
from evalkit.runs.batch_devices import mixture

Entry = Mapping[str, Any]
"""A task or a group of results.json."""


def metric_table(stored: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Every metric of every task and group, as lm-eval computed it.

    Args:
        stored: what results.json holds.
        manifest: the run's.
    """
    entries = [*stored["tasks"], *stored["groups"]]
    filters = {metric["filter"] for entry in entries for metric in entry["metrics"]}
    unofficial = {name for name, source in manifest["documents"].items() if not source["official"]}
    rows = [row for entry in entries for row in _rows(entry, len(filters) > 1, entry["task"] in unofficial)]
    headers = ["task", "n", "n-shot", *(["filter"] if len(filters) > 1 else []), "metric", "value", "± SE", "seconds"]
    left = {"task", "filter", "metric"}
    table = aligned(
        rows,
        headers,
        tablefmt="simple",
        colalign=["left" if header in left else "right" for header in headers],
    )
    notes = ["metrics as lm-eval " + str(manifest["versions"]["lm-eval"]) + " computes them"]
    if extension := manifest["specification"].get("context_extension"):
        notes.append(Extension(**extension).describe())
    notes += mixture(manifest)
    if any(metric["higher_is_better"] is False for entry in entries for metric in entry["metrics"]):
        notes.append("↓: lower is better")
    sources = sorted({source["source"] for source in manifest["documents"].values()})
    notes.append("documents: " + "; ".join(sources[:5]) + ("; …" if len(sources) > 5 else ""))
    if unofficial:
        notes.append("*: not the official documents of the task")
    return "\n".join([table, "", *map(printable, notes)])


def state(stored: Mapping[str, Any]) -> str:
    """A finished run in a few words, for a list of runs."""
    if not (entries := stored["groups"] or stored["tasks"]):
        return ""
    first, *others = entries
    shown = [f"{metric['metric']} {number(metric['value'])}" for metric in first["metrics"][:1]]
    return " ".join([first["task"], *shown, *([f"and {len(others)} more"] if others else [])])


def requests_text(requests: Sequence[Any]) -> str:
    """lm-eval's requests of a few documents: context, continuation or what is generated."""
    lines = []
    for request in requests:
        name = f"{request.task_name} document {request.doc_id}, {request.request_type}"
        context, rest = ("", request.args[0]) if len(request.args) == 1 else request.args
        shown = rest if isinstance(rest, str) else f"  generated: {rest}"
        texts = click.style(printable(context, "\n\t"), fg="cyan") + click.style(printable(shown, "\n\t"), fg="green")
        lines += [click.style(printable(name), bold=True), texts, ""]
    return "\n".join(lines)


def number(value: Any) -> str:
    """A metric's value with lm-eval's four digits; as it is where it is no number."""
    return f"{value:.4f}" if isinstance(value, (int, float)) else str(value)


def _rows(entry: Entry, with_filter: bool, unofficial: bool) -> Iterator[list[str]]:
    shots = "" if entry["num_fewshot"] is None else str(entry["num_fewshot"])
    seconds = f"{entry['seconds']:.1f}" if "seconds" in entry else ""
    about = [entry["task"] + ("*" if unofficial else ""), str(entry["n"]), shots]
    for place, metric in enumerate(entry["metrics"]):
        arrow = " ↓" if metric["higher_is_better"] is False else ""
        error = "–" if metric["stderr"] is None else f"± {metric['stderr']:.4f}"
        yield [
            *(about if place == 0 else ["", "", ""]),
            *([metric["filter"]] if with_filter else []),
            metric["metric"] + arrow,
            number(metric["value"]),
            error,
            seconds if place == 0 else "",
        ]
