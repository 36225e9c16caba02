"""Documents of runs for a page: the union of each task's documents, with the decisions of every run under every rule.

In: finished runs. Out: `DocumentData`: an index for the page's script, and a block for each task (`blocks.py`).
Decisions are computed here, by the rules themselves; the page only shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evalkit.benchmarks.alike import document_difference
from evalkit.benchmarks.document_views import ChoiceView
from evalkit.benchmarks.registry import benchmark_of
from evalkit.data.sampling import DocumentSample
from evalkit.display import Say
from evalkit.pages.blocks import DocumentData, ViewOfRun
from evalkit.pages.choices import answers_block, choices_block
from evalkit.runs.folder import Run
from evalkit.runs.score_table import SEGMENTS


def document_data(
    runs: Sequence[Run], names: Sequence[str], say: Say, sample: DocumentSample | None = None
) -> DocumentData:
    """Collect the documents of all runs.

    Args:
        runs: finished runs.
        names: their names in the page.
        say: called with messages for the user.
        sample: which documents to take; None: all.

    Documents that runs share are read once within `remembering`.

    Raises:
        EvalkitError: a run is damaged.
    """
    tasks: list[dict[str, Any]] = []
    blocks: list[str] = []
    used: set[str] = set()
    problems: dict[str, list[str]] = {}
    for members in _by_documents(runs, say):
        about, block = _block(members, sample)
        numbers = [member.number for member in members]
        if about["task"] in used:  # other documents under the same name
            of = ", ".join(names[number] for number in numbers)
            about |= {"task": f"{about['task']} ({of})", "label": f"{about['label']} ({of})"}
        used.add(about["task"])
        for problem in dict.fromkeys(member.view.problem for member in members if member.view.problem):
            problems.setdefault(problem, []).append(about["task"])
        tasks.append(about | {"block": len(blocks), "runs": numbers})
        blocks.append(block)
    for problem, listed in problems.items():
        say(f"{', '.join(listed)}: {problem}")
    listed_runs = [
        {"name": name, "id": run.manifest["id"], "rule": run.rule} for name, run in zip(names, runs, strict=True)
    ]
    return DocumentData({"runs": listed_runs, "segments": list(SEGMENTS), "tasks": tasks}, blocks)


def _by_documents(runs: Sequence[Run], say: Say) -> Iterator[list[ViewOfRun]]:
    """Yield the runs' views of each task; runs that have other documents of a task are apart."""
    order: dict[tuple[str, str], list[list[tuple[int, Run]]]] = {}
    for number, run in enumerate(runs):
        for task in run.manifest["documents"]:
            parts = order.setdefault((run.kind, task), [])
            same = (part for part in parts if document_difference(part[0][1], run, task) is None)
            if (part := next(same, None)) is None:
                parts.append(part := [])
            part.append((number, run))
    for (_, task), parts in order.items():
        for part in parts:
            found = [
                ViewOfRun(number, run, view)
                for number, run in part
                for view in benchmark_of(run).views(run, (task,), say)
            ]
            if found:
                yield found


def _block(members: Sequence[ViewOfRun], sample: DocumentSample | None) -> tuple[dict[str, Any], str]:
    """Return a task's entry in the index and its block."""
    first = members[0]
    make = choices_block if isinstance(first.view, ChoiceView) else answers_block
    about, block = make(members, sample)
    task, run = first.view.task, first.run
    general = {
        "task": task,
        "label": benchmark_of(run).label(run, task).full,
        "official": run.manifest["documents"].get(task, {}).get("official"),
    }
    return general | about, block
