"""Scores as the official code prints them, their report and figure, and predictions in the official format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.longbench.data import read_predictions, write_predictions
from evalkit.benchmarks.longbench.protocol import E_TASKS, TASKS, suite_tasks
from evalkit.benchmarks.longbench.results import (
    BUCKETS,
    bucket,
    draw_by_length,
    longbench_report,
    score_generations,
    scores_by_length,
)
from evalkit.cli import main
from evalkit.errors import DataError, UnknownNameError
from tests.benchmarks.longbench.made import generations, prediction, write
from tests.fixtures import official_scores
from tests.printed import printed


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main(["longbench", *map(str, arguments)])
    return int(done.value.code or 0)


def hits(right: int, wrong: int, task: str = "hotpotqa", lengths: list[int] | None = None) -> pd.DataFrame:
    return generations(task, *[("yes", "yes")] * right, *[("no", "yes")] * wrong, lengths=lengths)


def test_the_command_reproduces_official_scores(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("score", "--e", golden, "--format", "csv") == 0
    printed = capsys.readouterr()
    scores = {
        row["name"]: {name: float(score) for name in BUCKETS if (score := row[f"score_{name}"])}
        for row in csv.DictReader(io.StringIO(printed.out))
        if row["kind"] == "task"
    }
    assert scores == official_scores()
    assert "qasper.jsonl 672 for 224 (each 3 times)" in printed.err
    assert "multifieldqa_en.jsonl 300 for 150" in printed.err
    assert printed.err.count(".jsonl ") == 2


@pytest.mark.slow
def test_every_official_score_is_reproduced(all_golden: Path) -> None:
    expected = json.loads((all_golden / "result.json").read_text())
    table = read_predictions([all_golden], "longbench-e")[0]
    tasks = {task["task"]: task for task in score_generations(table, "longbench-e")["tasks"]}
    assert list(tasks) == list(E_TASKS)
    for name, task in tasks.items():
        scores = dict(zip(BUCKETS, (part["score"] for part in task["buckets"]), strict=True))
        assert {name: score for name, score in scores.items() if score is not None} == expected[name]
        assert sum(part["n"] for part in task["buckets"]) == task["all"]["n"]
    pytest.importorskip("rapidfuzz")
    code = table[table["task"].isin(["lcc", "repobench-p"])]
    for task in score_generations(code, "longbench-e", "rapidfuzz")["tasks"]:
        # 2.2 and 2.4 on the whole of LongBench
        assert 1 < task["all"]["score"] - tasks[task["task"]]["all"]["score"] < 4


def test_buckets() -> None:
    assert bucket([0, 3999, 4000, 7999, 8000, 10**6]).tolist() == [0, 0, 1, 1, 2, 2]
    results = score_generations(hits(1, 2, lengths=[1, 2, 9000]), "longbench-e")
    [task] = results["tasks"]
    assert [(part["n"], part["score"]) for part in task["buckets"]] == [(2, 50.0), (0, None), (1, 0.0)]
    assert [part["score"] for part in results["plain_mean"]["buckets"]] == [50.0, None, 0.0]
    assert (task["buckets"][2]["low"], task["buckets"][2]["high"]) == (None, None)  # a single row has no interval
    assert "NaN" not in json.dumps(results)


def test_means_are_of_groups_and_of_tasks() -> None:
    results = score_generations(pd.concat([hits(1, 3), hits(3, 1, "musique"), hits(4, 0, "qasper")]))
    assert [task["task"] for task in results["tasks"]] == ["qasper", "hotpotqa", "musique"]
    assert [(group["name"], group["all"]["score"], group["all"]["n"]) for group in results["groups"]] == [
        ("Single-Document QA (1 of 3 tasks)", 100.0, 4),
        ("Multi-Document QA (2 of 3 tasks)", 50.0, 8),
    ]
    assert results["mean_of_groups"]["name"] == "Mean of groups (3 of 16 tasks)"
    assert results["mean_of_groups"]["all"]["score"] == 75.0
    assert results["plain_mean"]["all"]["score"] == round(200 / 3, 2)
    answers = {"passage_retrieval_en": "Paragraph 1"}
    whole = pd.concat([generations(name, (answers.get(name, "x"),) * 2) for name in TASKS]).assign(all_classes='["x"]')
    results = score_generations(whole)
    names = [mean["name"] for mean in (*results["groups"], results["mean_of_groups"], results["plain_mean"])]
    assert len(names) == 8
    assert not any("(" in name for name in names)


def test_intervals() -> None:
    """Against closed forms; they do not depend on other tasks, and take rows of one document together."""
    table = hits(30, 70)
    [task] = score_generations(table)["tasks"]
    assert score_generations(pd.concat([table, hits(1, 1, "lcc")]))["tasks"][0]["all"] == task["all"]
    half = 196 * np.sqrt(0.3 * 0.7 / 100)
    assert task["all"]["low"] == pytest.approx(30 - half, abs=1.5)
    assert task["all"]["high"] == pytest.approx(30 + half, abs=1.5)
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
    assert score_generations(table.assign(source=range(len(table))))["tasks"][0]["all"] == alone
    single = score_generations(table.assign(source="x"))["tasks"][0]["all"]
    assert (single["low"], single["high"]) == (None, None)


def test_the_report_marks_what_differs() -> None:
    table = pd.concat([generations("lcc", ("x", "x"), ("y", "z")), generations("hotpotqa", ("a b", "c"))])
    plain = printed(longbench_report(score_generations(table)))
    assert "cut" not in plain
    assert "*" not in plain
    results = score_generations(table.assign(truncated=[0, 5, 0]), official={"lcc": False, "hotpotqa": True})
    assert [(task["truncated"], task["official"]) for task in results["tasks"]] == [(0, True), (1, False)]
    text = printed(longbench_report(results, ["a note"]))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert (rows["LCC*"][1:5], rows["LCC*"][-1]) == (["edit", "sim.", "2", "50.00"], "1")
    assert rows["HotpotQA"][1:5] == ["F1", "1", "0.00", "–"]
    assert "a note" in text
    latex = printed(longbench_report(results), "latex")
    assert "95 \\% interval" in latex
    assert "–" not in "".join(line for line in latex.splitlines() if not line.startswith("%"))


def test_tables_that_cannot_be_scored() -> None:
    with pytest.raises(DataError):
        score_generations(hits(0, 0))
    with pytest.raises(UnknownNameError, match="hotpotq"):
        score_generations(hits(1, 0, "hotpotq"))
    broken = hits(2, 0)
    broken.loc[1, "answers"] = "[]"
    with pytest.raises(DataError, match="hotpotqa, row 2"):
        score_generations(broken)


def test_scores_by_length(tmp_path: Path) -> None:
    bands = scores_by_length(hits(2, 2, lengths=[1999, 2000, 2001, 16000]))
    assert [tuple(band)[1:4] for band in bands] == [(0, 1, 100.0), (1, 2, 50.0), (4, 1, 0.0)]
    assert [band.stderr for band in bands] == [None, pytest.approx(50.0), None]
    pairs = [("Paragraph 1", "Paragraph 1"), ("no", "Paragraph 2")]
    draw_by_length(pd.concat([generations(task, *pairs, lengths=[1000, 9000]) for task in TASKS]), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_irregular_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = [prediction("a", [f"answer {number}"], number) for number in range(3)]
    write(tmp_path / "lcc.jsonl", once + once[::-1])  # several processes write in arbitrary order
    write(tmp_path / "qasper.jsonl", once)
    write(tmp_path / "multifieldqa_en.jsonl", [prediction("a", [str(number)], number) for number in range(151)])
    write(tmp_path / "vcsum.jsonl", once)
    write(tmp_path / "result.json", [{"hotpotqa": 1.0}])
    assert command("score", tmp_path, tmp_path / "result.json") == 0
    out = capsys.readouterr().out
    expected = ("lcc.jsonl 6 for 3 (each 2 times)", "qasper.jsonl 3 for 200", "multifieldqa_en.jsonl 151 for 150")
    assert all(note in out for note in (*expected, "--e", "vcsum.jsonl", "result.json"))
    labels = {"trec": "Person", "passage_retrieval_en": "Paragraph 1"}
    for task in suite_tasks("longbench-e"):
        rows = [prediction("x", [labels.get(task.name, "x")], n, ["Person"]) for n in range(task.documents + 1)]
        write(tmp_path / "e" / f"{task.name}.jsonl", rows)
    [note] = read_predictions([tmp_path / "e"])[1]
    assert (note.count(".jsonl "), note.count("--e")) == (13, 1)
    files = [write(tmp_path / "e" / f"{task}.jsonl", once) for task in ("musique", "lcc")]
    [note] = read_predictions(files, "longbench-e")[1]
    assert str(files[0]) in note


@pytest.mark.parametrize(
    ("bad", "noun"),
    [
        ({"pred": "x", "answers": ["x"], "length": 9}, "'all_classes'"),
        (prediction("x", []), "'answers'"),
        (prediction("x", "x"), "'answers'"),
        (prediction(None, ["x"]), "'pred'"),
        (prediction("x", ["x"], "9", ["x"]), "'length'"),
        (prediction("x", ["x"], all_classes=[1]), "'all_classes'"),
        (prediction("x", ["x"]), "'all_classes'"),
        ([], "list"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: Any, noun: str) -> None:
    file = write(tmp_path / "trec.jsonl", [prediction("x", ["x"], all_classes=["x"]), bad])
    with pytest.raises(DataError, match=rf"trec\.jsonl, line 2 \(trec\): .*{noun}"):
        read_predictions([file])


def test_the_length_is_required_for_e_and_plots_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "hotpotqa.jsonl", [{"pred": "x", "answers": ["x"], "all_classes": None}])
    assert command("score", file) == 0
    assert "100.00" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"hotpotqa\.jsonl, line 1 .*'length'"):
        read_predictions([file], "longbench-e")
    assert command("score", file, "--plot", tmp_path / "lengths.png") == 1
    assert "'length'" in capsys.readouterr().err


def test_files_that_are_no_predictions(tmp_path: Path) -> None:
    line = prediction("x", ["x"])
    with pytest.raises(DataError, match=str(tmp_path)):
        read_predictions([tmp_path])
    inner = write(tmp_path / "pred" / "my-model" / "lcc.jsonl", [line]).parent
    with pytest.raises(DataError, match=str(inner)):
        read_predictions([tmp_path])
    with pytest.raises(DataError, match="lcc"):
        read_predictions([inner / "lcc.jsonl", write(tmp_path / "lcc_e.jsonl", [line])])
    for content in ([], [b""]):
        with pytest.raises(DataError, match=r"lcc\.jsonl"):
            read_predictions([write(inner / "lcc.jsonl", content)])
    with pytest.raises(UnknownNameError, match="hotpotqa"):
        read_predictions([write(tmp_path / "hotpot.jsonl", [])])
    write(tmp_path / "manifest.json", [{}])
    with pytest.raises(DataError, match="rescore"):
        read_predictions([tmp_path])


def test_written_predictions_are_read_again(tmp_path: Path) -> None:
    table = generations("lcc", ("x = '\u2028'\n", "é"), ("y", "z"), lengths=[3, 4])
    [file] = write_predictions(table, tmp_path / "pred")
    assert json.loads(file.read_bytes().split(b"\n")[0]) == prediction("x = '\u2028'\n", ["é"], 3)
    columns = ["task", "length", "prediction", "answers", "all_classes"]
    assert read_predictions([file])[0][columns].to_dict("list") == table[columns].to_dict("list")
    with pytest.raises(OSError, match="lcc"):
        write_predictions(table, file)
