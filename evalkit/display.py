"""What a command shows on standard error while it works, so that none is silent for a second.

`with doing("hashing model.safetensors (2.5 GB)")` names an activity, which is shown once there has been no output for
`_SILENCE` seconds: printed as a line, or on a terminal as a line that is erased when the work ends. Only the command
line turns this on (`shown_activity`). `Progress` is for work with a known total: a live bar, or plain lines now and
then. In both, messages stand above the line that changes.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from evalkit.escape import printable

Say = Callable[[str], None]
"""Callback that receives one line of information for the user."""

_SILENCE = 0.4  # seconds without output after which the current activity is shown
_SHORTEST = 0.1  # seconds that an activity lasts at least before it is shown
_LINE_EVERY = 15.0  # seconds between plain lines of progress


def imports(package: str) -> bool:
    """Return whether a package is not imported yet: a value for `slow` of `doing`."""
    return package not in sys.modules


class _Status:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._on = False
        self._activities: list[str] = []
        self._printed: set[str] = set()
        # The activity on the terminal's last line, and the columns that it may use
        self._line, self._columns = "", 0
        self._timer: threading.Timer | None = None
        self._last = time.monotonic()  # of output

    @contextmanager
    def doing(self, what: str, *, slow: bool = False) -> Iterator[None]:
        """Name the activity of a block with its object, such as "loading demo"; of nested ones, the innermost is shown.

        A `slow` one is shown at once, such as the first import of torch: an import of compiled code can keep other
        threads from running.
        """
        with self._lock:
            self._activities.append(printable(what))
            self._schedule(at_once=slow)
        try:
            yield
        finally:
            with self._lock:
                self._activities.pop()
                if self._activities[-1:] != [self._line]:
                    self._erase()
                self._schedule()

    def news(self, line: str) -> None:
        """Print a line on standard error, above the activity that is shown."""
        with self._lock:
            self._erase()
            print(line, file=sys.stderr, flush=True)
            self._last = time.monotonic()
            self._schedule()

    @contextmanager
    def shown(self, on: bool) -> Iterator[None]:
        """Show activities within the block, or hide them."""
        before = self._switch(on)
        try:
            yield
        finally:
            self._switch(before)
            if on:
                self._printed.clear()

    def _switch(self, on: bool) -> bool:
        with self._lock:
            before, self._on = self._on, on
            self._last = time.monotonic()
            self._erase()
            self._schedule()
            return before

    def _schedule(self, at_once: bool = False) -> None:
        """Show the innermost activity, at once or after `_SILENCE` seconds without output."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._on or not self._activities or self._activities[-1] == self._line:
            return
        if at_once:
            self._show()
            return
        delay = max(_SHORTEST, _SILENCE - (time.monotonic() - self._last))
        self._timer = threading.Timer(delay, self._show_late)
        self._timer.daemon = True
        self._timer.start()

    def _show_late(self) -> None:
        with self._lock:
            # Another activity may have started while this timer waited for the lock
            if self._timer is threading.current_thread():
                self._show()

    def _show(self) -> None:
        activity = self._activities[-1]
        # A closed standard error is not a reason to stop
        with suppress(OSError, ValueError, AttributeError):
            if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
                self._erase()
                from wcwidth import clip, wcswidth  # some characters take two columns

                self._line, self._columns = activity, shutil.get_terminal_size().columns - 1
                line = f"{activity} …"
                fits = wcswidth(line) <= self._columns
                sys.stderr.write(line if fits else clip(line, 0, self._columns - 1) + "…")
            elif activity not in self._printed:
                self._printed.add(activity)
                sys.stderr.write(f"{activity} …\n")
            sys.stderr.flush()
            self._last = time.monotonic()

    def _erase(self) -> None:
        if self._line:
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"\r{' ' * self._columns}\r")
                sys.stderr.flush()
            self._line = ""


_status = _Status()
doing, news = _status.doing, _status.news
shown_activity = partial(_status.shown, True)
"""Show activities on standard error within a block."""
hidden_activity = partial(_status.shown, False)
"""Show no activities within a block, while a progress bar uses the terminal's last line."""


class Progress:
    """Progress of work with a known total, in a unit that takes about constant time: a bar if `live` or a terminal."""

    def __init__(self, live: bool | None = None) -> None:
        self._live = sys.stderr.isatty() if live is None else live
        self._bar: Any = None
        self._after = ExitStack()
        self._label = ""
        self._total = self._done = self._skipped = 0.0
        self._documents = 0
        self._end: float | None = None
        """When all is expected to be finished, if the caller estimates it; seconds of a monotonic clock."""
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bar()

    def say(self, line: str) -> None:
        """Print a message on one line, above the bar."""
        line = printable(line)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            news(line)

    def start(self, total: float, done: float) -> None:
        """Start, with `done` of `total` finished in an earlier session; ends the bar of the work before."""
        self._end_bar()
        self._total, self._done, self._skipped, self._documents = total, done, done, 0
        self._started = self._last_line = time.monotonic()
        self._end = None
        if self._live:
            self._start_bar()

    def task(self, label: str) -> None:
        self._label = printable(label)
        self._draw()

    def advance(self, work: float, documents: int) -> None:
        self._done += work
        self._documents += documents
        self._draw()
        if self._bar is None and time.monotonic() - self._last_line >= _LINE_EVERY:
            self._last_line = time.monotonic()
            self.say(self.line())

    def expect(self, done: float, total: float, seconds: float | None) -> None:
        """Replace finished (perhaps less than before) and total work, and the time left; None: by the rate so far."""
        self._done, self._total = done, total
        self._end = None if seconds is None else time.monotonic() + seconds
        self._draw()

    def share(self) -> float:
        return self._done / self._total if self._total else 1.0

    def seconds_left(self) -> float | None:
        """Return the estimated time left; None before anything is finished."""
        if self._end is not None:
            return max(self._end - time.monotonic(), 0.0)
        if self._done <= self._skipped:
            return None
        elapsed = time.monotonic() - self._started
        return elapsed / (self._done - self._skipped) * (self._total - self._done)

    def line(self) -> str:
        """Return the state in one line: task, share, rate, time left."""
        label = f"{self._label}: " if self._label else ""
        seconds = self.seconds_left()
        left = "" if seconds is None else f", about {clock(seconds)} left"
        return f"{label}{self.share():4.0%} of all, {self._rate()}{left}"

    def _rate(self) -> str:
        elapsed = time.monotonic() - self._started
        return f"{self._documents / elapsed:.1f} documents/s" if elapsed > 0 else "–"

    def _time(self) -> str:
        """Return the time left; when all is finished, the time that it took."""
        finished = self._done >= self._total
        seconds = time.monotonic() - self._started if finished else self.seconds_left()
        return "-:--:--" if seconds is None else clock(seconds)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description:<14}"), BarColumn(), TaskProgressColumn(),
                   TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[left]}"))  # fmt: skip
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._bar.add_task("", total=self._total, completed=self._done, rate="", left="")
        # From now on the bar uses the terminal's last line
        self._after.enter_context(hidden_activity())
        self._bar.start()
        self._after.callback(self._bar.stop)

    def _draw(self) -> None:
        if self._bar is not None:
            of_all = {"completed": self._done, "total": self._total, "rate": self._rate(), "left": self._time()}
            self._bar.update(self._bar.task_ids[0], description=self._label, **of_all)

    def _end_bar(self) -> None:
        self._bar = None
        self._after.close()


def clock(seconds: float) -> str:
    """Format a time as hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
