"""Short `repr`s of what users hold: one line, of fewer than 120 characters, whatever the names in it are."""

from __future__ import annotations

from evalkit.reporting.escape import printable

_WIDTH = 119
_LONGEST_PART = 48


def brief(thing: object, *parts: object) -> str:
    """The name of a thing's class with some of what it holds: "Run(zeroshot8, demo, …)".

    A part that is too long is cut in its middle, since names differ at both ends; what is too much in all is left out.
    """
    start, end = f"{type(thing).__name__}(", ")"
    text = start + ", ".join(_cut(printable(str(part))) for part in parts) + end
    return text if len(text) <= _WIDTH else text[: _WIDTH - 2] + "…" + end


def with_error(value: float, stderr: float | None) -> str:
    """A fraction with its standard error, where it has one: "0.670 ± 0.033"."""
    return f"{value:.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")


def counted(count: int, what: str) -> str:
    """A number of things: "1 task", "8 tasks"."""
    return f"{count} {what}{'s' * (count != 1)}"


def _cut(text: str) -> str:
    if len(text) <= _LONGEST_PART:
        return text
    half = (_LONGEST_PART - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
