"""SIGTERM prints the message of Ctrl-C at any point of a run; `test_kills.py` sends both during scoring."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evalkit.cli import main
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")

INTERRUPTED = "evalkit: interrupted; finished batches are saved: run the same command again to resume"

LOADING = """
import evalkit.models.loading.load as place
place.load = lambda *_, **__: (print("reached", flush=True), time.sleep(300))
"""
IN_THE_ENCODER = """
import evalkit.benchmarks.multiple_choice.prompts as place
encode = place.Prompter.encode
def slowly(own, questions, unconditional=False):
    for one in encode(own, questions, unconditional):
        if threading.current_thread() is not threading.main_thread():
            print("reached", flush=True)
            time.sleep(0.2)
        yield one
place.Prompter.encode = slowly
"""


@pytest.mark.parametrize("patch", [LOADING, IN_THE_ENCODER], ids=["while the model loads", "while a thread encodes"])
def test_it_interrupts_a_run_before_anything_is_scored(
    checkpoint: Path, documents: Path, tmp_path: Path, patch: str
) -> None:
    options = ["run", "--model", str(checkpoint), "--data-dir", str(documents), "--allow-unofficial-data",
               "--tasks", "mmlu", "--output", str(tmp_path / "runs")]  # fmt: skip
    script = f"import threading, time\n{patch}\n"
    script += f"from evalkit.cli import main\nmain({options!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EVALKIT_CACHE": str(tmp_path / "cache")},  # without stored tokens
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reached\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert err.splitlines()[-1] == INTERRUPTED
    assert "Traceback" not in err
    assert not list((tmp_path / "runs").glob("*"))  # nothing was scored


def _code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "evalkit.cli.listing.rules",
        lambda: os.kill(os.getpid(), signal.SIGTERM) or Report((simple_table("rules", ["rule"], []),)),
    )
    assert _code(["ls", "rules"]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
    assert _code(["--version"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_handler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calling program's handler, or a shell that ignores the signal; other threads cannot set one."""
    codes = []
    thread = threading.Thread(target=lambda: codes.append(_code(["ls", "rules"])))
    thread.start()
    thread.join()
    assert codes == [0]
    caught = []
    previous = signal.signal(signal.SIGTERM, lambda *_: caught.append("theirs"))
    try:
        monkeypatch.setattr(
            "evalkit.cli.listing.rules",
            lambda: os.kill(os.getpid(), signal.SIGTERM) or Report((simple_table("rules", ["rule"], []),)),
        )
        assert _code(["ls", "rules"]) == 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert caught == ["theirs"]
