"""Values that the runs of a process share."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from evalkit.benchmarks.request import remembered, remembering


def test_a_value_is_made_once_within_the_outermost_block() -> None:
    numbers = count()

    def make() -> int:
        return next(numbers)

    assert [remembered("kind", 1, make) for _ in range(2)] == [0, 1]
    with remembering():
        with remembering():
            assert [remembered("kind", 1, make) for _ in range(2)] == [2, 2]
        assert remembered("kind", 1, make) == 2
        # Kinds and keys are apart, and the key that was used least recently is forgotten
        assert [remembered("a", key, make, most=2) for key in (1, 2, 1, 3, 1, 2)] == [3, 4, 3, 5, 3, 6]
        with pytest.raises(ZeroDivisionError):
            remembered("failing", 1, lambda: 1 // 0)
        assert remembered("failing", 1, lambda: 1) == 1
    assert remembered("kind", 1, make) == 7


def test_threads_make_a_value_once_and_others_are_not_kept_back() -> None:
    begun, go, made = threading.Event(), threading.Event(), []

    def make() -> None:
        made.append(begun.set())
        go.wait(10)

    with remembering():
        threads = [threading.Thread(target=remembered, args=("kind", 1, make)) for _ in range(8)]
        for thread in threads:
            thread.start()
        begun.wait(10)
        assert remembered("kind", 2, lambda: 2) == 2
        go.set()
        for thread in threads:
            thread.join(10)
    assert len(made) == 1
