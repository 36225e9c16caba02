"""No command is silent for long: slow steps and progress on standard error, and nothing stays on a terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evalkit import display
from evalkit.display import Progress, doing, hidden_activity, shown_activity

LONG = 0.15
"""Seconds, more than the silence below."""


def test_long_work_is_one_line_and_the_innermost_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line only, and never under a bar or after an error."""
    monkeypatch.setattr(display, "_SILENCE", 0.03)
    monkeypatch.setattr(display, "_SHORTEST", 0.03)
    with doing("elsewhere", slow=True):
        time.sleep(LONG)
    with shown_activity():
        for _ in range(2):
            with doing("outer"):
                with doing("inner\x1b[2J"):
                    time.sleep(LONG)
                time.sleep(LONG)
        with doing("fast"):
            pass
        with doing("loading it", slow=True):
            pass
        assert capsys.readouterr() == ("", "inner\\x1b[2J …\nouter …\nloading it …\n")
        with pytest.raises(ValueError, match="no"), doing("failing"):
            raise ValueError("no")
        with hidden_activity(), doing("below a bar", slow=True):
            time.sleep(LONG)
        with Progress(live=True) as progress:
            progress.start(2, 0)
            with doing("below the bar", slow=True):
                time.sleep(LONG)
            progress.advance(2, 1)
    assert not [word for word in ("failing", "below") if word in capsys.readouterr().err]


def on_terminal(script: str, columns: int = 40) -> str:
    """Return a script's output on a terminal of some columns."""
    import pty

    parent, child = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-c", f"from evalkit.display import *\nimport time\n{script}"]
    with subprocess.Popen(command, stderr=child, stdout=child, env=environment, cwd=Path(__file__).parents[1]):
        os.close(child)
        parts = []
        while select.select([parent], [], [], 20)[0]:
            try:
                part = os.read(parent, 4096)
            except OSError:  # Linux, when the other end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(parent)
    return b"".join(parts).decode(errors="replace")


def screen(output: str) -> list[str]:
    """Return the lines that remain after carriage returns and erasures."""
    lines = []
    for line in output.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            if part.startswith("\x1b[K"):
                cells.clear()
            cells[: len(part)] = part.removeprefix("\x1b[K")
        lines.append("".join(cells).rstrip())
    return lines


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_nothing_stays_on_a_terminal() -> None:
    script = """
with shown_activity():
    with doing('loading', slow=True):
        news('fetched')
        time.sleep(.6)
    with doing('夜里' * 60, slow=True):
        pass
    print('result')
try:
    with shown_activity(), doing('loading', slow=True):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print('interrupted')
"""
    output = on_terminal(script)
    assert output.count("…") >= 1 and output.count("夜") <= 10
    assert screen(output) == ["fetched", "result", "interrupted", ""]
    bar = on_terminal(
        "with Progress() as p:\n    p.say('before [bold]')\n    p.start(10, 2)\n    p.task('piqa')\n"
        "    p.advance(3, 1)\n    p.say('during [bold]')\n    p.advance(5, 1)\n",
        100,
    )
    assert all(text in bar for text in ("before [bold]", "during [bold]", "100%"))


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_line_now_and_then_has_share_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this session: what is done before does not count for the rate."""
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    progress = Progress(live=False)
    progress.start(total=1000, done=500)
    assert progress.seconds_left() is None
    progress.task("boolq")
    clock.now += 20
    progress.advance(100, documents=4)
    assert progress.line() == "boolq:  60% of all, 0.2 documents/s, about 1:20 left"
    progress.expect(done=1.0, total=4.0, seconds=300.0)
    assert progress.line() == "boolq:  25% of all, 0.2 documents/s, about 5:00 left"
    clock.now += 60
    assert progress.seconds_left() == 240.0
    capsys.readouterr()
    with Progress() as progress:
        progress.start(total=100, done=0)
        progress.task("mmlu")
        for _ in range(30):
            clock.now += 1
            progress.advance(1, documents=1)
        progress.say("news with [brackets]")
    assert capsys.readouterr() == (
        "",
        "mmlu:  15% of all, 1.0 documents/s, about 1:25 left\nmmlu:  30% of all, 1.0 documents/s, about 1:10 left\n"
        "news with [brackets]\n",
    )
