"""The command line through its real entry point: settings from three places, errors, signals, completion, start-up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from evalkit.cli.root import cli
from evalkit.reporting.report import Report
from evalkit.reporting.table import FORMATS
from evalkit.runs.folder import Run, load_run
from tests.cli.conftest import Command, Outcome, _no_settings, complains, completed, evalkit, run

__all__ = ["_no_settings", "evalkit", "run"]  # fixtures, which other folders import from here


def test_a_run_prints_its_table_and_opens_again_at_once(
    run: Command, evalkit: Command, checkpoint: Path, documents: Path
) -> None:
    first = run()
    assert first.code == 0
    lines = first.out.splitlines()
    assert "LlamaForCausalLM" in first.err
    assert run() == Outcome(0, first.out, "")
    finished = load_run(lines[-1])
    content = json.loads(run("--format", "json", "--rule", "acc_norm").out)
    assert content.items() >= json.loads(json.dumps(finished.results("acc_norm").to_json())).items()
    assert (content["run"], content["folder"]) == (finished.manifest["id"], str(finished.folder))
    # The checkpoint is an argument or an option
    options = ["--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa,boolq", "-L", 2, "--output", "runs"]
    assert evalkit("run", checkpoint, *options).out == first.out


def test_command_line_over_environment_over_file(
    evalkit: Command, checkpoint: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": str(checkpoint), "data_dir": str(documents), "allow-unofficial-data": True, "limit": 1,
                "tasks": ["piqa", "boolq"], "format": "json", "rule": "acc", "token-budget": None,
                "output": "runs"}  # fmt: skip
    Path("settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")

    def limit_and_rule(*more: str) -> tuple[int, str]:
        content = json.loads(evalkit("run", "--config", "settings.yaml", *more).out)
        assert len(content["tasks"]) == 2
        return content["tasks"][0]["n"], content["rule"]

    assert limit_and_rule() == (1, "acc")
    monkeypatch.setenv("EVALKIT_LIMIT", "2")
    assert limit_and_rule() == (2, "acc")
    assert limit_and_rule("-L", "3", "--rule", "ppl", "--token_budget", "512") == (3, "ppl")


def test_variables_of_one_command_break_no_other(evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_SUITE", "zeroshot8")
    complains(evalkit("longbench", "--model", "demo", "--tasks", "x"), 2, "longbench", "'x'")
    monkeypatch.setenv("EVALKIT_FORMAT", " ")
    complains(evalkit("table", "main_res"), 2, "EVALKIT_FORMAT")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("limt: 3", ["settings.yaml", "limt", "limit"]),
        ("- model", ["settings.yaml"]),
        ("limit: 2.7", ["settings.yaml", "limit", "2.7"]),
        ("data_dir: a\ndata-dir: b", ["settings.yaml", "data-dir"]),
        ("set: [window]", ["--set", "window"]),
        ("revision: 0123", ["x@0123"]),
    ],
)
def test_config_values_are_taken_as_they_are_written(evalkit: Command, content: str, words: list[str]) -> None:
    Path("settings.yaml").write_text(content, encoding="utf-8")
    outcome = evalkit("run", "--config", "settings.yaml", "--model", "./x")
    complains(outcome, 1 if "@" in words[0] else 2, *words)


def test_every_command_that_prints_a_table_has_the_same_formats() -> None:
    def commands(group: click.Group) -> Iterator[click.Command]:
        for command in group.commands.values():
            yield from commands(command) if isinstance(command, click.Group) else [command]

    options = [option for command in commands(cli) for option in command.params if "--format" in option.opts]
    assert len(options) == 26
    assert all(isinstance(option.type, click.Choice) and tuple(option.type.choices) == FORMATS for option in options)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system where nobody may write")
def test_what_cannot_be_read_or_written(run: Command, checkpoint: Path) -> None:
    Path("file").touch()
    for output in ("file", "file/below", "/proc/runs"):
        complains(run("--output", output), 1, output, "--output")
    broken = shutil.copytree(checkpoint, Path("broken"))
    (broken / "model.safetensors").unlink()
    complains(run("--model", "./broken"), 1, "broken", "safetensors")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "nouns"),
    [
        (["--verison"], ["--verison", "--version"]),
        (["--modle", "hf", "--tasks", "piqa"], ["--modle", "--model"]),
        (["run", "/absent", "--data-dir", "/absent", "--dtype", "fp8"], ["dtype 'fp8'", "float16"]),
        (["run", "/absent", "--dtype", "fp8", "--tasks", "zzz_*"], ["dtype 'fp8'"]),
        (["run", "/absent", "--context-method", "yran"], ["'yran'", "yarn"]),
        (["ruler", "/absent", "--context", "8192", "--context-method", "yran"], ["'yran'", "yarn"]),
        (["longbench", "/absent", "--context", "none", "--context-method", "yran"], ["'yran'", "yarn"]),
    ],
)
def test_a_mistyped_option_or_value_is_the_first_error(evalkit: Command, words: list[str], nouns: list[str]) -> None:
    complains(evalkit(*words), 2, *nouns)


# As a process


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "evalkit", "ls"], **pipes) as listing:
        assert listing.stdout is not None and listing.stderr is not None
        listing.stdout.close()
        assert listing.stderr.read() == ""


@pytest.mark.parametrize("raised", [BaseException("panic"), MemoryError()])
def test_an_unexpected_error_is_one_line_and_a_report(
    evalkit: Command, monkeypatch: pytest.MonkeyPatch, raised: BaseException, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("evalkit.benchmarks.run_listing.list_found", fail)
    outcome = evalkit("ls", "runs")
    reports = list(tmp_path.glob("evalkit-error-*.txt"))
    assert len(outcome.err.splitlines()) == 1
    if isinstance(raised, MemoryError):
        complains(outcome, 1, "out of memory")
    else:
        complains(outcome, 1, type(raised).__name__, str(reports[0]), "--debug")
        assert "Traceback" in reports[0].read_text(encoding="utf-8")
    assert evalkit("ls", "runs", "--debug").err.startswith("Traceback")


def test_an_error_in_a_thread_is_one_line(evalkit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Any:
        thread = threading.Thread(target=lambda: [][0])
        thread.start()
        thread.join()
        return Report(())

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("evalkit.cli.listing.rules", fail)
    outcome = evalkit("ls", "rules")
    assert (outcome.code, len(outcome.err.splitlines())) == (0, 1)
    assert "IndexError" in outcome.err


def test_a_folder_in_place_of_a_list(evalkit: Command, tmp_path: Path) -> None:
    (tmp_path / "some" / "runs").mkdir(parents=True)
    assert "none in some/runs" in evalkit("ls", "some/runs").out
    complains(evalkit("ls", "some/runs", "--in", "x"), 2, "--in x", "some/runs")
    complains(evalkit("ls", "other/runs"), 2, "other/runs", "no folder")


# Signals: SIGTERM ends a command as Ctrl-C does; tests/test_kills.py sends both during scoring

LOADING = """
import evalkit.models.loading.load as module
module.load = lambda *_, **__: (print("reached", flush=True), time.sleep(300))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.slow
def test_sigterm_interrupts_a_run_before_anything_is_scored(checkpoint: Path, documents: Path, tmp_path: Path) -> None:
    options = ["run", "--model", str(checkpoint), "--data-dir", str(documents), "--allow-unofficial-data",
               "--tasks", "mmlu", "--output", str(tmp_path / "runs")]  # fmt: skip
    script = f"import time\n{LOADING}\nfrom evalkit.cli import main\nmain({options!r})"
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "reached\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert err.splitlines()[-1].startswith("evalkit: interrupted")
    assert "Traceback" not in err and not list((tmp_path / "runs").glob("*"))


RESUMED = {"run CKPT": True, "run CKPT --dry-run": False, "run CKPT --show-prompts 1": False, "run A B": True,
           "decide A B --margin 1": True, "perplexity CKPT --text a.txt": True, "attention CKPT": True,
           "ruler CKPT": True, "needle CKPT": True, "longbench CKPT": True, "study run a.yaml": True,
           "study run a.yaml --dry-run": False, "study status a.yaml": False, "report RUN": False, "show RUN": False,
           "cost CKPT": False, "compare A B": False, "table main_res": False, "rescore RUN": False, "ls": False,
           "models average A B -o C": False, "figure bos RUN": False, "noise a.yaml": False}  # fmt: skip


@pytest.mark.parametrize("line", RESUMED)
def test_only_what_is_resumed_says_so(evalkit: Command, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    def interrupted(command: click.Command, _: click.Context) -> None:
        if not isinstance(command, click.Group):
            raise KeyboardInterrupt

    monkeypatch.setattr(click.Command, "invoke", interrupted)
    result = evalkit(*line.split())
    assert result.code == 130 and result.err.splitlines()[-1].startswith("evalkit: interrupted")
    assert ("same command again" in result.err) is RESUMED[line]


def test_handlers_are_restored_and_those_of_others_stay(evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return Report(())

    monkeypatch.setattr("evalkit.cli.listing.rules", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert evalkit("ls", "rules").code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    caught: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: caught.append(number))
    try:
        assert evalkit("ls", "rules").code == 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert caught == [signal.SIGTERM]


FORKED = """
import os, signal, time

def forked():
    if (child := os.fork()) == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os._exit(7)
    print("signal", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

import evalkit.cli.listing as module
from evalkit.cli import main
from evalkit.reporting.report import Report
module.rules = lambda: (forked(), Report(()))[1]
main(["ls", "rules"])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
def test_a_forked_process_is_terminated_without_a_word() -> None:
    """Such as those of lm-eval's pool for bootstrap samples."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, env=environment, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"signal -{int(signal.SIGTERM)}")
    assert done.stderr == ""


# Completion


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["comp"], ["compare"]),
        (["run", "--suite", "zeroshot8_"], ["zeroshot8_text"]),
        (["run", "--tasks", "piqa,arc_"], ["piqa,arc_easy", "piqa,arc_challenge"]),
        (["rescore", "x", "--rule", "acc_n"], ["acc_norm"]),
        (["run", "--data-dir", "here"], ["file"]),
        (["nonsense", "--x"], []),
    ],
)
def test_completion(words: list[str], expected: list[str]) -> None:
    assert completed(*words) == expected


def test_completion_of_runs(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_OUTPUT", str(finished.folder.parent))
    assert finished.folder.name in completed("compare", "one", finished.folder.name[:5])
