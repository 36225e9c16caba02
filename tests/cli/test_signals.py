"""SIGTERM prints the message of Ctrl-C at any point of a run; `test_kills.py` sends both during scoring."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalkit.cli import main
from evalkit.reporting.report import Report

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")

LOADING = """
import evalkit.models.loading.load as module
module.load = lambda *_, **__: (print("reached", flush=True), time.sleep(300))
"""
IN_THE_ENCODER = """
import evalkit.benchmarks.multiple_choice.prompts as module
encode = module.Prompter.encode
def slowly(*arguments, **options):
    for sequence in encode(*arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            print("reached", flush=True)
            time.sleep(0.2)
        yield sequence
module.Prompter.encode = slowly
"""


@pytest.mark.parametrize(
    "patch",
    [pytest.param(LOADING, id="while the model loads", marks=pytest.mark.slow),
     pytest.param(IN_THE_ENCODER, id="while a thread encodes")],
)  # fmt: skip
def test_it_interrupts_a_run_before_anything_is_scored(
    checkpoint: Path, documents: Path, tmp_path: Path, patch: str
) -> None:
    options = ["run", "--model", str(checkpoint), "--data-dir", str(documents), "--allow-unofficial-data",
               "--tasks", "mmlu", "--output", str(tmp_path / "runs")]  # fmt: skip
    script = f"import threading, time\n{patch}\nfrom evalkit.cli import main\nmain({options!r})"
    environment = os.environ | {"EVALKIT_CACHE": str(tmp_path / "cache")}  # without stored tokens
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "reached\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert err.splitlines()[-1].startswith("evalkit: interrupted")
    assert "Traceback" not in err
    assert not list((tmp_path / "runs").glob("*"))  # nothing was scored


def code_of(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_handlers_are_restored_and_those_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return Report(())

    monkeypatch.setattr("evalkit.cli.listing.rules", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert code_of(["ls", "rules"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    caught: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        assert code_of(["ls", "rules"]) == 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert caught == [signal.SIGTERM]
