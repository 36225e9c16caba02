"""A thread that plans tasks ahead, while the model computes the first ones.

In: a function that plans a task. Out: the plan of each task, when it is needed. On a CPU the thread competes with the
model for the cores, and everywhere for the interpreter. So while it is ahead of the scoring it encodes a twentieth of
the time, which makes a batch at most 5 % longer; it is ahead if the share of the next task that is encoded is at least
the share of the current task that is scored. Otherwise, and when a plan is waited for, it works all the time. Only the
encoding has rests; what follows takes less than a second a task.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Condition
from typing import Generic, TypeVar

Item = TypeVar("Item")
Planned = TypeVar("Planned")

_REST = 19
"""Times as long as it has worked that the thread rests."""
_LEAST = 0.002
"""Seconds of work before a rest."""
_LOOK = 0.05
"""Seconds of a rest after which it looks whether another run waits."""


class Stopped(Exception):
    """Nobody needs the plans any more."""


class Pace:
    """Pace of the thread: passes items on, with rests while it is ahead."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._needed = 0.0
        """Number of tasks that have to be planned by now, with a fraction of the last one."""
        self._before = 0
        """Number of tasks before the current one."""
        self._stopped = False

    def __call__(
        self, items: Iterable[Item], count: int, is_awaited: Callable[[], bool] = lambda: False
    ) -> Iterator[Item]:
        """Yield items, with a rest where making them has taken some time."""
        started = time.perf_counter()
        for number, item in enumerate(items, start=1):
            yield item
            if (spent := time.perf_counter() - started) >= _LEAST:
                self._rest(_REST * spent, self._before + number / count, is_awaited)
                started = time.perf_counter()
            if self._stopped:
                raise Stopped

    def begin(self, before: int) -> None:
        """Begin the task that has so many before it."""
        self._before = before

    def need(self, tasks: float) -> None:
        """Say how many tasks have to be planned by now."""
        with self._changed:
            self._needed = max(self._needed, tasks)
            self._changed.notify_all()

    def stop(self) -> None:
        """Make the thread stop at its next item."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _rest(self, seconds: float, done: float, is_awaited: Callable[[], bool]) -> None:
        end = time.perf_counter() + seconds
        with self._changed:
            while not self._stopped and done > self._needed and not is_awaited():
                if (left := end - time.perf_counter()) <= 0:
                    return
                self._changed.wait(min(left, _LOOK))


class BackgroundPlanner(Generic[Planned]):
    """Background thread that plans all tasks, in order.

    Args:
        plan: plans one task; encodes by the pace.
        tasks: tasks in the order in which `take` is called.
    """

    def __init__(self, plan: Callable[[str, Pace], Planned], tasks: Sequence[str]) -> None:
        self._plan = plan
        self._pace = Pace()
        self._order = {task: number for number, task in enumerate(tasks)}
        self._thread = ThreadPoolExecutor(1, "evalkit-encode")
        self._planned: dict[str, Future[Planned]] = {}

    def __enter__(self) -> BackgroundPlanner[Planned]:
        self._planned = {task: self._thread.submit(self._run, task) for task in self._order}
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def stop(self) -> None:
        """Make the thread stop, and `take` raise `Stopped`; may be called by another thread."""
        self._pace.stop()

    def take(self, task: str) -> Planned:
        """Return a task's plan; wait until it is ready."""
        self._pace.need(self._order[task] + 1)
        return self._planned.pop(task).result()

    def scored(self, task: str, share: float) -> None:
        """Say how much of a task is scored, from 0 to 1."""
        self._pace.need(self._order[task] + 1 + share)

    def wait(self) -> None:
        """Wait until all tasks are planned; raise the first failure."""
        self._pace.need(math.inf)
        wait(self._planned.values())
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the failure of a later task as soon as it is known, before the task's turn."""
        for planned in self._planned.values():
            if planned.done() and (failure := planned.exception()):
                raise failure

    def _run(self, task: str) -> Planned:
        self._pace.begin(self._order[task])
        return self._plan(task, self._pace)
