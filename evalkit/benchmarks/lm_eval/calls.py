"""Calls of lm-eval: without its log, bars and standard output, with its random state, and with errors that name a task.

evalkit reserves standard output for results and shows its own progress.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evalkit.compatibility.lm_eval import compiled_once, without_bars
from evalkit.display import Say, doing, imports
from evalkit.errors import DataError, EvalkitError, first_line
from evalkit.models.loading.locate import silent


@contextlib.contextmanager
def quiet_lm_eval(say: Say = silent) -> Iterator[None]:
    """Suppress lm-eval's progress bars, log and prints, and compile each Jinja template once.

    `say` is called when lm-eval starts a bootstrap, which can take minutes.
    """
    with doing("loading lm-eval", slow=imports("lm_eval")):
        import datasets
        import lm_eval.tasks  # noqa: F401

    def bootstrapping(statistic: str, samples: int) -> None:
        say(f"standard error of {statistic}: {samples:,} bootstrap samples, as lm-eval takes them")

    with contextlib.ExitStack() as after:
        after.enter_context(log_from(logging.CRITICAL))
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            after.callback(datasets.enable_progress_bars)
        after.enter_context(compiled_once())
        after.enter_context(without_bars(bootstrapping))
        after.enter_context(tokenizer_threads())
        after.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


@contextlib.contextmanager
def tokenizer_threads() -> Iterator[None]:
    """Enable the tokenizer's threads, which lm-eval's command line disables.

    A variable that was not set stays: the tokenizers library would warn about processes that are forked later.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@contextlib.contextmanager
def log_from(level: int) -> Iterator[None]:
    """Set the level of lm-eval's log within the context."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def task_errors(task: str, step: str) -> Iterator[None]:
    """Turn any error of a task's code or of lm-eval's into a `DataError` that names the task and the step."""
    try:
        yield
    except EvalkitError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise DataError(f"task {task}: lm-eval cannot {step} ({reason})") from error


@dataclass(frozen=True)
class RandomState:
    """State of Python's and NumPy's global random number generators."""

    python: Any
    numpy: Any

    def restore(self) -> None:
        """Set both generators to this state."""
        import numpy as np

        random.setstate(self.python)
        np.random.set_state(self.numpy)


def random_state() -> RandomState:
    """Return the current state."""
    import numpy as np

    return RandomState(random.getstate(), np.random.get_state())
