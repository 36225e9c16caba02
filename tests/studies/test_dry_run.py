"""Dry runs: estimates from samples beside what runs really take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import spread
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import run_plan
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.runs.folder import Run
from evalkit.studies.dry_run import dry_run_report, plans_report
from evalkit.studies.running import run_here, run_study
from evalkit.studies.study_file import read_study
from tests.benchmarks.conftest import plugin  # noqa: F401
from tests.benchmarks.lm_eval.made import made_tasks
from tests.printed import printed
from tests.studies.tiny_studies import CHOICES, NEEDLE, Told, made_files, made_study
from tests.tiny import tiny_checkpoint

TOKENS = "^n_(special|instruction|context|continuation|end)$"
"""Columns of tokens in a score table."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and documents. Do not modify."""
    return made_files(tmp_path_factory.mktemp("study"), count=30)


def counted(run: Run) -> int:
    """Return the tokens that a finished run has scored, from its table."""
    return int(run.scores.filter(regex=TOKENS).to_numpy().sum())


def tokens_of(folder: Path, sample: int, **options: Any) -> dict[str, Any]:
    """Return task → estimate for a run of the tiny checkpoint."""
    plan = planned(folder / "vanilla", {"device": "cpu", "dtype": "float32"} | options, silent)
    kind = benchmark(plan.manifest["kind"])
    return {one.task: one for one in kind.token_counts(plan, tokenizer_alone(plan.checkpoint, silent), sample, silent)}


def test_tokens_of_all_documents_are_counted_exactly_and_a_sample_is_scaled_up(folder: Path, tmp_path: Path) -> None:
    """A single run is counted by task, and takes no time once it is finished."""
    options = CHOICES | {"data_dir": folder / "documents", "tasks": ("piqa", "boolq"), "limit": 25}
    plan = planned(folder / "vanilla", options | {"output": tmp_path}, silent)
    report = plans_report([("vanilla", plan)], silent)
    assert not plan.folder.exists()
    rows, total = {record["task"]: record for record in report.content["groups"]}, report.content["total"]
    assert list(rows) == list(plan.manifest["documents"])
    for name in ("documents", "tokens", "distinct_tokens"):
        assert total[name] == sum(row[name] for row in rows.values())
    assert total["seconds"] > 0 and total["distinct_tokens"] < total["tokens"]
    run = run_plan(plan, Told())
    after = plans_report([("vanilla", plan)], silent)
    assert after.content["total"]["seconds"] == 0 and after.content["finished"]
    whole, part = tokens_of(folder, 10_000, **options), tokens_of(folder, 12, **options)
    for task, one in whole.items():
        table = run.scores[run.scores["task"] == task]
        assert (one.rows, one.documents) == (len(table), table.groupby("subtask")["doc_id"].nunique().sum())
        assert one.alone == pytest.approx(table.filter(regex=TOKENS).to_numpy().sum())
        assert one.distinct <= one.alone
        assert (part[task].documents, part[task].sampled) == (one.documents, 12)
        assert part[task].alone == pytest.approx(one.alone, rel=0.15)
        assert part[task].distinct == pytest.approx(one.distinct, rel=0.3)
    mmlu = options | {"tasks": ("mmlu",), "limit": None}
    assert tokens_of(folder, 12, **mmlu)["mmlu"].sampled == 57  # one of each subject
    # The rule pmi scores further sequences
    assert sum(one.alone for one in tokens_of(folder, 10_000, **options, rule="pmi").values()) > counted(run)


def test_distinct_tokens_are_those_of_the_trees(folder: Path) -> None:
    """A budget that takes a task in one batch; there, each prefix is computed once."""
    from evalkit.benchmarks.multiple_choice.encoded import question_sequences
    from evalkit.benchmarks.multiple_choice.prompts import Prompter
    from evalkit.scoring import pack

    options = CHOICES | {"data_dir": folder / "documents", "tasks": ("piqa", "boolq")}
    plan: Any = planned(folder / "vanilla", {"device": "cpu", **options}, silent)
    prompter = Prompter(plan.template, tokenizer_alone(plan.checkpoint, silent), 1024)
    for task, one in tokens_of(folder, 1000, **options).items():
        encoded = list(prompter.encode(plan.questions[task]))
        [batch] = pack.batches_of(question_sequences(encoded, frozenset({2, 3})), 10**6)
        assert one.distinct == len(batch.tree.tokens)


def test_every_kind_of_request_of_lm_evals_tasks_is_counted(folder: Path, tmp_path: Path) -> None:
    tasks = made_tasks(tmp_path / "tasks", count=8)
    names = ("made_choice", "made_last_word", "made_texts", "made_answers", "made_shots")
    options = {"suite": "lm_eval", "include_path": tasks, "tasks": names}
    found = tokens_of(folder, 1000, **options)
    assert {name: (one.documents, one.generated) for name, one in found.items()} == {
        name: (8, 64 if name == "made_answers" else 0) for name in names
    }
    assert found["made_answers"].rows == 8
    assert found["made_shots"].alone > 2 * found["made_choice"].alone
    half = tokens_of(folder, 4, **options)
    assert all(one.sampled == 4 for one in half.values()) and half["made_answers"].generated == 64


def test_places_are_spread_in_blocks() -> None:
    assert spread(5, 8) == [0, 1, 2, 3, 4]
    found = spread(1000, 40, 4)
    assert (len(found), found[:5]) == (40, [0, 1, 2, 3, 99]) and found[-1] > 850
    assert max(spread(41, 40, 4)) <= 40


def test_a_study_is_counted_by_benchmark(folder: Path) -> None:
    """What is finished takes no time; several checkpoints of a command have a line each."""
    benchmarks = {"zeroshot8": CHOICES, "needle": NEEDLE, "norms": {"count": 12}}
    study = read_study(made_study(folder, {"A": "vanilla", "B": "intg-*"}, benchmarks, "dry.yaml", output="dry"))
    report = dry_run_report(study, silent)
    assert not study.output.exists()
    rows = {record["benchmark"]: record for record in report.content["groups"]}
    assert [(rows[name]["documents"], rows[name]["parameters"]) for name in benchmarks] == [
        (documents, 139_584) for documents in (3 * 60, 3 * 2, 0)
    ]
    assert rows["needle"]["generated_tokens"] == 3 * 2 * 32
    total = report.content["total"]
    assert (total["runs"], total["to_do"]) == (9, 9) and total["seconds"] > 0
    assert total["tokens"] == rows["zeroshot8"]["tokens"] + rows["needle"]["tokens"]
    text = printed(report)
    assert "norms: benchmark norms cannot estimate its tokens; not in the totals" in text
    assert "a matrix product timed now on cpu" in text
    smaller = read_study(made_study(folder, {"A": "vanilla"}, {"zeroshot8": CHOICES}, "small.yaml", output="dry"))
    run_study(smaller, Told(), run_here, wait=False)
    after = dry_run_report(study, silent).content
    assert [record["to_do"] for record in after["groups"]] == [2, 3, 3] and json.dumps(after)
    options = CHOICES | {"data_dir": folder / "documents", "output": folder / "several"}
    names = sorted(path.name for path in folder.glob("intg-*"))
    report = plans_report([(name, planned(folder / name, options, silent)) for name in names], silent)
    assert [record["checkpoint"] for record in report.content["groups"]] == names


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_cannot_be_estimated(folder: Path) -> None:
    """A device that is elsewhere has tokens and no time; layers that a model lacks are named, as by the run itself."""
    attention = {"suite": "attention", "tasks": ["piqa"], "sample": 2, "measures": ["bos"], "layers": ["-3"]}
    documents = {"data_dir": "documents", "allow_unofficial_data": True}
    benchmarks = {"zeroshot8": CHOICES, "here": CHOICES | {"suite": "zeroshot8", "limit": 3, "device": "cpu"},
                  "maps": attention | documents}  # fmt: skip
    path = made_study(folder, {"A": "vanilla"}, benchmarks, "cuda.yaml", settings={"device": "cuda"}, output="cuda")
    report = dry_run_report(read_study(path), silent)
    rows = {record["benchmark"]: record for record in report.content["groups"]}
    assert rows["zeroshot8"]["tokens"] > rows["here"]["tokens"] > 0
    assert rows["zeroshot8"]["seconds"] is None and rows["here"]["seconds"] > 0
    text = printed(report)
    assert "time is not estimated: --device cuda: this machine has no cuda device(s) for torch" in text
    assert "no attention layer -3" in text and "not in the totals" in text


def test_models_with_one_tokenizer_and_other_windows_have_other_tokens(tmp_path: Path, folder: Path) -> None:
    """Long prompts are cut to the window."""
    shutil.copytree(folder / "documents", tmp_path / "documents")
    for name, window in (("long", 1024), ("short", 64)):
        tiny_checkpoint(tmp_path / name, window=window)
    both, long, short = (
        dry_run_report(read_study(made_study(tmp_path, {name: name for name in names})), silent).content["total"]
        for names in (("long", "short"), ("long",), ("short",))
    )
    assert both["tokens"] == long["tokens"] + short["tokens"] > 2 * short["tokens"]
