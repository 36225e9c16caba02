"""Evaluation during training with transformers' Trainer.

In: a trainer, and the arguments of `evalkit.evaluate`. Out: every n steps an ordinary run folder of the live model,
named by step, and its metrics wherever the trainer logs. The evaluation is that of any training loop: see `loop.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

import transformers

from evalkit.benchmarks.keywords import SuiteSettings
from evalkit.benchmarks.request import SuiteRequest
from evalkit.display import Progress
from evalkit.errors import UsageError
from evalkit.inputs import values
from evalkit.inputs.settings import with_settings
from evalkit.studies.loop import InLoop

_log = logging.getLogger(__name__)


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Evaluate the model of a `transformers.Trainer` every n steps; weights, optimizer and random numbers stay equal.

        trainer.add_callback(evalkit.TrainerCallback(trainer, every=1000, suite="zeroshot8", sample=100))

    Each evaluation is logged with `trainer.log` (`evalkit/<suite>/<task>`), so that it reaches what the trainer logs
    to, and leaves a run folder named "<name> step <step>" in `output`. Several callbacks evaluate several suites.
    Training does not begin if the options are invalid or the documents are missing.

    In distributed training (DDP, FSDP2) the processes share the batches. Ctrl-C ends the training, as always.

    Args:
        trainer: the trainer that the callback is added to.
        every: steps (updates of the weights) between two evaluations; None: only at the end.
        at_end: whether to evaluate after the last step, too.
        budget: share of the training's time, such as "2%", that evaluations may take; see `evalkit.InLoop`.
        on_error: what a failed evaluation does: "warn" logs a warning and the training goes on; "raise" ends it.
        tokenizer: the model's tokenizer; None: the trainer's `processing_class`.
        settings: further settings of the suite's benchmark, see `evalkit.evaluate`.
        attention: see `evalkit.evaluate`.
        progress: receives messages and progress; None: lines on standard error.
        **shared: suite, tasks, sample and the other settings of `evalkit.evaluate` that are not about loading a model;
            `name` is that of the training, by default the trainer's `run_name`, or the name of its output folder.

    Raises:
        UsageError: an argument is invalid.
    """

    @with_settings(SuiteSettings, SuiteRequest)
    def __init__(
        self,
        trainer: transformers.Trainer,
        *,
        every: int | None = None,
        at_end: bool = True,
        budget: str | None = None,
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
        self._trainer = trainer
        self._folder = Path(trainer.args.output_dir).resolve()
        if (tokenizer := trainer.processing_class if tokenizer is None else tokenizer) is None:
            raise UsageError("the trainer has no processing_class; pass tokenizer=…, the tokenizer of the model")
        shared.setdefault("name", trainer.args.run_name or self._folder.name or "training")
        self._inloop = InLoop(
            tokenizer=tokenizer, every=self._every, budget=budget, on_error=on_error, settings=settings,
            attention=attention, progress=progress, **shared,
        )  # fmt: skip
        self._is_training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Plan an evaluation before the first step, so that invalid options and missing documents are found."""
        self._inloop.evaluated, self._is_training = None, True
        self._inloop.check(self._trainer.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluate the model if it is time for it; gradients of the step are already applied and removed."""
        self._evaluate(state, control, control.should_training_stop)

    on_epoch_end = on_step_end
    """For a training that another callback has stopped since."""

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Evaluate the last step if it is not evaluated yet."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is None:
            self._evaluate(state, control, is_last=True)
        elif self._at_end and self._inloop.evaluated != state.global_step and state.is_world_process_zero:
            # The weights are those of another step by now
            _log.warning(
                "step %s, the last one, is not evaluated: the trainer has loaded %s", f"{state.global_step:,}", best
            )
        self._inloop.close()
        self._is_training = False

    def _evaluate(self, state: Any, control: Any, is_last: bool) -> None:
        """Evaluate the model, if it is time for it, and log its metrics, in all processes."""
        step, now = state.global_step, is_last and self._at_end
        if not self._is_training or self._inloop.evaluated == step or (self._every is None and not now):
            return
        saved_as = self._folder / f"checkpoint-{step}"
        if metrics := self._inloop(self._trainer.model, step, saved_as=saved_as, now=now):
            # Logging tells the trainer that its own numbers of this step are logged, too, which they are not
            should_log = control.should_log
            self._trainer.log(dict(metrics))
            control.should_log = should_log
