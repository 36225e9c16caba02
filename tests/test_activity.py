"""No command is silent for long: slow steps are reported on standard error, and nothing stays on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalkit import display
from evalkit.display import Progress, doing, hidden_activity, imports, news, shown_activity

LONG = 0.15
"""Seconds, more than the silence below."""


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_SILENCE", 0.03)
    monkeypatch.setattr(display, "_SHORTEST", 0.03)


@pytest.fixture
def shown() -> Iterator[None]:
    with shown_activity():
        yield


def work() -> None:
    time.sleep(LONG)


@pytest.mark.usefixtures("shown")
def test_long_work_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with doing("hashing model (2 MB)"):
            work()
    assert capsys.readouterr() == ("", "hashing model (2 MB) …\n")


@pytest.mark.usefixtures("shown")
def test_fast_work_is_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_SILENCE", 60)
    monkeypatch.setattr(display, "_SHORTEST", 60)
    with doing("nothing much"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("shown")
def test_slow_work_is_shown_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with doing("loading it", slow=True):
        assert capsys.readouterr().err == "loading it …\n"


@pytest.mark.usefixtures("shown")
def test_the_innermost_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with doing("outer"):
        with doing("inner\x1b[2J"):
            work()
        work()
    assert capsys.readouterr().err == "inner\\x1b[2J …\nouter …\n"


@pytest.mark.usefixtures("shown")
def test_an_error_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), doing("failing"):
        raise ValueError("no")
    work()
    assert capsys.readouterr().err == ""


def test_silent_outside_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with doing("whatever", slow=True):
        work()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("shown")
def test_hidden_while_something_else_is_live(capsys: pytest.CaptureFixture[str]) -> None:
    with hidden_activity(), doing("below a bar", slow=True):
        work()
    assert capsys.readouterr().err == ""
    with doing("after it", slow=True):
        pass
    assert capsys.readouterr().err == "after it …\n"


@pytest.mark.usefixtures("shown")
def test_hidden_under_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(live=True) as progress:
        progress.start(2, 0)
        with doing("below the bar", slow=True):
            work()
        progress.advance(2, 1)
    assert "below the bar" not in capsys.readouterr().err
    with doing("after it", slow=True):
        pass
    assert capsys.readouterr().err == "after it …\n"


def test_what_has_yet_to_be_imported() -> None:
    assert not imports("sys")
    assert imports("no_such_package")


def on_terminal(script: str, columns: int = 40) -> str:
    """Return a script's output on a terminal of some columns."""
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
    return b"".join(parts).decode()


def screen(output: str) -> list[str]:
    """Return the lines that remain after carriage returns."""
    lines = []
    for line in output.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


def test_a_terminals_line_goes_when_the_work_ends() -> None:
    output = on_terminal(
        "with shown_activity():\n  with doing('loading', slow=True): time.sleep(.1)\n  print('result')"
    )
    assert output.startswith("loading …\r ")
    assert screen(output) == ["result", ""]


def test_news_stand_above_a_terminals_line() -> None:
    output = on_terminal("with shown_activity(), doing('loading', slow=True): news('fetched'); time.sleep(.6)")
    assert "loading …" in output[output.index("fetched") :]
    assert screen(output) == ["fetched", ""]


def test_a_line_fits_the_terminal() -> None:
    output = on_terminal("with shown_activity(), doing('夜里' * 60, slow=True): pass")
    assert screen(output) == [""]
    assert output.count("夜") <= 10


def test_nothing_stays_when_interrupted() -> None:
    work = "with shown_activity(), doing('loading', slow=True): raise KeyboardInterrupt"
    script = f"try:\n {work}\nexcept KeyboardInterrupt: print('interrupted')"
    assert screen(on_terminal(script)) == ["interrupted", ""]


def test_a_closed_standard_error_is_no_error() -> None:
    script = "from evalkit.display import *\nwith shown_activity(), doing('loading', slow=True): print('result')"
    command = f'{sys.executable} -c "{script}" 2>&-'
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert done.stdout == "result\n"


def first_byte(command: list[str], environment: dict[str, str]) -> tuple[float, bytes]:
    """Return the seconds until a command's first output, and its standard error."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        ready, _, _ = select.select([process.stdout, process.stderr], [], [], 60)
        waited = time.monotonic() - started
        assert ready
        return waited, process.communicate()[1]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["run", "--limit", "2"], ["doctor"]])
def test_a_command_shows_something_within_a_second(
    arguments: list[str], checkpoint: Path, documents: Path, tmp_path: Path
) -> None:
    """Beside how long Python takes to start and to import the command line."""
    environment = os.environ | {"EVALKIT_DATA_DIR": str(documents), "EVALKIT_OUTPUT": str(tmp_path)}
    evalkit = [sys.executable, "-m", "evalkit"]
    started, _ = first_byte([*evalkit, "--version"], environment)
    asked = [*arguments, "--model", str(checkpoint), "--allow-unofficial-data"] if arguments[0] == "run" else arguments
    waited, lines = first_byte([*evalkit, *asked], environment)
    assert waited < started + 1
    assert " …\n" in lines.decode()


def test_news_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    news("fetched")
    assert capsys.readouterr().err == "fetched\n"
