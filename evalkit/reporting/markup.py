"""Markup of labels and captions, the same for every format.

    **bold**   *italic*   ~small caps~   $math$   \\* for the character itself

Names of a checkpoint or a folder are not parsed: `literal` converts them without markup.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from evalkit.errors import TableError
from evalkit.escape import printable

_TOKENS = re.compile(r"\\(.)|(\*\*|\*|~|\$)|([^\\*~$]+|\\)", re.DOTALL)
_STYLES = {"**": "bold", "*": "italic", "~": "small_caps", "$": "math"}


class Span(NamedTuple):
    """A piece of text in one style."""

    text: str
    bold: bool = False
    italic: bool = False
    small_caps: bool = False
    math: bool = False
    superscript: bool = False


Text = tuple[Span, ...]


def literal(text: str) -> Text:
    """Return a string as text without markup."""
    return (Span(printable(text)),) if text else ()


def superscript(text: str) -> Text:
    """Return a superscript that refers to a note."""
    return (Span(text, superscript=True),)


def parse(text: str, where: str) -> Text:
    """Parse markup; `where` names the source in error messages.

    Raises:
        TableError: a style is not closed.
    """
    spans: list[Span] = []
    on: dict[str, bool] = {}
    for match in _TOKENS.finditer(text):
        escaped, style, plain = match.groups()
        if style and on.pop(style, None) is None:
            on[style] = True
        elif not style:
            span = Span(printable(escaped or plain), **{_STYLES[name]: True for name in on})
            if spans and spans[-1][1:] == span[1:]:
                span = span._replace(text=spans.pop().text + span.text)
            spans.append(span)
    for style in on:
        raise TableError(f"{where}: '{style}' is not closed in '{text}'; write \\{style} for the character")
    return tuple(spans)


def plain(text: Text) -> str:
    """Return the text without styles; references to notes are in brackets after a space."""
    return "".join(f" [{span.text}]" if span.superscript else span.text for span in text)


Format = Literal["terminal", "markdown", "latex", "html", "csv", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[Format, str] = {
    "terminal": ".txt",
    "markdown": ".md",
    "latex": ".tex",
    "html": ".html",
    "csv": ".csv",
    "json": ".json",
}
"""Endings of files in each format."""
