"""Evaluation during training with transformers' Trainer.

In: a trainer, and the arguments of `evalkit.evaluate`. Out: every n steps an ordinary run folder of the live model,
named by step, and its metrics wherever the trainer logs. The training itself is not changed: see `models/live.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

import torch
import transformers
from torch import distributed

from evalkit.benchmarks.keywords import SuiteSettings
from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.request import SuiteRequest
from evalkit.benchmarks.run import given_options, planned
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.errors import EvalkitError, UsageError, first_line
from evalkit.inputs import values
from evalkit.inputs.settings import fitted, settings_of, with_settings
from evalkit.models.live import live_model
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import ModelSpec
from evalkit.runs.folder import Run


def logged_metrics(run: Run, rule: str) -> dict[str, float]:
    """Return the metrics of a finished run, named `evalkit/<suite>/<task>` and `evalkit/<suite>/<average>`.

    A task's main metric has the task's name; its further ones have their own name after it. The error of the last
    average is `…_stderr`. Values have the benchmark's own unit (accuracies are fractions). Numbers that are not finite
    are left out: a file of logged numbers must be valid JSON.

    Args:
        run: the run.
        rule: of the plan: a finished run may have been started under another one.
    """
    other, logged = run.other_rule(rule), dict[str, float | None]()
    tasks: set[str] = set()
    for metric in benchmark_of(run).metrics(run, other):
        if metric.layer is None:
            logged[f"{metric.task}/{metric.name}" if metric.task in tasks else metric.task] = metric.value
            tasks.add(metric.task)
    averages = benchmark_of(run).stored_averages(run, other)
    logged |= {average["name"]: average["accuracy"] for average in averages}
    if averages:
        logged[f"{averages[-1]['name']}_stderr"] = averages[-1]["stderr"]
    numbers = {name: float(value) for name, value in logged.items() if value is not None}
    return {f"evalkit/{run.suite}/{name}": value for name, value in numbers.items() if math.isfinite(value)}


Result = TypeVar("Result")


class _Processes:
    """All processes of this training; created by all of them at the same time. A single process needs no group."""

    def __init__(self) -> None:
        self._group: Any = None
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(days=7))

    def from_main(self, compute: Callable[[], Result]) -> Result:
        """Compute in the main process and return the result, which is pickled, in all.

        An exception in the main process leaves the others waiting until that process ends.
        """
        if self._group is None:
            return compute()
        results: list[Any] = [compute() if distributed.get_rank() == 0 else None]
        distributed.broadcast_object_list(results, src=0, group=self._group, device=torch.device("cpu"))
        result: Result = results[0]
        return result

    def close(self) -> None:
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None


_log = logging.getLogger(__name__)


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Evaluate the model of a `transformers.Trainer` every n steps; weights, optimizer and random numbers stay equal.

        trainer.add_callback(evalkit.TrainerCallback(trainer, every=1000, suite="zeroshot8", sample=100))

    Each evaluation is logged with `trainer.log` (`evalkit/<suite>/<task>`), so that it reaches what the trainer logs
    to, and leaves a run folder named "<name> step <step>" in `output`. Several callbacks evaluate several suites.
    Training does not begin if the options are invalid or the documents are missing.

    In distributed training (DDP) the main process evaluates while the others wait. Ctrl-C ends the training, as always.

    Args:
        trainer: the trainer that the callback is added to.
        every: steps (updates of the weights) between two evaluations; None: only at the end.
        at_end: whether to evaluate after the last step, too.
        on_error: what a failed evaluation does: "warn" logs a warning and the training goes on; "raise" ends it.
        tokenizer: the model's tokenizer; None: the trainer's `processing_class`.
        settings: further settings of the suite's benchmark, see `evalkit.evaluate`.
        attention: see `evalkit.evaluate`.
        progress: receives messages and progress; None: lines on standard error.
        **shared: suite, tasks, sample and the other settings of `evalkit.evaluate` that are not about loading a model;
            `name` is that of the training, by default the trainer's `run_name`, or the name of its output folder.

    Raises:
        UsageError: an argument is invalid, or the trainer shards the model over processes.
    """

    @with_settings(SuiteSettings, SuiteRequest)
    def __init__(
        self,
        trainer: transformers.Trainer,
        *,
        every: int | None = None,
        at_end: bool = True,
        on_error: Literal["warn", "raise"] = "warn",
        tokenizer: transformers.PreTrainedTokenizerBase | None = None,
        settings: Mapping[str, Any] | None = None,
        attention: Literal["auto", "sdpa", "eager"] = "auto",
        progress: Progress | None = None,
        **shared: Unpack[SuiteSettings],
    ) -> None:
        """Take the arguments of the class, and the settings of `evalkit.evaluate`.

        Args:
            {settings}
        """
        self._every = None if every is None else values.whole("every", every, 1)
        self._at_end = values.switch("at_end", at_end)
        if self._every is None and not self._at_end:
            raise UsageError("every and at_end: nothing is evaluated; pass every=1000, for example")
        if on_error not in ("warn", "raise"):
            raise UsageError(f"on_error is {on_error!r}; it must be 'warn' or 'raise'")
        _check_trainer(trainer)
        self._trainer = trainer
        self._raises = on_error == "raise"
        own_name = trainer.args.run_name or Path(trainer.args.output_dir).resolve().name or "training"
        self._tokenizer = trainer.processing_class if tokenizer is None else tokenizer
        if self._tokenizer is None:
            raise UsageError("the trainer has no processing_class; pass tokenizer=…, the tokenizer of the model")
        self._options = given_options(shared, settings or {})
        self._name = values.text("name", self._options.pop("name", own_name))
        defaults = {setting.name: setting.default for setting in settings_of(ModelSpec).values()}
        given = fitted(ModelSpec, {"attention": attention})
        self._loading: dict[str, Any] = defaults | given | {"tokenizer": self._tokenizer}
        self._progress = progress or Progress(live=False)
        self._processes: _Processes | None = None
        self._evaluated: int | None = None
        self._error: Exception | None = None
        """The error of the last evaluation, in the process that evaluates."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Plan an evaluation before the first step, so that invalid options and missing documents are found."""
        self._evaluated, self._processes = None, _Processes()
        _, error = self._processes.from_main(lambda: self._attempt(self._plan))
        if error:
            raise self._error or EvalkitError(error)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluate the model if it is time for it; gradients of the step are already applied and removed."""
        due = self._every is not None and state.global_step % self._every == 0
        if due or (self._at_end and control.should_training_stop):
            self._evaluate(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluate the model at the end of a training that another callback stopped."""
        if self._at_end and control.should_training_stop:
            self._evaluate(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluate the last step if it is not evaluated yet."""
        is_due = self._at_end and self._evaluated != state.global_step
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if is_due and best is None:
            self._evaluate(state, control)
        elif is_due and state.is_world_process_zero:
            # The weights are those of another step by now
            _log.warning(
                "step %s, the last one, is not evaluated: the trainer has loaded %s", f"{state.global_step:,}", best
            )
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _evaluate(self, state: Any, control: Any) -> None:
        """Evaluate the model in the main process; log its metrics in all."""
        step = state.global_step
        if self._processes is None or self._evaluated == step:
            return
        self._evaluated = step
        metrics, error = self._processes.from_main(lambda: self._attempt(lambda: self._run(step)))
        if metrics:
            # Logging tells the trainer that its own numbers of this step are logged, too, which they are not
            should_log = control.should_log
            self._trainer.log(dict(metrics))
            control.should_log = should_log
        if error and self._raises:
            raise self._error or EvalkitError(error)
        if error and state.is_world_process_zero:
            unexpected = None if isinstance(self._error, EvalkitError) else self._error
            message = "the evaluation of step %s failed and is left out; the training goes on: %s"
            _log.warning(message, f"{step:,}", error, exc_info=unexpected)
        self._error = None

    def _attempt(self, work: Callable[[], dict[str, float]]) -> tuple[dict[str, float], str]:
        """Return metrics, the same in all processes, or none and why the work failed."""
        self._error = None
        try:
            return work(), ""
        except Exception as error:  # whatever fails, the training is not to be lost
            self._error = error
            named = isinstance(error, EvalkitError)
            return {}, str(error) if named else f"{type(error).__name__}: {first_line(error)}"

    def _run(self, step: int) -> dict[str, float]:
        name, loading = f"{self._name} step {step}", dict(self._loading)
        loading["saved_as"] = Path(self._trainer.args.output_dir).resolve() / f"checkpoint-{step}"
        with self._progress as shown, live_model(self._trainer.model, name, **loading) as spec:
            plan = planned(spec, self._options, shown.say)
            return logged_metrics(run_plan(plan, shown), plan.manifest["rule"])

    def _plan(self) -> dict[str, float]:
        with live_model(self._trainer.model, self._name, **self._loading) as spec:
            planned(spec, self._options, silent)
        return {}


def _check_trainer(trainer: Any) -> None:
    """Raise `UsageError` if a trainer shards its model: no process then has all weights."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    sharding = "FSDP" if trainer.is_fsdp_enabled else ""
    if plugin is not None and getattr(plugin, "zero_stage", None) == 3:
        sharding = "DeepSpeed ZeRO-3"
    if sharding:
        raise UsageError(
            f"the trainer shards the model over processes ({sharding}); evaluate its checkpoints as they are saved: "
            f"evalkit run --watch {trainer.args.output_dir}"
        )
