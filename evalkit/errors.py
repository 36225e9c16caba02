"""Every error a user can meet, in one tree.

    EvalkitError                 exit code 1
    ├── UsageError               exit code 2: a flag, a name or a combination that cannot be
    │   └── UnknownNameError     a suite, task, template, rule … that does not exist; offers the nearest
    ├── CheckpointError          a checkpoint that cannot be found, trusted, read or scored
    ├── DataError                documents that are missing, malformed or not the expected ones
    ├── TemplateError            a prompt template that cannot be read or does not make sense
    ├── TableError               a table's layout, numbers or mapping of runs that cannot be read or do not fit
    ├── ScoringError             a document that cannot be scored (window too small, out of memory)
    └── RunError                 a run folder that is in use, damaged, or cannot be written

A message is one line, whatever the names in it hold: it names the file, task, document, checkpoint or key, says what
was expected and what to do. The command line prints it without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar

from evalkit.reporting.escape import printable

_MOST_LISTED = 200
"""Of more names than these, a message shows none."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, shortened to one line; its kind if it says nothing.

    Of a heading ("Validation error for field 'x':") the line beneath belongs to it; a `KeyError` says only the key.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError) or not lines:
        return " ".join([type(error).__name__, *lines[:1]])
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


class EvalkitError(Exception):
    """Base of all errors that evalkit raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        """The message, on one line and without control characters."""
        return printable(super().__str__())


class UsageError(EvalkitError):
    """What was asked for cannot be: a wrong flag value or combination."""

    exit_code: ClassVar[int] = 2


class UnknownNameError(UsageError):
    """A name that is not among the known ones.

    Args:
        kind: what the name was meant to be ("suite", "task", …).
        name: what was given.
        known: the names that exist.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else "there is no name like it."
        # lm-eval has thousands of tasks, of which the first twenty tell nobody anything
        many = len(names) > _MOST_LISTED
        shown = f"{len(names):,} names" if many else ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        super().__init__(f"unknown {kind} '{name}': {hint} Known: {shown}")


class CheckpointError(EvalkitError):
    """A checkpoint that cannot be found, trusted, read or scored."""


class DataError(EvalkitError):
    """Documents that are missing, malformed or not the expected ones."""


class TemplateError(EvalkitError):
    """A prompt template that cannot be read or does not make sense."""


class TableError(EvalkitError):
    """A table's layout, published numbers or mapping of runs that cannot be read or do not fit together."""


class ScoringError(EvalkitError):
    """A document that cannot be scored."""


class RunError(EvalkitError):
    """A run folder that is in use, damaged, or cannot be written."""
