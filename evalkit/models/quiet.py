"""Suppress progress bars, log lines and warnings of transformers.

Warnings that matter, such as missing weights, are requested explicitly and become errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from evalkit.compatibility.transformers import without_gguf_bar


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars, log lines below errors and Python warnings; restore them at the end."""
    with warnings.catch_warnings(), ExitStack() as after:
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        after.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            after.callback(logging.enable_progress_bar)
        after.enter_context(without_gguf_bar())
        yield
