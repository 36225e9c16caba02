"""Apply a tokenizer's chat template under a time limit.

In: a tokenizer and turns of a conversation. Out: the result of `apply_chat_template`. transformers renders templates in
a sandbox, which blocks access to the machine but does not limit time: two nested loops can run for days.
"""

from __future__ import annotations

import json
import pprint
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import markupsafe

from evalkit.errors import TemplateError

MOST_SECONDS = 10.0
"""Time limit of a template, which normally takes milliseconds."""
_SOURCE = "<template>"
"""File name of the Python code to which Jinja compiles a template."""
_CODE = (
    _SOURCE,
    *(package.__path__[0] for package in (jinja2, markupsafe, json)),
    *(str(module.__file__) for module in (pprint, textwrap)),
)
"""Beginnings of the file names of a template's code, of Jinja and of the libraries that its filters call."""


class _OutOfTime(BaseException):
    """The limit is exceeded; not an `Exception`, which Jinja catches while it evaluates constants."""


def apply_chat_template(tokenizer: Any, turns: Sequence[Mapping[str, str]], **settings: Any) -> Any:
    """Return the result of `tokenizer.apply_chat_template`; errors of the template are passed on.

    Raises:
        TemplateError: the template exceeds the time limit.
    """
    with _time_limit():
        return tokenizer.apply_chat_template(turns, **settings)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Stop template code that exceeds the limit; works in any thread and on any system.

    Python calls the trace function for every line of the template's code and every function that it calls. It raises
    in known code only, since Python ignores an error in a finaliser or a callback of the garbage collector, which can
    run at any time, and stops tracing after it. A single call of a function in C is not interrupted.
    """
    deadline = time.monotonic() + MOST_SECONDS

    def trace(frame: FrameType, _: str, __: Any) -> Any:
        file = frame.f_code.co_filename
        if file.startswith(_CODE) and time.monotonic() > deadline:
            raise _OutOfTime
        return trace if file == _SOURCE else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except _OutOfTime:
        raise TemplateError(
            f"the tokenizer's chat template runs for more than {MOST_SECONDS:g} s; it may loop forever; "
            "correct it (chat_template.jinja, or chat_template in tokenizer_config.json)"
        ) from None
    finally:
        sys.settrace(before)
