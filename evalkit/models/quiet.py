"""Silence around calls into transformers, whose progress bars and warnings are not evalkit's to show.

What matters among them (missing weights, for one) is asked for explicitly and becomes an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from evalkit.compatibility.transformers import without_gguf_bar


@contextmanager
def quiet() -> Iterator[None]:
    """No bars, log lines below errors, or Python warnings from transformers inside; all as before after."""
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
