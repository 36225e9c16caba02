"""Status line of the current activity on standard error, so that no command is silent for a second.

In: `with doing("hashing model.safetensors (2.5 GB)")` around work that may take long. Out: the activity, once there has
been no output for `_SILENCE` seconds: printed as a line, or on a terminal as a line that is erased when the work ends.
Fast work prints nothing. Only the command line turns this on (`shown_activity`); evalkit used as a library is silent.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from evalkit.reporting.escape import printable

_SILENCE = 0.4
"""Seconds without output after which the current activity is shown."""
_SHORTEST = 0.1
"""Minimum seconds that an activity lasts before it is shown."""


@contextmanager
def doing(what: str, *, slow: bool = False) -> Iterator[None]:
    """Name the activity of a block; of nested ones, the innermost is shown.

    Args:
        what: an activity with its object, such as "loading demo".
        slow: show it at once, because it is known to take seconds, such as the first import of torch: an import of
            compiled code can keep other threads from running.
    """
    _status.begin(printable(what), slow)
    try:
        yield
    finally:
        _status.end()


def imports(package: str) -> bool:
    """Return whether a package is not imported yet: a value for `slow`."""
    return package not in sys.modules


@contextmanager
def shown_activity() -> Iterator[None]:
    """Show activities on standard error within the block."""
    before = _status.switch(True)
    try:
        yield
    finally:
        _status.switch(before)
        _status.forget()


@contextmanager
def hidden_activity() -> Iterator[None]:
    """Show no activities within the block, while a progress bar uses the terminal's last line."""
    before = _status.switch(False)
    try:
        yield
    finally:
        _status.switch(before)


def news(line: str) -> None:
    """Print a line on standard error, above the activity that is shown."""
    _status.print(line)


class _Status:
    """Stack of current activities, and the one that is shown."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._on = False
        self._activities: list[str] = []
        self._printed: set[str] = set()
        """Activities that have been printed as a line."""
        self._line = ""
        """The activity on the terminal's last line."""
        self._columns = 0
        """Columns of the terminal that the activity may use."""
        self._timer: threading.Timer | None = None
        self._last = time.monotonic()
        """Time of the last output, or of the process's start."""

    def begin(self, what: str, slow: bool) -> None:
        with self._lock:
            self._activities.append(what)
            self._schedule(0.0 if slow else None)

    def end(self) -> None:
        with self._lock:
            self._activities.pop()
            if self._activities[-1:] != [self._line]:
                self._erase()
            self._schedule()

    def switch(self, on: bool) -> bool:
        """Turn the display on or off; return the previous state."""
        with self._lock:
            before, self._on = self._on, on
            self._last = time.monotonic()
            self._erase()
            self._schedule()
            return before

    def forget(self) -> None:
        """Forget which activities were printed, so that they are printed again."""
        with self._lock:
            self._printed.clear()

    def print(self, line: str) -> None:
        with self._lock:
            self._erase()
            print(line, file=sys.stderr, flush=True)
            self._last = time.monotonic()
            self._schedule()

    def _schedule(self, delay: float | None = None) -> None:
        """Show the innermost activity after a delay; None: after `_SILENCE` seconds without output."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._on or not self._activities or self._activities[-1] == self._line:
            return
        if delay is None:
            delay = max(_SHORTEST, _SILENCE - (time.monotonic() - self._last))
        if not delay:
            self._show()
            return
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
        what = f"{activity} …"
        # A closed standard error is not a reason to stop
        with suppress(OSError, ValueError, AttributeError):
            if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
                self._erase()
                self._line, self._columns = activity, shutil.get_terminal_size().columns - 1
                sys.stderr.write(_fitted(what, self._columns))
            elif what not in self._printed:
                self._printed.add(what)
                sys.stderr.write(f"{what}\n")
            else:
                return
            sys.stderr.flush()
            self._last = time.monotonic()

    def _erase(self) -> None:
        if self._line:
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"\r{' ' * self._columns}\r")
                sys.stderr.flush()
            self._line = ""


def _fitted(text: str, columns: int) -> str:
    """Truncate a text to a terminal's columns; some characters take two."""
    from wcwidth import clip, wcswidth

    return text if wcswidth(text) <= columns else clip(text, 0, columns - 1) + "…"


_status = _Status()
