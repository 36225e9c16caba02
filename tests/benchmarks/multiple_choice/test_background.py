"""The thread that plans ahead: its share of the time, and its failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from evalkit.benchmarks.multiple_choice import background
from evalkit.benchmarks.multiple_choice.background import BackgroundPlanner, Pace


def working(seconds: float, parts: int) -> Callable[[str, Pace], float]:
    """Return a plan that works in parts, and returns how long it took."""

    def plan(_: str, pace: Pace) -> float:
        started = time.perf_counter()
        for _ in pace(time.sleep(seconds) for _ in range(parts)):
            pass
        return time.perf_counter() - started

    return plan


def test_while_nobody_waits_it_rests_nineteen_times_as_long() -> None:
    with BackgroundPlanner(working(0.01, 4), ["first"]) as planner:
        time.sleep(0.9)  # four parts of 10 ms, each followed by 190 ms or more
        assert planner.take("first") >= 4 * 20 * 0.01 * 0.95


def test_who_waits_is_not_kept_waiting() -> None:
    with BackgroundPlanner(working(0.01, 40), ["first", "second"]) as planner:
        assert planner.take("first") < 40 * 20 * 0.01 / 4
        started = time.perf_counter()
        planner.wait()
        assert time.perf_counter() - started < 40 * 20 * 0.01 / 4


def test_a_rest_ends_when_somebody_begins_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_REST", 100_000)
    with BackgroundPlanner(working(0.01, 3), ["first"]) as planner:
        time.sleep(0.1)  # it rests by now
        assert planner.take("first") < 10


def test_leaving_stops_a_plan_that_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_REST", 100_000)
    done = []

    def plan(_: str, pace: Pace) -> None:
        for number in pace(time.sleep(0.01) or number for number in range(1000)):
            done.append(number)

    with BackgroundPlanner(plan, ["first"]):
        time.sleep(0.1)
    assert len(done) <= 2
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
