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

from evalkit.cli import main
from evalkit.runs.folder import Run, load_run
from tests.arguments import arguments
from tests.documents import made_up, rewrite


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


def test_a_run_prints_its_table_and_where_it_is(run: Command) -> None:
    outcome = run()
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].split()[:3] == ["task", "n", "acc."]
    assert [line.split()[0] for line in lines[2:5]] == ["PIQA*", "BoolQ*", "Knowledge"]
    assert lines[2].split()[1] == "2"
    assert "rule ppl: lowest perplexity of the whole sequence" in outcome.out
    assert "*: not the official documents of the task" in outcome.out
    assert load_run(lines[-1]).complete
    assert "LlamaForCausalLM" in outcome.err


def test_the_same_again_prints_the_same_at_once(run: Command) -> None:
    first, again = run(), run()
    assert again == Outcome(0, first.out, "")


def test_json(run: Command) -> None:
    outcome = run("--format", "json", "--rule", "acc_norm")
    content = json.loads(outcome.out)
    assert content["rule"] == "acc_norm"
    assert [task["task"] for task in content["tasks"]] == ["piqa", "boolq"]
    [folder] = Path("runs").iterdir()
    finished = load_run(folder)
    assert content.items() >= json.loads(json.dumps(finished.results("acc_norm").to_json())).items()
    assert (content["run"], content["folder"]) == (finished.manifest["id"], str(folder))
    assert content["seconds"].keys() == content["documents"].keys() == {"piqa", "boolq"}


def test_detail_shows_the_subjects(run: Command) -> None:
    outcome = run("--tasks", "mmlu", "--limit", 3, "--detail")
    assert [
        line.split()[:2] for line in outcome.out.splitlines() if line.startswith(("abstract", "anat", "astro"))
    ] == [
        ["abstract_algebra", "1"],
        ["anatomy", "1"],
        ["astronomy", "1"],
    ]


def test_hyphens_and_underscores(evalkit: Command, checkpoint: Path, documents: Path) -> None:
    outcome = evalkit("run", "--model", checkpoint, "--data_dir", documents, "--allow_unofficial_data",
                      "--token_budget", "512", "--tasks", "piqa", "-L", "1", "-o", "runs")  # fmt: skip
    assert outcome.code == 0


def test_prompts_are_shown_and_nothing_is_scored(run: Command) -> None:
    outcome = run("--show-prompts", 1, "--tasks", "boolq")
    assert outcome.code == 0
    assert outcome.out.startswith("boolq document 0, gold answer ")
    assert "<s>[INST] You are a knowledgeable assistant." in outcome.out
    assert outcome.out.count(" tokens: special ") == 2
    assert not Path("runs").exists()


def test_rescoring(evalkit: Command, finished: Run) -> None:
    outcome = evalkit("rescore", finished.folder, "--rule", "acc")
    assert outcome.code == 0
    assert "rule acc: " in outcome.out
    assert outcome.out.splitlines()[-1] == str(finished.folder)
    assert "acc <" in outcome.out
    own = evalkit("rescore", finished.folder)
    assert "rule ppl: " in own.out
    complains(evalkit("rescore", finished.folder, "--rule", "pmi"), 2, "rule pmi", "--rule pmi")
    complains(evalkit("rescore", finished.folder, "--rule", "ac"), 2, "unknown rule 'ac'", "did you mean 'acc'")
    complains(evalkit("rescore", "nowhere"), 2, "unknown run 'nowhere'", "none in results/runs")


# Settings from three places


def test_environment(evalkit: Command, checkpoint: Path, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": checkpoint, "DATA_DIR": documents, "ALLOW_UNOFFICIAL_DATA": "1", "TASKS": "piqa",
                        "LIMIT": "1", "OUTPUT": "by-environment", "FORMAT": "json"}.items():  # fmt: skip
        monkeypatch.setenv(f"EVALKIT_{name}", str(value))
    outcome = evalkit("run")
    assert outcome.code == 0
    assert [task["n"] for task in json.loads(outcome.out)["tasks"]] == [1]
    assert evalkit("run", "--limit", 2).out.count('"n": 2') == 1
    assert len(list(Path("by-environment").iterdir())) == 2
    limits = [run["documents"] for run in json.loads(evalkit("ls", "runs", "--format", "json").out)]
    assert sorted(limits) == ["limit 1", "limit 2"]


def test_command_line_over_environment_over_file(
    evalkit: Command, checkpoint: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": str(checkpoint), "data_dir": str(documents), "allow-unofficial-data": True, "limit": 1,
                "tasks": ["piqa", "boolq"], "format": "json", "rule": "acc", "token-budget": None,
                "output": "runs"}  # fmt: skip
    Path("settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")

    def limit_and_rule(*more: str) -> tuple[int, str]:
        outcome = evalkit("run", "--config", "settings.yaml", *more)
        assert outcome.code == 0, outcome.err
        content = json.loads(outcome.out)
        assert len(content["tasks"]) == 2
        return content["tasks"][0]["n"], content["rule"]

    assert limit_and_rule() == (1, "acc")
    monkeypatch.setenv("EVALKIT_LIMIT", "2")
    assert limit_and_rule() == (2, "acc")
    assert limit_and_rule("--limit", "3", "--rule", "ppl") == (3, "ppl")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("limt: 3", ["unknown key 'limt'", "did you mean 'limit'"]),
        ("form: json", ["unknown key 'form'", "did you mean 'format'"]),
        ("- model", ["must contain keys and values"]),
        ("a: [", ["settings.yaml, line 1: not valid YAML"]),
        ("limit: many", ["settings.yaml: key 'limit': 'many' is not a valid integer"]),
        ("model: x\nconfig: y", ["unknown key 'config'"]),
        ("set: [window]", ["--set window: write KEY=VALUE"]),
        ("set: [[a]]", ["key 'set' must be a string, or a list of strings"]),
    ],
)
def test_invalid_config_files(evalkit: Command, content: str, words: list[str]) -> None:
    Path("settings.yaml").write_text(content, encoding="utf-8")
    complains(evalkit("run", "--config", "settings.yaml", "--model", "x"), 2, *words)


# Errors of bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["unknown command 'rnu'", "did you mean 'run'"]),
        (["run"], ["name a checkpoint: evalkit run CKPT, or --model CKPT", "evalkit run --help"]),
        (["run", "--modle", "x"], ["No such option '--modle'", "--model"]),
        (["run", "--model", "x", "--limit", "ten"], ["--limit", "'ten' is not a valid integer"]),
        (["run", "--model", "x", "--token-budget", "many"], ["--token-budget is 'many'", "auto"]),
        (["run", "--model", "x", "--show-prompts", "-1"], ["--show-prompts", "-1"]),
        (
            ["run", "--model", "x", "--format", "xml"],
            ["--format", "'xml'", "'terminal', 'markdown', 'latex', 'html', 'csv', 'json'"],
        ),
        (["run", "--config", "nowhere.yaml"], ["config file nowhere.yaml cannot be read", "No such file"]),
        (["ls", "rules", "more"], ["unexpected extra argument"]),
        (["ls", "ruls"], ["unknown list 'ruls'", "did you mean 'rules'"]),
        (["rescore"], ["Missing argument 'RUN'"]),
        (["rescore", ""], ["RUN is empty; give a value"]),
        (["data", "--tasks", "piqqa"], ["unknown task 'piqqa'", "did you mean 'piqa'"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    outcome = evalkit(*arguments)
    complains(outcome, 2, *words)
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "zeroshot"], ["unknown suite 'zeroshot'", "did you mean 'zeroshot8'"]),
        # lm-eval's catalogue is read first
        pytest.param(["--tasks", "piqa,bolq"], ["unknown task 'bolq'", "mean 'boolq'"], marks=pytest.mark.slow),
        (["--template", "isnt"], ["unknown template 'isnt'", "did you mean 'inst'"]),
        (["--rule", "acc-norm"], ["unknown rule 'acc-norm'", "did you mean 'acc_norm'"]),
        (["--dtype", "fp32"], ["unknown dtype 'fp32'"]),
        (["--attention", "flash"], ["unknown attention implementation 'flash'"]),
        (["--limit", "0"], ["--limit is 0"]),
        (["--template", "plain", "--rule", "ppl"], ["rule ppl", "template plain", "--template inst"]),
    ],
)
def test_names_that_do_not_exist(run: Command, arguments: list[str], words: list[str]) -> None:
    complains(run(*arguments), 2, *words)
    assert not Path("runs").exists()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, ["broken", "file or folder not found"]),
        (_empty, ["broken", "the folder is empty", "config.json"]),
        (lambda folder: _cut(folder / "model.safetensors"), ["model.safetensors"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"garbage" * 99), ["model.safetensors"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["broken", "safetensors"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["broken", "tokenizer"]),
        (lambda folder: _configure(folder, model_type="bert", architectures=["BertForMaskedLM"]), ["BertForMaskedLM"]),
    ],
)
def test_invalid_checkpoints(run: Command, checkpoint: Path, damage: Callable[[Path], Any], words: list[str]) -> None:
    damage(shutil.copytree(checkpoint, Path("broken")))
    complains(run("--model", "./broken"), 1, *words)
    nothing_whole()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: rewrite(path, 2, {"goal": None}), ["piqa.jsonl", "line 2", "goal"]),
        (lambda path: rewrite(path, 3, {"label": 2}), ["piqa.jsonl", "line 3", "label", "2"]),
        (lambda path: rewrite(path, 3, '{"goal": "x", '), ["piqa.jsonl", "line 3", "JSON"]),
        (lambda path: path.write_bytes(b""), ["piqa.jsonl", "found none"]),
        (lambda path: path.write_bytes(b"\xff\xfe"), ["piqa.jsonl", "UTF-8"]),
    ],
)
def test_invalid_documents(run: Command, damage: Callable[[Path], Any], words: list[str]) -> None:
    damage(made_up(Path("documents")) / "piqa.jsonl")
    complains(run("--data-dir", "documents"), 1, *words)
    assert not Path("runs").exists()


def test_a_subject_without_documents(run: Command) -> None:
    path = made_up(Path("documents")) / "mmlu.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "anatomy" not in line), encoding="utf-8")
    complains(run("--data-dir", "documents", "--tasks", "mmlu"), 1, "mmlu", "subject anatomy")
    nothing_whole()


def test_documents_that_are_not_the_official_ones(evalkit: Command, checkpoint: Path, documents: Path) -> None:
    outcome = evalkit("run", "--model", checkpoint, "--data-dir", documents, "--tasks", "piqa", "--output", "runs")
    complains(outcome, 1, "piqa", "expected the official 1838 documents", "found 6", "--allow-unofficial-data")
    assert not Path("runs").exists()
    complains(evalkit("run", "--model", checkpoint, "--data-dir", "nowhere"), 1, "--data-dir nowhere", "nothing there")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("parts:\n  - context: '{context}'\n", ["own.yaml", "{continuation}"]),
        ("parts:\n  - contxt: '{context}'\n", ["own.yaml", "parts[0]", "unknown key 'contxt'", "'context'"]),
        ("parts: [", ["own.yaml, line 1: not valid YAML"]),
        ("part: []", ["own.yaml", "unknown key 'part'"]),
    ],
)
def test_invalid_templates(run: Command, content: str, words: list[str]) -> None:
    Path("own.yaml").write_text(content, encoding="utf-8")
    complains(run("--template", "own.yaml"), 1, *words)
    assert not Path("runs").exists()


def test_invalid_output(run: Command) -> None:
    Path("file").touch()
    complains(run("--output", "file"), 1, "output folder file/", "choose another --output")
    complains(run("--output", "file/below"), 1, "output folder file/below/", "choose another --output")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system where nobody may write")
def test_an_output_without_write_permission(run: Command) -> None:
    complains(run("--output", "/proc/runs"), 1, "/proc/runs", "choose another --output")


def test_a_damaged_run_says_what_to_do(run: Command) -> None:
    out = run().out
    folder = Path(out.splitlines()[-1])
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for name, deleted in (
        ("results.json", "results.json"),
        ("scores.parquet", "results.json"),
        ("manifest.json", "it"),
    ):
        (folder / name).write_bytes(whole[name][:50])
        complains(run(), 1, name, "is damaged", f"delete {deleted} and run its command again")
        # Following the advice brings the result back, without the model
        (folder / (name if deleted == "it" else deleted)).unlink()
        assert run() == Outcome(0, out, "")
        whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_interrupted(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from evalkit.runs.journal import Journal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", interrupt)
    complains(run(), 130, "interrupted", "run the same command again")
    nothing_whole()


# Listing commands


def test_lists(evalkit: Command, own_run: Path) -> None:
    everything = evalkit("ls", "--output", own_run.parent)
    assert everything.code == 0
    for word in ("zeroshot8", "winogrande", "14,042", "the paper's", "acc_norm", own_run.name[-12:-5]):
        assert word in everything.out
    rules = json.loads(evalkit("ls", "rules", "--format", "json").out)["rows"]
    assert [row["rule"] for row in rules] == [
        "ppl",
        "ppl_continuation",
        "ppl_continuation_end",
        "acc",
        "acc_norm",
        "acc_bytes",
        "acc_token",
        "pmi",
    ]
    assert "none in nowhere" in evalkit("ls", "runs", "--output", "nowhere").out


def test_a_run_that_was_interrupted_is_listed_so(evalkit: Command, own_run: Path) -> None:
    average = load_run(own_run).results().average
    shown = evalkit("ls", "runs", "-o", own_run.parent).out
    assert f"{100 * average.accuracy:.1f} ± {100 * average.stderr:.1f} (ppl)" in shown
    (own_run / "results.json").unlink()
    assert "interrupted" in evalkit("ls", "runs", "-o", own_run.parent).out


def test_data_says_where_documents_are(evalkit: Command, documents: Path) -> None:
    outcome = evalkit("data", "--data-dir", documents, "--tasks", "piqa")
    assert outcome.code == 0
    assert "piqa" in outcome.out
    assert "data-dir" in outcome.out
    assert "expected the official 1838 documents" in outcome.out


def test_data_of_the_official_documents(evalkit: Command, shared_data: Path) -> None:
    outcome = evalkit("data", "--data-dir", shared_data / "zeroshot8", "--tasks", "openbookqa,piqa")
    rows = [line.split() for line in outcome.out.splitlines()[2:] if line and line[0] != " "]
    assert [(*row[:3], row[-1]) for row in rows] == [
        ("openbookqa", "data-dir", "official,", "500"),
        ("piqa", "data-dir", "official,", "1,838"),
    ]


def test_doctor(evalkit: Command, documents: Path) -> None:
    outcome = evalkit("doctor", "--data-dir", documents)
    assert outcome.code == 0
    for word in ("python", "torch", "lm-eval", "0.4.13", "memory", "8 of 8 tasks here", "GiB free"):
        assert word in outcome.out


# As a process


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "evalkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["ls", "templates"], ["rnu"]])
def test_starts_without_anything_heavy(arguments: list[str]) -> None:
    imported = {line.rpartition("|")[2].strip() for line in process(*arguments).stderr.splitlines()}
    assert "click" in imported
    assert imported.isdisjoint({"torch", "transformers", "datasets", "lm_eval"})
    assert "pandas" not in imported or arguments[0] == "ls"


def test_rescoring_needs_no_torch(finished: Run) -> None:
    done = process("rescore", str(finished.folder), "--rule", "acc_bytes")
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "transformers", "datasets", "lm_eval"})


def test_a_reader_that_leaves_gets_no_traceback(finished: Run) -> None:
    listing = subprocess.Popen(
        [sys.executable, "-m", "evalkit", "ls"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert listing.stdout is not None
    assert listing.stderr is not None
    listing.stdout.close()
    assert listing.stderr.read() == ""
    listing.stderr.close()
    listing.wait()


def test_memory_that_runs_out(evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("evalkit.benchmarks.run_listing.list_found", full)
    complains(evalkit("ls", "runs"), 1, "evalkit: out of memory; ")


@pytest.mark.parametrize("raised", [KeyError("tasks"), RecursionError("too deep\nin a file"), BaseException("panic")])
def test_an_unexpected_error_is_one_line_and_a_report(
    evalkit: Command, monkeypatch: pytest.MonkeyPatch, raised: BaseException, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("evalkit.benchmarks.run_listing.list_found", fail)
    outcome = evalkit("ls", "runs")
    [report] = tmp_path.glob("evalkit-error-*.txt")
    complains(outcome, 1, f"unexpected error ({type(raised).__name__}: ", str(report), "--debug")
    assert len(outcome.err.splitlines()) == 1
    assert "Traceback" in report.read_text(encoding="utf-8")
    assert "evalkit ls runs" not in outcome.err


def test_debug_shows_the_traceback(evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = evalkit("rescore", "nowhere")
    for given in (("--debug", "rescore", "nowhere"), ("rescore", "nowhere", "--debug")):
        outcome = evalkit(*given)
        assert outcome.err.startswith("Traceback")
        assert outcome.err.splitlines()[-1] == plain.err.strip()
        assert outcome.code == plain.code == 2
    monkeypatch.setenv("EVALKIT_DEBUG", "1")
    assert "Traceback" in evalkit("rescore", "nowhere").err


def test_an_error_in_a_thread_is_one_line(evalkit: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> list[object]:
        thread = threading.Thread(target=lambda: [][0])
        thread.start()
        thread.join()
        return []

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("evalkit.benchmarks.run_listing.list_found", fail)
    outcome = evalkit("ls", "runs")
    assert outcome.code == 0
    assert outcome.err.startswith("evalkit: unexpected error (IndexError: list index out of range); a report is in ")
    assert len(outcome.err.splitlines()) == 1


def test_the_checkpoint_by_its_place(
    run: Command, evalkit: Command, checkpoint: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa", "--output", tmp_path]
    first = evalkit("run", checkpoint, *asked)
    assert first.code == 0
    assert evalkit("run", *asked, "--model", checkpoint).out == first.out
    # The command line overrides the environment
    monkeypatch.setenv("EVALKIT_MODEL", "nowhere")
    assert evalkit("run", checkpoint, *asked).out == first.out
    complains(evalkit("run", checkpoint, "--model", checkpoint), 2, "the checkpoint is given twice")


def test_variables_of_one_command_break_no_other(evalkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = evalkit("table", "main_res").out
    monkeypatch.setenv("EVALKIT_SUITE", "zeroshot8")
    assert evalkit("table", "main_res").out == expected
    assert "unknown longbench task 'x'" in evalkit("longbench", "--model", "demo", "--tasks", "x").err
    monkeypatch.setenv("EVALKIT_FORMAT", "jsn")
    complains(evalkit("table", "main_res"), 2, "'jsn' is not one of")
