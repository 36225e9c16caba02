"""Documents of a finished run of lm-eval's tasks as people read them.

In: a finished run. Out: a view of each task. Choices are in the score table; texts and generated answers are in the
sample files, if the run has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from evalkit.benchmarks.document_views import ChoiceView, TaskView
from evalkit.benchmarks.lm_eval.samples import NO_SAMPLES, answer_view, stored_texts
from evalkit.runs.folder import Run


def task_views(run: Run, tasks: Collection[str]) -> Iterator[TaskView]:
    """Yield the tasks of a finished run. Arguments and errors: see `Benchmark.views`."""
    with_choices = {task for members in run.manifest["groups"].values() for task in members}
    for entry in run.stored["tasks"]:
        if tasks and entry["task"] not in tasks:
            continue
        yield _choice_view(run, entry["task"]) if entry["task"] in with_choices else answer_view(run, entry)


def _choice_view(run: Run, task: str) -> ChoiceView:
    from evalkit.scores.results import available_rules

    table = run.scores[run.scores["task"] == task].reset_index(drop=True)
    texts = stored_texts(run, table)
    return ChoiceView(task, table, tuple(available_rules(run.scores)), texts, "" if texts else NO_SAMPLES)
