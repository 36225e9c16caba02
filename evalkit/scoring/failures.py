"""Failures of a model's code: any exception → an error in one line, or the reason why a check fails.

In: code that runs a model. Out: `CheckpointError`s, `ScoringError`s, and `TooManyTokens` where fewer might fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evalkit.errors import CheckpointError, EvalkitError, ScoringError, first_line
from evalkit.scoring.memory import is_out_of_memory, refuse_to_split
from evalkit.scoring.pack import SequenceSet


class TooManyTokens(Exception):
    """Memory ran out on several items, which can still be split."""


@contextmanager
def one_line(what: str, tokens: int) -> Iterator[None]:
    """Convert any exception of the model's code into a one-line error with its message.

    Args:
        what: what the model does then, such as "does not run".
        tokens: on how many it is run.
    """
    try:
        yield
    except EvalkitError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ScoringError(f"out of memory on {tokens} tokens; free some memory, or use a smaller dtype") from error
        raise CheckpointError(f"the model {what} ({type(error).__name__}: {first_line(error)[:200]})") from error


def failure_of(check: Callable[[], str]) -> str:
    """Return a check's result, or its exception as a failure, since an architecture may raise anything.

    Raises:
        TooManyTokens: memory ran out, so the check has no result.
    """
    try:
        return check()
    except ScoringError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise TooManyTokens from None
        return f"it fails ({type(error).__name__}: {first_line(error)[:120]})"


@contextmanager
def memory_for(item: SequenceSet, tokens: int, at_most: bool = True) -> Iterator[None]:
    """Convert out-of-memory errors: name the document, or raise `TooManyTokens` if a batch can be split."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if not at_most:
            raise TooManyTokens from None
        refuse_to_split(f"{item.label}, {tokens} tokens")
        raise ScoringError(
            f"{item.label}: out of memory on {tokens} tokens; free some memory, or use a smaller dtype"
        ) from error
