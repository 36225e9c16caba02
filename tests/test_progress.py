"""Progress as plain lines and as a live bar."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evalkit import display as module
from evalkit.display import Progress


class Clock:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_line_has_share_rate_and_time_left(clock: Clock) -> None:
    progress = Progress(live=False)
    progress.start(total=1000, done=0)
    progress.task("piqa")
    clock.now += 10
    progress.advance(100, documents=5)
    # 10 s for a tenth of the work: 90 s for the rest
    assert progress.line() == "piqa:  10% of all, 0.5 documents/s, about 1:30 left"


def test_what_an_earlier_session_did_is_not_part_of_the_rate(clock: Clock) -> None:
    progress = Progress(live=False)
    progress.start(total=1000, done=500)
    progress.task("boolq")
    clock.now += 20
    progress.advance(100, documents=4)
    assert progress.line() == "boolq:  60% of all, 0.2 documents/s, about 1:20 left"
    clock.now += 36000
    progress.advance(1, documents=1)
    assert progress.line().endswith("left")
    assert "about 39:" in progress.line()  # hours


def test_a_better_estimate_replaces_the_rate(clock: Clock) -> None:
    progress = Progress(live=False)
    progress.start(total=1000, done=0)
    assert progress.seconds_left() is None
    clock.now += 10
    progress.advance(900, documents=5)
    progress.expect(done=1.0, total=4.0, seconds=300.0)
    assert progress.line() == " 25% of all, 0.5 documents/s, about 5:00 left"
    clock.now += 60
    assert progress.seconds_left() == 240.0
    progress.start(total=10, done=0)
    assert progress.seconds_left() is None


def test_lines_come_now_and_then_to_standard_error(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.start(total=100, done=0)
        progress.task("mmlu")
        for _ in range(30):
            clock.now += 1
            progress.advance(1, documents=1)
        progress.say("news with [brackets]")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "mmlu:  15% of all, 1.0 documents/s, about 1:25 left",
        "mmlu:  30% of all, 1.0 documents/s, about 1:10 left",
        "news with [brackets]",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("columns", ["100", "20"])
def test_a_terminal_gets_a_bar(columns: str) -> None:
    import pty

    script = (
        "from evalkit.display import Progress\n"
        "with Progress() as p:\n"
        "    p.say('before [bold]')\n    p.start(10, 2)\n    p.task('piqa')\n    p.advance(3, 1)\n"
        "    p.say('during [bold]')\n    p.advance(5, 1)\n"
    )
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": columns, "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", script], stderr=theirs, stdout=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode(errors="replace")
    os.close(ours)
    assert done.returncode == 0, shown
    assert done.stdout == b""
    assert "before [bold]" in shown
    assert "during [bold]" in shown
    assert ("100%" in shown) == (columns == "100")
