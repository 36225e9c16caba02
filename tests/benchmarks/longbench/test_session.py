"""LongBench runs from documents to results, on a checkpoint of random weights."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from evalkit.benchmarks.generated import about_run
from evalkit.benchmarks.longbench.benchmark import LongBench, LongBenchRequest
from evalkit.benchmarks.longbench.metrics import score_prediction
from evalkit.benchmarks.longbench.prompts import prompt
from evalkit.benchmarks.longbench.protocol import TASKS
from evalkit.benchmarks.longbench.scores import GENERATIONS, load_generations, results_of
from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.errors import RunError, ScoringError, UsageError
from evalkit.generation.generator import Generator
from evalkit.models.loading.locate import silent
from evalkit.runs.batch_devices import BatchDevice
from evalkit.runs.folder import JOURNAL, RESULTS, Run
from evalkit.runs.journal import Journal
from tests.benchmarks.longbench.made import evaluate_longbench, record, write
from tests.benchmarks.longbench.test_truncation import official
from tests.benchmarks.multiple_choice.test_evaluation import Lines
from tests.fixtures import LONGBENCH_ROWS
from tests.generation.made import by_transformers
from tests.journals import relocate
from tests.models.loading import load_folder
from tests.tiny import TRAINING_TEXT, tiny_checkpoint

TALK = "\n".join(TRAINING_TEXT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some rows longer than the window, some that share a document, and many scripts."""
    folder = tmp_path_factory.mktemp("rows")
    for task in ("qasper", "trec", "samsum", "lcc"):
        records = [record(task, number, context=TALK[50 * number :] * (1 + number % 3)) for number in range(4)]
        records += [record(task, number, context=TALK, input=records[0]["input"]) for number in range(4, 6)]
        write(folder / f"{task}.jsonl", records)
    return folder


def request(model: Path, rows: Path, output: Path, *tasks: str, **asked: Any) -> LongBenchRequest:
    named = {"tasks": tasks or ("qasper", "trec", "samsum", "lcc"), "max_prompt_tokens": 600}
    # Without extension, as in the transformers reference
    common = {"data_dir": rows, "output": output, "dtype": "float32", "context": "none"}
    return request_of(LongBenchRequest, model, common | named | asked)


def table_of(run: Run) -> pd.DataFrame:
    """Return everything but times, which is the same for every start of a run."""
    return load_generations(run).drop(columns="seconds")


@pytest.fixture(scope="module")
def generated(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Not to be changed."""
    return evaluate_longbench(request(model, rows, tmp_path_factory.mktemp("runs"), token_budget=2000), Lines())


def compare_with_transformers(run: Run, asked: LongBenchRequest) -> pd.DataFrame:
    """Compare every answer with transformers' generation after the same tokens; return the table."""
    table = load_generations(run)
    loaded = load_folder(Path(asked.model.model), dtype="float32")
    newline = loaded.tokenizer("\n", add_special_tokens=False).input_ids[-1]
    assert asked.max_prompt_tokens is not None
    for name, documents in LongBench().plan(asked, silent).tasks.items():
        task, own = TASKS[name], table[table["task"] == name]
        assert list(own["id"]) == [row.id for row in documents]
        for row, stored in zip(documents, own.itertuples(), strict=True):
            text = prompt(task, row)
            assert stored.prompt_sha256 == hashlib.sha256(text.encode()).hexdigest()
            ids = np.array(official(loaded.tokenizer, text, asked.max_prompt_tokens))
            before = len(loaded.tokenizer(text, verbose=False).input_ids)
            assert (stored.tokens_before, stored.truncated) == (before, before > asked.max_prompt_tokens)
            ends = [1, newline] if task.name == "samsum" else [1]
            expected = by_transformers(loaded.model, ids, task.max_new_tokens, ends, task.name == "samsum")
            whole = loaded.tokenizer.decode(expected, skip_special_tokens=True)
            assert stored.tokens == len(ids)
            assert whole.startswith(stored.prediction.rstrip("�"))
            assert (stored.ended == "enough") == (len(expected) > stored.new_tokens)
            answers, classes = json.loads(stored.answers), json.loads(stored.all_classes)
            assert stored.score == score_prediction(task, whole, answers, classes)
    return table


def test_every_row_is_what_transformers_generates(generated: Run, model: Path, rows: Path) -> None:
    table = compare_with_transformers(generated, request(model, rows, Path("none")))
    assert list(table["task"].unique()) == ["qasper", "trec", "samsum", "lcc"]
    assert {True, False} == set(table["truncated"])
    assert (table["reused"] > 0).any()


def test_results(generated: Run) -> None:
    stored, table = generated.stored, load_generations(generated)
    assert generated.complete
    for task in stored["tasks"]:
        own = table.loc[table["task"] == task["task"], "score"]
        assert task["all"]["score"] == pytest.approx(100 * own.mean(), abs=0.005)
        assert task["all"]["n"] == 6
        assert task["official"] is False
    assert stored == json.loads(json.dumps(asdict(results_of(generated)) | {"averages": stored["averages"]}))
    assert [mean["name"] for mean in stored["averages"]] == [
        "Plain mean (4 of 16 tasks)",
        "Mean of groups (4 of 16 tasks)",
    ]
    assert generated.manifest["loaded"]["architecture"] == "LlamaForCausalLM"
    assert generated.manifest["token_budget"] == 2000


@pytest.mark.parametrize("budget", [700, 10**6])
def test_the_budget_changes_no_text(generated: Run, model: Path, rows: Path, tmp_path: Path, budget: int) -> None:
    again = evaluate_longbench(request(model, rows, tmp_path, token_budget=budget), Lines())
    pd.testing.assert_frame_equal(
        table_of(again).drop(columns="reused"), table_of(generated).drop(columns="reused"), check_exact=True
    )


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", [1, 2, 5])
def test_what_is_missing_is_generated(
    generated: Run, model: Path, rows: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after some batches, with a torn last line: the table is the same, reuse included."""
    output = tmp_path / "runs"
    asked = request(model, rows, output, token_budget=2000)
    append = Journal.append
    count = 0

    def stop(journal: Journal, entry: Any, rows: Any, packed: Any = None) -> Any:
        nonlocal count
        if count == after:
            raise Stopped
        count += 1
        return append(journal, entry, rows)

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(Journal, "append", stop)
        evaluate_longbench(asked, Lines())
    [folder] = output.iterdir()
    journal = folder / JOURNAL
    kept = journal.read_bytes()
    journal.write_bytes(kept + b"0badc0de [half a li")
    said = Lines()
    # The budget is that of the first session, whatever memory is free now
    resumed = evaluate_longbench(request(model, rows, output), said)
    pd.testing.assert_frame_equal(table_of(resumed), table_of(generated), check_exact=True)
    assert journal.read_bytes().startswith(kept)
    assert len(journal.read_bytes().splitlines()) == len((generated.folder / JOURNAL).read_bytes().splitlines())
    assert resumed.manifest["token_budget"] == 2000
    assert any("1 damaged line(s) dropped" in line for line in said.said)


def test_another_device_is_reported(generated: Run, model: Path, rows: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(generated.folder, tmp_path / generated.folder.name))
    for name in (RESULTS, GENERATIONS):
        (folder / name).unlink()
    relocate(folder / JOURNAL, BatchDevice("cuda:0", "NVIDIA H100", "sdpa", "there"), keep=2)
    said = Lines()
    again = evaluate_longbench(request(model, rows, tmp_path), said)
    [warning] = [line for line in said.said if line.startswith("warning: this run was started on cuda NVIDIA H100; ")]
    assert warning.endswith(
        "may differ in their last digits, and generated texts may diverge; manifest.json will list the batches"
    )
    there, here = again.manifest["devices"]
    assert (there["device"], there["host"], here["device"], here["kernel"]) == ("cuda:0", "there", "cpu", "sdpa")
    assert sum(len(spans.split(",")) for spans in there["batches"].values()) == 2
    note = f"computed in part on cuda NVIDIA H100 and in part on cpu {platform.machine()}"
    assert any(line.startswith(note) for line in about_run(again))
    assert not any(line.startswith("computed in part") for line in about_run(generated))


def test_a_finished_run_needs_no_model(
    generated: Run, model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", pytest.fail)
    asked = request(model, rows, generated.folder.parent)
    assert run_plan(LongBench().plan(asked, silent), Lines()).folder == generated.folder


@pytest.mark.parametrize("lost", [GENERATIONS, RESULTS])
def test_files_are_made_anew_from_the_journal(
    generated: Run, model: Path, rows: Path, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", pytest.fail)
    folder = Path(shutil.copytree(generated.folder, tmp_path / generated.folder.name))
    (folder / lost).unlink()
    again = evaluate_longbench(request(model, rows, tmp_path), Lines())
    pd.testing.assert_frame_equal(load_generations(again), load_generations(generated), check_exact=True)
    assert again.stored == generated.stored


def test_a_damaged_table(generated: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(generated.folder, tmp_path / generated.folder.name))
    (folder / GENERATIONS).write_bytes(b"no parquet")
    with pytest.raises(RunError, match=r"generations.parquet is damaged .*delete results.json and run its command"):
        load_generations(Run(folder, generated.manifest))


def test_a_run_of_something_else(own_run: Path) -> None:
    from evalkit.runs.folder import load_run

    with pytest.raises(RunError, match="is not a LongBench run"):
        load_generations(load_run(own_run))


def test_no_choices_no_rules(generated: Run) -> None:
    with pytest.raises(
        UsageError, match=r"has no choices that a rule could decide between: benchmark longbench has its own"
    ):
        generated.results("acc")


def test_a_model_that_ends_at_once(model: Path, rows: Path, tmp_path: Path) -> None:
    """Its predictions are empty, and score nothing."""
    loaded = load_folder(model, dtype="float32").model
    states: list[torch.Tensor] = []
    loaded.base_model.norm.register_forward_hook(lambda *found: states.append(found[2]))
    loaded(torch.arange(2, 60)[None])
    # The common component of all hidden states makes this token the argmax
    loaded.get_output_embeddings().weight.data[1] = 100 * states[0].mean((0, 1))
    mute = Path(shutil.copytree(model, tmp_path / "mute"))
    loaded.save_pretrained(mute)
    table = load_generations(evaluate_longbench(request(mute, rows, tmp_path / "runs"), Lines()))
    empty = table[table["prediction"] == ""]
    assert len(empty) > len(table) / 4
    assert set(empty["ended"]) == {"end"}
    assert set(empty["new_tokens"]) == {1}
    assert set(empty["score"]) == {0.0}
    # On samsum the end token cannot come first
    assert (table.loc[table["task"] == "samsum", "new_tokens"] > 1).all()


def test_memory_that_runs_out_parts_batches(
    generated: Run, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Generator._generate

    def narrow(generator: Generator, batch: Any) -> Any:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(generator, batch)

    monkeypatch.setattr(Generator, "_generate", narrow)
    said = Lines()
    run = evaluate_longbench(request(model, rows, tmp_path, token_budget=10**6), said)
    pd.testing.assert_frame_equal(
        table_of(run).drop(columns="reused"), table_of(generated).drop(columns="reused"), check_exact=True
    )
    assert "out of memory on 6 prompts: going on with 3" in said.said


def test_memory_for_not_one(model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Generator, "_generate", none)
    with pytest.raises(ScoringError, match="is more than memory holds"):
        evaluate_longbench(request(model, rows, tmp_path / "runs"), Lines())
    assert not any((tmp_path / "runs").iterdir())


def test_stretched(model: Path, rows: Path, tmp_path: Path) -> None:
    asked = request(model, rows, tmp_path, "trec", context=4096, max_prompt_tokens=None, limit=2)
    run = evaluate_longbench(asked, Lines())
    specification = run.manifest["specification"]
    assert (specification["max_prompt_tokens"], specification["context_extension"]["method"]) == (3500, "yarn")
    assert run.manifest["loaded"]["context_extension"]["factor"] == 4.0
    assert not load_generations(run)["truncated"].any()


def test_longbench_e(model: Path, tmp_path: Path) -> None:
    records = [record("trec", number, dataset="trec_e", length=5000 * number) for number in range(3)]
    write(tmp_path / "rows" / "trec_e.jsonl", records)
    run = evaluate_longbench(request(model, tmp_path / "rows", tmp_path / "runs", "trec", suite="longbench-e"), Lines())
    assert run.folder.name.startswith("tiny-longbench-e-plain-")
    [task] = run.stored["tasks"]
    assert [bucket["n"] for bucket in task["buckets"]] == [1, 1, 1]


@pytest.mark.parametrize(
    "context", ["{braces} and {input} {0}", "夜里河水上涨。🌊 في الصباح", "\x00\x1f￾", "a" * 20000]
)
def test_unusual_documents(model: Path, tmp_path: Path, context: str) -> None:
    write(tmp_path / "rows" / "qasper.jsonl", [record("qasper", context=context, answers=["桥 ✓"])])
    asked = request(model, tmp_path / "rows", tmp_path / "runs", "qasper")
    run = evaluate_longbench(asked, Lines())
    [row] = load_generations(run).to_dict("records")
    text = prompt(TASKS["qasper"], LongBench().plan(asked, silent).tasks["qasper"][0])
    assert context in text
    assert row["prompt_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert json.loads(row["answers"]) == ["桥 ✓"]


def test_real_rows(model: Path, real_rows: Path, tmp_path: Path) -> None:
    """A row of nine tasks, most of them far longer than the window."""
    asked = request(model, real_rows, tmp_path, *LONGBENCH_ROWS, max_prompt_tokens=400)
    table = compare_with_transformers(evaluate_longbench(asked, Lines()), asked)
    assert list(table["task"]) == list(LONGBENCH_ROWS)
    assert all(table["truncated"])


@pytest.mark.slow
def test_real_rows_of_every_task(model: Path, longbench_data: Path, tmp_path: Path) -> None:
    """A few of every task; with all sixteen the averages bear their plain names."""
    asked = request(model, longbench_data / "minilongbench_en", tmp_path, *TASKS, limit=1, max_prompt_tokens=400)
    run = evaluate_longbench(asked, Lines())
    table = load_generations(run)
    assert list(table["task"]) == list(TASKS)
    assert table["truncated"].sum() > 10
    assert [mean["name"] for mean in run.stored["averages"]] == ["Plain mean", "Mean of groups"]


def test_documents_as_people_read_them(generated: Run) -> None:
    table = load_generations(generated)
    found = {view.task: view for view in benchmark_of(generated).views(generated, (), silent)}
    assert list(found) == list(dict.fromkeys(table["task"]))
    for task, rows in table.groupby("task"):
        view = found[task]
        assert view.metric == TASKS[task].metric
        for one, (_, row) in zip(view.documents, rows.iterrows(), strict=True):
            assert (one.id, one.answer, one.references) == (
                row["id"],
                row["prediction"],
                tuple(json.loads(row["answers"])),
            )
            assert one.score == row["score"] and 0 <= one.score <= 1
            assert one.facts["prompt tokens"] == f"{row['tokens_before']:,}"
            assert ("cut" in one.facts) == row["truncated"]
            assert one.facts.get("prompt tokens after the cut", f"{row['tokens']:,}") == f"{row['tokens']:,}"
    assert table["truncated"].any() and not table["truncated"].all()
    [task] = [view.task for view in benchmark_of(generated).views(generated, [table["task"][0]], silent)]
    assert task == table["task"][0]
