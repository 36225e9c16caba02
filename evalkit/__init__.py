"""evalkit: zero-shot evaluation of language-model checkpoints.

    import evalkit

    run = evalkit.evaluate(model="demo", suite="zeroshot8", sample=50)
    run.results().average        # accuracy and standard error
    run.scores                   # the score table, a pandas DataFrame
    run.results("acc_norm")      # another rule, no model needed
    evalkit.compare(run, "1a2b3c4")   # paired on the same documents; runs by folder, name, id or checkpoint
    evalkit.evaluate(model, tokenizer=tokenizer, name="step 1000")   # a model in memory, which is not changed
    inloop = evalkit.InLoop(every=1000, tokenizer=tokenizer)   # in any training loop: inloop(model, step)
    trainer.add_callback(evalkit.TrainerCallback(trainer, every=1000))   # transformers' Trainer, while it trains

    lm_eval.simple_evaluate(model=evalkit.harness("demo"), tasks=["lambada_openai"])

Importing evalkit is fast: torch is imported when a model is loaded. docs/python.md documents the Python API.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evalkit.errors import (
    CheckpointError,
    DataError,
    EvalkitError,
    OutOfMemoryError,
    RunError,
    RunInUseError,
    ScoringError,
    SeveralErrors,
    TableError,
    TemplateError,
    UnknownNameError,
    UsageError,
)

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.harness import harness
    from evalkit.benchmarks.run import evaluate
    from evalkit.comparison.comparison import compare, load_run
    from evalkit.comparison.differences import AverageDifference, Comparison, TaskDifference
    from evalkit.display import Progress
    from evalkit.runs.accuracies import Average, Results, TaskResult
    from evalkit.runs.finding import list_runs
    from evalkit.runs.folder import Run
    from evalkit.studies.loop import InLoop
    from evalkit.studies.training import TrainerCallback

# Not read from the installed metadata: the distribution named "evalkit" is another project
__version__ = "0.1.0"

_NAMES = {
    "benchmarks.lm_eval.harness": ["harness"],
    "benchmarks.run": ["evaluate"],
    "comparison.comparison": ["compare", "load_run"],
    "comparison.differences": ["AverageDifference", "Comparison", "TaskDifference"],
    "display": ["Progress"],
    "runs.accuracies": ["Average", "Results", "TaskResult"],
    "runs.finding": ["list_runs"],
    "runs.folder": ["Run"],
    "studies.loop": ["InLoop"],
    "studies.training": ["TrainerCallback"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Average", "AverageDifference", "CheckpointError", "Comparison", "DataError", "EvalkitError", "InLoop",
    "OutOfMemoryError", "Progress", "Results", "Run", "RunError", "RunInUseError", "ScoringError", "SeveralErrors",
    "TableError", "TaskDifference", "TaskResult", "TemplateError", "TrainerCallback", "UnknownNameError", "UsageError",
    "compare", "evaluate", "harness", "list_runs", "load_run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'evalkit' has no attribute {name!r}")
    return getattr(import_module(f"evalkit.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
