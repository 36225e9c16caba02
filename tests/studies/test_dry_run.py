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
from evalkit.models.zoo.shapes import parameter_count
from evalkit.runs.folder import Run, load_run
from evalkit.studies.dry_run import dry_run_report, plans_report
from evalkit.studies.running import run_here, run_study
from evalkit.studies.study import record_of
from evalkit.studies.study_file import read_study
from tests.benchmarks.conftest import plugin  # noqa: F401
from tests.benchmarks.lm_eval.made import made_tasks
from tests.printed import printed
from tests.studies.tiny_studies import CHOICES, NEEDLE, Told, made_files, made_study
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and documents. Do not modify."""
    return made_files(tmp_path_factory.mktemp("study"), count=30)


def counted(run: Run) -> int:
    """Return the tokens that a finished run has scored, from its table."""
    return int(run.scores.filter(regex="^n_(special|instruction|context|continuation|end)$").to_numpy().sum())


def tokens_of(folder: Path, sample: int, **options: Any) -> Any:
    """Return the estimates for a run of the tiny checkpoint."""
    plan = planned(folder / "vanilla", {"device": "cpu", "dtype": "float32"} | options, silent)
    kind = benchmark(plan.manifest["kind"])
    return kind.token_counts(plan, tokenizer_alone(plan.checkpoint, silent), sample, silent)


@pytest.mark.parametrize("more", [{}, {"template": "plain", "rule": "pmi"}, {"limit": 7}], ids=["inst", "pmi", "limit"])
def test_tokens_of_all_documents_are_counted_exactly(more: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    from evalkit.benchmarks.run import evaluate

    options = CHOICES | {"data_dir": folder / "documents", "tasks": ("piqa", "boolq", "mmlu")} | more
    run = evaluate(folder / "vanilla", **options, device="cpu", dtype="float32", output=tmp_path, progress=Told())
    found = tokens_of(folder, 1000, **options)
    table = run.scores
    for one in found:
        rows = table[table["task"] == one.task]
        assert (one.rows, one.documents) == (len(rows), rows.groupby("subtask")["doc_id"].nunique().sum())
        if "rule" not in more:  # pmi scores further sequences
            expected = rows.filter(regex="^n_(special|instruction|context|continuation|end)$").to_numpy().sum()
            assert one.alone == pytest.approx(expected)
        assert one.distinct <= one.alone
    if "rule" in more:
        assert sum(one.alone for one in found) > counted(run)


def test_distinct_tokens_are_those_of_the_trees(folder: Path) -> None:
    """A budget that takes a task in one batch; there, each prefix is computed once."""
    from evalkit.benchmarks.multiple_choice.encoded import question_sequences
    from evalkit.benchmarks.multiple_choice.prompts import Prompter
    from evalkit.scoring import pack

    options = CHOICES | {"data_dir": folder / "documents", "tasks": ("piqa", "boolq")}
    plan = planned(folder / "vanilla", {"device": "cpu", **options}, silent)
    tokenizer = tokenizer_alone(plan.checkpoint, silent)
    prompter = Prompter(plan.template, tokenizer, 1024)  # type: ignore[attr-defined]
    for one in tokens_of(folder, 1000, **options):
        encoded = list(prompter.encode(plan.questions[one.task]))  # type: ignore[attr-defined]
        [batch] = pack.batches_of(question_sequences(encoded, frozenset({2, 3})), 10**6)
        assert one.distinct == len(batch.tree.tokens)


def test_a_sample_is_scaled_up(folder: Path) -> None:
    options = CHOICES | {"data_dir": folder / "documents", "tasks": ("piqa", "boolq", "mmlu")}
    whole = {one.task: one for one in tokens_of(folder, 1000, **options)}
    for one in tokens_of(folder, 12, **options):
        assert one.documents == whole[one.task].documents
        assert one.sampled == (57 if one.task == "mmlu" else 12)
        assert one.alone == pytest.approx(whole[one.task].alone, rel=0.15)
        assert one.distinct == pytest.approx(whole[one.task].distinct, rel=0.3)


def test_every_kind_of_request_of_lm_evals_tasks_is_counted(folder: Path, tmp_path: Path) -> None:
    tasks = made_tasks(tmp_path / "tasks", count=8)
    names = ("made_choice", "made_last_word", "made_texts", "made_answers", "made_shots")
    options = {"suite": "lm_eval", "include_path": tasks, "tasks": names}
    found = {one.task: one for one in tokens_of(folder, 1000, **options)}
    assert found.keys() == {*names}
    assert {one.documents for one in found.values()} == {8}
    assert found["made_answers"].generated == 64
    assert found["made_answers"].rows == 8
    assert found["made_shots"].alone > 2 * found["made_choice"].alone
    assert all(one.generated == 0 for name, one in found.items() if name != "made_answers")
    half = {one.task: one for one in tokens_of(folder, 4, **options)}
    assert all(one.sampled == 4 for one in half.values())
    assert half["made_answers"].generated == 64


def test_places_are_spread_in_blocks() -> None:
    assert spread(5, 8) == [0, 1, 2, 3, 4]
    found = spread(1000, 40, 4)
    assert len(found) == 40
    assert found[:5] == [0, 1, 2, 3, 99]
    assert found[-1] > 850
    assert max(spread(41, 40, 4)) <= 40


def test_parameters_are_counted_without_loading(folder: Path) -> None:
    plan = planned(folder / "vanilla", CHOICES | {"data_dir": folder / "documents"}, silent)
    assert parameter_count(plan.checkpoint) == 139_584


def test_the_report_has_every_benchmark_and_a_total(folder: Path) -> None:
    benchmarks = {"zeroshot8": CHOICES, "needle": NEEDLE, "norms": {"count": 12}}
    path = made_study(folder, {"A": "vanilla", "B": "intg-*"}, benchmarks, "dry.yaml", output="dry")
    study = read_study(path)
    report = dry_run_report(study, silent)
    assert not study.output.exists()
    rows = {record["benchmark"]: record for record in report.content["groups"]}
    assert [rows[name]["documents"] for name in benchmarks] == [3 * 60, 3 * 2, 0]
    assert rows["needle"]["generated_tokens"] == 3 * 2 * 32
    total = report.content["total"]
    assert (total["runs"], total["to_do"]) == (9, 9)
    assert total["tokens"] == rows["zeroshot8"]["tokens"] + rows["needle"]["tokens"]
    assert total["seconds"] > 0
    text = printed(report)
    assert "norms: benchmark norms cannot estimate its tokens; not in the totals" in text
    assert "a matrix product timed now on cpu" in text
    # What is finished takes no time
    smaller = made_study(folder, {"A": "vanilla"}, {"zeroshot8": CHOICES}, "small.yaml", output="dry")
    run_study(read_study(smaller), Told(), run_here, wait=False)
    after = dry_run_report(study, silent)
    rows = {record["benchmark"]: record for record in after.content["groups"]}
    assert rows["zeroshot8"]["to_do"] == 2
    record = record_of(study.output, study.runs[0])
    assert record is not None
    run = load_run(study.output / record.folder)
    assert rows["zeroshot8"]["tokens"] == 3 * counted(run)
    assert rows["zeroshot8"]["seconds"] > 0
    assert json.dumps(after.content)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_elsewhere(folder: Path) -> None:
    """Tokens are those of any machine."""
    benchmarks = {"zeroshot8": CHOICES, "here": CHOICES | {"suite": "zeroshot8", "limit": 3, "device": "cpu"}}
    own = made_study(folder, {"A": "vanilla"}, benchmarks, "cuda.yaml", settings={"device": "cuda"}, output="cuda")
    report = dry_run_report(read_study(own), silent)
    rows = {record["benchmark"]: record for record in report.content["groups"]}
    assert rows["zeroshot8"]["tokens"] > rows["here"]["tokens"] > 0
    assert rows["zeroshot8"]["seconds"] is None
    assert rows["here"]["seconds"] > 0
    text = printed(report)
    assert "time is not estimated: --device cuda: this machine has no cuda device(s) for torch" in text
    nowhere = made_study(folder, {"A": "vanilla"}, name="no.yaml", settings={"device": "cuda"}, output="cuda")
    text = printed(dry_run_report(read_study(nowhere), silent))
    assert "matrix product" not in text
    assert "tokens: of at most" in text


def test_a_single_run_is_counted_by_task(folder: Path) -> None:
    """All documents are sampled here, so the tokens are those of the run that follows, which then takes no time."""
    options = CHOICES | {"data_dir": folder / "documents", "output": folder / "alone"}
    plan = planned(folder / "vanilla", options, silent)
    report = plans_report([("vanilla", plan)], silent)
    assert not plan.folder.exists()
    rows = {record["task"]: record for record in report.content["groups"]}
    total = report.content["total"]
    assert list(rows) == list(plan.manifest["documents"])
    for name in ("documents", "tokens", "distinct_tokens"):
        assert total[name] == sum(row[name] for row in rows.values())
    assert total["seconds"] > 0 and total["distinct_tokens"] < total["tokens"]
    run = run_plan(plan, Told())
    assert total["tokens"] == counted(run)
    after = plans_report([("vanilla", plan)], silent)
    assert after.content["total"]["seconds"] == 0 and after.content["finished"]
    assert f"finished: {plan.folder}" in printed(after)


def test_several_checkpoints_have_a_line_each(folder: Path) -> None:
    options = CHOICES | {"data_dir": folder / "documents", "output": folder / "several"}
    names = sorted(path.name for path in folder.glob("intg-*"))
    report = plans_report([(name, planned(folder / name, options, silent)) for name in names], silent)
    assert [record["checkpoint"] for record in report.content["groups"]] == names
    assert report.content["total"]["runs"] == len(names)


def test_models_with_one_tokenizer_and_other_windows_have_other_tokens(tmp_path: Path, folder: Path) -> None:
    """Long prompts are cut to the window."""
    shutil.copytree(folder / "documents", tmp_path / "documents")
    for name, window in (("long", 1024), ("short", 64)):
        tiny_checkpoint(tmp_path / name, window=window)
    tokens = []
    for names in (("long", "short"), ("long",), ("short",)):
        path = made_study(tmp_path, {name: name for name in names}, name="study.yaml")
        tokens.append(dry_run_report(read_study(path), silent).content["total"]["tokens"])
    assert tokens[1] > tokens[2]
    assert tokens[0] == tokens[1] + tokens[2]


@pytest.mark.parametrize("layers", [["1", "2"], ["-3"]])
def test_layers_that_a_model_does_not_have(layers: list[str], folder: Path) -> None:
    """They are named, as by the run itself, and the benchmark has no estimate."""
    options = {"suite": "attention", "tasks": ["piqa"], "data_dir": "documents", "allow_unofficial_data": True}
    benchmarks = {"maps": options | {"sample": 2, "measures": ["bos"], "layers": layers}}
    path = made_study(folder, {"A": "vanilla"}, benchmarks, f"layers{layers[-1]}.yaml", output="maps")
    text = printed(dry_run_report(read_study(path), silent))
    assert f"no attention layer {layers[-1]}" in text and "not in the totals" in text
