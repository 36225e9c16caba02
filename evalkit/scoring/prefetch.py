"""Prefetching: the next batch is made ready in a thread while the model computes the current one.

In: an iterator of batches, and what makes one ready, such as building its tree. Out: the same batches in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Prefetched = TypeVar("Prefetched")


def prefetched(
    batches: Iterator[Prefetched], warm: Callable[[Prefetched], None], stop: Callable[[], None] = lambda: None
) -> Iterator[Prefetched]:
    """Yield batches, while a thread takes the next one from the iterator and makes it ready.

    Args:
        batches: advanced in the thread only.
        warm: makes a batch ready.
        stop: makes the iterator raise an exception soon; called where the batches are not needed any more.
    """

    def following() -> Prefetched | None:
        if (batch := next(batches, None)) is not None:
            warm(batch)
        return batch

    with ThreadPoolExecutor(1, "evalkit-prefetch") as thread:
        future = thread.submit(following)
        try:
            while (batch := future.result()) is not None:
                future = thread.submit(following)
                yield batch
        except BaseException:
            # Before the thread is waited for
            stop()
            raise
