"""Commands that compute: longbench, models, study, and run on several checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from evalkit.models.zoo.named import models, named_model
from tests.arguments import arguments
from tests.benchmarks.longbench.made import record, write
from tests.cli.conftest import Command, Outcome, complains
from tests.models.small import TEXT, small
from tests.studies.conftest import files, folder
from tests.studies.made import write_study
from tests.tiny import TRAINING_TEXT, tiny_checkpoint, tiny_tokenizer

TASKS = ("qasper", "trec", "lcc")


__all__ = ["files", "folder"]  # fixtures

# longbench


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture
def longbench(evalkit: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `evalkit longbench` on synthetic rows; later options override these."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for task in TASKS:
        records = [record(task, n, context="\n".join(TRAINING_TEXT) * (1 + n % 3)) for n in range(6)]
        write(tmp_path / "rows" / f"{task}.jsonl", records)
    common = {"--model": model, "--data-dir": "rows", "--tasks": ",".join(TASKS), "--max-prompt-tokens": 400,
              "--limit": 2, "--context": "none", "--output": "runs"}  # fmt: skip
    return lambda *more: evalkit("longbench", *arguments(common, more))


def test_longbench_and_what_reads_it(
    longbench: Command, evalkit: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run is a suite of `evalkit run`, where variables set what they set elsewhere."""
    first = longbench()
    assert first.code == 0 and "Mean of groups (3 of 16 tasks)" in first.out
    assert longbench() == Outcome(0, first.out, "")  # finished: without messages
    common = ["--data-dir", "rows", "--tasks", ",".join(TASKS), "--limit", 2, "--context", "none", "--output", "runs"]
    suite = ["run", model, "--suite", "longbench", *common]
    assert evalkit("longbench", *common, "--max-prompt-tokens", 400, model).out == first.out
    assert evalkit(*suite, "--set", "max_prompt_tokens=400").out == first.out
    complains(evalkit(*suite, "--template", "inst"), 2, "--template", "--set")
    monkeypatch.setenv("EVALKIT_MAX_PROMPT_TOKENS", "400")
    assert evalkit(*suite).out == first.out
    folder = Path(first.out.splitlines()[-1])
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
    assert evalkit("compare", folder, Path(longbench("--limit", 1).out.splitlines()[-1])).code == 0


def test_results_say_what_they_are_of(longbench: Command, evalkit: Command, model: Path, tmp_path: Path) -> None:
    """Checkpoint, window and context extension, in every format; by default the paper's context."""
    about = f"{model}, float32, plain prompts, cut above 400 tokens of a context of 8,192"
    table = longbench("--context", 8192)
    folder = table.out.splitlines()[-1]
    assert about in table.out
    assert "context stretched from 1,024 to 8,192 tokens by yarn: factor 8" in table.out
    assert about in json.loads(evalkit("longbench", "rescore", folder, "--format", "json").out)["notes"]
    assert about in evalkit("longbench", "rescore", folder, "--format", "csv").err
    options = ["--data-dir", "rows", "--tasks", ",".join(TASKS), "--limit", 2, "--max-prompt-tokens", 400, "-o", "runs"]
    assert evalkit("longbench", model, *options).out == table.out
    assert "--context none" in longbench("--context-method", "linear", "--context", "none").err
    # A model whose context cannot be extended is not silently run without
    gpt2 = tiny_tokenizer(tmp_path / "gpt2")
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=512, vocab_size=512, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    bare = ["longbench", "--model", gpt2, "--data-dir", "rows", "--tasks", "lcc", "--limit", 1]
    complains(evalkit(*bare), 1, "gpt2", "--context none")
    assert "of a context of 512" in evalkit(*bare, "--context", "none").out


# models


def test_models_are_listed_and_shown(evalkit: Command) -> None:
    listed = json.loads(evalkit("models", "ls", "--format", "json").out)
    assert [model["name"] for model in listed] == [model.name for model in models()]
    for model in models():
        assert f"{named_model(model.name).shape.attention.heads} of " in evalkit("models", "show", model.name).out
    shown = evalkit("models", "show", "llama-125m-intg-16h-8s").out
    for words in ("integral in layers 10–19 (from 0), vanilla in the others", "16 of 48 channels; 8 signals of 6",
                  "125,015,808: 24,576,000 in the embedding, 100,439,808 in the rest",
                  "61,440 bytes per token in bfloat16"):  # fmt: skip
        assert words in shown
    assert "4 pairs of maps of 96 (d_h), with values of 192" in evalkit("models", "show", "llama-125m-diff").out


@pytest.mark.parametrize("attention", ["cog", "differential", "integral"])
def test_a_made_model_is_one_that_run_accepts(
    evalkit: Command, documents: Path, tmp_path: Path, attention: str
) -> None:
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    source = small(tmp_path, attention, window=4096).source
    made = evalkit("models", "init", source, "--output", "ckpt", "--seed", 7, "--train-tokenizer", "text.txt")
    assert made.out == f"{attention}, random weights of seed 7, float32: ckpt\n"
    shown = [evalkit("models", "show", given).out.splitlines() for given in (source, "./ckpt")]
    assert shown[0][2:] == shown[1][1:]
    options = ["--data-dir", documents, "--allow-unofficial-data", "--tasks", "piqa", "--limit", 5, "--output", "runs"]
    outcome = evalkit("run", "--model", "ckpt", *options)
    assert outcome.out.splitlines()[2].split()[:2] == ["PIQA*", "5"], outcome.err
    if attention == "integral":
        complains(evalkit("models", "convert", "./ckpt", "-o", "x"), 1, "./ckpt")


# study, and run on several checkpoints


def test_a_study_is_planned_run_and_shown(folder: Path, evalkit: Command) -> None:
    """A failed run sets the exit code; problems are on a line each."""
    path = write_study(folder / "study.yaml", {"A": "vanilla", "B": "intg-seed2"})
    outcome = evalkit("study", "run", path, "--dry-run")
    assert (outcome.code, "2 runs, 2 of them not finished" in outcome.out) == (0, True)
    assert not (folder / "runs").exists()
    for command in ("run", "status"):
        assert "2 runs: 2 finished" in evalkit("study", command, path).out
    for run in (folder / "runs").glob("vanilla-*"):
        (run / "results.json").write_text("{}")
    outcome = evalkit("study", "run", path)
    assert (outcome.code, "1 finished, 1 failed" in outcome.out) == (1, True)
    assert "A on zs" in outcome.err and "results.json" in outcome.err and "Traceback" not in outcome.err
    assert "1 failed" in evalkit("study", "status", path).out
    write_study(path, {f"gone{number}": f"./nix{number}" for number in range(40)})
    outcome = evalkit("study", "run", path)
    lines = outcome.err.splitlines()[-41:]
    assert (outcome.code, outcome.out) == (1, "") and "40 problems" in lines[0]
    assert all(f"gone{number} on " in line for number, line in enumerate(lines[1:]))


def test_run_on_several_checkpoints_has_a_line_for_each(folder: Path, evalkit: Command) -> None:
    options: list[Any] = ["--data-dir", folder / "documents", "--allow-unofficial-data", "--output", folder / "adhoc",
                          "--tasks", "piqa,boolq", "--dtype", "float32", "--device", "cpu"]  # fmt: skip
    complains(evalkit("run", folder / "nix-*", *options), 2, "nix-*")
    outcome = evalkit("run", folder / "vanilla", folder / "nix", folder / "nox", *options)
    assert (outcome.code, "2 problems" in outcome.err) == (1, True)
    for option in ("--detail", "--show-prompts=1", "--model=demo"):
        outcome = evalkit("run", folder / "vanilla", folder / "intg-seed1", *options, option)
        complains(outcome, 2, option.partition("=")[0])
    assert not (folder / "adhoc").exists()
    pattern = folder / "train" / "diff-seed2" / "checkpoint-*"
    outcome = evalkit("run", "--model", pattern, *options)
    assert (outcome.code, "2 of 2 checkpoints are finished on zeroshot8" in outcome.out) == (0, True), outcome.err
    lines = [line.split() for line in outcome.out.splitlines() if "checkpoint-" in line]
    assert [line[0] for line in lines] == ["checkpoint-5", "checkpoint-10"]
    # The same numbers as single runs, which are finished now
    for line in lines:
        content = json.loads(evalkit("run", pattern.parent / line[0], *options, "--format", "json").out)
        values = [task["accuracy"] for task in content["tasks"]] + [content["averages"][-1]["accuracy"]]
        assert [float(cell) for cell in line[1:]] == pytest.approx([100 * value for value in values], abs=0.051)
    # As the shell expands the pattern: several arguments have the order in which they are given
    again = evalkit("run", *sorted(pattern.parent.glob("*")), *options).out
    assert [line.split() for line in again.splitlines() if "checkpoint-" in line] == lines[::-1]
