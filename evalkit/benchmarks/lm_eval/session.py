"""A prepared run of lm-eval's tasks, to a finished run folder.

lm-eval itself builds the requests and computes the metrics; evalkit answers the requests (`answers.py`) and keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.lm_eval.answers import Answers
from evalkit.benchmarks.lm_eval.preparation import SEEDS, PreparedTasks, prepare_tasks
from evalkit.benchmarks.lm_eval.quiet import quiet_lm_eval
from evalkit.benchmarks.lm_eval.results import write_results
from evalkit.benchmarks.request import Request
from evalkit.errors import DataError, EvalkitError, RunError, UsageError, first_line
from evalkit.progress import Progress
from evalkit.runs.folder import Run
from evalkit.runs.place import place_of
from evalkit.runs.writing import RunWriter, finished_run

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.harness import Harness

_LONGEST_NAME = 200
"""Bytes of a task's name: file systems take 255, of which the rest of a sample file's name needs some."""


def evaluate_tasks(request: Request, progress: Progress) -> Run:
    """Evaluate a checkpoint on lm-eval's tasks; resume or open the run if it was begun or finished before.

    Raises:
        EvalkitError: whatever is wrong, in one line.
    """
    return run_tasks(prepare_tasks(request, progress.say), progress)


def run_tasks(prepared: PreparedTasks, progress: Progress) -> Run:
    """Score what is missing of a prepared run, write its results and open it."""
    if prepared.request.log_samples:
        _refuse_long_names(prepared)
    return finished_run(
        prepared.folder,
        prepared.manifest,
        lambda run: run.serves(prepared.request.log_samples),
        lambda writer: _Session(prepared, writer, progress).complete(),
        progress.say,
        prepared.request.device,
    )


def _refuse_long_names(prepared: PreparedTasks) -> None:
    """Raise a `UsageError` where a sample file could not be named after its task, as lm-eval names it."""
    for name in prepared.tasks.tasks:
        if (size := len(os.fsencode(name))) > _LONGEST_NAME:
            raise UsageError(
                f"task {name[:60]}…: its name has {size} bytes, and --log-samples needs names of at most "
                f"{_LONGEST_NAME} to name files after; give it a shorter one in its task file"
            )


class _Session:
    """The part of a run that one process does."""

    def __init__(self, prepared: PreparedTasks, writer: RunWriter, progress: Progress) -> None:
        self._prepared = prepared
        self._writer = writer
        self._progress = progress
        self._harness: Harness | None = None
        self._answers = Answers(writer, self._load, self._requests, progress)

    def complete(self) -> None:
        """Have lm-eval evaluate every task, and write what comes out."""
        import lm_eval.evaluator

        request, tasks = self._prepared.request, self._prepared.tasks
        for task in tasks.tasks.values():
            _name_errors(task)
            # Anew, since the sampler moves with every document that is asked for
            task.set_fewshot_seed(SEEDS["fewshot"])
        with quiet_lm_eval(self._progress.say):
            try:
                results = lm_eval.evaluator.evaluate(
                    self._answers,
                    tasks.as_lm_eval(),
                    limit=request.limit,
                    log_samples=True,
                )
            except EvalkitError:
                raise
            except Exception as error:
                raise RunError(
                    f"lm-eval cannot evaluate {', '.join(tasks.names)} ({type(error).__name__}: {first_line(error)}); "
                    f"what was scored is kept in {self._writer.folder}"
                ) from error
        self._record_sharing()
        write_results(self._writer, tasks, self._answers, results, request.log_samples)

    def _record_sharing(self) -> None:
        """Add to the manifest what the start-up check has found, where anything was scored."""
        if self._harness is not None and self._harness.engine.checked:
            self._writer.save_manifest(sharing=self._harness.engine.describe())

    def _requests(self) -> list[Any]:
        """All requests of the run, once lm-eval has built them."""
        return [request for task in self._prepared.tasks.tasks.values() for request in task.instances]

    def _load(self) -> Harness:
        from evalkit.benchmarks.lm_eval.harness import Harness
        from evalkit.benchmarks.multiple_choice.evaluation import load_model
        from evalkit.scoring.budget import resumed_budget

        request, manifest, say = self._prepared.request, self._writer.manifest, self._progress.say
        loaded = load_model(self._prepared.checkpoint, request, manifest["specification"], self._progress)
        budget = resumed_budget(manifest, bool(self._answers), request.token_budget, say)
        harness = Harness(loaded, token_budget=budget, say=say)
        harness.asked_budget = request.token_budget
        harness.remembers = True
        self._writer.compute_on(place_of(loaded.device, loaded.attention))
        self._writer.save_manifest(
            token_budget=harness.token_budget,
            generation_batch=harness.batch_size,
            loaded=loaded.facts() | {"window": harness.max_length, "prefix_id": harness.prefix_token_id},
        )
        self._harness = harness
        return harness


def _name_errors(task: Any) -> None:
    """Let what goes wrong inside a task name it."""

    def named(step: Callable[..., Any], what: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                return step(*arguments, **options)
            except EvalkitError:
                raise
            except Exception as error:
                raise DataError(
                    f"task {task.task_name}: lm-eval cannot {what} ({type(error).__name__}: {first_line(error)})"
                ) from error

        return run

    task.build_all_requests = named(task.build_all_requests, "build its requests")
    task.process_results = named(task.process_results, "measure a document")
