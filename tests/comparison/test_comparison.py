"""Comparisons of synthetic runs, checked with statsmodels and explicit computation; runs that are not comparable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from evalkit.comparison.differences import exit_code
from evalkit.errors import EvalkitError, UsageError
from evalkit.stats.adjusted import size_of_differences, with_one_won_and_one_lost
from evalkit.stats.estimates import mean
from evalkit.stats.significance import cluster_sums, holm, mcnemar, sign_flip, t_test
from tests.comparison.conftest import PASSAGES, Make, answers
from tests.comparison.made import compared, make_run, scores_of
from tests.sealed import reseal


def test_every_number_of_a_task(make: Make) -> None:
    found = compared(make("org/a", 0.4), make("org/b", 0.7, seed=5))
    a, b = (np.array(answers(seed, share, 60), float) for seed, share in ((1, 0.4), (5, 0.7)))
    arc = found.tasks[0]
    assert (arc.name, arc.n, arc.sources, arc.strata, arc.test) == ("arc_easy", 60, 60, 1, "McNemar")
    assert (arc.score_a, arc.score_b) == (pytest.approx(a.mean()), pytest.approx(b.mean()))
    assert arc.difference == pytest.approx((b - a).mean())
    assert arc.stderr == pytest.approx(stats.sem(b - a), rel=1e-10)
    won, lost = int((b > a).sum()), int((b < a).sum())
    assert (arc.won, arc.lost, arc.same) == (won, lost, 60 - won - lost)
    assert arc.p == mcnemar(won, lost)
    assert arc.low < arc.difference < arc.high
    assert arc.detectable is not None
    assert 2 * (arc.stderr or 0) < arc.detectable < 4 * (arc.stderr or 0)


def test_passages_are_clusters_and_subjects_strata(make: Make) -> None:
    found = compared(make("org/a", 0.4), make("org/b", 0.7, seed=5))
    boolq, mmlu = found.tasks[1:]
    differences = np.array(answers(6, 0.7, 40), float) - np.array(answers(2, 0.4, 40), float)
    clusters = np.array(PASSAGES)
    assert (boolq.sources, boolq.test) == (20, "sign flip and t")
    assert boolq.stderr == pytest.approx(mean(differences, clusters).stderr, rel=1e-10)
    flips = sign_flip(cluster_sums(differences, clusters))
    size = size_of_differences(cluster_sums(differences, clusters), cluster_sums(np.ones(40), clusters))
    adjusted = with_one_won_and_one_lost(mean(differences, clusters), 20, size)
    assert boolq.p == pytest.approx(max(flips, t_test(adjusted)))
    in_subjects = np.array(answers(7, 0.7, 57), float) - np.array(answers(3, 0.4, 57), float)
    assert (mmlu.strata, mmlu.test) == (19, "McNemar")
    # The two numberings of subjects differ in the order of documents only
    assert mmlu.stderr == pytest.approx(mean(in_subjects, strata=np.arange(57) % 19).stderr, rel=1e-10)


def test_sources_are_numbered_within_subjects(tmp_path: Path) -> None:
    right, subjects, clusters = [1, 0, 1, 0, 1, 1], ["x", "x", "x", "y", "y", "y"], [0, 0, 2, 0, 0, 2]
    a, b = (
        make_run(tmp_path, {"mmlu": scores_of("mmlu", given, clusters=clusters, subtasks=subjects)}, model=name)
        for name, given in (("a", right), ("b", right[::-1]))
    )
    [mmlu] = compared(a, b).tasks
    assert (mmlu.sources, mmlu.strata) == (4, 2)


def test_holm_is_over_the_tasks_and_averages_are_unweighted(make: Make) -> None:
    found = compared(make("org/a", 0.4), make("org/b", 0.7, seed=5))
    assert [task.p_holm for task in found.tasks] == holm([task.p or 0.0 for task in found.tasks])
    assert [mean.name for mean in found.averages] == ["Knowledge", "Average"]
    assert found.average.difference == pytest.approx(np.mean([task.difference for task in found.tasks]))
    expected = np.sqrt(sum((task.stderr or 0) ** 2 for task in found.tasks)) / 3
    assert found.average.stderr == pytest.approx(expected)
    assert found.averages[0].difference == pytest.approx(np.mean([task.difference for task in found.tasks[1:]]))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.lists(st.booleans(), min_size=3, max_size=25), data=st.data())
def test_a_and_b_are_mirrors(tmp_path: Path, first: list[bool], data: st.DataObject) -> None:
    second = data.draw(st.lists(st.booleans(), min_size=len(first), max_size=len(first)))
    shared = data.draw(st.lists(st.integers(0, 2), min_size=len(first), max_size=len(first)))
    clusters = [shared.index(one) for one in shared]
    shutil.rmtree(tmp_path / "mirror", ignore_errors=True)
    a, b = (
        make_run(tmp_path / "mirror", {"arc_easy": scores_of("arc_easy", answered, clusters=clusters)}, model=name)
        for name, answered in (("a", first), ("b", second))
    )
    there, back = compared(a, b), compared(b, a)
    for one, other in ((there.tasks[0], back.tasks[0]), (there.average, back.average)):
        assert (one.difference, one.low, one.high) == pytest.approx((-other.difference, -other.high, -other.low))
        assert (one.score_a, one.score_b) == (other.score_b, other.score_a)
        assert one.p == other.p
    assert (there.tasks[0].won, there.tasks[0].lost) == (back.tasks[0].lost, back.tasks[0].won)


def test_rules_can_disagree(tmp_path: Path) -> None:
    right, wrong = [1] * 40, [0] * 40
    a = make_run(tmp_path, {"arc_easy": scores_of("arc_easy", wrong, norm_right=right)}, model="a")
    b = make_run(tmp_path, {"arc_easy": scores_of("arc_easy", right, norm_right=wrong)}, model="b")
    found = compared(a, b)
    assert (found.rule, found.average.difference) == ("acc", 1)
    verdicts = {one.rule: (one.average.verdict, one.better, one.worse) for one in found.rules}
    assert verdicts["acc"] == ("better", 1, 0)
    assert verdicts["acc_norm"] == ("worse", 0, 1)
    assert compared(a, b, "acc_norm").average.difference == -1


def test_documents_that_only_some_runs_have_are_dropped_and_counted(make: Make) -> None:
    found = compared(make("org/a", first=30, limit=30), make("org/b", 0.7, seed=5))
    assert [(task.n, task.dropped) for task in found.tasks] == [(30, 30), (30, 10), (30, 27)]
    alone = compared(make("org/c", first=30, limit=30), make("org/d", 0.7, seed=5, first=30, limit=30))
    assert [task.difference for task in found.tasks] == [task.difference for task in alone.tasks]
    assert [task.stderr for task in found.tasks] == [task.stderr for task in alone.tasks]
    assert found.claim.settings["limit"] == ("30", "none")


def test_tables_in_another_order_are_aligned(make: Make) -> None:
    a, b = make("org/a", 0.4), make("org/b", 0.7, seed=5)
    straight = compared(a, b)
    table = pd.read_parquet(b / "scores.parquet")
    documents = [rows for _, rows in table.groupby(["task", "subtask", "doc_id"], sort=False)]
    np.random.default_rng(1).shuffle(documents)
    pd.concat(documents).to_parquet(b / "scores.parquet", index=False)
    reseal(b)
    turned = compared(a, b)
    for one, other in zip(straight.tasks, turned.tasks, strict=True):
        assert (one.difference, one.p, one.won) == (other.difference, other.p, other.won)
        assert one.stderr == pytest.approx(other.stderr)


def test_tasks_that_are_not_shared_are_left_out(tmp_path: Path) -> None:
    right = [1, 0, 1, 1]
    tables = {task: scores_of(task, right) for task in ("arc_easy", "piqa", "boolq")}
    groups = {"Average": ["arc_easy", "piqa", "boolq"]}
    some = {task: tables[task] for task in ("arc_easy", "piqa")}
    found = compared(make_run(tmp_path, tables, model="a", groups=groups), make_run(tmp_path, some, model="b"))
    assert [task.name for task in found.tasks] == ["arc_easy", "piqa"]
    assert found.average.name == "Average (2 of 3)"
    assert found.left_out == {"boolq": "not in every run"}


# Statements about a comparison


def test_two_checkpoints_one_checkpoint_or_two_architectures(make: Make) -> None:
    a, b = make("org/a"), make("org/b", 0.6)
    assert compared(a, b).claim.kind == "checkpoints"
    other = make("org/a", 0.6, dtype="bfloat16")
    claim = compared(a, other).claim
    assert (claim.kind, claim.settings) == ("setting", {"dtype": ("float32", "bfloat16")})
    assert "about dtype, not about models" in claim.sentence
    seeds = [make(f"org/b-seed{seed}", 0.6, seed) for seed in (4, 8)]
    assert compared(a, [b, *seeds]).claim.kind == "mixed"
    others = [make(f"org/a-seed{seed}", 0.5, seed) for seed in (4, 8)]
    claim = compared([a, *others], [b, *seeds]).claim
    assert claim.kind == "architectures"
    assert "hardly known" not in claim.sentence
    assert "hardly known" in compared([a, others[0]], [b, seeds[0]]).claim.sentence
    steps = [make(f"org/b-{step}", 0.6, 3, manifest={"revision": f"step{step}"}) for step in (1000, 2000)]
    assert compared([a, others[0]], steps).claim.kind == "trainings"


def test_seeds_widen_the_error(make: Make) -> None:
    a = [make(f"org/a{seed}", 0.3 + 0.08 * seed, seed=9) for seed in range(3)]
    b = [make(f"org/b{seed}", 0.4 + 0.08 * seed, seed=9) for seed in range(3)]
    found = compared(a, b)
    average = found.average
    assert average.spread is not None
    shares = np.array([[np.mean(answers(9, 0.3 + 0.1 * late + 0.08 * one, 60)) for one in range(3)] for late in (0, 1)])
    arc = found.tasks[0]
    assert arc.spread is not None
    assert arc.spread.deviations == pytest.approx(tuple(shares.std(axis=1, ddof=1)))
    assert arc.freedom is not None and 2 <= arc.freedom <= 59  # that of three runs, or of 60 documents
    assert (arc.score_a, arc.score_b) == pytest.approx(tuple(shares.mean(axis=1)))
    alone = compared(a[0], b[0]).tasks[0]
    assert alone.spread is None
    assert (arc.stderr or 0) ** 2 >= max(arc.spread.seeds, arc.spread.documents)
    assert average.verdict == "undecided"


# Runs that are not comparable


def refused(a: Path, b: Path, *words: str, kind: type[EvalkitError] = UsageError) -> None:
    with pytest.raises(kind) as caught:
        compared(a, b)
    for word in words:
        assert word in str(caught.value)


def test_other_rules(make: Make) -> None:
    a, b = make("org/a"), make("org/b", manifest={"rule": "acc_norm"})
    refused(a, b, "different rules (acc, acc_norm)", "--rule", "acc_bytes")
    assert compared(a, b, "acc").rule == "acc"


# lm-eval's tasks


def lm_eval(root: Path, model: str, right: list[int], **more: Any) -> Path:
    about = {"documents": "hash", "config": "hash", "num_fewshot": 0}
    run = make_run(
        root,
        {"sciq": scores_of("sciq", right)},
        model=model,
        suite="lm_eval",
        tasks={"sciq": about | more.pop("task", {}), "lambada": about},
        **more,
    )
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    results["tasks"].append(results["tasks"][0] | {"task": "lambada"})
    (run / "results.json").write_text(json.dumps(results), encoding="utf-8")
    reseal(run)
    return run


def test_lm_evals_multiple_choice_tasks_are_compared(tmp_path: Path) -> None:
    found = compared(lm_eval(tmp_path, "a", [1, 0, 0, 0]), lm_eval(tmp_path, "b", [1, 1, 1, 0]))
    assert (found.tasks[0].name, found.tasks[0].won) == ("sciq", 2)
    way_out = "run it without multiple-choice tasks to compare its own metric"
    assert found.left_out == {"lambada": f"no multiple-choice scores; {way_out}"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": {"documents": "another"}}, ["content hash of the documents", "another"]),
        ({"task": {"config": "another"}}, ["task's definition"]),
        ({"task": {"num_fewshot": 5}}, ["number of examples"]),
        ({"limit": 3}, ["the limit"]),
    ],
)
def test_lm_evals_tasks_that_differ(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    a, b = lm_eval(tmp_path, "a", [1, 0, 1]), lm_eval(tmp_path, "b", [1, 0, 1], **change)
    refused(a, b, "task sciq", a.name, b.name, *words)


# For continuous integration


@pytest.mark.parametrize(
    ("share", "margin", "code"),
    [(0.95, 0.0, 0), (0.2, 0.0, 3), (0.6, 0.0, 4), (0.6, 0.1, 0), (0.59, 0.001, 4), (0.2, 0.9, 0)],
)
def test_exit_codes(make: Make, share: float, margin: float, code: int) -> None:
    found = compared(make("org/a", 0.6), make("org/b", share))
    assert exit_code([found], margin) == code


def test_an_average_that_is_worse_is_enough(make: Make) -> None:
    found = compared(make("org/a", 0.54), make("org/b", 0.5))
    assert (found.average.verdict, found.count("worse")) == ("worse", 0)
    assert exit_code([found], 0.0) == 3


def test_one_task_that_is_worse_is_enough(tmp_path: Path) -> None:
    tables = [
        {task: scores_of(task, [right] * 40) for task, right in zip(("arc_easy", "piqa", "boolq"), given, strict=True)}
        for given in ((1, 0, 0), (0, 1, 1))
    ]
    a, b = (make_run(tmp_path, one, model=name) for one, name in zip(tables, "ab", strict=True))
    found = compared(a, b)
    assert (found.average.verdict, found.count("worse")) == ("better", 1)
    assert exit_code([found], 0.0) == 3
