"""Dry runs: estimates from samples beside what runs really take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import run_plan
from evalkit.errors import SeveralErrors
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.requests.encoded import EncodedDocuments
from evalkit.requests.requests import Encoder, Facts
from evalkit.scoring import pack
from evalkit.studies.dry_run import dry_run_report, plans_report
from evalkit.studies.running import run_here, run_study
from evalkit.studies.study_file import read_study
from tests.benchmarks.conftest import plugin  # noqa: F401
from tests.benchmarks.lm_eval.made import made_tasks
from tests.documents import made_up
from tests.printed import printed
from tests.studies.made import NEEDLE, ZS, Told, write_study
from tests.tiny import tiny_checkpoint

TOKENS = "^n_(special|instruction|context|continuation|end)$"
"""Columns of tokens in a score table."""


@pytest.fixture(scope="module")
def folder(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and more documents. Do not modify."""
    folder = Path(shutil.copytree(files, tmp_path_factory.mktemp("dry") / "files"))
    made_up(folder / "documents", count=30)
    return folder


def tokens_of(folder: Path, sample: int, **options: Any) -> dict[str, Any]:
    """Task → estimate for a run of the tiny checkpoint."""
    plan = planned(folder / "vanilla", {"device": "cpu", "dtype": "float32"} | options, silent)
    kind = benchmark(plan.manifest["kind"])
    counts = kind.computation.token_counts(plan, tokenizer_alone(plan.checkpoint, silent), sample, silent)
    return {count.task: count for count in counts}


def options_of(folder: Path) -> dict[str, Any]:
    return ZS | {
        "data_dir": folder / "documents",
        "allow_unofficial_data": True,
        "limit": 25,
        "tasks": ("piqa", "boolq"),
    }


def test_tokens_of_all_documents_are_counted_exactly_and_a_sample_is_scaled_up(folder: Path, tmp_path: Path) -> None:
    """A single run is counted by task, and takes no time once it is finished."""
    options = options_of(folder)
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
    for task, count in whole.items():
        table = run.scores[run.scores["task"] == task]
        assert (count.rows, count.documents) == (len(table), table.groupby("subtask")["doc_id"].nunique().sum())
        assert count.alone == pytest.approx(table.filter(regex=TOKENS).to_numpy().sum())
        assert count.distinct <= count.alone
        assert (part[task].documents, part[task].sampled) == (count.documents, 12)
        assert part[task].alone == pytest.approx(count.alone, rel=0.15)
        assert part[task].distinct == pytest.approx(count.distinct, rel=0.3)
    assert tokens_of(folder, 12, **options | {"tasks": ("mmlu",), "limit": None})["mmlu"].sampled == 57  # each subject
    # The rule pmi scores further sequences
    further = tokens_of(folder, 10_000, **options, rule="pmi").values()
    assert sum(count.alone for count in further) > sum(count.alone for count in whole.values())


def test_distinct_tokens_are_those_of_the_trees(folder: Path) -> None:
    """A budget that takes a task in one batch; there, each prefix is computed once."""
    plan: Any = planned(folder / "vanilla", {"device": "cpu", **options_of(folder)}, silent)
    encoder = Encoder(tokenizer_alone(plan.checkpoint, silent), Facts(1024))
    counts = tokens_of(folder, 1000, **options_of(folder))
    assert list(counts) == [requests.task for requests in plan.requests.tasks]
    for requests in plan.requests.tasks:
        [batch] = pack.batches_of(EncodedDocuments.of(requests.scored(encoder)).sequences, 10**6)
        assert counts[requests.task].distinct == len(batch.tree.tokens)


def test_every_kind_of_request_of_lm_evals_tasks_is_counted(folder: Path, tmp_path: Path) -> None:
    names = ("made_choice", "made_last_word", "made_texts", "made_answers", "made_shots")
    options = {"suite": "lm_eval", "include_path": made_tasks(tmp_path / "tasks", count=8), "tasks": names}
    counts = tokens_of(folder, 1000, **options)
    assert {name: (count.documents, count.generated) for name, count in counts.items()} == {
        name: (8, 64 if name == "made_answers" else 0) for name in names
    }
    assert counts["made_answers"].rows == 8 and counts["made_shots"].alone > 2 * counts["made_choice"].alone
    half = tokens_of(folder, 4, **options)
    assert all(count.sampled == 4 for count in half.values()) and half["made_answers"].generated == 64


@pytest.mark.slow
def test_models_with_one_tokenizer_and_other_windows_have_other_tokens(tmp_path: Path, files: Path) -> None:
    """Long prompts are cut to the window."""
    shutil.copytree(files / "documents", tmp_path / "documents")
    for name, window in (("long", 1024), ("short", 100)):
        tiny_checkpoint(tmp_path / name, window=window)
    both, long, short = (
        dry_run_report(read_study(write_study(tmp_path / "s.yaml", {n: n for n in names})), silent).content["total"]
        for names in (("long", "short"), ("long",), ("short",))
    )
    assert both["tokens"] == long["tokens"] + short["tokens"] > 2 * short["tokens"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_study_is_counted_by_benchmark(folder: Path) -> None:
    """What is finished takes no time; a device that is elsewhere has tokens and no time."""
    benchmarks = {"zs": ZS, "needle": NEEDLE, "far": ZS | {"limit": 3, "device": "cuda"}}
    study = read_study(write_study(folder / "dry.yaml", {"A": "vanilla", "B": "intg-*"}, benchmarks, output="dry"))
    small = read_study(write_study(folder / "small.yaml", {"A": "vanilla"}, {"zs": ZS}, output="dry"))
    run_study(small, Told(), run_here, wait=False)
    report = dry_run_report(study, silent)
    rows = {record["benchmark"]: record for record in report.content["groups"]}
    assert [rows[name]["to_do"] for name in benchmarks] == [2, 3, 3]
    assert (rows["zs"]["documents"], rows["zs"]["parameters"]) == (3 * 10, 139_584)
    assert rows["needle"]["generated_tokens"] == 3 * 2 * 32
    assert rows["zs"]["seconds"] > 0 and rows["far"]["seconds"] is None and rows["far"]["tokens"] > 0
    assert "time is not estimated: --device cuda" in printed(report)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"suite": "attention", "sample": 1, "layers": [0, 2]}, "--layers 2"),
        ({"suite": "attention", "sample": 1, "layers": "-3"}, "--layers -3"),
        ({"suite": "perplexity", "text": "text.txt", "stride": 1025}, "--stride 1025"),
        ({"suite": "needle", "lengths": [1025]}, "--lengths 1025"),
        ({"suite": "needle", "lengths": [30]}, "--lengths 30"),
        ({"suite": "needle", "lengths": [500], "depths": [101]}, "--depths 101"),
        ({"suite": "zeroshot8", "tasks": "piqa", "template": "chat"}, "template chat"),
        ({"suite": "attention", "measures": "bos,categories"}, "'categories'"),
    ],
)
def test_settings_that_fail_when_computed_fail_in_a_dry_run(folder: Path, wrong: dict[str, Any], named: str) -> None:
    """Each problem with its run, and the right ones beside it do not hide it."""
    (folder / "text.txt").write_text("The river rose in the night. " * 20, "utf-8")
    path = write_study(folder / "wrong.yaml", {"A": "vanilla"}, {"right": ZS | {"limit": 2}, "wrong": wrong})
    with pytest.raises(SeveralErrors, match=named):
        dry_run_report(read_study(path), silent)
    assert not (folder / "runs").exists()
