"""Finished multiple-choice runs whose results.json has the results of their score tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evalkit.runs.accuracies import summarise_all
from evalkit.runs.folder import RESULTS, Run, load_run
from tests.comparison.conftest import GROUPS, PASSAGES, SUBJECTS, N, answers
from tests.comparison.made import make_run, scores_of
from tests.sealed import read, reseal, write

SECONDS = 1.5
"""Seconds of each task."""


def finished_run(
    root: Path, model: str, share: float = 0.5, seed: int = 1, first: int | None = None, **more: Any
) -> Run:
    """A run of a plain task, one with shared passages, and one with subjects.

    Args:
        root: folder of runs.
        model: its name; also stands for its weights.
        share: about the share of right answers.
        seed: of the answers.
        first: only this many documents of each task.
        more: other arguments of `make_run`.
    """

    def part(values: Sequence[Any]) -> list[Any]:
        return list(values)[:first]

    def right(task: str, number: int) -> list[Any]:
        return part(answers(seed + number, share, N[task]))

    tables = {
        "arc_easy": scores_of("arc_easy", right("arc_easy", 0), norm_right=right("arc_easy", 3)),
        "boolq": scores_of("boolq", right("boolq", 1), clusters=part(PASSAGES)),
        "mmlu": scores_of("mmlu", right("mmlu", 2), subtasks=part(SUBJECTS)),
    }
    folder = make_run(root / "runs", tables, model=model, **({"groups": GROUPS} | more))
    run = load_run(folder)
    found = {rule: results.to_json() for rule, results in summarise_all(run.scores, run.manifest).items()}
    results = found[run.manifest["rule"]] | {"rules": found, "samples": False}
    for task in results["tasks"]:
        task["seconds"] = SECONDS
    write(folder, RESULTS, read(folder, RESULTS) | results)
    reseal(folder)
    return load_run(folder)
