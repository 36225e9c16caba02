"""Prefetching of batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from evalkit.benchmarks.session import prefetched


class Made:
    """A batch."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.warmed_by = ""

    def warm(self) -> None:
        """Note the thread."""
        self.warmed_by = threading.current_thread().name


def batches(count: int, taken: list[int] | None = None) -> Iterator[Made]:
    """Yield batches; note which were taken."""
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield Made(number)


def test_every_batch_in_order_made_ready_by_a_thread() -> None:
    found = list(prefetched(batches(5), Made.warm))
    assert [one.number for one in found] == [0, 1, 2, 3, 4]
    assert all(one.warmed_by.startswith("evalkit-prefetch") for one in found)


def test_one_batch_ahead() -> None:
    taken: list[int] = []
    run = prefetched(batches(5, taken), Made.warm)
    assert next(run).number == 0
    assert next(run).number == 1
    run.close()  # type: ignore[attr-defined]
    assert taken == [0, 1, 2]


def test_no_batches() -> None:
    assert list(prefetched(batches(0), Made.warm)) == []


def test_a_failure_comes_after_the_batches_before_it() -> None:
    def broken() -> Iterator[Made]:
        yield Made(0)
        raise ValueError("broken")

    found = []
    with pytest.raises(ValueError, match="broken"):
        for one in prefetched(broken(), Made.warm):
            found.append(one.number)
    assert found == [0]


def test_a_batch_that_takes_long_is_stopped_before_it_is_waited_for() -> None:
    stopped = threading.Event()

    def endless() -> Iterator[Made]:
        yield Made(0)
        stopped.wait(30)
        yield Made(1)

    run = prefetched(endless(), Made.warm, stopped.set)
    next(run)
    started = time.perf_counter()
    run.close()
    assert time.perf_counter() - started < 10
