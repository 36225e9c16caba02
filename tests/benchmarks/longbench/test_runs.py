"""LongBench's requests, plans and runs, from documents to results, on checkpoints of random weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from evalkit.benchmarks.generated import DocumentPlan
from evalkit.benchmarks.longbench.benchmark import LongBench, max_prompt_tokens
from evalkit.benchmarks.longbench.official import prompt_text, score_prediction
from evalkit.benchmarks.longbench.protocol import TASKS, suite_tasks
from evalkit.benchmarks.longbench.results import load_generations, report_of
from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import CheckpointError, DataError, ScoringError, UsageError
from evalkit.generation.generator import Generator
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.benchmarks.kinds import Lines
from tests.benchmarks.longbench.made import evaluate_longbench, record, request, write
from tests.benchmarks.longbench.test_prompts import official
from tests.fixtures import LONGBENCH_ROWS
from tests.generation.made import by_transformers
from tests.models.loading import edit_config, load_folder
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


@pytest.fixture(scope="module")
def generated(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Not to be changed."""
    return evaluate_longbench(request(model, rows, tmp_path_factory.mktemp("runs"), token_budget=2000), Lines())


def planned(
    model: Path, rows: Path, *tasks: str, say: Any = silent, output: Path = Path("runs"), **options: Any
) -> DocumentPlan:
    options = {"max_prompt_tokens": None} | options
    return LongBench().plan(request(model, rows, output, *(tasks or ("qasper", "trec")), **options), say)


@pytest.mark.parametrize(
    ("requested", "context", "most_new", "most"),
    [(None, 8192, 512, 7500), (None, 4096, 512, 3500), (None, 2048, 512, 1356), (None, 16384, 512, 15500),
     (None, 12000, 512, 11308), (None, 1000, 128, 500), (None, 700, 512, 188), (7680, 8192, 512, 7680)],
)  # fmt: skip
def test_windows(requested: int | None, context: int, most_new: int, most: int) -> None:
    assert max_prompt_tokens(requested, context, most_new) == most
    for beyond in (context - most_new + 1, 1, 0):
        with pytest.raises(UsageError, match=f"--max-prompt-tokens {beyond}:"):
            max_prompt_tokens(beyond, context, most_new)
    with pytest.raises(UsageError, match="--context"):
        max_prompt_tokens(None, most_new, most_new)


def test_what_makes_another_run(model: Path, rows: Path, tmp_path: Path) -> None:
    plain = planned(model, rows)
    assert plain.manifest["specification"]["max_prompt_tokens"] == 512
    assert plain.manifest["context"] == 1024
    source = f"data-dir {rows / 'qasper.jsonl'}"
    assert plain.manifest["documents"]["qasper"] == {"source": source, "official": False, "count": 6}
    assert json.loads(json.dumps(plain.manifest)) == plain.manifest
    changed, ending = Path(shutil.copytree(rows, tmp_path / "rows")), Path(shutil.copytree(model, tmp_path / "tiny"))
    write(changed / "qasper.jsonl", [record("qasper", number, context="Changed.") for number in range(6)])
    (ending / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    options: list[dict[str, Any]] = [
        {"max_prompt_tokens": 300}, {"chat": True}, {"limit": 2}, {"context": 4096}, {"device": "cuda"}
    ]  # fmt: skip
    others = [planned(model, rows, **option) for option in options]
    others += [planned(model, rows, "qasper"), planned(model, changed), planned(ending, rows)]
    assert len({plan.manifest["id"] for plan in (plain, *others)}) == 9
    assert others[1].folder.name.startswith("tiny-longbench-chat-")
    assert others[3].manifest["specification"]["max_prompt_tokens"] == 3500
    assert planned(model, rows, token_budget=64).manifest["id"] == plain.manifest["id"]


def test_tasks_without_documents_are_left_out(model: Path, tmp_path: Path) -> None:
    """The error if there are no documents, or else a message, says the same of many tasks once."""
    every, said = tuple(task.name for task in suite_tasks("longbench-e")), list[str]()
    with pytest.raises(DataError, match=f"^{', '.join(every)}: .*hub.*--data-dir") as caught:
        planned(model, tmp_path, *every, suite="longbench-e", say=said.append)
    assert str(caught.value).count("no documents") == 1
    write(tmp_path / "lcc_e.jsonl", [record("lcc")])
    write(tmp_path / "trec_e.jsonl", [b"{"])
    plan = planned(model, tmp_path, *every, suite="longbench-e", say=said.append)
    assert list(plan.tasks) == ["lcc"]
    # The window is that of the remaining task
    assert planned(model, tmp_path, *every, suite="longbench-e", max_prompt_tokens=960).manifest["context"] == 1024
    assert [("line 1 (trec)" in line, "qasper" in line) for line in plan.manifest["left_out"]] == [
        (False, True), (True, False)]  # fmt: skip
    assert [line for line in said if "left out" in line] == [f"left out: {line}" for line in plan.manifest["left_out"]]
    inner = write(tmp_path / "rows" / "qasper.jsonl", [record("qasper")]).parent
    with pytest.raises(DataError, match=str(inner)):
        planned(model, tmp_path, "qasper")


def test_invalid_requests(model: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dynamic-yarn"):
        planned(model, rows, context=4096, context_method="dynamic-yarn")
    # Within the window nothing is extended, whatever the method
    assert planned(model, rows, context=1024, context_method="dynamic-yarn").manifest["context"] == 1024
    without_window = tiny_checkpoint(tmp_path / "tiny")
    edit_config(without_window, "max_position_embeddings")
    with pytest.raises(UsageError, match="--context-original"):
        planned(without_window, rows)
    assert planned(without_window, rows, context=1024, context_original=1024).manifest["context"] == 1024


def test_the_papers_context_is_the_default(model: Path, rows: Path, tmp_path: Path) -> None:
    """The same run as with --context 8192, announced in one line that says how to disable it."""
    said: list[str] = []
    bare = planned(model, rows, context=None, say=said.append)
    [announced] = [line for line in said if "8,192 tokens by yarn: factor 8" in line]
    assert "--context none" in announced
    assert bare.manifest["id"] == planned(model, rows, context=8192).manifest["id"]
    assert bare.request.model.context == 8192  # the model is loaded with it
    assert (bare.manifest["context"], bare.manifest["specification"]["max_prompt_tokens"]) == (8192, 7500)
    assert planned(model, rows).manifest["specification"]["context_extension"] is None
    long = tiny_checkpoint(tmp_path / "long", window=8192)
    assert planned(long, rows, context=None).manifest["id"] == planned(long, rows).manifest["id"]


def test_a_method_without_a_context(model: Path, rows: Path, tmp_path: Path) -> None:
    def extension(**options: Any) -> dict[str, Any]:
        return dict(
            planned(model, rows, **({"context": None} | options)).manifest["specification"]["context_extension"]
        )

    assert extension(context_method="linear") == extension(context_method="linear", context=8192)
    assert extension(context_original=512)["factor"] == 16
    path = tmp_path / "own.yaml"
    path.write_text("beta_fast: 20\n", encoding="utf-8")
    assert (extension(context_config=path)["target"], extension(context_config=path)["beta_fast"]) == (8192, 20)
    path.write_text("context: 2048\n", encoding="utf-8")
    assert extension(context_config=path)["target"] == 2048
    with pytest.raises(UsageError, match="--context-method"):
        planned(model, rows, context_method="linear")
    own = tiny_checkpoint(tmp_path / "tiny", window=2048)
    edit_config(own, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match=r"config\.json.*--context none.*--context 8192"):
        planned(own, rows, context=None)
    assert planned(own, rows).manifest["context"] == 2048


def compare_with_transformers(run: Run, plan: DocumentPlan, most: int) -> pd.DataFrame:
    """Compare every answer with transformers' generation after the same tokens; return the table."""
    table = load_generations(run)
    loaded = load_folder(Path(plan.request.model.model), dtype="float32")
    newline = loaded.tokenizer("\n", add_special_tokens=False).input_ids[-1]
    for name, documents in plan.tasks.items():
        task, answers = TASKS[name], table[table["task"] == name]
        assert list(answers["id"]) == [row.id for row in documents]
        for row, stored in zip(documents, answers.itertuples(), strict=True):
            text = prompt_text(task, row)
            assert stored.prompt_sha256 == hashlib.sha256(text.encode()).hexdigest()
            ids = np.array(official(loaded.tokenizer, text, most))
            before = len(loaded.tokenizer(text, verbose=False).input_ids)
            assert (stored.tokens_before, stored.tokens, stored.truncated) == (before, len(ids), before > most)
            ends = [1, newline] if task.name == "samsum" else [1]
            expected = by_transformers(loaded.model, ids, task.max_new_tokens, ends, task.name == "samsum")
            whole = loaded.tokenizer.decode(expected, skip_special_tokens=True)
            assert whole.startswith(stored.prediction.rstrip("�"))
            assert (stored.ended == "enough") == (len(expected) > stored.new_tokens)
            assert stored.score == score_prediction(task, whole, row.answers, row.all_classes)
    return table


def test_every_row_is_what_transformers_generates(generated: Run, model: Path, rows: Path) -> None:
    plan = planned(model, rows, "qasper", "trec", "samsum", "lcc", max_prompt_tokens=600)
    table = compare_with_transformers(generated, plan, 600)
    assert {True, False} == set(table["truncated"])
    assert (table["reused"] > 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["real_rows", "longbench_data"])
def test_real_rows(model: Path, source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Most are far longer than the window; with all sixteen tasks the averages have their plain names."""
    folder, tasks = request.getfixturevalue(source), LONGBENCH_ROWS
    if source == "longbench_data":
        folder, tasks = folder / "minilongbench_en", tuple(TASKS)
    plan = planned(model, folder, *tasks, max_prompt_tokens=400, limit=1, output=tmp_path)
    run = evaluate_longbench(plan.request, Lines())
    assert compare_with_transformers(run, plan, 400)["truncated"].sum() > 7
    assert (run.stored["averages"][0]["name"] == "Plain mean") == (len(tasks) == 16)


@pytest.mark.slow
def test_batches_of_a_real_model(demo: Path, longbench_data: Path, tmp_path: Path) -> None:
    short = [task.name for task in TASKS.values() if task.max_new_tokens <= 64 or task.name == "samsum"]
    tables, options = [], {"max_prompt_tokens": 800, "limit": 3}
    for budget in (1, 30_000):
        output, rows = tmp_path / str(budget), longbench_data / "minilongbench_en"
        run = evaluate_longbench(request(demo, rows, output, *short, token_budget=budget, **options), Lines())
        tables.append(load_generations(run).drop(columns=["seconds", "reused"]))
    assert len(tables[0]) >= 30
    pd.testing.assert_frame_equal(*tables)


def test_results_and_views(generated: Run, rows: Path) -> None:
    stored, table = generated.stored, load_generations(generated)
    for task in stored["tasks"]:
        scores = table.loc[table["task"] == task["task"], "score"]
        assert task["all"]["score"] == pytest.approx(100 * scores.mean(), abs=0.005)
        assert (task["all"]["n"], task["official"]) == (6, False)
    content = report_of(generated).content
    assert {name: content[name] for name in stored if name != "averages"} == {
        name: value for name, value in stored.items() if name != "averages"
    }
    for view in benchmark_of(generated).views(generated, (), silent):
        assert view.metric == TASKS[view.task].metric
        for document, row in zip(view.documents, table[table["task"] == view.task].itertuples(), strict=True):
            assert (document.id, document.answer, document.score) == (row.id, row.prediction, row.score)
            assert document.references == tuple(json.loads(row.answers))
            assert ("cut" in document.facts) == row.truncated
    with pytest.raises(UsageError, match="longbench"):
        generated.results("acc")


def test_batches_change_no_text(
    generated: Run, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size, also where memory runs out."""
    generate = Generator._generate
    most = 1

    def narrow(generator: Generator, batch: Any) -> Any:
        if len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(generator, batch)

    monkeypatch.setattr(Generator, "_generate", narrow)
    said = Lines()
    run = evaluate_longbench(request(model, rows, tmp_path, token_budget=10**6), said)
    first, again = (load_generations(run).drop(columns=["seconds", "reused"]) for run in (generated, run))
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    assert any(line.startswith("out of memory on 6 prompts") for line in said.said)
    most = 0
    with pytest.raises(ScoringError, match="memory"):
        evaluate_longbench(request(model, rows, tmp_path / "none"), Lines())


def test_a_model_that_ends_at_once(model: Path, rows: Path, tmp_path: Path) -> None:
    """Its predictions are empty and score nothing; on samsum the end token cannot come first."""
    loaded = load_folder(model, dtype="float32").model
    states: list[torch.Tensor] = []
    loaded.base_model.norm.register_forward_hook(lambda *arguments: states.append(arguments[2]))
    loaded(torch.arange(2, 60)[None])
    # The common component of all hidden states makes this token the argmax
    loaded.get_output_embeddings().weight.data[1] = 100 * states[0].mean((0, 1))
    mute = Path(shutil.copytree(model, tmp_path / "mute"))
    loaded.save_pretrained(mute)
    table = load_generations(evaluate_longbench(request(mute, rows, tmp_path, limit=2), Lines()))
    empty = table[table["prediction"] == ""]
    assert len(empty) >= len(table) / 4
    assert (set(empty["ended"]), set(empty["new_tokens"]), set(empty["score"])) == ({"end"}, {1}, {0.0})
    assert (table.loc[table["task"] == "samsum", "new_tokens"] > 1).all()


def test_other_suites_windows_and_scripts(model: Path, tmp_path: Path) -> None:
    """LongBench-E, an extended context, and documents of any characters."""
    records = [record("trec", number, dataset="trec_e", length=5000 * number) for number in range(3)]
    write(tmp_path / "rows" / "trec_e.jsonl", records)
    options = {"suite": "longbench-e", "context": 4096, "max_prompt_tokens": None}
    run = evaluate_longbench(request(model, tmp_path / "rows", tmp_path, "trec", **options), Lines())
    assert run.folder.name.startswith("tiny-longbench-e-plain-")
    assert [part["n"] for part in run.stored["tasks"][0]["buckets"]] == [1, 1, 1]
    specification = run.manifest["specification"]
    assert (specification["max_prompt_tokens"], specification["context_extension"]["method"]) == (3500, "yarn")
    assert run.manifest["loaded"]["context_extension"]["factor"] == 4.0
    texts = ["{braces} and {input} {0}", "夜里河水上涨。🌊 في الصباح", "\x00\x1f￾", "a" * 20000]
    odd = [record("qasper", number, context=text, answers=["桥 ✓"]) for number, text in enumerate(texts)]
    write(tmp_path / "rows" / "qasper.jsonl", odd)
    plan = planned(model, tmp_path / "rows", "qasper", max_prompt_tokens=600, output=tmp_path)
    compare_with_transformers(evaluate_longbench(plan.request, Lines()), plan, 600)
