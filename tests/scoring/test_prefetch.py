"""Prefetching of batches by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from evalkit.benchmarks.session import prefetched


def test_every_batch_in_order_one_ahead_by_a_thread() -> None:
    taken: list[int] = []
    threads: list[str] = []

    def batches() -> Iterator[int]:
        for number in range(5):
            taken.append(number)
            yield number

    def warm(_: int) -> None:
        threads.append(threading.current_thread().name)

    assert list(prefetched(batches(), warm)) == [0, 1, 2, 3, 4]
    assert len(threads) == 5 and all(name.startswith("evalkit-prefetch") for name in threads)
    taken.clear()
    run = prefetched(batches(), warm)
    assert (next(run), next(run)) == (0, 1)
    run.close()  # type: ignore[attr-defined]
    assert taken == [0, 1, 2]


def test_a_failure_comes_after_the_batches_before_it() -> None:
    found = []
    with pytest.raises(ZeroDivisionError):
        for number in prefetched((4 // divisor for divisor in (2, 1, 0)), lambda _: None):
            found.append(number)
    assert found == [2, 4]


def test_a_batch_that_takes_long_is_stopped_before_it_is_waited_for() -> None:
    stopped = threading.Event()

    def endless() -> Iterator[int]:
        yield 0
        stopped.wait(30)
        yield 1

    run = prefetched(endless(), lambda _: None, stopped.set)
    next(run)
    started = time.perf_counter()
    run.close()  # type: ignore[attr-defined]
    assert time.perf_counter() - started < 10
