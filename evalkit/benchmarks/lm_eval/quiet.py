"""Silence around calls into lm-eval: its log, its bars, and what it prints to standard output.

evalkit keeps standard output for results, and shows progress of its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

from evalkit.models.locate import Say, silent


@contextlib.contextmanager
def quiet_lm_eval(say: Say = silent) -> Iterator[None]:
    """Neither bars, nor log lines, nor prints; each Jinja template is compiled once, not for every document; and no
    word of the tokenizers library about processes that lm-eval forks for its bootstrap.

    Args:
        say: told when lm-eval begins to bootstrap, which can take minutes.
    """
    import datasets
    import lm_eval.api.metrics
    import lm_eval.api.task
    import lm_eval.utils
    from tqdm import tqdm  # type: ignore[import-untyped]

    compile_template = lru_cache(maxsize=256)(lm_eval.utils.env.from_string)
    bootstrap = _without_bar(lm_eval.api.metrics.bootstrap_stderr, say)
    with contextlib.ExitStack() as after:
        after.enter_context(log_from(logging.CRITICAL))
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            after.callback(datasets.enable_progress_bars)
        after.enter_context(patch.object(lm_eval.utils.env, "from_string", compile_template))
        after.enter_context(patch.object(lm_eval.api.task, "tqdm", partial(tqdm, disable=True)))
        after.enter_context(patch.object(lm_eval.api.metrics, "bootstrap_stderr", bootstrap))
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


def _without_bar(bootstrap: Callable[..., float], say: Say) -> Callable[..., float]:
    """lm-eval's bootstrap, which imports its bar when it is called."""
    import tqdm

    def quiet_bootstrap(f: Callable[..., float], xs: Sequence[Any], iters: int) -> float:
        say(f"standard error of {f.__name__}: {iters:,} bootstrap samples, as lm-eval takes them")
        with patch.object(tqdm, "tqdm", partial(tqdm.tqdm, disable=True)):
            return bootstrap(f, xs, iters=iters)

    return quiet_bootstrap
