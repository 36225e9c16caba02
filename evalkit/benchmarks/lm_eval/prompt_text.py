"""Terminal output of lm-eval's requests.

In: requests. Out: text with each context, and its continuation or generation_kwargs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from evalkit.reporting.escape import printable


def requests_text(requests: Sequence[Any]) -> str:
    """Return requests as text: context, and continuation or generation_kwargs."""
    lines = []
    for request in requests:
        name = f"{request.task_name} document {request.doc_id}, {request.request_type}"
        context, rest = ("", request.args[0]) if len(request.args) == 1 else request.args
        shown = rest if isinstance(rest, str) else f"  generated: {rest}"
        texts = click.style(printable(context, "\n\t"), fg="cyan") + click.style(printable(shown, "\n\t"), fg="green")
        lines += [click.style(printable(name), bold=True), texts, ""]
    return "\n".join(lines)
