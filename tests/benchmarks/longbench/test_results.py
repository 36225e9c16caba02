"""Scores as the official code prints them, their intervals, report and figure."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.longbench.data import read_predictions
from evalkit.benchmarks.longbench.protocol import E_TASKS
from evalkit.benchmarks.longbench.results import (
    BUCKETS,
    draw_by_length,
    score_generations,
    scores_by_length,
)
from evalkit.cli import main
from evalkit.errors import DataError
from tests.benchmarks.longbench.made import generations
from tests.fixtures import official_scores


def hits(right: int, wrong: int, task: str = "hotpotqa", lengths: list[int] | None = None) -> pd.DataFrame:
    return generations(task, *[("yes", "yes")] * right, *[("no", "yes")] * wrong, lengths=lengths)


def test_the_command_reproduces_official_scores(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["longbench", "score", "--e", str(golden), "--format", "csv"])
    assert not done.value.code
    printed = capsys.readouterr()
    scores = {
        row["name"]: {name: float(score) for name in BUCKETS if (score := row[f"score_{name}"])}
        for row in csv.DictReader(io.StringIO(printed.out))
        if row["kind"] == "task"
    }
    assert scores == official_scores()
    assert "qasper.jsonl 672 for 224 (each 3 times)" in printed.err


@pytest.mark.slow
def test_every_official_score_is_reproduced(longbench_data: Path) -> None:
    all_golden = longbench_data / "golden_e"
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


def test_buckets_and_means_of_groups_and_of_tasks() -> None:
    results = score_generations(hits(2, 4, lengths=[0, 3999, 4000, 7999, 8000, 10**6]), "longbench-e")
    assert [(part["n"], part["score"]) for part in results["tasks"][0]["buckets"]] == [(2, 100.0), (2, 0.0), (2, 0.0)]
    results = score_generations(hits(1, 2, lengths=[1, 2, 9000]), "longbench-e")
    [task] = results["tasks"]
    assert [(part["n"], part["score"]) for part in task["buckets"]] == [(2, 50.0), (0, None), (1, 0.0)]
    assert [part["score"] for part in results["plain_mean"]["buckets"]] == [50.0, None, 0.0]
    assert (task["buckets"][2]["low"], task["buckets"][2]["high"]) == (None, None)  # a single row has no interval
    assert "NaN" not in json.dumps(results)
    results = score_generations(pd.concat([hits(1, 3), hits(3, 1, "musique"), hits(4, 0, "qasper")]))
    assert [task["task"] for task in results["tasks"]] == ["qasper", "hotpotqa", "musique"]
    assert [(group["name"], group["all"]["score"], group["all"]["n"]) for group in results["groups"]] == [
        ("Single-Document QA (1 of 3 tasks)", 100.0, 4),
        ("Multi-Document QA (2 of 3 tasks)", 50.0, 8),
    ]
    assert results["mean_of_groups"]["name"] == "Mean of groups (3 of 16 tasks)"
    assert results["mean_of_groups"]["all"]["score"] == 75.0
    assert results["plain_mean"]["all"]["score"] == round(200 / 3, 2)


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
    single = score_generations(table.assign(source="x"))["tasks"][0]["all"]
    assert (single["low"], single["high"]) == (None, None)


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
