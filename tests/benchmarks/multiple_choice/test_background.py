"""The thread that plans ahead: its share of the time, and its failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from evalkit.benchmarks.multiple_choice import background
from evalkit.benchmarks.multiple_choice.background import BackgroundPlanner, Pace, Stopped

PART = 0.01
"""Seconds of work of a part."""
PACED = 20 * PART * 0.95
"""Least seconds of a part with its rest."""
UNPACED = 5 * PART
"""Most seconds of a part without a rest, on a busy machine too."""


def working(parts: int, is_awaited: Callable[[], bool] = lambda: False) -> Callable[[str, Pace], float]:
    """Return a plan that works in parts, and returns how long it took."""

    def plan(_: str, pace: Pace) -> float:
        started = time.perf_counter()
        for _ in pace((time.sleep(PART) for _ in range(parts)), parts, is_awaited):
            pass
        return time.perf_counter() - started

    return plan


@pytest.mark.slow
def test_ahead_of_the_scoring_it_rests_nineteen_times_as_long_as_it_works() -> None:
    with BackgroundPlanner(working(4), ["first", "second", "third"]) as planner:
        assert planner.take("first") < 4 * UNPACED  # waited for
        planner.scored("first", 0.0)  # and nothing is needed of the second
        time.sleep(4 * 20 * PART * 1.5)
        assert planner.take("second") >= 4 * PACED
        planner.scored("second", 0.0)
        time.sleep(4 * 20 * PART * 1.5)
        assert planner.take("third") >= 4 * PACED


def test_it_keeps_up_with_the_scoring() -> None:
    """When half of a task is scored, half of the next one is planned without a rest."""
    reached: list[float] = []

    def plan(task: str, pace: Pace) -> None:
        for number in pace((time.sleep(PART) or number for number in range(10)), 10):
            if task == "second":
                reached.append(number)

    with BackgroundPlanner(plan, ["first", "second"]) as planner:
        planner.take("first")
        planner.scored("first", 0.5)
        time.sleep(5 * UNPACED)
        assert 5 <= len(reached) <= 7
        planner.scored("first", 1.0)
        time.sleep(5 * UNPACED)
        assert len(reached) == 10


def test_who_waits_is_not_kept_waiting() -> None:
    with BackgroundPlanner(working(40), ["first", "second"]) as planner:
        assert planner.take("first") < 40 * UNPACED
        started = time.perf_counter()
        planner.wait()
        assert time.perf_counter() - started < 40 * UNPACED


def test_another_run_that_waits_is_not_kept_waiting() -> None:
    with BackgroundPlanner(working(4, is_awaited=lambda: True), ["first", "second"]) as planner:
        planner.take("first")
        time.sleep(4 * UNPACED)
        assert planner.take("second") < 4 * UNPACED


def test_a_rest_ends_when_somebody_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_REST", 100_000)
    with BackgroundPlanner(working(3), ["first", "second"]) as planner:
        planner.take("first")
        time.sleep(10 * PART)  # it rests by now
        assert planner.take("second") < 10


def test_stopping_ends_a_rest_and_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_REST", 100_000)
    with BackgroundPlanner(working(1000), ["first", "second"]) as planner:
        timer = threading.Timer(10 * PART, planner.stop)
        timer.start()
        started = time.perf_counter()
        with pytest.raises(Stopped):
            planner.take("first")
        assert time.perf_counter() - started < 500 * PART
    assert not [one for one in threading.enumerate() if one.name.startswith("evalkit-encode")]


def test_a_later_task_s_failure_is_raised_before_its_turn() -> None:
    def plan(task: str, _: Pace) -> str:
        if task == "second":
            raise ValueError(task)
        return task

    with BackgroundPlanner(plan, ["first", "second"]) as planner:
        assert planner.take("first") == "first"
        with pytest.raises(ValueError, match="second"):
            planner.wait()
        with pytest.raises(ValueError, match="second"):
            planner.raise_failure()
        with pytest.raises(ValueError, match="second"):
            planner.take("second")
