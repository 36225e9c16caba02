"""`evalkit longbench` through its real entry point: runs, kills, bad input, and its runs in other commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from evalkit.benchmarks.longbench.scores import load_generations
from evalkit.runs.folder import JOURNAL, load_run
from tests.arguments import arguments
from tests.benchmarks.longbench.made import record, write
from tests.cli.test_root import Command, Outcome, _no_settings, complains, evalkit
from tests.sealed import reseal
from tests.test_kills import batches_in, journal_of, wait_for
from tests.tiny import TRAINING_TEXT, tiny_checkpoint, tiny_tokenizer

__all__ = ["_no_settings", "evalkit"]  # fixtures

TASKS = ("qasper", "trec", "lcc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for task in TASKS:
        records = [record(task, n, context="\n".join(TRAINING_TEXT) * (1 + n % 3)) for n in range(6)]
        write(tmp_path / "rows" / f"{task}.jsonl", records)
    return tmp_path / "rows"


@pytest.fixture
def longbench(evalkit: Command, model: Path, rows: Path) -> Command:
    """Run `evalkit longbench` on the synthetic rows; later options override these."""
    common = {"--model": model, "--data-dir": rows, "--tasks": ",".join(TASKS), "--max-prompt-tokens": 400,
              "--limit": 2, "--context": "none", "--output": "runs"}  # fmt: skip
    return lambda *more: evalkit("longbench", *arguments(common, more))


def test_a_run(longbench: Command) -> None:
    first = longbench()
    assert first.code == 0
    lines = first.out.splitlines()
    assert load_run(lines[-1]).complete
    assert [line.split()[0] for line in lines if line.startswith(("Qasper", "TREC", "LCC"))] == [
        "Qasper*", "TREC*", "LCC*"]  # fmt: skip
    assert "Mean of groups (3 of 16 tasks)" in first.out
    assert "about 1 min, and up to 0.0 GiB beside the model" in first.err
    # Finished: the same at once, without messages
    assert longbench() == Outcome(0, first.out, "")


def test_results_say_what_they_are_of(longbench: Command, evalkit: Command, model: Path) -> None:
    """Checkpoint, window and context extension, in every format."""
    about = f"{model}, float32, plain prompts, cut above 400 tokens of a context of 2,048"
    context = "context stretched from 1,024 to 2,048 tokens by yarn: factor 2"
    table = longbench("--context", 2048)
    folder = table.out.splitlines()[-1]
    assert about in table.out
    assert context in table.out
    assert about in json.loads(evalkit("longbench", "rescore", folder, "--format", "json").out)["notes"]
    lines = evalkit("longbench", "rescore", folder, "--format", "csv")
    assert about in lines.err
    assert "lcc,Code Completion,edit_similarity,difflib,2," in lines.out
    [listed] = json.loads(evalkit("ls", "runs", "--output", "runs", "--format", "json").out)
    assert (listed["documents"], listed["context"]) == ("limit 2", "2,048 by yarn")


def test_the_papers_context_is_the_default(evalkit: Command, model: Path, rows: Path) -> None:
    """Announced, printed with the scores, and the run that `--context 8192` makes."""
    bare = [
        "longbench",
        "--model",
        model,
        "--data-dir",
        rows,
        "--tasks",
        "lcc",
        "--max-prompt-tokens",
        400,
        "--limit",
        1,
    ]
    first = evalkit(*bare)
    assert first.code == 0
    stretched = "context stretched from 1,024 to 8,192 tokens by yarn: factor 8, beta 32/1, attention factor 1.20794"
    [announced] = [line for line in first.err.splitlines() if line.startswith(stretched) and "--context none" in line]
    assert "cut above 400 tokens of a context of 8,192" in first.out
    assert stretched in first.out
    # In the lines of the model that was loaded too
    assert first.err.index(announced) < first.err.index("LlamaForCausalLM")
    assert evalkit(*bare, "--context", 8192).out == first.out
    left = evalkit(*bare, "--context", "none")
    assert "stretched" not in left.out + left.err
    assert "of a context of 1,024" in left.out
    assert left.out.splitlines()[-1] != first.out.splitlines()[-1]
    complains(evalkit(*bare, "--context", "long"), 2, "--context is 'long'; it must be a whole number, or none")


def test_positions_without_context_extension(evalkit: Command, rows: Path, tmp_path: Path) -> None:
    """The model is not silently run without extension; with `--context none` it runs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tiny_tokenizer(tmp_path / "gpt2")
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=512, vocab_size=512, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    bare = ["longbench", "--model", folder, "--data-dir", rows, "--tasks", "lcc", "--limit", 1]
    complains(evalkit(*bare), 1, "model type 'gpt2' has no rope_parameters", "give --context none")
    assert "of a context of 512" in evalkit(*bare, "--context", "none").out


def test_options_stand_where_they_are_read(longbench: Command, evalkit: Command) -> None:
    folder = longbench().out.splitlines()[-1]
    before = evalkit("longbench", "--format", "latex", "rescore", folder)
    complains(before, 2, "give the options of evalkit longbench rescore after its name")
    complains(evalkit("longbench", "--tasks", "trec"), 2, "name a checkpoint: evalkit longbench run CKPT")
    complains(longbench("--tasks", ","), 2, "--tasks ,: contains no name")
    Path("own.yaml").write_text("max-prompt-tokens:\n  tokens: 3\n")
    complains(longbench("--config", "own.yaml"), 2, "own.yaml: key 'max-prompt-tokens'")


def test_a_table_without_a_column_is_damaged(longbench: Command, evalkit: Command) -> None:
    folder = Path(longbench().out.splitlines()[-1])
    table = pd.read_parquet(folder / "generations.parquet")
    table.drop(columns="answers").to_parquet(folder / "generations.parquet")
    reseal(folder)
    complains(evalkit("longbench", "rescore", folder), 1, "generations.parquet is damaged (it has no column answers)")


def test_looking_at_a_run(longbench: Command, evalkit: Command) -> None:
    folder = Path(longbench().out.splitlines()[-1])
    listed = evalkit("ls", "runs", "--output", "runs")
    [header, _, line] = listed.out.splitlines()[:3]
    assert folder.name.endswith(f"longbench-plain-float32-{load_run(folder).manifest['id']}")
    assert folder.name[-12:].startswith(line.split()[0])
    assert line[header.index("settings") :].startswith("limit 2 ")
    assert "longbench plain" in line
    [about] = json.loads(evalkit("ls", "runs", "--output", "runs", "--format", "json").out)
    assert "mean of groups (3 of 16 tasks) " in about["result"]
    table = evalkit("longbench", "rescore", folder)
    assert table.code == 0
    assert "Mean of groups (3 of 16 tasks)" in table.out
    found = json.loads(evalkit("longbench", "rescore", folder, "--format", "json").out)
    assert [task["task"] for task in found["tasks"]] == list(TASKS)
    drawn = evalkit("longbench", "rescore", folder, "--plot", "lengths.png", "--format", "csv")
    assert drawn.code == 0
    assert Path("lengths.png").stat().st_size > 1000
    pytest.importorskip("rapidfuzz")
    other = evalkit("longbench", "rescore", folder, "--format", "json", "--edit-similarity", "rapidfuzz")
    assert json.loads(other.out)["edit_similarity"] == "rapidfuzz"


def test_commands_that_choose_between_answers_refuse_it(longbench: Command, evalkit: Command) -> None:
    one, two = (Path(longbench("--limit", limit).out.splitlines()[-1]) for limit in (1, 2))
    words = ("has no choices that a rule could decide between", "benchmark longbench has its own metrics")
    complains(evalkit("rescore", one), 2, *words)
    complains(evalkit("rescore", one, "--rule", "acc"), 2, *words)
    assert evalkit("compare", one, two).code == 0  # document by document, as graded scores
    complains(evalkit("integrity", one), 2, "is of suite longbench; the published numbers are of suite zeroshot8")
    complains(evalkit("export", one, "--to", "lm_eval", "--output", "exported"), 2, "has no files in lm-eval's format")
    assert evalkit("export", one, "--to", "hub", "--output", "exported").code == 0
    assert "path: THUDM/LongBench" in Path("exported/model_card.md").read_text(encoding="utf-8").replace(
        "type:", "path:"
    )


def test_a_damaged_task_is_left_out(longbench: Command, rows: Path) -> None:
    with (rows / "trec.jsonl").open("ab") as file:
        file.write(b'{"torn')
    outcome = longbench("--limit", 10)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith(f"evalkit: left out: data-dir {rows / 'trec.jsonl'}, line 7 (trec): expected one JSON")
    assert "Mean of groups (2 of 16 tasks)" in outcome.out
    run = load_run(outcome.out.splitlines()[-1])
    assert set(load_generations(run)["task"]) == {"qasper", "lcc"}
    # Repeated: the same, at once
    again = longbench("--limit", 10)
    assert (again.code, again.out) == (1, outcome.out)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (
            ["--max-prompt-tokens", "1000"],
            2,
            ["--max-prompt-tokens 1000: the model takes 1024 tokens", "give a --max-prompt-tokens of 2 to 896"],
        ),
        (["--max-prompt-tokens", "0"], 2, ["--max-prompt-tokens is 0; it must be at least 1"]),
        (["--context", "4096", "--context-method", "dynamic-yarn"], 2, ["dynamic-yarn", "use yarn"]),
        (["--tasks", "narativeqa"], 2, ["unknown longbench task 'narativeqa': did you mean 'narrativeqa'?"]),
        (["--suite", "longbench-e", "--tasks", "qmsum"], 2, ["unknown longbench-e task 'qmsum'"]),
        (["--tasks", "qmsum"], 1, ["no documents for qmsum", "the hub cannot be used", "--data-dir"]),
        (["--data-dir", "nowhere"], 1, ["--data-dir nowhere: expected a folder"]),
        (["--chat"], 1, ["the tokenizer has no chat template; leave out --chat"]),
        (["--model", "nowhere"], 1, ["nowhere"]),
        (["--device", "abacus"], 2, ["--device abacus: not a device"]),
        (["--token-budget", "few"], 2, ["--token-budget is 'few'; it must be a whole number"]),
        (["--format", "xml"], 2, ["xml"]),
        (["--plot", "lengths.gif"], 2, ["--plot lengths.gif: figures are written as .png, .pdf or .svg"]),
    ],
)
def test_bad_input(longbench: Command, options: list[str], code: int, words: list[str]) -> None:
    complains(longbench(*options), code, *words)


def test_no_documents_at_all(evalkit: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = evalkit("longbench", "--model", model, "--tasks", "qasper")
    complains(outcome, 1, "no documents for qasper", "Unpack data.zip of the dataset THUDM/LongBench", "--data-dir")
    assert outcome.err.count("Unpack data.zip") == 1


def test_help(evalkit: Command) -> None:
    assert "evalkit longbench rescore RUN" in evalkit("longbench").out
    assert "--max-prompt-tokens" in evalkit("longbench", "--help").out
    assert "--plot" in evalkit("longbench", "rescore", "--help").out
    complains(evalkit("longbench", "rescor", "x"), 2, "extra argument")


def test_a_checkpoint_needs_no_flag(longbench: Command, evalkit: Command, model: Path, rows: Path) -> None:
    """At any position; the same run is a suite of `evalkit run`."""
    expected = longbench()
    common = ["--data-dir", rows, "--tasks", ",".join(TASKS), "--limit", 2, "--context", "none", "--output", "runs"]
    assert evalkit("longbench", model, *common, "--max-prompt-tokens", 400).out == expected.out
    assert evalkit("longbench", *common, "--max-prompt-tokens", 400, model).out == expected.out
    assert evalkit("run", model, "--suite", "longbench", *common, "--set", "max_prompt_tokens=400").out == expected.out
    complains(evalkit("longbench", model, "--model", model, *common), 2, "the checkpoint is given twice")


def test_what_a_suite_has_not(evalkit: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected as an option, and ignored as a variable of other commands."""
    asked = ["run", model, "--suite", "longbench", "--tasks", "lcc", "--data-dir", "nowhere"]
    complains(evalkit(*asked, "--template", "inst"), 2, "--template: suite longbench has no such setting; it has --set")
    monkeypatch.setenv("EVALKIT_TEMPLATE", "inst")
    complains(evalkit(*asked), 1, "--data-dir nowhere: expected a folder")
    monkeypatch.setenv("EVALKIT_SUITE", "my.yaml")
    complains(evalkit("longbench", model, "--tasks", "lcc", "--data-dir", "nowhere"), 1, "--data-dir nowhere")
    complains(evalkit("run", model, "--suite", "longbnech"), 2, "unknown suite 'longbnech': did you mean 'longbench'")
    monkeypatch.setenv("EVALKIT_SUITE", "longbnech")
    complains(evalkit("longbench", model, "--tasks", "lcc", "--data-dir", "nowhere"), 2, "'longbnech' is not one of")


def test_variables_set_what_they_set_elsewhere(
    longbench: Command, evalkit: Command, model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = longbench("--max-prompt-tokens", "300")
    monkeypatch.setenv("EVALKIT_MAX_PROMPT_TOKENS", "300")
    monkeypatch.setenv("EVALKIT_CHAT", "0")
    common = ["--data-dir", rows, "--tasks", ",".join(TASKS), "--limit", 2, "--context", "none", "--output", "runs"]
    assert evalkit("run", model, "--suite", "longbench", *common).out == expected.out
    complains(evalkit("run", model, "--suite", "longbench", *common, "--set", "chat=maybe"), 2, "--chat is 'maybe'")
    complains(evalkit("longbench", model, "--tasks", "score", *common[:2]), 2, "unknown longbench task 'score'")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_the_command_is_killed_and_given_again(
    longbench: Command, model: Path, rows: Path, kind: signal.Signals
) -> None:
    """The table equals an uninterrupted run's, and nothing is generated twice."""
    budget = ["--token-budget", "1100", "--limit", "6"]
    expected = load_generations(load_run(longbench(*budget, "--output", "undisturbed").out.splitlines()[-1]))
    batches, output = batches_in(Path("undisturbed")), Path("disturbed")
    process = subprocess.Popen(
        [sys.executable, "-m", "evalkit", "longbench", "--model", str(model), "--data-dir", str(rows), "--tasks",
         ",".join(TASKS), "--max-prompt-tokens", "400", "--context", "none", *budget, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_for(lambda: batches_in(output) >= 2 or process.poll() is not None, 120)
    process.send_signal(kind)
    out, err = process.communicate()
    assert out == ""
    assert "Traceback" not in err
    assert process.returncode == (130 if kind == signal.SIGINT else -signal.SIGKILL)
    assert 2 <= batches_in(output) < batches
    kept = journal_of(output).read_bytes()
    again = longbench(*budget, "--output", output)
    assert again.code == 0
    run = load_run(again.out.splitlines()[-1])
    pd.testing.assert_frame_equal(
        load_generations(run).drop(columns="seconds"), expected.drop(columns="seconds"), check_exact=True
    )
    assert (run.folder / JOURNAL).read_bytes().startswith(kept.rpartition(b"\n")[0])
    assert batches_in(output) == batches
