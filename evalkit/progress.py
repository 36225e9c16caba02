"""Progress of long work: a live bar on a terminal, plain lines elsewhere.

In: the amount of finished work. Out: a bar or lines on standard error, so that standard output contains results only.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from evalkit.activity import hidden_activity, news
from evalkit.reporting.escape import printable

_LINE_EVERY = 15.0
"""Seconds between plain lines."""


class Progress:
    """Progress of work whose total is known, in a unit that takes about constant time.

    Args:
        live: draw a bar; None: if standard error is a terminal.
    """

    def __init__(self, live: bool | None = None) -> None:
        self._live = sys.stderr.isatty() if live is None else live
        self._bar: Any = None
        self._after = ExitStack()
        self._bar_task: Any = None
        self._total = self._done = self._skipped = 0.0
        self._documents = 0
        self._end: float | None = None
        """When all is expected to be finished, if the caller estimates it; seconds of a monotonic clock."""
        self._label = ""
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar = None
        self._after.close()

    def say(self, line: str) -> None:
        """Print a message on one line, above the bar."""
        line = printable(line)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            news(line)

    def start(self, total: float, done: float) -> None:
        """Start, with `done` of `total` finished in an earlier session; ends the bar of the work before."""
        self._bar = None
        self._after.close()
        self._total, self._done, self._skipped, self._documents = total, done, done, 0
        self._started = self._last_line = time.monotonic()
        self._end = None
        if self._live:
            self._start_bar(total, done)

    def task(self, label: str) -> None:
        """Set the label of the current task."""
        self._label = label = printable(label)
        if self._bar is not None:
            self._bar.update(self._bar_task, description=label)

    def advance(self, work: float, documents: int) -> None:
        """Add finished work and its number of documents."""
        self._done += work
        self._documents += documents
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=self._done, rate=self._rate())
        elif time.monotonic() - self._last_line >= _LINE_EVERY:
            self._last_line = time.monotonic()
            self.say(self.line())

    def expect(self, done: float, total: float, seconds: float | None) -> None:
        """Replace the finished and the total work by better estimates, and the time left by the caller's.

        Args:
            done: finished work, which may be less than before.
            total: all work.
            seconds: time left; None: by the rate so far.
        """
        self._done, self._total = done, total
        self._end = None if seconds is None else time.monotonic() + seconds
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=done, total=total, end=self._end)

    def share(self) -> float:
        """Return the finished share of the work, from 0 to 1."""
        return self._done / self._total if self._total else 1.0

    def seconds_left(self) -> float | None:
        """Return the estimated time left; None before anything is finished."""
        return self._left() if self._is_known() else None

    def line(self) -> str:
        """Return the state in one line: task, share, rate, time left."""
        label = f"{self._label}: " if self._label else ""
        left = f", about {clock(self._left())} left" if self._is_known() else ""
        return f"{label}{self.share():4.0%} of all, {self._rate()}{left}"

    def _rate(self) -> str:
        elapsed = time.monotonic() - self._started
        return f"{self._documents / elapsed:.1f} documents/s" if elapsed > 0 else "–"

    def _is_known(self) -> bool:
        return self._end is not None or self._done > self._skipped

    def _left(self) -> float:
        if self._end is not None:
            return max(self._end - time.monotonic(), 0.0)
        worked = self._done - self._skipped
        elapsed = time.monotonic() - self._started
        return elapsed / worked * (self._total - self._done) if worked else 0.0

    def _start_bar(self, total: float, done: float) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import (
            Progress as Bar,
        )
        from rich.text import Text

        class TimeLeftColumn(TimeRemainingColumn):
            """The caller's estimate if there is one."""

            def render(self, task: Any) -> Text:
                """Return the text of the column."""
                end = task.fields.get("end")
                if end is None or task.finished:
                    return super().render(task)
                return Text(clock(max(end - time.monotonic(), 0.0)), style="progress.remaining")

        self._bar = Bar(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeLeftColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            # Averaged over minutes, since tasks differ in speed
            speed_estimate_period=300,
        )
        self._bar_task = self._bar.add_task("", total=total, completed=done, rate="")
        # From now on the bar uses the terminal's last line
        self._after.enter_context(hidden_activity())
        self._bar.start()
        self._after.callback(self._bar.stop)


def clock(seconds: float) -> str:
    """Format a time as hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
