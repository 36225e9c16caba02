"""Short `repr`s of public objects.

In: an object and its main attributes. Out: one line of fewer than 120 characters, whatever the names in it.
"""

from __future__ import annotations

from evalkit.reporting.escape import printable

_WIDTH = 119
_LONGEST_PART = 48


def brief(thing: object, *parts: object) -> str:
    """Return a `repr` of an object's class and some of its attributes: "Run(zeroshot8, demo, …)".

    A long part is shortened in its middle, since names differ at both ends; a long line is truncated at its end.
    """
    start, end = f"{type(thing).__name__}(", ")"
    text = start + ", ".join(_cut(printable(str(part))) for part in parts) + end
    return text if len(text) <= _WIDTH else text[: _WIDTH - 2] + "…" + end


def with_error(value: float, stderr: float | None) -> str:
    """Format a fraction with its standard error, if known: "0.670 ± 0.033"."""
    return f"{value:.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")


def counted(count: int, what: str) -> str:
    """Format a count with its noun: "1 task", "8 tasks"."""
    return f"{count} {what}{'s' * (count != 1)}"


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_PART:
        return text
    half = (_LONGEST_PART - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
