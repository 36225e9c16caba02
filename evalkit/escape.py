"""Escaping of names, labels and messages for a line of a terminal, LaTeX, Markdown or a CSV.

All output of evalkit in these formats is escaped here, once. The module also contains LaTeX that tables share.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import suppress

_WIDTH, _LONGEST_PART = 119, 48


def brief(thing: object, *parts: object) -> str:
    """Return a `repr` of an object's class and some of its attributes: "Run(zeroshot8, demo, …)".

    A long part is shortened in its middle, since names differ at both ends; a long line is truncated at its end.
    """
    text = f"{type(thing).__name__}({', '.join(_cut(printable(str(part))) for part in parts)})"
    return text if len(text) <= _WIDTH else text[: _WIDTH - 2] + "…)"


def counted(count: int, what: str) -> str:
    """Format a count with its noun: "1 task", "8 tasks"."""
    return f"{count} {what}{'s' * (count != 1)}"


def part_name(name: str, count: int, size: int) -> str:
    """Return the name of an average over `count` of `size` tasks: with both numbers where some are missing."""
    return name if count == size else f"{name} ({count} of {size})"


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_PART:
        return text
    half = (_LONGEST_PART - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


PACKAGES = r"\usepackage[T1]{fontenc} \usepackage[utf8]{inputenc} \usepackage{booktabs,graphicx,multirow}"
"""LaTeX packages that a document with a table needs."""

SHRUNK = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
"""Start of a box that is shrunk to the text width if it is wider; ended by a brace."""

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "*": r"{*}",
    "[": "{[}", "]": "{]}",  # after \\ the first one would start an optional argument
    "–": r"\textendash{}", "—": r"\textemdash{}", "…": r"\dots{}", "†": r"\textdagger{}",
    "×": r"$\times$", "±": r"$\pm$", "−": "$-$", "≥": r"$\geq$", "≤": r"$\leq$",
}  # fmt: skip

_TYPESET = frozenset(map(chr, [*range(0x20, 0x7F), *range(0xA1, 0x100)])) - {"\xad"}
"""Latin-1 characters that T1 with textcomp typesets; TeX's default fonts have no glyphs for others."""


_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that are invisible or change how others are displayed."""
_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that change the order in which others are displayed."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes of a cell that spreadsheets interpret as a formula."""


def printable(text: str, kept: str = "") -> str:
    """Escape control and invisible characters (line ends, escapes, changes of direction) but `kept`, as \\x1b."""
    if text.isprintable():
        return text
    return "".join(_code(c) if c not in kept and unicodedata.category(c) in _HIDDEN else c for c in text)


def in_json(text: str) -> str:
    """Escape changes of direction in JSON text, so that whoever parses it gets their codes, as \\u202e."""
    return _DIRECTIONS.sub(lambda mark: "\\" + _code(mark[0]), text)


def in_csv(value: object) -> object:
    """Escape a value for CSV; text that a spreadsheet would run as a formula is prefixed by an apostrophe.

    A lone minus is not a formula: tables print it for a missing value.
    """
    if not isinstance(value, str) or value == "-":
        return value
    with suppress(ValueError):
        float(value)
        return value
    return ("'" if value.startswith(_FORMULA) else "") + printable(value)


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def in_latex(text: str) -> str:
    """Escape text for LaTeX; characters without a glyph in default fonts are printed by their code, as [U+4E2D]."""
    escaped = "".join(map(_latex_of, unicodedata.normalize("NFC", text)))
    # TeX's ligatures: two hyphens give a dash, two quotes a quotation mark
    return re.sub(r"([-'])(?=\1)", r"\1{}", escaped)


def _latex_of(character: str) -> str:
    if character in _LATEX:
        return _LATEX[character]
    if character.isspace():
        return " "
    return character if character in _TYPESET else f"{{[}}U+{ord(character):04X}{{]}}"


def in_markdown(text: str) -> str:
    """Escape text for Markdown, on one line."""
    return re.sub(r"([\\`*_\[\]<>|~$&#])", r"\\\1", printable(" ".join(text.split())))
