"""From what a user asks to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evalkit.benchmarks.base import Plan, Say
from evalkit.benchmarks.registry import benchmark, kind_of_suite
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.inputs import values
from evalkit.progress import Progress
from evalkit.runs.folder import Run


def evaluate(
    model: str | Path, *, suite: str | Path | None = None, progress: Progress | None = None, **options: Any
) -> Run:
    """Evaluate a checkpoint; resume, or just open the run, if it was begun or finished before.

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo".
        suite: of any benchmark (`evalkit ls suites`), or a YAML file; None: zeroshot8, or lm_eval if a task is not in
            it.
        progress: where news and progress go; standard error by default.
        **options: how the model is loaded, as the fields of `ModelSpec`, and settings of the benchmark, as the fields
            of its request (`SuiteRequest`, `LongBenchRequest`, `NeedleRequest`).

    Returns:
        The finished run.

    Raises:
        EvalkitError: whatever is wrong, in one line.
    """
    with progress or Progress() as shown:
        return run_plan(planned(model, options | {"suite": suite}, shown.say), shown)


def planned(model: str | Path, options: dict[str, Any], say: Say) -> Plan:
    """The run that is asked for, of whatever benchmark has the suite.

    Raises:
        EvalkitError: whatever is wrong with the options, the checkpoint or the documents.
    """
    suite = options.get("suite")
    served = benchmark(kind_of_suite(None if suite is None else values.name_or_path("--suite", suite)))
    asked = served.request()
    if "suite" not in asked.__dataclass_fields__:
        options = {name: value for name, value in options.items() if name != "suite"}
    return served.plan(request_of(asked, model, options), say)
