"""Commands on a file of requests: `run` and its controls, and what reads finished runs of gold answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evalkit.benchmarks.run import evaluate
from evalkit.data.requests import request_tasks
from evalkit.display import Progress
from evalkit.runs.folder import Run, load_run
from tests.benchmarks.multiple_choice.request_files import gold_lines, lines_of, write
from tests.cli.conftest import Command, complains
from tests.tiny import TRAINING_TEXT, tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each kind, and a suite of both."""
    folder = tmp_path_factory.mktemp("requests")
    pairs = list(enumerate(TRAINING_TEXT))
    choices = [lines_of(n, f"{text}\nAnswer:", [f" {text[:3]}", f" {text[3:11]}", " no"], n % 3) for n, text in pairs]
    write(folder / "choices.jsonl.gz", *choices)
    write(
        folder / "gold.jsonl", *(gold_lines(n, f"{text[:20]}", f"{text[20:]}") for n, text in pairs if len(text) > 20)
    )
    content = {"groups": {"A": ["mine"], "B": ["answers"]}, "labels": {"answers": "Answers & more"}}
    content["requests"] = {"mine": "choices.jsonl.gz", "answers": "gold.jsonl"}  # type: ignore[assignment]
    (folder / "both.yaml").write_text(yaml.safe_dump(content), "utf-8")
    return folder


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [checkpoint, tiny_checkpoint(tmp_path_factory.mktemp("other") / "other", window=4096, seed=1)]


@pytest.fixture(scope="module")
def runs(models: list[Path], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Run]]:
    """Runs of both checkpoints, by what they are of."""
    gold, choices, both = folder / "gold.jsonl", folder / "choices.jsonl.gz", str(folder / "both.yaml")
    output = tmp_path_factory.mktemp("runs")
    options: dict[str, dict[str, Any]] = {
        "gold": {"requests": gold},
        "choices": {"requests": choices},
        "bits": {"requests": choices, "rule": "bits_per_byte"},
        "both": {"suite": both},
        "swap": {"suite": both, "control": "swap"},
    }
    return {
        name: [evaluate(model, **about, output=output, progress=Progress(live=False)) for model in models]
        for name, about in options.items()
    }


def content(outcome: Any) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    parsed: dict[str, Any] = json.loads(outcome.out)
    return parsed


def mean_bits(run: Run, task: str) -> float:
    rows = run.scores[(run.scores["task"] == task) & (run.scores["choice"] == run.scores["gold"])]
    return float(np.mean(-rows["ll_continuation"] / np.log(2) / rows["bytes"]))


def margins(run: Run) -> list[float]:
    """The margin of each document by rule acc."""
    values = []
    for _, rows in run.scores.groupby("doc_id"):
        likelihoods, gold = rows["ll_continuation"].tolist(), int(rows["gold"].iloc[0])
        values.append(likelihoods.pop(gold) - max(likelihoods))
    return values


def test_a_file_is_one_task_named_after_it(evalkit: Command, checkpoint: Path, folder: Path) -> None:
    command = (
        "run",
        "--model",
        checkpoint,
        "--requests",
        folder / "gold.jsonl",
        "--output",
        "runs",
        "--format",
        "json",
    )
    made = content(evalkit(*command))
    [task] = made["tasks"]
    run = load_run(Path(made["folder"]))
    assert task["task"] == "gold" and task["value"] == pytest.approx(mean_bits(run, "gold"), rel=1e-9)
    assert content(evalkit(*command))["run"] == made["run"]  # finished
    dry = evalkit("run", "--model", checkpoint, "--requests", folder / "choices.jsonl.gz", "--dry-run")
    assert dry.code == 0 and str(len(TRAINING_TEXT)) in dry.out
    prompts = evalkit("run", "--model", checkpoint, "--requests", folder / "gold.jsonl", "--show-prompts", 1)
    assert prompts.code == 0 and f"<s>{TRAINING_TEXT[0][:20]}" in prompts.out and TRAINING_TEXT[0][20:] in prompts.out


def test_an_invalid_file_is_one_line(evalkit: Command, checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", lines_of(0, "Q", [" a", " b"], 2))
    command = ("run", "--model", checkpoint, "--requests")
    complains(evalkit(*command, bad), 1, "bad.jsonl", "document 0", "label 2")
    complains(evalkit(*command, tmp_path), 2 if tmp_path.is_file() else 1, str(tmp_path))
    complains(evalkit(*command, folder / "gold.jsonl", "--suite", "zeroshot8"), 2, "--requests")
    complains(evalkit(*command, folder / "gold.jsonl", "--rule", "acc"), 2, "acc", "gold")
    complains(evalkit(*command, folder / "gold.jsonl", "--vary", "template"), 2, "--vary", "bits_per_byte")
    complains(evalkit(*command, folder / "gold.jsonl", "--control", "other"), 2, "--control", "swap")


def test_a_control_reports_the_paired_drop(evalkit: Command, checkpoint: Path, folder: Path) -> None:
    """The differences are those of `evalkit compare` on the two runs, of which the second is the control."""
    arguments = ("--model", checkpoint, "--requests", folder / "gold.jsonl", "--control", "swap", "--output", "runs")
    made = content(evalkit("run", *arguments, "--format", "json"))
    folders = sorted(Path("runs").glob("*"), key=lambda path: "control" in load_run(path).manifest["specification"])
    assert len(folders) == 2 and Path(made["folder"]).name == folders[1].name
    compared = content(evalkit("compare", *folders, "--format", "json"))
    [[drop], [expected]] = [each["comparisons"][0]["tasks"] for each in (made["control"], compared)]
    names = ("difference", "low", "high", "stderr", "p", "n")
    assert [drop[name] for name in names] == pytest.approx([expected[name] for name in names])
    before, after = (mean_bits(load_run(path), "gold") for path in folders)
    assert drop["difference"] == pytest.approx(after - before) and before != after
    text = evalkit("run", *arguments).out
    assert "other documents' contexts" in text and "not results of the tasks" in text


def test_rescore(evalkit: Command, runs: dict[str, list[Run]]) -> None:
    gold, both = runs["gold"][0].folder, runs["both"][0].folder
    for rule, measured in (("greedy_match", None), ("bits_per_byte", mean_bits(runs["gold"][0], "gold"))):
        [task] = content(evalkit("rescore", gold, "--rule", rule, "--format", "json"))["tasks"]
        assert measured is None or task["value"] == pytest.approx(measured)
    assert evalkit("rescore", gold, "--detail").code == 0
    complains(evalkit("rescore", gold, "--rule", "acc"), 2, "acc", "gold")
    complains(evalkit("rescore", both, "--rule", "brier"), 2, "brier", "answers")
    # Under a rule a mixed suite has the tasks with choices alone
    [task] = content(evalkit("rescore", both, "--rule", "acc_norm", "--format", "json"))["tasks"]
    assert task["task"] == "mine"
    for form in ("terminal", "markdown", "latex", "csv"):
        outcome = evalkit("rescore", both, "--format", form)
        assert outcome.code == 0 and "mine" in outcome.out


def test_compare(evalkit: Command, runs: dict[str, list[Run]]) -> None:
    for name, tasks in (("gold", ["gold"]), ("both", ["mine", "answers"])):
        a, b = runs[name]
        [compared] = content(evalkit("compare", a.folder, b.folder, "--format", "json"))["comparisons"]
        for task, expected in zip(compared["tasks"], tasks, strict=True):
            assert task["name"] == expected
            assert task["difference"] == pytest.approx(mean_bits(b, expected) - mean_bits(a, expected))
    a, b = (run.folder for run in runs["gold"])
    assert evalkit("compare", a, b, "--outcome", "greedy_match").code == 0
    complains(evalkit("compare", a, b, "--rule", "acc"), 2, "acc", "gold")
    complains(evalkit("compare", a, b, "--outcome", "margin"), 2, "margin", "gold")
    # The margin of a run with an outcome of its own is that of rule acc
    command = ("compare", *(run.folder for run in runs["bits"]), "--outcome", "margin", "--format", "json")
    [margin] = content(evalkit(*command))["comparisons"]
    before, after = (np.mean(margins(run)) for run in runs["bits"])
    assert margin["tasks"][0]["difference"] == pytest.approx(after - before) and margin["rule"] == "margin:acc"
    complains(evalkit("compare", a, runs["choices"][0].folder), 2, "choices")


def test_show(evalkit: Command, runs: dict[str, list[Run]], folder: Path) -> None:
    listed = content(evalkit("show", runs["gold"][0].folder, "--format", "json", "--limit", 1000))
    texts = {n: text for n, text in enumerate(TRAINING_TEXT) if len(text) > 20}
    assert {document["document"] for document in listed["documents"]} == set(map(str, texts))
    scores = [document["runs"][0]["score"] for document in listed["documents"]]
    assert scores == sorted(scores) and -np.mean(scores) == pytest.approx(mean_bits(runs["gold"][0], "gold"))
    for document in listed["documents"]:
        text = texts[int(document["document"])]
        assert document["prompt"][-1]["text"] == text[:20]
        assert document["runs"][0]["references"] == [text[20:]] and document["runs"][0]["right"] is None
    mixed = content(evalkit("show", runs["both"][0].folder, "--format", "json", "--limit", 1000))
    assert len(mixed["documents"]) == len(texts) + len(TRAINING_TEXT) and mixed["rule"] == "acc"
    complains(evalkit("show", runs["gold"][0].folder, "--wrong"), 2, "--wrong", "gold")
    assert evalkit("show", *(run.folder for run in runs["gold"])).code == 0
    assert evalkit("show", runs["swap"][0].folder, "--text", TRAINING_TEXT[0][:20]).code == 0


def test_report_and_exports(evalkit: Command, runs: dict[str, list[Run]]) -> None:
    folders = [run.folder for name in ("gold", "choices", "both") for run in runs[name]]
    outcome = evalkit("report", *folders, "--output", "page.html")
    assert outcome.code == 0, outcome.err
    assert "Answers &amp; more" in Path("page.html").read_text("utf-8")
    for form in ("lm_eval", "every_eval_ever", "run"):
        outcome = evalkit("export", runs["both"][0].folder, "--to", form, "--output", form)
        assert outcome.code == 0 and outcome.out, (form, outcome.err)
    complains(evalkit("export", runs["gold"][0].folder, "--to", "hub"), 2, "gold", "hub")


def test_a_control_is_refused_in_a_table_with_other_runs(
    evalkit: Command, runs: dict[str, list[Run]], folder: Path
) -> None:
    layout = {"caption": "x", "suite": str(folder / "both.yaml"), "rows": [{"items": {"own": "Own", "other": "Other"}}],
              "columns": [{"items": {"mine": "Mine"}}]}  # fmt: skip
    Path("mine.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    rows = {"own": str(runs["both"][0].folder), "other": str(runs["swap"][0].folder)}
    Path("runs.yaml").write_text(yaml.safe_dump({"rows": rows}), "utf-8")
    outcome = evalkit("table", "mine.yaml", "--source", "runs", "--runs", "runs.yaml")
    complains(outcome, 2, "control")


def test_lists_have_the_tasks_of_requests(evalkit: Command) -> None:
    tasks = content(evalkit("ls", "tasks", "--format", "json"))
    assert {task["task"] for task in tasks["rows"]} >= {*request_tasks()}
    suites = json.dumps(content(evalkit("ls", "suites", "--format", "json")))
    assert all(name in suites for name in ("olmes-cloze", "olmes-letters", "olmo-small", "gold-bpb", "skills"))
    documents = json.dumps(content(evalkit("data", "--format", "json")))
    assert str(sum(about.count for about in request_tasks().values())) in documents and "absent" in documents


def test_a_study_of_both_kinds(evalkit: Command, models: list[Path], folder: Path) -> None:
    both = str(folder / "both.yaml")
    study = {
        "output": "runs",
        "checkpoints": {"zero": str(models[0]), "one": str(models[1])},
        "benchmarks": {"both": {"suite": both}, "swap": {"suite": both, "control": "swap"}},
    }
    Path("study.yaml").write_text(yaml.safe_dump(study), "utf-8")
    outcome = evalkit("study", "run", "study.yaml")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("finished") >= 4 and "bits per byte" in outcome.out
    # Averages of bits per byte are no shares in percent
    tables = evalkit("table", "--study", "study.yaml")
    for path in Path("runs").glob("*"):
        if not path.name.startswith(".") and (path / "results.json").is_file():
            run = load_run(path)
            assert f"{(mean_bits(run, 'mine') + mean_bits(run, 'answers')) / 2:.4f}" in tables.out
    assert evalkit("compare", "--study", "study.yaml", "--benchmark", "both").code == 0
