"""Scores: the official code's to two decimals, and their means and intervals."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.longbench.official_format import read_predictions
from evalkit.benchmarks.longbench.protocol import E_TASKS, TASKS
from evalkit.benchmarks.longbench.results_report import scores_by_length
from evalkit.benchmarks.longbench.scores import BUCKETS, LongBenchResults, bucket, score_generations, score_rows
from evalkit.errors import DataError, UnknownNameError
from tests.benchmarks.longbench.made import generations
from tests.fixtures import PREDICTED, official_scores


def scores_of(predictions: Path) -> LongBenchResults:
    return score_generations(read_predictions([predictions], "longbench-e").generations, "longbench-e")


@pytest.fixture(scope="module")
def golden_results(golden: Path) -> LongBenchResults:
    return scores_of(golden)


@pytest.fixture(scope="module")
def all_golden_results(all_golden: Path) -> LongBenchResults:
    return scores_of(all_golden)


@pytest.mark.parametrize("name", PREDICTED)
def test_official_scores_are_reproduced(golden_results: LongBenchResults, name: str) -> None:
    expected = official_scores()[name]
    assert len(expected) == (1 if name == "gov_report" else 3)
    reproduces(golden_results, name, expected)


@pytest.mark.parametrize("name", E_TASKS)
def test_every_official_score_is_reproduced(all_golden: Path, all_golden_results: LongBenchResults, name: str) -> None:
    reproduces(all_golden_results, name, json.loads((all_golden / "result.json").read_text())[name])


def reproduces(found: LongBenchResults, name: str, expected: dict[str, float]) -> None:
    [task] = [task for task in found.tasks if task.task == name]
    scores = dict(zip(BUCKETS, (part.score for part in task.buckets), strict=True))
    assert {bucket: score for bucket, score in scores.items() if score is not None} == expected
    assert sum(part.n for part in task.buckets) == task.all.n


def test_the_other_edit_similarity_is_another_number(all_golden: Path, all_golden_results: LongBenchResults) -> None:
    pytest.importorskip("rapidfuzz")
    rows = read_predictions([all_golden / "lcc.jsonl", all_golden / "repobench-p.jsonl"], "longbench-e").generations
    by_difflib = {task.task: task.all.score for task in all_golden_results.tasks}
    for task in score_generations(rows, "longbench-e", "rapidfuzz").tasks:
        before = by_difflib[task.task]
        assert task.all.score is not None
        assert before is not None
        assert 1 < task.all.score - before < 4  # 2.2 and 2.4 on the whole of LongBench


def hits(right: int, wrong: int, task: str = "hotpotqa", lengths: list[int] | None = None) -> pd.DataFrame:
    return generations(task, *[("yes", "yes")] * right, *[("no", "yes")] * wrong, lengths=lengths)


def test_buckets_end_below_their_limits() -> None:
    assert bucket([0, 3999, 4000, 7999, 8000, 10**6]).tolist() == [0, 0, 1, 1, 2, 2]


def test_an_empty_bucket_has_no_score() -> None:
    results = score_generations(hits(1, 2, lengths=[1, 2, 9000]), "longbench-e")
    [task] = results.tasks
    assert [(part.n, part.score) for part in task.buckets] == [(2, 50.0), (0, None), (1, 0.0)]
    assert [part.score for part in results.plain_mean.buckets] == [50.0, None, 0.0]
    assert (task.buckets[2].low, task.buckets[2].high) == (None, None)  # a single row has no interval
    assert "NaN" not in json.dumps(asdict(results))


def test_means_are_of_groups_and_of_tasks() -> None:
    table = pd.concat([hits(1, 3), hits(3, 1, "musique"), hits(4, 0, "qasper")])
    results = score_generations(table)
    assert [task.task for task in results.tasks] == ["qasper", "hotpotqa", "musique"]
    assert [(group.name, group.all.score, group.all.n) for group in results.groups] == [
        ("Single-Document QA (1 of 3 tasks)", 100.0, 4),
        ("Multi-Document QA (2 of 3 tasks)", 50.0, 8),
    ]
    assert results.mean_of_groups.name == "Mean of groups (3 of 16 tasks)"
    assert results.mean_of_groups.all.score == 75.0
    assert results.plain_mean.all.score == round(200 / 3, 2)


def test_whole_suites_are_named_plainly() -> None:
    answers = {"trec": "x", "passage_retrieval_en": "Paragraph 1"}
    table = pd.concat([generations(name, (answers.get(name, "x"), answers.get(name, "x"))) for name in TASKS])
    table["all_classes"] = '["x"]'
    results = score_generations(table)
    names = [mean.name for mean in (*results.groups, results.mean_of_groups, results.plain_mean)]
    assert not any("of 16" in name or "(" in name for name in names)
    assert len(results.groups) == 6


def test_intervals_are_those_of_the_mean_and_the_same_every_time() -> None:
    table = hits(30, 70)
    [task] = score_generations(table).tasks
    [again] = score_generations(pd.concat([table, hits(1, 1, "lcc")])).tasks[:1]
    assert task.all == again.all
    assert task.all.low is not None
    assert task.all.high is not None
    half = 196 * np.sqrt(0.3 * 0.7 / 100)
    assert task.all.low == pytest.approx(30 - half, abs=1.5)
    assert task.all.high == pytest.approx(30 + half, abs=1.5)


def test_cut_rows_and_unofficial_documents_are_kept_track_of() -> None:
    table = pd.concat([hits(2, 1), hits(1, 1, "lcc")])
    table["truncated"] = [0, 12, 700, 0, 0]
    hotpotqa, lcc = score_generations(table, official={"hotpotqa": False}).tasks
    assert (hotpotqa.truncated, hotpotqa.official, lcc.truncated, lcc.official) == (2, False, 0, None)


def test_rows_are_scored_in_their_order() -> None:
    assert score_rows(TASKS["hotpotqa"], hits(1, 2)).tolist() == [1.0, 0.0, 0.0]


def test_unscorable_documents_are_reported() -> None:
    with pytest.raises(DataError, match="no generations"):
        score_generations(hits(0, 0))
    with pytest.raises(UnknownNameError, match="hotpotq"):
        score_generations(hits(1, 0, "hotpotq"))
    broken = hits(2, 0)
    broken.loc[1, "answers"] = "[]"
    with pytest.raises(DataError, match="generations of hotpotqa, row 2 cannot be scored"):
        score_generations(broken)


def test_bands_of_length() -> None:
    found = scores_by_length(hits(2, 2, lengths=[1999, 2000, 2001, 16000]))
    assert [(part.band, part.n, part.score) for part in found] == [
        ("<2k", 1, 100.0),
        ("2-4k", 2, 50.0),
        ("16k+", 1, 0.0),
    ]
    assert [part.stderr for part in found] == [None, pytest.approx(50.0), None]


def test_intervals_take_rows_of_one_document_together() -> None:
    """Against the cluster-robust standard error of a mean; rows of one document score alike here."""
    dice = np.random.default_rng(5)
    sizes = dice.integers(1, 9, 120)
    sources = np.repeat(np.arange(120), sizes)
    right = np.repeat(dice.random(120) < 0.5, sizes)
    table = generations("passage_count", *(("7" if one else "0", "7") for one in right))
    alone = score_generations(table).tasks[0].all
    together = score_generations(table.assign(source=sources)).tasks[0].all
    assert (alone.n, alone.score) == (together.n, together.score)
    for found, codes in ((alone, np.arange(len(right))), (together, sources)):
        residuals = np.bincount(codes, right - right.mean())
        error = 100 * np.sqrt((residuals**2).sum()) / len(right)
        assert found.low is not None and found.high is not None
        assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.08)
    # Each document once: the same interval as by rows, to the last digit
    assert score_generations(table.assign(source=range(len(table)))).tasks[0].all == alone
    # A single document has no interval
    one = score_generations(table.assign(source="x")).tasks[0].all
    assert (one.low, one.high) == (None, None)
