"""Silence around calls into lm-eval: its log, its bars, and what it prints to standard output.

evalkit keeps standard output for results, and shows progress of its own.
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
    """Neither bars, nor log lines, nor prints; each Jinja template is compiled once, not for every document; and no
    word of the tokenizers library about processes that lm-eval forks for its bootstrap.

    Args:
        say: told when lm-eval begins to bootstrap, which can take minutes.
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
    """lm-eval's log without what is less than a level."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
