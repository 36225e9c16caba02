"""Suppression of lm-eval's log, progress bars and standard output.

evalkit reserves standard output for results and shows its own progress.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from unittest.mock import patch

from evalkit.activity import doing, imports
from evalkit.compatibility.lm_eval import compiled_once, without_bars
from evalkit.models.locate import Say, silent


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
        after.enter_context(patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "true"}))
        after.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


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
