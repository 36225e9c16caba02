"""A thread that plans tasks ahead, while the model computes the first ones.

In: a function that plans a task. Out: the plan of each task, when it is needed. The thread works a twentieth of the
time while nobody waits for it, so that a batch takes at most 5 % longer: on a CPU it competes for the cores, and
everywhere for the interpreter. When a task is waited for, it works all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from typing import Generic, TypeVar

Item = TypeVar("Item")
Planned = TypeVar("Planned")

_REST = 19
"""Times as long as it has worked that the thread rests."""
_LEAST = 0.002
"""Seconds of work before a rest."""


class Stopped(Exception):
    """Nobody needs the plans any more."""


class Pace:
    """Pace of the thread: passes items on, with rests."""

    def __init__(self) -> None:
        self.hurry = Event()
        """Set while a task is waited for."""
        self.stop = Event()

    def __call__(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, with a rest where making them has taken some time.

        Raises:
            Stopped: the plans are not needed any more.
        """
        started = time.perf_counter()
        for item in items:
            yield item
            if (spent := time.perf_counter() - started) >= _LEAST:
                self.hurry.wait(_REST * spent)
                started = time.perf_counter()
            if self.stop.is_set():
                raise Stopped


class BackgroundPlanner(Generic[Planned]):
    """Background thread that plans all tasks, in order.

    Args:
        plan: plans one task; works through what takes long by the pace.
        tasks: tasks in the order in which `take` is called.
    """

    def __init__(self, plan: Callable[[str, Pace], Planned], tasks: Sequence[str]) -> None:
        self._pace = Pace()
        self._thread = ThreadPoolExecutor(1, "evalkit-encode")
        self._planned = {task: self._thread.submit(plan, task, self._pace) for task in tasks}

    def __enter__(self) -> BackgroundPlanner[Planned]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pace.stop.set()
        self._pace.hurry.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, task: str) -> Planned:
        """Return a task's plan; wait until it is ready."""
        self._pace.hurry.set()
        try:
            return self._planned.pop(task).result()
        finally:
            self._pace.hurry.clear()

    def wait(self) -> None:
        """Wait until all tasks are planned; raise the first failure."""
        self._pace.hurry.set()
        wait(self._planned.values())
        self._pace.hurry.clear()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the failure of a later task as soon as it is known, before the task's turn."""
        for planned in self._planned.values():
            if planned.done() and (failure := planned.exception()):
                raise failure
