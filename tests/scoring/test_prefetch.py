"""Prefetching of batches by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from typing import cast

import pytest

from evalkit.benchmarks.session import prefetched


def test_batches_come_in_order_one_ahead_and_stop() -> None:
    """A failure comes after the batches before it; a batch that takes long is stopped before it is waited for."""
    taken: list[int] = []
    threads: list[str] = []
    stopped = threading.Event()

    def batches(divisors: tuple[int, ...]) -> Iterator[int]:
        for divisor in divisors:
            taken.append(divisor)
            yield 4 // divisor if divisor >= 0 else int(stopped.wait(30))

    def warm(_: int) -> None:
        threads.append(threading.current_thread().name)

    assert list(prefetched(batches((4, 2, 1)), warm)) == [1, 2, 4]
    assert len(threads) == 3 and all(name.startswith("evalkit-prefetch") for name in threads)
    failing, received = prefetched(batches((2, 1, 0)), warm), []
    with pytest.raises(ZeroDivisionError):
        received.extend(failing)
    taken.clear()
    ahead = cast("Generator[int]", prefetched(batches((4, 2, 1, 1)), warm))
    assert (next(ahead), next(ahead)) == (1, 2)
    ahead.close()
    assert taken == [4, 2, 1]
    slow = cast("Generator[int]", prefetched(batches((4, -1)), warm, stopped.set))
    next(slow)
    started = time.perf_counter()
    slow.close()
    assert time.perf_counter() - started < 10
