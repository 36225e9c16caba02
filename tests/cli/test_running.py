"""Commands that compute: longbench, and run on several checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from evalkit.benchmarks.registry import results_of
from evalkit.runs.folder import load_run
from tests.arguments import arguments
from tests.cli.conftest import Command, Outcome, complains
from tests.longcontext.longbench.made import record, write
from tests.models.loading import edit_config
from tests.studies.conftest import files
from tests.tables.runs import mapped, written
from tests.tiny import TRAINING_TEXT, tiny_checkpoint, tiny_tokenizer

__all__ = ["files"]  # fixture
TASKS = ("qasper", "trec", "lcc")


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
    common = ["--data-dir", "rows", "--tasks", ",".join(TASKS), "--limit", 2, "--context", "none", "--output", "runs"]
    suite = ["run", model, "--suite", "longbench", *common]
    assert evalkit(*suite, "--set", "max_prompt_tokens=400") == Outcome(0, first.out, "")  # finished: no messages
    complains(evalkit(*suite, "--template", "inst"), 2, "--template", "--set")
    monkeypatch.setenv("EVALKIT_MAX_PROMPT_TOKENS", "400")
    assert evalkit(*suite).out == first.out
    folder = Path(first.out.splitlines()[-1])
    # Graded scores are no choices
    complains(evalkit("rescore", folder), 2, "benchmark longbench")
    complains(evalkit("integrity", folder), 2, "longbench", "zeroshot8")
    complains(evalkit("export", folder, "--to", "lm_eval", "--output", "exported"), 2, "lm-eval")


def test_longbench_has_the_papers_context_by_default(longbench: Command, evalkit: Command, tmp_path: Path) -> None:
    table = longbench("--context", 8192)
    assert "cut above 400 tokens of a context of 8,192" in table.out
    assert "context stretched from 1,024 to 8,192 tokens by yarn: factor 8" in table.out
    # A model whose context cannot be extended is not silently run without
    gpt2 = tiny_tokenizer(tmp_path / "gpt2")
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=512, vocab_size=512, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    bare = ["longbench", "--model", gpt2, "--data-dir", "rows", "--tasks", "lcc", "--limit", 1]
    complains(evalkit(*bare), 1, "gpt2", "--context none")
    assert "of a context of 512" in evalkit(*bare, "--context", "none").out


def test_run_on_several_checkpoints_has_a_line_for_each(files: Path, evalkit: Command) -> None:
    """The same numbers as single runs, in the order of their steps."""
    options: list[Any] = ["--data-dir", files / "documents", "--allow-unofficial-data", "--output", "adhoc",
                          "--tasks", "piqa,boolq", "--dtype", "float32", "--device", "cpu"]  # fmt: skip
    outcome = evalkit("run", files / "vanilla", files / "nix", files / "nox", *options)
    assert (outcome.code, "2 problems" in outcome.err) == (1, True)
    complains(evalkit("run", files / "vanilla", files / "intg-seed1", *options, "--detail"), 2, "--detail")
    assert not Path("adhoc").exists()
    pattern = files / "train" / "diff-seed2" / "checkpoint-*"
    outcome = evalkit("run", "--model", pattern, *options)
    assert outcome.code == 0, outcome.err
    caption = "zeroshot8, inst prompts, rule ppl; all documents; n = 6 of each task;"
    printed = " ".join(outcome.out.split())
    assert printed.startswith(f"{caption} ±: standard error over documents.")
    limited = evalkit("run", "--model", pattern, *options, "--limit", 2)
    assert "the first 2 documents of each task; n = 2 of each task" in " ".join(limited.out.split())
    lines = [line.split() for line in outcome.out.splitlines() if "checkpoint-" in line]
    assert [line[0] for line in lines] == ["checkpoint-5", "checkpoint-10"]
    for line in lines:
        content = json.loads(evalkit("run", pattern.parent / line[0], *options, "--format", "json").out)
        values = [task["value"] for task in content["tasks"]] + [content["averages"][-1]["value"]]
        [*cells, sign, error] = line[1:]
        assert [float(cell) for cell in cells] == pytest.approx([100 * value for value in values], abs=0.051)
        # No average stands without its error, also in CSV
        assert sign == "±" and float(error) == pytest.approx(100 * content["averages"][-1]["stderr"], abs=0.051)
    table = evalkit("run", "--model", pattern, *options, "--format", "csv").out.splitlines()
    columns = table[0].split(",")
    errors = [float(line.split(",")[columns.index("average_stderr")]) for line in table[1:]]
    assert [f"{100 * error:.1f}" for error in errors] == [line[-1] for line in lines]


@pytest.mark.parametrize(
    ("command", "options", "of_one"),
    [
        ("perplexity", ["--text", "text.txt"], ["--methods", "none,linear", "--context", 4096]),
        ("attention", ["--text", "text.txt", "--measures", "bos"], ["--detail"]),
        ("needle", ["--lengths", 300, "--depths", 50, "--repeats", 1], ["--plot", "needle.png"]),
    ],
)
def test_other_benchmarks_take_several_checkpoints(
    command: str, options: list[Any], of_one: list[Any], files: Path, evalkit: Command
) -> None:
    """A line each with the numbers of single runs; an option of one checkpoint is named before anything runs."""
    Path("text.txt").write_text("\n".join(TRAINING_TEXT) * 4, "utf-8")
    models = [files / "vanilla", files / "intg-seed1"]
    common = [*options, "--device", "cpu", "--dtype", "float32", "--output", "runs"]
    for refused in (of_one, ["--name", "both"]):
        complains(evalkit(command, *models, *common, *refused), 2, refused[0])
    assert not Path("runs").exists()
    outcome = evalkit(command, *models, *common, "--format", "json")
    assert outcome.code == 0, outcome.err
    entries = json.loads(outcome.out)
    assert [Path(entry["model"]) for entry in entries] == models
    for entry, model in zip(entries, models, strict=True):
        [metric] = entry["tasks"]
        run = load_run(Path(evalkit(command, model, *common).out.splitlines()[-1]))
        assert str(run.folder) == entry["folder"]
        assert metric["value"] == results_of(run).metrics()[0].value
    dry = evalkit(command, "--model", files / "intg-seed*", *common, "--dry-run", "--format", "json")
    planned = [Path(group["checkpoint"]).name for group in json.loads(dry.out)["groups"]]
    assert planned == ["intg-seed1", "intg-seed2"]


def test_longbench_takes_several_checkpoints(longbench: Command, model: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        shutil.copytree(model, tmp_path / f"model-{number}")
    models = tmp_path / "model-*"
    for option, value in (("--plot", "lengths.png"), ("--edit-similarity", "rapidfuzz")):
        complains(longbench("--model", models, option, value), 2, option)
    outcome = longbench("--model", models, "--tasks", "lcc", "--format", "json")
    assert outcome.code == 0, outcome.err
    assert [Path(entry["model"]).name for entry in json.loads(outcome.out)] == ["model-1", "model-2"]


def test_a_run_under_a_name(files: Path, evalkit: Command) -> None:
    """Commands find it by the name and by the checkpoint; without the name, the same settings open the same run."""
    options: list[Any] = ["--data-dir", files / "documents", "--allow-unofficial-data", "--output", "runs",
                          "--tasks", "piqa,boolq", "--dtype", "float32", "--device", "cpu", "--limit", 3]  # fmt: skip
    named = evalkit("run", files / "vanilla", *options, "--name", "the first/try")
    other = evalkit("run", files / "intg-seed1", *options, "--name", "second")
    folder = Path(named.out.splitlines()[-1])
    assert (named.code, other.code, folder.name.startswith("the_first_try-zeroshot8-inst-float32-")) == (0, 0, True)
    assert evalkit("run", files / "vanilla", *options).out == named.out
    outputs = [evalkit("compare", name, "second", "--in", "runs").out for name in ("the first/try", files / "vanilla")]
    assert outputs[0] == outputs[1] and "second" in outputs[0] and "the first/try" in outputs[0]
    assert "the first/try" in evalkit("ls", "runs", "--in", "runs").out
    complains(evalkit("run", files / "vanilla", files / "intg-seed1", *options, "--name", "both"), 2, "--name")


def test_names_of_seeds_and_beginnings(files: Path, evalkit: Command, tmp_path: Path) -> None:
    """Seeds of two models in folders of the same names have different names; a name that is completed is reported."""
    options: list[Any] = ["--data-dir", files / "documents", "--allow-unofficial-data", "--output", "runs",
                          "--tasks", "piqa,boolq", "--dtype", "float32", "--device", "cpu", "--limit", 3]  # fmt: skip
    for name, source in (("alpha", "vanilla"), ("beta", "intg-seed1")):
        shutil.copytree(files / source, tmp_path / name / "seed1" / "model")
        outcome = evalkit("run", tmp_path / name / "seed1" / "model", *options)
        assert outcome.code == 0
    first = evalkit("compare", "alpha/seed1/model", "beta/seed1/model", "--in", "runs")
    assert first.code == 0 and "alpha/seed1/model: alpha-seed1-model-zeroshot8-" in first.err
    assert "beta/seed1/model" in first.out.splitlines()[0] and "alpha/seed1/model" in first.out
    completed = evalkit("compare", "alpha-seed1-model", "beta-seed1-model-zeroshot8", "--in", "runs")
    assert completed.out == first.out and "beta-seed1-model-zeroshot8: beta-seed1-model-zeroshot8-" in completed.err
    complains(evalkit("compare", "alpha", "beta-seed", "--in", "runs"), 1, "alpha")


def test_settings_that_a_model_does_not_read_are_in_all_that_is_printed(
    run: Command, evalkit: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A patched checkpoint with a neutral name: what its config.json says of it, beside every number of it."""
    monkeypatch.setenv("EVALKIT_OUTPUT", "runs")
    patched = Path(shutil.copytree(checkpoint, "neutral"))
    edit_config(patched, my_attention={"kind": "integral"})
    dry = run("--model", patched, "--dry-run")
    first = run("--model", patched)
    assert "warning: " in first.err
    plain = run()
    folders = [outcome.out.splitlines()[-1] for outcome in (first, plain)]
    again = run("--model", patched)  # finished: nothing is loaded
    written(Path("own.yaml"), suite="zeroshot8", rows=[{"items": {"one": "One", "two": "Two"}}],
            columns=[{"items": {"piqa": None, "boolq": None}}])  # fmt: skip
    mapped(Path(), rows=dict(zip(("one", "two"), folders, strict=True)))
    page = Path("report.html")
    evalkit("report", *folders, "--without-documents", "-o", page)
    shown = [
        dry,
        first,
        again,
        evalkit("models", "show", patched),
        evalkit("ls", "runs"),
        evalkit("show", folders[0]),
        evalkit("rescore", folders[0], "--rule", "acc"),
        evalkit("compare", *folders),
        evalkit("table", "own.yaml", "--source", "runs", "--runs", "mapping.yaml"),
    ]
    for outcome in shown:
        assert outcome.code == 0 and "does not read (my_attention)" in outcome.out, outcome
    assert "my_attention" not in plain.out + plain.err
    assert "does not read (my_attention)" in page.read_text(encoding="utf-8")


def test_a_checkpoint_with_a_foreign_manifest_is_no_run(
    run: Command, evalkit: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message suggests to delete the folder, which has the weights."""
    monkeypatch.setenv("EVALKIT_OUTPUT", "runs")
    model = Path(shutil.copytree(checkpoint, "models/foreign"))
    for name in ("manifest.json", "results.json"):
        (model / name).write_text('{"files": ["model.safetensors"]}', encoding="utf-8")
    assert run("--model", model).code == 0
    for command in (("show",), ("rescore",), ("report", "-o", "report.html")):
        outcome = evalkit(command[0], model, *command[1:])
        assert outcome.code == 0, outcome
    assert "none in models" in evalkit("ls", "runs", "--in", "models").out
    shutil.rmtree("runs")
    unknown = evalkit("show", model)
    complains(unknown, 1, "models/foreign")
    assert "delete" not in unknown.err and "damaged" not in unknown.err
