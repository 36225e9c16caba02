"""Any text on one line of a terminal, in LaTeX, in Markdown or in a CSV, whatever a checkpoint's name or a label holds.

Everything that evalkit writes in these forms passes through here, once. Also what its LaTeX tables share.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress

PACKAGES = r"\usepackage[T1]{fontenc} \usepackage[utf8]{inputenc} \usepackage{booktabs,graphicx,multirow}"
"""What a document that holds a table loads."""

SHRUNK = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""What is wider than the text is shrunk to it; a brace closes it."""

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after \\ a bare one would be read as its argument
    "]": "{]}",
    "*": r"{*}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "†": r"\textdagger{}",
    "×": r"$\times$",
    "±": r"$\pm$",
    "−": "$-$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
}

# Of Latin-1, what T1 with textcomp sets; other letters have no glyph in the fonts a stock TeX loads
_TYPESET = frozenset(map(chr, [*range(0x20, 0x7F), *range(0xA1, 0x100)])) - {"\xad"}


_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of characters that change how others are shown, or are not shown themselves."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that spreadsheets take for a formula."""


def printable(text: str, kept: str = "") -> str:
    """Any text with what a terminal would obey or hide (line ends, escapes, changes of direction) as its code, \\x1b.

    Args:
        text: a name, or a message that holds some.
        kept: characters that stay what they are.
    """
    if text.isprintable():
        return text
    return "".join(_code(c) if c not in kept and unicodedata.category(c) in _HIDDEN else c for c in text)


def in_csv(value: object) -> object:
    """A value of a CSV; text that a spreadsheet would run as a formula gets an apostrophe before it."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return ("'" if value.startswith(_FORMULA) else "") + printable(value)


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def in_latex(text: str) -> str:
    """Any text as LaTeX that prints its characters; those that stock fonts lack by their code, as [U+4E2D]."""
    escaped = "".join(map(_latex_of, unicodedata.normalize("NFC", text)))
    # What TeX's fonts would join: two hyphens to a dash, two quotes to a quotation mark
    return re.sub(r"([-'])(?=\1)", r"\1{}", escaped)


def _latex_of(character: str) -> str:
    if character in _LATEX:
        return _LATEX[character]
    if character.isspace():
        return " "
    return character if character in _TYPESET else f"{{[}}U+{ord(character):04X}{{]}}"


def in_markdown(text: str) -> str:
    """Any text as Markdown that prints its characters, on one line."""
    return _MARKDOWN.sub(r"\\\1", printable(" ".join(text.split())))


_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~$&#])")
