"""Markup of labels and captions, the same for every format.

    **bold**   *italic*   ~small caps~   $math$   \\* for the character itself

In: a string of a layout file. Out: a `Text`, which each writer renders in its own format. Other names (of a checkpoint,
a folder) are not parsed: `literal` converts them without markup.
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
        if style:
            on[style] = not on.get(style, False)
        else:
            active = {_STYLES[name]: True for name, value in on.items() if value}
            spans.append(Span(printable(escaped or plain), **active))
    if left := [style for style, value in on.items() if value]:
        raise TableError(f"{where}: '{left[0]}' is not closed in '{text}'; write \\{left[0]} for the character")
    return _joined(spans)


def plain(text: Text) -> str:
    """Return the text without styles; references to notes are in brackets after a space."""
    return "".join(f" [{span.text}]" if span.superscript else span.text for span in text)


def _joined(spans: list[Span]) -> Text:
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1][1:] == span[1:]:
            joined[-1] = joined[-1]._replace(text=joined[-1].text + span.text)
        else:
            joined.append(span)
    return tuple(joined)


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
