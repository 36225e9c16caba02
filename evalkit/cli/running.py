"""Running a benchmark from a command: plan, run, print."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evalkit.activity import doing

if TYPE_CHECKING:
    from evalkit.runs.folder import Run


def run_and_print(model: str, options: dict[str, Any], output: Callable[[Run, str], None]) -> None:
    """Run a benchmark and print the result.

    Args:
        model: see `evalkit.evaluate`.
        options: see `evalkit.evaluate`.
        output: prints the finished run, under the requested rule.

    Raises:
        EvalkitError: the run failed; or, after all is saved and printed, something was skipped.
    """
    from evalkit.benchmarks.run import planned
    from evalkit.benchmarks.session import run_plan
    from evalkit.errors import DataError
    from evalkit.progress import Progress

    with Progress() as progress:
        with doing("planning the run"):
            plan = planned(model, options, progress.say)
        run = run_plan(plan, progress)
    output(run, plan.manifest["rule"])
    if left_out := plan.manifest.get("left_out"):
        raise DataError(f"left out: {'; '.join(left_out)}")
