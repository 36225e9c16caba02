"""A tokenizer's chat template, applied for a bounded time.

In: a tokenizer and turns of a conversation. Out: what `apply_chat_template` gives. transformers renders templates in a
sandbox, which keeps them from the machine but lets two nested loops run for days.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from evalkit.errors import TemplateError

MOST_SECONDS = 10.0
"""Of a template, which takes milliseconds."""
_SOURCE = "<template>"
"""File name of a template's code, which Jinja compiles to Python."""


def apply_chat_template(tokenizer: Any, turns: Sequence[Mapping[str, str]], **settings: Any) -> Any:
    """Return what `tokenizer.apply_chat_template` gives; it may raise whatever a template raises.

    Raises:
        TemplateError: it takes too long.
    """
    with _bounded():
        return tokenizer.apply_chat_template(turns, **settings)


@contextmanager
def _bounded() -> Iterator[None]:
    """Stop a template's code that runs for too long, in any thread, on any system.

    Python's trace function is called for every line of the template's code and every function that it calls.
    """
    until = time.monotonic() + MOST_SECONDS

    def trace(frame: FrameType, _: str, __: Any) -> Any:
        if time.monotonic() > until:
            raise TemplateError(
                f"the tokenizer's chat template runs for more than {MOST_SECONDS:g} s, as a loop without end does; "
                "correct it (chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        return trace if frame.f_code.co_filename == _SOURCE else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
