"""From a request to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import Say
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, asked_suite, plan_suite
from evalkit.benchmarks.request import Request, request_of
from evalkit.benchmarks.session import run_plan
from evalkit.progress import Progress
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.plan import TaskPlan


def evaluate(model: str | Path, *, progress: Progress | None = None, **options: Any) -> Run:
    """Evaluate a checkpoint; resume, or just open the run, if it was begun or finished before.

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo".
        progress: where news and progress go; standard error by default.
        **options: the other fields of `Request`.

    Returns:
        The finished run.

    Raises:
        EvalkitError: whatever is wrong, in one line.
    """
    request = request_of(model, options)
    with progress or Progress() as shown:
        return run_plan(planned(request, shown.say), shown)


def planned(request: Request, say: Say) -> ChoicePlan | TaskPlan:
    """The run that a request asks for: of a suite, or of lm-eval's tasks.

    Raises:
        EvalkitError: whatever is wrong with the request, the checkpoint or the documents.
    """
    if (suite := asked_suite(request, say)) is not None:
        return plan_suite(request, suite, say)
    from evalkit.benchmarks.lm_eval.plan import plan_tasks

    return plan_tasks(request, say)
