"""Values that the runs of a process share."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from evalkit.benchmarks.request import remembered, remembering


def counting() -> tuple[Callable[[], int], list[int]]:
    """Return a function that makes 0, 1, 2 …, and what it has made."""
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    return make, made


def test_outside_of_the_block_every_value_is_made_anew() -> None:
    make, made = counting()
    assert [remembered("kind", 1, make) for _ in range(2)] == [0, 1]
    with remembering():
        assert [remembered("kind", 1, make) for _ in range(2)] == [2, 2]
    assert remembered("kind", 1, make) == 3
    with remembering():
        assert remembered("kind", 1, make) == 4
    assert made == [0, 1, 2, 3, 4]


def test_blocks_nest() -> None:
    make, _ = counting()
    with remembering():
        with remembering():
            assert remembered("kind", 1, make) == 0
        assert remembered("kind", 1, make) == 0


def test_kinds_and_keys_are_apart_and_the_oldest_is_forgotten() -> None:
    make, _ = counting()
    with remembering():
        assert [remembered("a", key, make, most=2) for key in (1, 2, 1, 3, 1, 2)] == [0, 1, 0, 2, 0, 3]
        assert remembered("b", 1, make) == 4


def test_a_value_that_cannot_be_made_is_tried_again() -> None:
    def fail() -> int:
        raise ValueError

    make, _ = counting()
    with remembering():
        with pytest.raises(ValueError):
            remembered("kind", 1, fail)
        assert remembered("kind", 1, make) == 0


def test_threads_make_a_value_once() -> None:
    make, made = counting()
    with remembering():
        threads = [threading.Thread(target=remembered, args=("kind", 1, make)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert made == [0]


def test_a_value_that_another_thread_waits_for() -> None:
    begun, go = threading.Event(), threading.Event()

    def make() -> int:
        begun.set()
        go.wait(10)
        return 1

    with remembering():
        threads = [threading.Thread(target=remembered, args=("kind", 1, make)) for _ in range(2)]
        threads[0].start()
        begun.wait(10)
        assert remembered("kind", 2, lambda: 2) == 2  # other values are not kept back
        threads[1].start()
        go.set()
        for thread in threads:
            thread.join(10)
        assert remembered("kind", 1, lambda: 3) == 1
