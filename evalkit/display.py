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
        self._on_line = ""
        """The activity on the terminal's last line."""
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
            self._schedule()
            if slow:
                self._show()
        try:
            yield
        finally:
            with self._lock:
                self._activities.pop()
                self._schedule()

    def news(self, line: str) -> None:
        with self._lock:
            self._erase()
            print(printable(line), file=sys.stderr, flush=True)
            self._last = time.monotonic()
            self._schedule()

    @contextmanager
    def shown(self, on: bool) -> Iterator[None]:
        """Show activities within the block, or hide them."""
        before = self._on
        self._switch(on)
        try:
            yield
        finally:
            self._switch(before)
            if on:
                self._printed.clear()

    def _switch(self, on: bool) -> None:
        with self._lock:
            self._on = on
            self._last = time.monotonic()
            self._schedule()

    def _schedule(self) -> None:
        """Show the innermost activity after `_SILENCE` seconds without output; erase one that has ended."""
        if self._timer is not None:
            self._timer.cancel()
        innermost = self._activities[-1] if self._on and self._activities else ""
        if self._on_line != innermost:
            self._erase()
        if innermost not in ("", self._on_line):
            delay = max(_SHORTEST, _SILENCE - (time.monotonic() - self._last))
            self._timer = threading.Timer(delay, self._show)
            self._timer.daemon = True
            self._timer.start()

    def _show(self) -> None:
        # A closed standard error is not a reason to stop
        with self._lock, suppress(OSError, ValueError, AttributeError):
            if not (self._on and self._activities):
                return
            activity = self._activities[-1]
            if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
                from rich.cells import set_cell_size  # some characters take two columns

                self._erase()
                self._on_line = activity
                sys.stderr.write(set_cell_size(f"{activity} …", shutil.get_terminal_size().columns - 1))
            elif activity not in self._printed:
                self._printed.add(activity)
                sys.stderr.write(f"{activity} …\n")
            sys.stderr.flush()
            self._last = time.monotonic()

    def _erase(self) -> None:
        if self._on_line:
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._on_line = ""


_status = _Status()
doing = _status.doing
shown_activity = partial(_status.shown, True)
"""Show activities on standard error within a block."""
hidden_activity = partial(_status.shown, False)
"""Show no activities within a block, while a progress bar uses the terminal's last line."""


def news(line: str) -> None:
    """Print a message that is not a result on standard error, above the activity that is shown."""
    _status.news(line)


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
        self._bar = None
        self._after.close()

    def say(self, line: str) -> None:
        """Print a message on one line, above the bar."""
        if self._bar is not None:
            self._bar.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
        else:
            news(line)

    def start(self, total: float, done: float) -> None:
        """Start, with `done` of `total` finished in an earlier session; ends the bar of the work before."""
        self.__exit__()
        self._total, self._done, self._skipped, self._documents = total, done, done, 0
        self._started = self._last_line = time.monotonic()
        self._end = None
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description:<14}"), BarColumn(), TaskProgressColumn(),
                       TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[left]}"))  # fmt: skip
            # From now on the bar uses the terminal's last line
            self._after.enter_context(hidden_activity())
            self._bar = self._after.enter_context(Bar(*columns, console=Console(stderr=True)))
            self._bar.add_task("", total=total, completed=done, rate="", left="")

    def task(self, label: str) -> None:
        self._label = printable(label)
        self._draw()

    def advance(self, work: float, documents: int) -> None:
        self._done += work
        self._documents += documents
        self._draw()
        if self._bar is None and time.monotonic() - self._last_line >= _LINE_EVERY:
            self._last_line = time.monotonic()
            news(self.line())

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

    def _draw(self) -> None:
        if self._bar is not None:
            # When all is finished, the time that it took
            finished = self._done >= self._total
            seconds = time.monotonic() - self._started if finished else self.seconds_left()
            left = "-:--:--" if seconds is None else clock(seconds)
            fields = {"completed": self._done, "total": self._total, "rate": self._rate(), "left": left}
            self._bar.update(self._bar.task_ids[0], description=self._label, **fields)


def clock(seconds: float) -> str:
    """Format a time as hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
