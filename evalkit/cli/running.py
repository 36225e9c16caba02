"""Running a benchmark from a command: plan, run, print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from evalkit.activity import doing

if TYPE_CHECKING:
    from evalkit.benchmarks.base import Plan
    from evalkit.benchmarks.run_summary import SummarisedRun
    from evalkit.engines.base import JobRunner, Outcome
    from evalkit.progress import Progress
    from evalkit.reporting.report import Report
    from evalkit.runs.folder import Run


def run_and_print(
    model: str, options: dict[str, Any], runner: JobRunner | None, output: Callable[[Run, str], None]
) -> None:
    """Run a benchmark and print the result.

    Args:
        model: see `evalkit.evaluate`.
        options: see `evalkit.evaluate`.
        runner: computes the run; None: this process.
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
        run = run_plan(plan, progress) if runner is None else _run_by(runner, model, plan, progress)
    output(run, plan.manifest["rule"])
    if left_out := plan.manifest.get("left_out"):
        raise DataError(f"left out: {'; '.join(left_out)}")


def dry_run(models: Sequence[str], options: dict[str, Any]) -> Report:
    """Return what runs will take: documents, tokens, time, memory and disk. Nothing is computed.

    Args:
        models: see `evalkit.evaluate`.
        options: see `evalkit.evaluate`.

    Raises:
        EvalkitError: a run cannot be planned.
    """
    from evalkit.benchmarks.run import planned
    from evalkit.progress import Progress
    from evalkit.studies.dry_run import plans_report

    with Progress() as progress:
        with doing("planning the run"):
            plans = [(model, planned(model, options, progress.say)) for model in models]
        return plans_report(plans, progress.say)


def _run_by(runner: JobRunner, model: str, plan: Plan, progress: Progress) -> Run:
    """Have a run computed; raise a `RunError` if it is not finished."""
    from evalkit.engines.base import Job
    from evalkit.errors import RunError
    from evalkit.runs.folder import load_run

    [outcome] = runner([Job(model, plan)], progress)
    if outcome.state != "finished":
        raise RunError(outcome.message)
    return load_run(plan.folder)


def run_several(models: Sequence[str], options: dict[str, Any], runner: JobRunner) -> tuple[Report, bool]:
    """Run a benchmark on several checkpoints.

    Args:
        models: see `evalkit.evaluate`.
        options: see `evalkit.evaluate`.
        runner: computes the runs.

    Returns:
        A summary, and whether all runs are finished and nothing was left out.

    Raises:
        EvalkitError: a run cannot be planned, or nothing can be computed.
    """
    from evalkit.benchmarks.run_summary import summary_report
    from evalkit.progress import Progress
    from evalkit.studies.planning import plan_checkpoints

    with Progress() as progress:
        outcomes = runner(plan_checkpoints(models, options, progress.say), progress)
    runs = [_summarised(one) for one in outcomes]
    return summary_report(runs), not any(one.message for one in runs)


def _summarised(outcome: Outcome) -> SummarisedRun:
    from evalkit.benchmarks.run_summary import SummarisedRun
    from evalkit.runs.folder import load_run

    if outcome.state != "finished":
        return SummarisedRun(outcome.job.label, None, state=outcome.state, message=outcome.message)
    plan, run = outcome.job.plan, load_run(outcome.job.plan.folder)
    left_out = "; ".join(plan.manifest.get("left_out", ()))
    rule = run.other_rule(plan.manifest["rule"])
    return SummarisedRun(outcome.job.label, run, rule, message=f"left out: {left_out}" if left_out else "")
