"""What the process is doing, shown on standard error where it takes long: no command is silent for a second.

In: `with doing("hashing model.safetensors (2.5 GB)")` around whatever may take long. Out: "hashing … …" once nothing
has been shown for a moment: a line of its own, or on a terminal a line that disappears when the work ends. What is fast
shows nothing. Only the command line shows anything (`shown_activity`); in a program of the user's all this is silent.
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
"""Seconds that an activity has to last to be shown, however long nothing was."""


@contextmanager
def doing(what: str, *, slow: bool = False) -> Iterator[None]:
    """Name what is done inside; of several, one inside the other, the innermost is shown.

    Args:
        what: an activity with its object, such as "loading demo".
        slow: whether it is known to take seconds, as the first import of torch does, and is shown at once: an import
            of compiled code can keep other threads from running.
    """
    _status.begin(printable(what), slow)
    try:
        yield
    finally:
        _status.end()


def imports(package: str) -> bool:
    """Whether a package has yet to be imported: a value for `slow`."""
    return package not in sys.modules


@contextmanager
def shown_activity() -> Iterator[None]:
    """Show activities on standard error inside."""
    before = _status.switch(True)
    try:
        yield
    finally:
        _status.switch(before)
        _status.forget()


@contextmanager
def hidden_activity() -> Iterator[None]:
    """Show no activities inside, where something else has the terminal's last line."""
    before = _status.switch(False)
    try:
        yield
    finally:
        _status.switch(before)


def news(line: str) -> None:
    """Print a line on standard error, above an activity that is shown."""
    _status.print(line)


class _Status:
    """The activities that are under way, and what is shown of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._on = False
        self._activities: list[str] = []
        self._printed: set[str] = set()
        """What has a line of its own already."""
        self._line = ""
        """The activity that stands on the terminal's last line."""
        self._columns = 0
        """Of the terminal's last line, those that it may take."""
        self._timer: threading.Timer | None = None
        self._last = time.monotonic()
        """When there was output, or the process started."""

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
        """Show activities or stop; returns what was before."""
        with self._lock:
            before, self._on = self._on, on
            self._last = time.monotonic()
            self._erase()
            self._schedule()
            return before

    def forget(self) -> None:
        """Show again what has been shown."""
        with self._lock:
            self._printed.clear()

    def print(self, line: str) -> None:
        with self._lock:
            self._erase()
            print(line, file=sys.stderr, flush=True)
            self._last = time.monotonic()
            self._schedule()

    def _schedule(self, delay: float | None = None) -> None:
        """Have the innermost activity shown after a delay; None: when there has been no output for a while."""
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
            # Another may have begun while this one waited for the lock
            if self._timer is threading.current_thread():
                self._show()

    def _show(self) -> None:
        activity = self._activities[-1]
        what = f"{activity} …"
        # A standard error that is closed shows nothing, which is no reason to stop
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
    """A text cut to a terminal's columns, of which some characters take two."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= columns else set_cell_size(text, columns - 1) + "…"


_status = _Status()
