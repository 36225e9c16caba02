"""Runs: tables compared with whole eager maps in float64 and plain loops, results, comparisons, and what ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import evalkit
from evalkit.attention.documents import AttentionRequest, batches_of, plan_attention
from evalkit.attention.groups import MEASURES
from evalkit.attention.map_blocks import stream_attention_maps
from evalkit.attention.results import ALL, DOCUMENTS, HEADS, attention_report, results_of
from evalkit.benchmarks.request import request_of
from evalkit.comparison.comparison import compare_pairing
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.display import Progress
from evalkit.errors import OutOfMemoryError, ScoringError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.models.memory import whole_batches
from evalkit.runs.folder import Run
from tests.attention import plainly
from tests.attention.made import made_run
from tests.models.variants.building import VARIANTS, model_of
from tests.tiny import tiny_checkpoint, tiny_tokenizer

WITHOUT_TAGGER = "bos,bos_tokens,entropy,negative,sink,distance,sparsity,similarity,rank,all_tokens"


def checkpoint_of(variant: str, folder: Path) -> Path:
    if variant == "vanilla":
        return tiny_checkpoint(folder / variant, window=1024)
    rows = len(AutoTokenizer.from_pretrained(tiny_tokenizer(folder / variant)))
    changes = {"vocab_size": rows, "max_position_embeddings": 1024, "num_attention_heads": 4}
    model_of("llama", VARIANTS[variant], **changes).save_pretrained(folder / variant)
    return folder / variant


def run_of(checkpoint: Path, documents: Path | None, output: Path, **options: Any) -> Run:
    of_documents = {"tasks": "piqa,boolq", "data_dir": documents, "allow_unofficial_data": True} if documents else {}
    return evalkit.evaluate(
        checkpoint, suite="attention", device="cpu", output=output, progress=Progress(live=False),
        **of_documents | options,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["vanilla", "differential"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, documents: Path) -> Run:
    """A finished run of each attention, on documents of two tasks. Do not modify."""
    folder = tmp_path_factory.mktemp("attention")
    settings = {"measures": WITHOUT_TAGGER, "layers": "0,1,-1"}
    return run_of(
        checkpoint_of(request.param, folder), documents, folder / "runs", settings=settings, sample=4, dtype="float32"
    )


def test_every_value_equals_that_of_whole_maps_in_float64(run: Run, documents: Path) -> None:
    """Of every document, layer and head. The run is in float32 with sums in float64; the expected values are of a model
    in float64. Weights differ by 1e-7, and a rank counts some hundred singular values: relative 2e-4."""
    path = run.manifest["path"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    options = {"sample": 4, "tasks": "piqa,boolq", "data_dir": documents, "allow_unofficial_data": True}
    plan = plan_attention(request_of(AttentionRequest, path, options | {"measures": "bos"}), silent)
    table = run.table(ALL).astype({"measure": str, "position": "Int64"})
    keys = ["task", "doc_id", "layer", "measure", "position"]
    rows = {key: own.to_numpy() for key, own in table.fillna({"position": 0}).groupby(keys, observed=True)["value"]}
    compared: dict[str, int] = {}
    for batch in batches_of(plan, 1024, AutoTokenizer.from_pretrained(path), set(), silent):  # type: ignore[arg-type]
        for sequence in batch.content:
            maps: dict[int, torch.Tensor] = {}
            ids = torch.tensor(sequence.tokens[None].astype(np.int64))
            stream_attention_maps(model, ids, lambda layer, seen, maps=maps: maps.update({layer: seen[0]}))
            for layer, seen in maps.items():
                expected = plainly.measures(seen.numpy(), None, [], sequence.last, sequence.bos)
                for name, values in expected.items():
                    measure = name.removesuffix("_by_position")
                    for number, column in enumerate(values.T) if name != measure else [(None, values)]:
                        each = measure == "bos_token"
                        position = 0 if number is None else 1 + number if each else 2**number
                        own = rows[batch.task, sequence.doc_id, layer, measure, position]
                        np.testing.assert_allclose(own, column, rtol=2e-4, atol=2e-6, err_msg=f"{name}, layer {layer}")
                        compared[measure] = compared.get(measure, 0) + len(own)
    assert compared.keys() >= {name for name, info in MEASURES.items() if info.group not in ("mass", "sink")}
    assert sum(compared.values()) == len(table)


def test_the_other_tables_and_the_results_are_group_bys_of_the_first(run: Run) -> None:
    words = {"task": str, "subtask": str, "measure": str, "position": float, "value": float}
    table = run.table(ALL).astype(words).fillna({"position": -1})
    for name, keys, made in (
        (DOCUMENTS, ["task", "subtask", "doc_id", "choice", "layer", "measure", "position"], ["mean", "median"]),
        (HEADS, ["task", "layer", "head", "measure", "position"], ["mean"]),
    ):
        kinds = {key: kind for key, kind in words.items() if key in keys}
        own = run.table(name).astype(kinds).fillna({"position": -1}).set_index(keys).sort_index()[made]
        pd.testing.assert_frame_equal(own, table.groupby(keys)["value"].agg(made).sort_index(), rtol=1e-9)
    assert run.table(HEADS)["n"].max() == 4
    rows = run.table(DOCUMENTS)
    rows = rows[rows["position"].isna()]
    for task in run.stored["tasks"]:
        assert (task["n"], task["truncated"]) == (4, 0)
        of_task = rows[rows["task"] == task["task"]]
        for name, result in task["measures"].items():
            column = "median" if name.startswith("rank") else "mean"
            values = of_task[of_task["measure"] == name].groupby("doc_id")[column].mean()
            assert result["value"] == pytest.approx(values.mean(), rel=1e-6)
            error = result["stderr"] or 0  # that of equal values is not known
            assert error == pytest.approx(values.sem(), rel=1e-6, abs=1e-12)
    assert [layer["layer"] for layer in run.stored["layers"]] == sorted(rows["layer"].unique())


def test_layers_and_continuations(tmp_path: Path, documents: Path) -> None:
    """The rank is of the last four layers, BOS by single positions of the last, unless layers are named."""
    model = tiny_checkpoint(tmp_path / "six", window=1024, layers=6)
    settings = {"measures": "rank,bos,bos_tokens", "continuation": "all"}
    every = run_of(model, documents, tmp_path, sample=1, settings=settings)
    heads, rows = every.table(HEADS), every.table(DOCUMENTS)
    assert set(heads[heads["measure"] == "rank"]["layer"]) == {2, 3, 4, 5}
    assert set(heads[heads["measure"] == "bos"]["layer"]) == {*range(6)}
    assert set(heads[heads["measure"] == "bos_token"]["layer"]) == {5}
    assert sorted(rows[rows["task"] == "piqa"]["choice"].unique()) == [0, 1]
    assert {task["task"]: task["n"] for task in every.stored["tasks"]} == {"piqa": 1, "boolq": 1}
    for measures in ("rank", "bos_tokens"):
        named = run_of(model, documents, tmp_path, sample=1, settings={"measures": measures, "layers": "1,-1"})
        assert set(named.table(HEADS)["layer"]) == {1, 5}
        assert attention_report(named, detail=True).notes
    with pytest.raises(UsageError, match=r"--layers 6"):
        run_of(model, documents, tmp_path, sample=1, settings={"measures": "rank", "layers": "6"})


def test_documents_that_no_measure_applies_to(tmp_path: Path, documents: Path, checkpoint: Path) -> None:
    """They are finished too, so that the run ends, and with a reason if nothing remains."""
    short = run_of(checkpoint, documents, tmp_path, sample=2, seed=1, settings={"measures": "sink"}, template="plain")
    assert [(task["task"], task["n"]) for task in short.stored["tasks"]] == [("piqa", 2), ("boolq", 2)]
    assert short.stored["tasks"][0]["measures"] == {}
    without_bos = tiny_checkpoint(tmp_path / "model", bos=None)
    for _ in range(2):
        with pytest.raises(ScoringError, match="BOS"):
            run_of(without_bos, documents, tmp_path, sample=2, settings={"measures": "bos,negative"})


def test_windows_of_a_text_may_be_shorter_than_the_models(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(f"word{n}" for n in range(300)), encoding="utf-8")
    settings = {"text": tmp_path / "book.txt", "measures": "bos"}
    rows = run_of(checkpoint, None, tmp_path / "runs", sample=2, context=100, settings=settings).table(DOCUMENTS)
    assert ({*rows["task"]}, {*rows["tokens"]}, rows["doc_id"].nunique()) == ({"text"}, {100}, 2)


def test_a_worker_without_memory_leaves_the_document_to_another(
    tmp_path: Path, documents: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("evalkit.attention.measures.measures_of", fail)
    settings = {"measures": "bos"}
    with pytest.raises(ScoringError, match=r"\d+ tokens; leave rank out") as caught:
        run_of(checkpoint, documents, tmp_path, sample=1, settings=settings)
    assert not isinstance(caught.value, OutOfMemoryError)
    with whole_batches(), pytest.raises(OutOfMemoryError, match=r"piqa document \d+"):
        run_of(checkpoint, documents, tmp_path, sample=1, settings=settings)


def frame(values: list[float], clusters: list[int], task: str = "boolq") -> pd.DataFrame:
    """Return a table over heads with one measure of one layer."""
    about = {"task": task, "subtask": task, "doc_id": range(len(values)), "choice": 0, "cluster": clusters,
             "tokens": 70, "truncated": [0, 3] + [0] * (len(values) - 2), "layer": 0, "measure": "bos_abs",
             "position": pd.NA}  # fmt: skip
    return pd.DataFrame(about | {"mean": values, "median": 0.0})


def test_errors_are_clustered_by_source_with_tasks_as_strata() -> None:
    def results(*tables: pd.DataFrame) -> dict[str, Any]:
        table = pd.concat(tables, ignore_index=True)
        return results_of(table, table[["task", "subtask", "doc_id", "choice", "tokens", "truncated"]], {})

    values = [0.1, 0.4, 0.5, 0.9]
    # Two documents of one source with the same value count as one: the error is that of the sources' mean
    doubled = results(frame([value for value in values for _ in range(2)], [0, 0, 2, 2, 4, 4, 6, 6]))
    [task] = doubled["tasks"]
    assert task["measures"]["bos_abs"] == {
        "n": 8,
        "unit": "fraction",
        "higher_is_better": None,
        "value": pytest.approx(0.475),
        "stderr": pytest.approx(pd.Series(values).sem()),
    }
    assert (task["truncated"], task["tokens"]) == (1, 560)
    assert results(frame([0.5, 0.5], [0, 0]))["measures"]["bos_abs"]["stderr"] is None
    both = results(frame([0.1, 0.2], [0, 1]), frame([0.8, 0.9], [0, 1], "piqa"))["measures"]["bos_abs"]
    # Each task's mean has the variance s² / 2 with s² = 0.005; the mean of two has a quarter of their sum
    assert (both["value"], both["stderr"]) == pytest.approx((0.5, (0.0025 * 2 / 4) ** 0.5))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs on the same documents. Do not modify."""
    root = tmp_path_factory.mktemp("runs")
    return [made_run(root, name, layers=5, tokens=(40, 90)) for name in ("one", "two")]


def paired(one: Run, two: Run) -> Any:
    return pair(Side("one", (one,)), Side("two", (two,)), {})


def test_what_is_not_compared(made: list[Run], tmp_path: Path) -> None:
    """Other tokens; measures of some documents only, as sinks need 64 tokens."""
    other = made_run(tmp_path, "other", layers=5, tokenizer=1, tokens=(40, 90))
    with pytest.raises(UsageError, match="sequence"):
        paired(made[0], other)
    for rule in ("sink", "rank@0", "rank@x"):
        with pytest.raises(UsageError, match=rule.partition("@")[0]):
            compare_pairing(paired(*made), rule)
