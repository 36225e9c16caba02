"""`evalkit longbench` through its real entry point: runs, bad input, and its runs in other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from tests.arguments import arguments
from tests.benchmarks.longbench.made import record, write
from tests.cli.test_root import Command, Outcome, _no_settings, complains, evalkit
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


def test_a_run_and_what_reads_it(longbench: Command, evalkit: Command) -> None:
    first = longbench()
    assert first.code == 0
    lines = first.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("Qasper", "TREC", "LCC"))] == [
        "Qasper*", "TREC*", "LCC*"]  # fmt: skip
    assert "Mean of groups (3 of 16 tasks)" in first.out
    # Finished: the same at once, without messages
    assert longbench() == Outcome(0, first.out, "")
    folder = Path(lines[-1])
    [listed] = json.loads(evalkit("ls", "runs", "--output", "runs", "--format", "json").out)
    assert "mean of groups (3 of 16 tasks) " in listed["result"]
    drawn = evalkit("longbench", "rescore", folder, "--plot", "lengths.png", "--format", "json")
    assert [task["task"] for task in json.loads(drawn.out)["tasks"]] == list(TASKS)
    assert Path("lengths.png").stat().st_size > 1000
    # Graded scores are no choices
    complains(evalkit("rescore", folder), 2, "benchmark longbench")
    complains(evalkit("integrity", folder), 2, "longbench", "zeroshot8")
    complains(evalkit("export", folder, "--to", "lm_eval", "--output", "exported"), 2, "lm-eval")
    assert evalkit("export", folder, "--to", "hub", "--output", "exported").code == 0
    assert "THUDM/LongBench" in Path("exported/model_card.md").read_text(encoding="utf-8")
    assert evalkit("compare", folder, Path(longbench("--limit", 1).out.splitlines()[-1])).code == 0
    # Options are after the name of the command
    complains(evalkit("longbench", "--format", "latex", "rescore", folder), 2, "longbench rescore")
    pytest.importorskip("rapidfuzz")
    other = evalkit("longbench", "rescore", folder, "--format", "json", "--edit-similarity", "rapidfuzz")
    assert json.loads(other.out)["edit_similarity"] == "rapidfuzz"


def test_results_say_what_they_are_of(longbench: Command, evalkit: Command, model: Path) -> None:
    """Checkpoint, window and context extension, in every format; by default the paper's context."""
    about = f"{model}, float32, plain prompts, cut above 400 tokens of a context of 8,192"
    extension = "context stretched from 1,024 to 8,192 tokens by yarn: factor 8"
    table = longbench("--context", 8192)
    folder = table.out.splitlines()[-1]
    assert about in table.out
    assert extension in table.out
    assert about in json.loads(evalkit("longbench", "rescore", folder, "--format", "json").out)["notes"]
    assert about in evalkit("longbench", "rescore", folder, "--format", "csv").err
    options = ["--data-dir", "rows", "--tasks", ",".join(TASKS), "--limit", 2, "--max-prompt-tokens", 400, "-o", "runs"]
    bare = evalkit("longbench", model, *options)
    assert bare.out == table.out
    assert "--context none" in longbench("--context-method", "linear", "--context", "none").err


def test_positions_that_cannot_be_extended(evalkit: Command, rows: Path, tmp_path: Path) -> None:
    """The model is not silently run without extension; with `--context none` it runs."""
    folder = tiny_tokenizer(tmp_path / "gpt2")
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=512, vocab_size=512, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    bare = ["longbench", "--model", folder, "--data-dir", rows, "--tasks", "lcc", "--limit", 1]
    complains(evalkit(*bare), 1, "gpt2", "--context none")
    assert "of a context of 512" in evalkit(*bare, "--context", "none").out


def test_a_damaged_task_is_left_out(longbench: Command, rows: Path) -> None:
    with (rows / "trec.jsonl").open("ab") as file:
        file.write(b'{"torn')
    outcome = longbench("--limit", 10)
    assert (outcome.code, "Mean of groups (2 of 16 tasks)" in outcome.out) == (1, True)
    assert f"left out: data-dir {rows / 'trec.jsonl'}, line 7 (trec)" in outcome.err.splitlines()[-1]
    # Repeated: the same, at once
    again = longbench("--limit", 10)
    assert (again.code, again.out) == (1, outcome.out)


@pytest.mark.parametrize(
    ("options", "code", "nouns"),
    [
        (["--max-prompt-tokens", "1000"], 2, ["--max-prompt-tokens 1000", "2 to 896"]),
        (["--context", "long"], 2, ["--context", "long"]),
        (["--tasks", "narativeqa"], 2, ["narativeqa", "narrativeqa"]),
        (["--tasks", ","], 2, ["--tasks"]),
        (["--suite", "longbench-e", "--tasks", "qmsum"], 2, ["qmsum"]),
        (["--tasks", "qmsum"], 1, ["qmsum", "--data-dir"]),
        (["--data-dir", "nowhere"], 1, ["--data-dir nowhere"]),
        (["--chat"], 1, ["--chat"]),
        (["--model", "nowhere"], 1, ["nowhere"]),
        (["--plot", "lengths.gif"], 2, ["--plot lengths.gif"]),
    ],
)
def test_bad_input(longbench: Command, options: list[str], code: int, nouns: list[str]) -> None:
    complains(longbench(*options), code, *nouns)


def test_a_checkpoint_needs_no_flag(
    longbench: Command, evalkit: Command, model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any position; the same run is a suite of `evalkit run`, where variables set what they set elsewhere."""
    expected = longbench()
    common = ["--data-dir", rows, "--tasks", ",".join(TASKS), "--limit", 2, "--context", "none", "--output", "runs"]
    assert evalkit("longbench", *common, "--max-prompt-tokens", 400, model).out == expected.out
    assert evalkit("run", model, "--suite", "longbench", *common, "--set", "max_prompt_tokens=400").out == expected.out
    complains(evalkit("longbench", model, "--model", model, *common), 2, "checkpoint")
    suite = ["run", model, "--suite", "longbench"]
    complains(evalkit(*suite, *common, "--template", "inst"), 2, "--template", "--set")
    monkeypatch.setenv("EVALKIT_MAX_PROMPT_TOKENS", "400")
    assert evalkit(*suite, *common).out == expected.out
    complains(evalkit(*suite, *common, "--set", "chat=maybe"), 2, "--chat")
    monkeypatch.setenv("EVALKIT_SUITE", "my.yaml")  # of another command
    assert evalkit("longbench", model, *common).out == expected.out
