"""Calls of lm-eval: without its log, bars and standard output, with its random state, on the selected documents.

evalkit reserves standard output for results and shows its own progress.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from evalkit.compatibility.lm_eval import compiled_once, without_bars
from evalkit.display import Say, doing, imports
from evalkit.models.locate import silent


@contextlib.contextmanager
def quiet_lm_eval(say: Say = silent) -> Iterator[None]:
    """Suppress lm-eval's progress bars, log and prints, and the tokenizers library's warning about forked processes.

    Each Jinja template is compiled once and not for every document.

    Args:
        say: called when lm-eval starts a bootstrap, which can take minutes.
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
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        after.callback(_set_variable, "TOKENIZERS_PARALLELISM", before)
        after.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


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


def restrict(task: Any, numbers: Sequence[int]) -> None:
    """Make a task iterate over some of its documents, in order.

    Args:
        task: its method `doc_iterator` is replaced.
        numbers: the documents' numbers, at least one.
    """
    every, chosen = task.doc_iterator, frozenset(numbers)

    def restricted(*, limit: int | None = None, **_: Any) -> Iterator[tuple[int, Any]]:
        found = ((number, doc) for number, doc in every(rank=0, world_size=1) if number in chosen)
        return islice(found, limit)

    task.doc_iterator = restricted
    if task.config.num_fewshot:
        _draw_in_turn(task, chosen)


def _draw_in_turn(task: Any, chosen: frozenset[int]) -> None:
    """Draw the examples of all documents when requests are built: a document's depend on those drawn before it."""
    build, context = task.build_all_requests, task.fewshot_context

    def built(**options: Any) -> None:
        before = enumerate(task.eval_docs)

        def in_turn(doc: Any, *arguments: Any, **rest: Any) -> Any:
            for number, skipped in before:
                if number in chosen:
                    break
                context(skipped, *arguments, **rest)
            return context(doc, *arguments, **rest)

        task.fewshot_context = in_turn
        try:
            build(**options)
        finally:
            task.fewshot_context = context

    task.build_all_requests = built
