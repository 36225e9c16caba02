"""Official files, which are recognised, marked or rejected; scores as the official code prints them."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.cli import main
from evalkit.data import sources
from evalkit.data.sampling import FirstDocuments
from evalkit.data.sources import Hub
from evalkit.errors import DataError, EvalkitError
from evalkit.longcontext.longbench.data import OFFICIAL_BLOBS, blob_hash, load_rows, read_predictions, write_predictions
from evalkit.longcontext.longbench.official import template
from evalkit.longcontext.longbench.protocol import TASKS
from evalkit.longcontext.longbench.results import (
    BUCKETS,
    draw_by_length,
    longbench_report,
    score_generations,
    scores_by_length,
)
from evalkit.models.loading.locate import silent
from tests.fixtures import official_scores
from tests.longcontext.longbench.made import generations, prediction, record, write


def load(folder: Path, task: str = "hotpotqa", **options: Any) -> TaskDocuments:
    return load_rows(TASKS[task], folder, say=pytest.fail, **options)


def test_documents_are_pinned_by_content(real_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert blob_hash(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    content = (real_rows / "hotpotqa.jsonl").read_bytes()
    [row], stored = load(real_rows).documents, json.loads(content)
    assert (row.context, row.input, list(row.answers)) == tuple(stored[key] for key in ("context", "input", "answers"))
    monkeypatch.setitem(OFFICIAL_BLOBS, "hotpotqa", blob_hash(content))
    path = tmp_path / "hotpotqa.jsonl"
    path.write_bytes(content.replace(b"\n", b"\r\n"))
    assert load(tmp_path).official
    path.write_bytes(content.replace(b"Great South Bay", b"Great South Bey", 1))
    assert not load(tmp_path).official
    (tmp_path / "gov_report.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"hotpotqa.*gov_report"):
        load(tmp_path, "gov_report")


def test_rows_of_a_file(tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbf" + json.dumps(record("trec")).encode(), b"", record("trec", 2)]
    path = write(tmp_path / "data" / "trec.jsonl", lines)
    rows = load(tmp_path, "trec")
    assert [(row.id, row.index) for row in rows.documents] == [("trec-0", 0), ("trec-2", 1)]
    assert (rows.documents[1].all_classes, rows.documents[1].length) == (("Person", "Place"), 2005)
    assert rows.source == f"data-dir {path}"
    write(tmp_path / "hotpotqa_e.jsonl", [record(number=1, dataset="hotpotqa_e"), record(number=2)])
    assert [row.id for row in load(tmp_path, suite="longbench-e").documents] == ["hotpotqa-1", "hotpotqa-2"]
    twice, other = record(_id=None), record(number=1, _id=None)
    write(tmp_path / "hotpotqa.jsonl", [twice, other, twice])
    first, second, again = (row.id for row in load(tmp_path).documents)
    assert again == f"{first}-2"
    write(tmp_path / "hotpotqa.jsonl", [other, twice])
    assert [row.id for row in load(tmp_path).documents] == [second, first]


@pytest.mark.parametrize(
    ("task", "bad", "noun"),
    [
        ("hotpotqa", {"context": " "}, "'context'"),
        ("hotpotqa", {"answers": ["", " "]}, "'answers'"),
        # The hub's re-worked copies: the prompt in the documents, or the question in a field of another name
        ("hotpotqa", {"input": None, "question": "Question: Who?", "answer_prefix": "A"}, "re-worked.*'question'"),
        ("hotpotqa", {"context": template(TASKS["hotpotqa"]).split("{context}")[0]}, "re-worked.*'context'"),
        ("trec", {"all_classes": ["Place"]}, "'all_classes'"),
        ("passage_retrieval_en", {"answers": ["3"]}, "'answers'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, task: str, bad: dict[str, Any], noun: str) -> None:
    write(tmp_path / f"{task}.jsonl", [record(task, 9), record(task, **bad)])
    with pytest.raises(DataError, match=rf"{task}\.jsonl, line 2 \({task}\): .*{noun}"):
        load(tmp_path, task)
    assert load(tmp_path, task, selection=FirstDocuments(1)).documents[0].id == f"{task}-9"


def test_the_hub_serves_what_the_folder_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive of hotpotqa and trec, whose rows of hotpotqa are a re-worked copy."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as opened:
        for row in (record("trec"), record(max_new_tokens=3)):
            opened.writestr(f"data/{row['dataset']}.jsonl", json.dumps(row) + "\n")
    monkeypatch.setattr(sources, "reach", lambda: None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "data.zip"))
    inner = write(tmp_path / "own" / "hotpotqa.jsonl", [record(number=1)]).parent
    assert load_rows(TASKS["hotpotqa"], inner, say=silent, hub=Hub()).documents[0].id == "hotpotqa-1"
    rows = load_rows(TASKS["trec"], inner, say=silent, hub=Hub())
    about = (rows.documents[0].id, rows.official, rows.source)
    assert about == ("trec-0", False, "hub THUDM/LongBench, data/trec.jsonl")
    for task, noun in (("hotpotqa", "data/hotpotqa.jsonl, line 1 .*re-worked"), ("lcc", r"data\.zip \(lcc\)")):
        with pytest.raises(DataError, match=noun):
            load_rows(TASKS[task], None, say=silent, hub=Hub())


def test_irregular_predictions_are_reported(tmp_path: Path) -> None:
    once = [prediction("a", [f"answer {number}"], number) for number in range(3)]
    write(tmp_path / "lcc.jsonl", once + once[::-1])  # several processes write in arbitrary order
    write(tmp_path / "qasper.jsonl", once)
    write(tmp_path / "multifieldqa_en.jsonl", [prediction("a", [str(number)], number) for number in range(151)])
    write(tmp_path / "vcsum.jsonl", once)
    out = " ".join(read_predictions([tmp_path])[1])
    expected = ("lcc.jsonl 6 for 3 (each 2 times)", "qasper.jsonl 3 for 200", "multifieldqa_en.jsonl 151 for 150")
    assert all(note in out for note in (*expected, "--e", "vcsum.jsonl"))


def test_a_bad_prediction_is_named(tmp_path: Path) -> None:
    for bad, noun in ((prediction("x", []), "'answers'"), (prediction("x", ["x"]), "'all_classes'")):
        file = write(tmp_path / "trec.jsonl", [prediction("x", ["x"], all_classes=["x"]), bad])
        with pytest.raises(DataError, match=rf"trec\.jsonl, line 2 \(trec\): .*{noun}"):
            read_predictions([file])


def test_files_of_predictions(tmp_path: Path) -> None:
    table = generations("lcc", ("x = '\u2028'\n", "é"), ("y", "z"), lengths=[3, 4])
    [file] = write_predictions(table, tmp_path / "pred")
    assert json.loads(file.read_bytes().split(b"\n")[0]) == prediction("x = '\u2028'\n", ["é"], 3)
    columns = ["task", "length", "prediction", "answers", "all_classes"]
    assert read_predictions([file])[0][columns].to_dict("list") == table[columns].to_dict("list")
    hotpotqa = write(tmp_path / "hotpotqa.jsonl", [{"pred": "x", "answers": ["x"], "all_classes": None}])
    other = write(tmp_path / "lcc_e.jsonl", [prediction("x", ["x"])])
    # LongBench-E has buckets of lengths; a task has one file
    for paths, suite, noun in (([hotpotqa], "longbench-e", "'length'"), ([file, other], "longbench", "lcc")):
        with pytest.raises(EvalkitError, match=noun):
            read_predictions(paths, suite)


def hits(right: int, wrong: int, task: str = "hotpotqa", lengths: list[int] | None = None) -> pd.DataFrame:
    return generations(task, *[("yes", "yes")] * right, *[("no", "yes")] * wrong, lengths=lengths)


def test_the_command_reproduces_official_scores(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["longbench", "score", "--e", str(golden), "--format", "csv"])
    assert not done.value.code
    printed = capsys.readouterr()
    scores = {
        row["name"]: {name: float(score) for name in BUCKETS if (score := row[f"value_{name}"])}
        for row in csv.DictReader(io.StringIO(printed.out))
        if row["kind"] == "task"
    }
    assert scores == official_scores()
    assert "qasper.jsonl 672 for 224 (each 3 times)" in printed.err


def test_buckets_and_means_of_groups_and_of_tasks() -> None:
    results = score_generations(hits(2, 4, lengths=[0, 3999, 4000, 7999, 8000, 10**6]), "longbench-e")
    assert [(part["n"], part["value"]) for part in results["tasks"][0]["buckets"]] == [(2, 100.0), (2, 0.0), (2, 0.0)]
    results = score_generations(hits(1, 2, lengths=[1, 2, 9000]), "longbench-e")
    [task] = results["tasks"]
    assert [(part["n"], part["value"]) for part in task["buckets"]] == [(2, 50.0), (0, None), (1, 0.0)]
    assert [part["value"] for part in results["plain_mean"]["buckets"]] == [50.0, None, 0.0]
    assert (task["buckets"][2]["low"], task["buckets"][2]["high"]) == (None, None)  # a single row has no interval
    assert "NaN" not in json.dumps(results)
    results = score_generations(pd.concat([hits(1, 3), hits(3, 1, "musique"), hits(4, 0, "qasper")]))
    assert [task["task"] for task in results["tasks"]] == ["qasper", "hotpotqa", "musique"]
    assert [(group["name"], group["all"]["value"], group["all"]["n"]) for group in results["groups"]] == [
        ("Single-Document QA (1 of 3 tasks)", 100.0, 4),
        ("Multi-Document QA (2 of 3 tasks)", 50.0, 8),
    ]
    assert results["mean_of_groups"]["name"] == "Mean of groups (3 of 16 tasks)"
    assert results["mean_of_groups"]["all"]["value"] == 75.0
    assert results["plain_mean"]["all"]["value"] == round(200 / 3, 2)


def test_intervals() -> None:
    """Against closed forms; they do not depend on other tasks, and take rows of one document together."""
    table = hits(30, 70)
    [task] = score_generations(table)["tasks"]
    assert score_generations(pd.concat([table, hits(1, 1, "lcc")]))["tasks"][0]["all"] == task["all"]
    half = 196 * np.sqrt(0.3 * 0.7 / 100)
    assert (task["all"]["low"], task["all"]["high"]) == pytest.approx((30 - half, 30 + half), abs=1.5)
    dice = np.random.default_rng(5)
    sizes = dice.integers(1, 9, 120)
    sources = np.repeat(np.arange(120), sizes)
    right = np.repeat(dice.random(120) < 0.5, sizes)
    table = generations("passage_count", *(("7" if is_right else "0", "7") for is_right in right))
    alone = score_generations(table)["tasks"][0]["all"]
    together = score_generations(table.assign(source=sources))["tasks"][0]["all"]
    for score, codes in ((alone, np.arange(len(right))), (together, sources)):
        residuals = np.bincount(codes, right - right.mean())
        error = 100 * np.sqrt((residuals**2).sum()) / len(right)
        assert score["high"] - score["low"] == pytest.approx(2 * 1.96 * error, rel=0.08)
        assert score["stderr"] == pytest.approx(error, rel=0.02)  # the closed form has no correction of few sources
    single = score_generations(table.assign(source="x"))["tasks"][0]["all"]
    assert (single["stderr"], single["low"], single["high"]) == (None, None, None)
    # Resampling equal scores would give [0, 0]; a mean with another task has that task's share
    both = score_generations(pd.concat([hits(0, 2), hits(3, 3, "lcc")]))
    equal = both["tasks"][0]["all"]
    assert (equal["value"], equal["stderr"], equal["low"], both["plain_mean"]["all"]["stderr"]) == (0, None, None, None)
    assert both["plain_mean"]["all"]["low"] == pytest.approx(both["tasks"][1]["all"]["low"] / 2, abs=0.01)
    assert any("all equal" in note for note in longbench_report(both).notes)
    assert not any("all equal" in note for note in longbench_report(score_generations(hits(3, 3))).notes)


def test_standard_errors_of_means() -> None:
    """Of groups over their tasks, of the mean of groups over the groups, of the plain mean over tasks."""
    sizes = {"hotpotqa": (3, 7), "musique": (5, 5), "qasper": (10, 30)}
    results = score_generations(pd.concat([hits(*of, task) for task, of in sizes.items()]))
    error = {
        task: 100 * np.sqrt(right * wrong / (right + wrong) ** 2 / (right + wrong - 1))
        for task, (right, wrong) in sizes.items()
    }
    assert {task["task"]: task["all"]["stderr"] for task in results["tasks"]} == pytest.approx(error, abs=1e-4)
    group = np.hypot(error["hotpotqa"], error["musique"]) / 2
    assert [each["all"]["stderr"] for each in results["groups"]] == pytest.approx([error["qasper"], group], abs=1e-4)
    assert results["mean_of_groups"]["all"]["stderr"] == pytest.approx(np.hypot(error["qasper"], group) / 2, abs=1e-4)
    plain = np.sqrt(sum(of**2 for of in error.values())) / 3
    assert results["plain_mean"]["all"]["stderr"] == pytest.approx(plain, abs=1e-4)


def test_tables_that_cannot_be_scored() -> None:
    broken = hits(2, 0)
    broken.loc[1, "answers"] = "[]"
    for table, noun in ((hits(0, 0), "generations"), (broken, "hotpotqa, row 2")):
        with pytest.raises(DataError, match=noun):
            score_generations(table)


def test_scores_by_length(tmp_path: Path) -> None:
    bands = scores_by_length(hits(2, 2, lengths=[1999, 2000, 2001, 16000]))
    assert bands == {"hotpotqa": [(0, 100.0, None), (1, 50.0, pytest.approx(50.0)), (4, 0.0, None)]}
    with pytest.raises(DataError, match="'length'"):
        draw_by_length(hits(1, 1).assign(length=None), tmp_path / "b.png")
