"""The command line through its real entry point: output, exit codes, and errors of bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from click.shell_completion import BashComplete

from evalkit.cli import main
from evalkit.cli.root import cli
from evalkit.runs.folder import Run, load_run
from tests.arguments import arguments
from tests.documents import made_up


class Outcome(NamedTuple):
    """Outcome of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Isolate tests from the environment and working folder of the test process."""
    for name in [name for name in os.environ if name.startswith("EVALKIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def evalkit(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        return Outcome(int(left.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def run(evalkit: Command, checkpoint: Path, documents: Path) -> Command:
    """Run `evalkit run` on two documents each of two tasks; later options override these."""
    common = {"--model": checkpoint, "--data-dir": documents, "--allow-unofficial-data": None, "--tasks": "piqa,boolq",
              "--limit": 2, "--output": "runs"}  # fmt: skip
    return lambda *more: evalkit("run", *arguments(common, more))


def complains(outcome: Outcome, code: int, *words: str) -> None:
    """Check that only the last line is an error, with these words, and that there is no traceback."""
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err
    *news, last = outcome.err.splitlines()
    assert last.startswith("evalkit: ")
    assert not any(line.startswith("evalkit:") for line in news)
    for word in words:
        assert word in last, last
    assert outcome.out == ""


def nothing_whole(output: Path = Path("runs")) -> None:
    """Check that no run folder under the output counts as finished."""
    assert not any(load_run(path.parent).complete for path in output.glob("*/manifest.json"))


def test_a_run_prints_its_table_and_opens_again_at_once(run: Command) -> None:
    first = run()
    assert first.code == 0
    lines = first.out.splitlines()
    assert "LlamaForCausalLM" in first.err
    assert run() == Outcome(0, first.out, "")
    finished = load_run(lines[-1])
    content = json.loads(run("--format", "json", "--rule", "acc_norm").out)
    assert content.items() >= json.loads(json.dumps(finished.results("acc_norm").to_json())).items()
    assert (content["run"], content["folder"]) == (finished.manifest["id"], str(finished.folder))


# Settings from three places


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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("limt: 3", ["settings.yaml", "limt", "limit"]),
        ("- model", ["settings.yaml"]),
        ("a: [", ["settings.yaml", "line 1"]),
        ("limit: many", ["settings.yaml", "limit", "many"]),
        ("limit: 2.7", ["settings.yaml", "limit", "2.7"]),
        ("limit: [1, 2]", ["settings.yaml", "limit"]),
        ("log-samples: maybe", ["settings.yaml", "log-samples", "maybe"]),
        ("tasks: []", ["settings.yaml", "tasks"]),
        ("data_dir: a\ndata-dir: b", ["settings.yaml", "data-dir"]),
        ("set: [window]", ["--set", "window"]),
        ("set: [[a]]", ["settings.yaml", "set"]),
        ("revision: 0123", ["x@0123"]),
    ],
)
def test_config_values_are_taken_as_they_are_written(evalkit: Command, content: str, words: list[str]) -> None:
    Path("settings.yaml").write_text(content, encoding="utf-8")
    outcome = evalkit("run", "--config", "settings.yaml", "--model", "./x")
    complains(outcome, 1 if "@" in words[0] else 2, *words)


def test_variables_of_one_command_break_no_other(evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_SUITE", "zeroshot8")
    complains(evalkit("longbench", "--model", "demo", "--tasks", "x"), 2, "longbench", "'x'")
    monkeypatch.setenv("EVALKIT_FORMAT", "jsn")
    complains(evalkit("table", "main_res"), 2, "'jsn'")
    monkeypatch.setenv("EVALKIT_FORMAT", " ")
    complains(evalkit("table", "main_res"), 2, "EVALKIT_FORMAT")


def test_the_checkpoint_is_given_once(run: Command, evalkit: Command, checkpoint: Path, documents: Path) -> None:
    options = ["--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa,boolq", "-L", 2, "--output", "runs"]
    assert evalkit("run", checkpoint, *options).out == run().out
    complains(evalkit("run", checkpoint, "--model", checkpoint), 2, "given twice")
    complains(evalkit("run", "--model", "a", "--model", "b"), 2, "--model", "a, b")


# Errors of bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["rnu", "'run'"]),
        (["run", "--modle", "x"], ["--modle", "--model"]),
        (["run", "--model", "x", "--token-budget", "many"], ["--token-budget", "'many'", "auto"]),
        (["run", "--model", "x", "--show-prompts", "-1"], ["--show-prompts", "-1"]),
        (["run", "--config", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["run", "--watch", ".", "--dry-run"], ["--watch and --dry-run"]),
        (["ls", "rules", "more"], ["more"]),
        (["rescore", ""], ["RUN"]),
        (["data", "--tasks", "piqqa"], ["'piqqa'", "'piqa'"]),
        (["compare", "a", "b", "--margin", "1"], ["--margin", "--fail-if-worse"]),
        (["compare", "a", "b", "--fail-if-worse", "--margin", "nan"], ["nan"]),
        (["table", "main_res", "--output", "."], ["--output ."]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    outcome = evalkit(*arguments)
    complains(outcome, 2, *words)
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # lm-eval's catalogue is read first
        pytest.param(["--tasks", "piqa,bolq"], ["'bolq'", "'boolq'"], marks=pytest.mark.slow),
        (["--template", "isnt"], ["'isnt'", "'inst'"]),
        (["--rule", "acc-norm"], ["'acc-norm'", "'acc_norm'"]),
        (["--dtype", "fp32"], ["'fp32'"]),
        (["--limit", "0"], ["--limit", "0"]),
        (["--set", "limit=3"], ["--set", "limit"]),
        (["--set", "lengths=3"], ["'lengths'"]),
    ],
)
def test_names_that_do_not_exist(run: Command, arguments: list[str], words: list[str]) -> None:
    complains(run(*arguments), 2, *words)
    assert not Path("runs").exists()


def _configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_empty, ["broken", "config.json"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["broken", "safetensors"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["broken", "tokenizer"]),
        (lambda folder: _configure(folder, model_type="bert", architectures=["BertForMaskedLM"]), ["BertForMaskedLM"]),
    ],
)
def test_invalid_checkpoints(run: Command, checkpoint: Path, damage: Callable[[Path], Any], words: list[str]) -> None:
    damage(shutil.copytree(checkpoint, Path("broken")))
    complains(run("--model", "./broken"), 1, *words)
    nothing_whole()


def test_a_subject_without_documents(run: Command) -> None:
    path = made_up(Path("documents")) / "mmlu.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "anatomy" not in line), encoding="utf-8")
    complains(run("--data-dir", "documents", "--tasks", "mmlu"), 1, "mmlu", "subject anatomy")
    nothing_whole()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system where nobody may write")
def test_an_output_that_cannot_be_written(run: Command) -> None:
    Path("file").touch()
    for output in ("file", "file/below", "/proc/runs"):
        complains(run("--output", output), 1, output, "--output")


# Other commands


def test_doctor(evalkit: Command, documents: Path) -> None:
    outcome = evalkit("doctor", "--data-dir", documents, "--clear-cache")
    for word in ("python", "torch", "0.4.13", "8 of 8 tasks here", "GiB free"):
        assert word in outcome.out
    assert "deleted" in outcome.err


# As a process


@pytest.mark.parametrize("arguments", [["run", "--help"], ["rescore", "RUN"]], ids=["help", "rescore"])
def test_starts_without_anything_heavy(arguments: list[str], finished: Run) -> None:
    words = [str(finished.folder) if word == "RUN" else word for word in arguments]
    command = [sys.executable, "-X", "importtime", "-m", "evalkit", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert imported.isdisjoint({"torch", "transformers", "datasets", "lm_eval"})
    assert "pandas" not in imported or arguments[0] == "rescore"


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    listing = subprocess.Popen(
        [sys.executable, "-m", "evalkit", "ls"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with listing:
        assert listing.stdout is not None and listing.stderr is not None
        listing.stdout.close()
        assert listing.stderr.read() == ""


@pytest.mark.parametrize("raised", [KeyError("tasks"), BaseException("panic"), MemoryError()])
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


def test_debug_shows_the_traceback(evalkit: Command) -> None:
    plain, outcome = evalkit("rescore", "nowhere"), evalkit("rescore", "nowhere", "--debug")
    assert outcome.err.startswith("Traceback")
    assert (outcome.code, outcome.err.splitlines()[-1]) == (plain.code, plain.err.strip())


def test_an_error_in_a_thread_is_one_line(evalkit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> list[object]:
        thread = threading.Thread(target=lambda: [][0])
        thread.start()
        thread.join()
        return []

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("evalkit.benchmarks.run_listing.list_found", fail)
    outcome = evalkit("ls", "runs")
    assert (outcome.code, len(outcome.err.splitlines())) == (0, 1)
    assert "IndexError" in outcome.err


# Completion


def completed(*words: str) -> list[str]:
    """Return the completions of the last word; "file" where a path is accepted."""
    *before, begun = words
    items = BashComplete(cli, {}, "evalkit", "_EVALKIT_COMPLETE").get_completions(before, begun)
    return [item.value if item.type == "plain" else item.type for item in items]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["comp"], ["compare"]),
        (["run", "--sui"], ["--suite"]),
        (["run", "--suite", "zeroshot8_"], ["zeroshot8_text"]),
        (["run", "--suite", "my_suite.y"], ["file"]),
        (["run", "--tasks", "piqa,arc_"], ["piqa,arc_easy", "piqa,arc_challenge"]),
        (["rescore", "x", "--rule", "acc_n"], ["acc_norm"]),
        (["export", "x", "--to", "h"], ["hub"]),
        (["table", "main"], ["main_res"]),
        (["run", "--data-dir", "here"], ["file"]),
        (["export", "x"], ["file"]),
        (["nonsense", "--x"], []),
    ],
)
def test_completion(words: list[str], expected: list[str]) -> None:
    assert completed(*words) == expected


def test_completion_of_runs(finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_OUTPUT", str(finished.folder.parent))
    assert finished.folder.name in completed("compare", "one", finished.folder.name[:5])
