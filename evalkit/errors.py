"""Hierarchy of evalkit's errors.

    EvalkitError                 exit code 1
    ├── UsageError               exit code 2: an invalid option, name or combination
    │   └── UnknownNameError     a suite, task, template, rule … that does not exist; suggests the nearest
    ├── CheckpointError          a checkpoint that cannot be found, trusted, read or scored
    ├── DataError                documents that are missing, malformed or not the expected ones
    ├── TemplateError            a prompt template that cannot be read or is invalid
    ├── TableError               a table's layout, numbers or mapping of runs that cannot be read or do not match
    ├── ScoringError             a document that cannot be scored (context window too small, out of memory)
    │   └── OutOfMemoryError     a batch that another process may have memory for
    ├── RunError                 a run folder that is damaged; a file or folder that cannot be written
    │   └── RunInUseError        a run folder that another process writes
    └── SeveralErrors            problems that are independent of each other, all at once; printed on a line each
        └── SeveralRunsError     (and a UsageError) a name that may mean several runs, on a line each

A message is one line, whatever the names in it contain. It names the file, task, document, checkpoint or key, and says
what was expected and what to do. The command line prints it without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

from evalkit.escape import printable

_NO_ROOM = ("ENOSPC", "EFBIG", "EDQUOT")


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, after a heading ("…:") the next one too.

    A `KeyError`, whose message is only the key, and an empty message begin with the error's class.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError) or not lines:
        return " ".join([type(error).__name__, *lines[:1]])
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


class EvalkitError(Exception):
    """Base class of evalkit's errors."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        """Return the message on one line, without control characters."""
        return printable(super().__str__())


class SeveralErrors(EvalkitError):
    """Independent problems, all at once; `summary` is what has them."""

    def __init__(self, summary: str, problems: Sequence[str]) -> None:
        super().__init__(f"{summary}: {'; '.join(problems)}")
        self.summary = summary
        self.problems = tuple(problems)


class UsageError(EvalkitError):
    """An invalid option, name or combination."""

    exit_code: ClassVar[int] = 2


class SeveralRunsError(SeveralErrors, UsageError):
    """A name that may mean several runs; `problems` are the runs."""


class UnknownNameError(UsageError):
    """An unknown name of a kind ("suite", "task", …); suggests the nearest known one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = get_close_matches(name, names, n=1, cutoff=0.5) or [full for full in names if _initials(full) == name]
        hint = f"did you mean '{near[0]}'?" if near else "no known name is similar."
        shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        known_names = f"{hint} Known: {shown}" if names else "there is none; leave it out"
        super().__init__(f"unknown {kind} '{name}': {known_names}")


def check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise an `UnknownNameError` for the first name that is not known; arguments as of the error."""
    for name in names:
        if name not in known:
            raise UnknownNameError(kind, name, known)


def _initials(name: str) -> str:
    """Return the first letters of a name's words: bpb of bits_per_byte."""
    return "".join(word[:1] for word in name.replace("-", "_").split("_"))


class CheckpointError(EvalkitError):
    """A checkpoint that cannot be found, trusted, read or scored."""


class DataError(EvalkitError):
    """Documents that are missing, malformed or not the expected ones."""


class TemplateError(EvalkitError):
    """A prompt template that cannot be read or is invalid."""


class TableError(EvalkitError):
    """A table's layout, published numbers or mapping of runs that cannot be read or do not match."""


class ScoringError(EvalkitError):
    """A document that cannot be scored."""


class OutOfMemoryError(ScoringError):
    """A batch that another process may have memory for."""


class RunError(EvalkitError):
    """A run folder that is damaged, or a file or folder that cannot be written."""


class RunInUseError(RunError):
    """A run folder that another process writes."""


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn the lack of room for a file or folder into a `RunError` that names it, whichever library writes it.

    Other errors pass unchanged, as do evalkit's.
    """
    try:
        yield
    except EvalkitError:
        raise
    except Exception as error:
        # Libraries in Rust have errors of their own, whose text has the number
        number = re.search(r"\(os error (\d+)\)", str(error))
        code = error.errno if isinstance(error, OSError) else number and int(number[1])
        if code is None or errno.errorcode.get(code) not in _NO_ROOM:
            raise
        raise RunError(f"{path}: cannot be written ({os.strerror(code)}); write elsewhere or free room") from error


@contextmanager
def reading_as(path: str | Path, form: str, kind: Callable[[str], EvalkitError]) -> Iterator[None]:
    """Turn whatever the reader of a file raises into one line that names the file.

        with reading_as(path, "a suite", UsageError):
            return _suite(yaml.safe_load(path.read_text(encoding="utf-8")))

    raises `UsageError("own.yaml: cannot be read as a suite (KeyError: 'tasks')")` for a file without that key. evalkit
    errors pass unchanged, since they name the file already. A reader may also write, see `writing`.
    """
    try:
        with writing(f"a temporary file, for {path}"):
            yield
    except (EvalkitError, MemoryError):
        raise
    except OSError as error:
        raise kind(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        reason = str(error).strip() or "no reason is given"
        if type(error).__name__ == "ValidationError" and (errors := getattr(error, "errors", None)):  # of pydantic
            first = errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            reason = f"'{key}': {first['msg']}" if key else str(first["msg"])
        raise kind(f"{path}: cannot be read as {form} ({type(error).__name__}: {reason})") from error
