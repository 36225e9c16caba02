"""LongBench's requests, plans and runs, compared with transformers on checkpoints of random weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.generated import DocumentPlan
from evalkit.benchmarks.registry import results_of
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.errors import CheckpointError, DataError, UsageError
from evalkit.longcontext.longbench.benchmark import LongBench, LongBenchRequest, max_prompt_tokens
from evalkit.longcontext.longbench.official import prompt_text, score_prediction
from evalkit.longcontext.longbench.protocol import TASKS, suite_tasks
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.generation.made import by_transformers
from tests.longcontext.longbench.made import official_prompt, record, write
from tests.models.loading import edit_config, load_folder
from tests.tiny import TRAINING_TEXT, tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures

TALK = "\n".join(TRAINING_TEXT)
MADE = ("qasper", "trec", "samsum", "lcc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=1024)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some rows longer than the window, some that share a document, and many scripts."""
    folder = tmp_path_factory.mktemp("rows")
    for task in MADE:
        records = [record(task, number, context=TALK[50 * number :] * (1 + number % 3)) for number in range(2)]
        write(folder / f"{task}.jsonl", [*records, record(task, 3, context=TALK, input=records[0]["input"])])
    return folder


def planned(model: Path, rows: Path, *tasks: str, say: Any = silent, **options: Any) -> DocumentPlan:
    named = {"tasks": tasks or ("qasper", "trec"), "output": Path("runs"), "dtype": "float32", "context": "none"}
    return LongBench().plan(request_of(LongBenchRequest, model, named | {"data_dir": rows} | options), say)


def made(plan: DocumentPlan) -> Run:
    return run_plan(plan, Progress(live=False))


def compare_with_transformers(run: Run, plan: DocumentPlan) -> pd.DataFrame:
    """Compare every answer with transformers' generation after the same tokens; return the table."""
    table, most = run.table("generations.parquet"), plan.manifest["specification"]["max_prompt_tokens"]
    loaded = load_folder(Path(plan.request.model.model), dtype="float32")
    newline = loaded.tokenizer("\n", add_special_tokens=False).input_ids[-1]
    for name, documents in plan.tasks.items():
        task, answers = TASKS[name], table[table["task"] == name]
        assert list(answers["id"]) == [row.id for row in documents]
        for row, stored in zip(documents, answers.itertuples(), strict=True):
            text = prompt_text(task, row)
            assert stored.prompt_sha256 == hashlib.sha256(text.encode()).hexdigest()
            ids = np.array(official_prompt(loaded.tokenizer, text, most))
            before = len(loaded.tokenizer(text, verbose=False).input_ids)
            assert (stored.tokens_before, stored.tokens, stored.truncated) == (before, len(ids), before > most)
            ends = [1, newline] if task.name == "samsum" else [1]
            expected = by_transformers(loaded.model, ids, task.max_new_tokens, ends, task.name == "samsum")
            whole = loaded.tokenizer.decode(expected, skip_special_tokens=True)
            assert whole.startswith(stored.prediction.rstrip("\ufffd"))
            assert (stored.ended == "enough") == (len(expected) > stored.new_tokens)
            assert stored.score == score_prediction(task, whole, row.answers, row.all_classes)
    return table


def test_every_row_is_what_transformers_generates(model: Path, rows: Path, evalkit: Command) -> None:
    """The results, the report and the views are of these rows; graded scores are no choices."""
    plan = planned(model, rows, *MADE, max_prompt_tokens=600, token_budget=2000)
    run = made(plan)
    table = compare_with_transformers(run, plan)
    assert {True, False} == set(table["truncated"])
    assert (table["reused"] > 0).any()
    stored = {name: value for name, value in run.stored.items() if name != "averages"}
    for task in stored["tasks"]:
        scores = table.loc[table["task"] == task["task"], "score"]
        assert task["all"]["value"] == pytest.approx(100 * scores.mean(), abs=0.005)
        assert (task["all"]["n"], task["official"]) == (3, False)
    for view in results_of(run).views((), silent):
        assert view.scale.name == TASKS[view.task].metric
        for document, row in zip(view.documents, table[table["task"] == view.task].itertuples(), strict=True):
            assert (document.id, document.answer, document.score) == (row.id, row.prediction, row.score)
            assert document.references == tuple(json.loads(row.answers))
            assert ("cut" in document.facts) == row.truncated
    complains(evalkit("integrity", run.folder), 2, "longbench", "zeroshot8")
    drawn = evalkit("longbench", "rescore", run.folder, "--plot", "lengths.png", "--format", "json")
    assert json.loads(drawn.out)["tasks"] == stored["tasks"]
    assert Path("lengths.png").stat().st_size > 1000


def test_other_suites_windows_and_scripts(model: Path, tmp_path: Path) -> None:
    records = [record("trec", number, dataset="trec_e", length=5000 * number) for number in range(3)]
    write(tmp_path / "rows" / "trec_e.jsonl", records)
    run = made(planned(model, tmp_path / "rows", "trec", suite="longbench-e", context=4096))
    assert run.folder.name.startswith("tiny-longbench-e-plain-")
    assert [part["n"] for part in run.stored["tasks"][0]["buckets"]] == [1, 1, 1]
    specification = run.manifest["specification"]
    assert (specification["max_prompt_tokens"], specification["context_extension"]["method"]) == (3500, "yarn")
    assert run.manifest["loaded"]["context_extension"]["factor"] == 4.0
    texts = ["{braces} and {input} {0}", "夜里河水上涨。🌊 في الصباح", "\x00\x1f￾", "a" * 3000]
    odd = [record("lcc", number, context=text, answers=["桥 ✓"]) for number, text in enumerate(texts)]
    write(tmp_path / "rows" / "lcc.jsonl", odd)
    plan = planned(model, tmp_path / "rows", "lcc", max_prompt_tokens=600)
    compare_with_transformers(made(plan), plan)


def test_tasks_without_documents_are_left_out(model: Path, tmp_path: Path) -> None:
    """The error if there are no documents, or else a message, says the same of many tasks once."""
    every, said = tuple(task.name for task in suite_tasks("longbench-e")), list[str]()
    with pytest.raises(DataError, match=f"^{', '.join(every)}: .*hub.*--data-dir"):
        planned(model, tmp_path, *every, suite="longbench-e")
    write(tmp_path / "lcc_e.jsonl", [record("lcc")])
    write(tmp_path / "trec_e.jsonl", [b"{"])
    # The window is that of the remaining task
    plan = planned(model, tmp_path, *every, suite="longbench-e", max_prompt_tokens=960, say=said.append)
    assert list(plan.tasks) == ["lcc"]
    assert [("line 1 (trec)" in line, "qasper" in line) for line in plan.manifest["left_out"]] == [
        (False, True), (True, False)]  # fmt: skip
    assert [line for line in said if "left out" in line] == [f"left out: {line}" for line in plan.manifest["left_out"]]


def test_windows() -> None:
    official = {8192: 7500, 4096: 3500, 2048: 1356, 16384: 15500, 12000: 11308, 700: 188}
    assert {context: max_prompt_tokens(None, context, 512) for context in official} == official
    assert (max_prompt_tokens(None, 1000, 128), max_prompt_tokens(7680, 8192, 512)) == (500, 7680)
    for beyond in (7681, 1, 0):
        with pytest.raises(UsageError, match=f"--max-prompt-tokens {beyond}:"):
            max_prompt_tokens(beyond, 8192, 512)
    with pytest.raises(UsageError, match="--context"):
        max_prompt_tokens(None, 512, 512)


def test_what_makes_another_run(model: Path, rows: Path, tmp_path: Path) -> None:
    plain = planned(model, rows)
    assert (plain.manifest["specification"]["max_prompt_tokens"], plain.manifest["context"]) == (512, 1024)
    changed, ending = Path(shutil.copytree(rows, tmp_path / "rows")), Path(shutil.copytree(model, tmp_path / "tiny"))
    write(changed / "qasper.jsonl", [record("qasper", number, context="Changed.") for number in range(6)])
    (ending / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    others = [planned(model, rows, **option) for option in ({"max_prompt_tokens": 300}, {"chat": True}, {"limit": 2})]
    others += [planned(model, rows, "qasper"), planned(model, changed), planned(ending, rows)]
    assert len({plan.manifest["id"] for plan in (plain, *others)}) == 7
    assert planned(model, rows, token_budget=64).manifest["id"] == plain.manifest["id"]


def test_the_papers_context_is_the_default(model: Path, rows: Path, tmp_path: Path) -> None:
    said: list[str] = []
    default = planned(model, rows, context=None, say=said.append)
    assert default.manifest["id"] == planned(model, rows, context=8192).manifest["id"]
    assert default.manifest["specification"]["max_prompt_tokens"] == 7500
    assert default.request.model.context == default.manifest["context"] == 8192  # the model is loaded with it
    assert any("8,192" in line and "--context none" in line for line in said)
    # Within the window nothing is extended, whatever the method; nor is a model whose positions cannot be
    assert planned(model, rows, context=1024, context_method="dynamic-yarn").manifest["context"] == 1024
    own = tiny_checkpoint(tmp_path / "own", window=2048)
    edit_config(own, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match=r"--context 8192: config\.json.*--context none"):
        planned(own, rows, context=None)
    assert planned(own, rows).manifest["context"] == 2048
