"""Comparisons by right and wrong answers, against statsmodels, scipy and explicit computation: every number, what is
paired, what the difference is a claim about, and what a program exits with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

import evalkit
from evalkit.benchmarks.choices import ComparableChoices, outcome_metrics
from evalkit.cli.root import cli
from evalkit.comparison.comparison import subject_differences
from evalkit.comparison.comparison_report import comparison_report
from evalkit.comparison.differences import exit_code
from evalkit.comparison.pairing import pair
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import load_run
from evalkit.stats.adjusted import size_of_differences, with_one_won_and_one_lost
from evalkit.stats.estimates import mean
from evalkit.stats.significance import cluster_sums, sign_flip, t_test
from tests.comparison.made import (
    PASSAGES,
    SUBJECTS,
    N,
    answers,
    compared,
    finished_run,
    make_run,
    scores_of,
    three_tasks,
)
from tests.marks import fast
from tests.sealed import read, reseal, write


def test_every_number(tmp_path: Path) -> None:
    """Independent documents, passages that several documents share, subjects, and the averages."""
    comparison = compared(three_tasks(tmp_path, "a", 0.4), three_tasks(tmp_path, "b", 0.7, seed=5))
    arc, boolq, mmlu = comparison.tasks
    for number, task in enumerate((arc, boolq, mmlu)):
        a, b = (np.array(answers(seed + number, share, task.n), float) for seed, share in ((1, 0.4), (5, 0.7)))
        won, lost = int((b > a).sum()), int((b < a).sum())
        assert (task.score_a, task.score_b, task.difference) == pytest.approx((a.mean(), b.mean(), (b - a).mean()))
        assert (task.won, task.lost, task.same) == (won, lost, task.n - won - lost)
        assert task.low < task.difference < task.high
        if task is not boolq:
            assert task.test == "McNemar" and task.p == pytest.approx(stats.binomtest(won, won + lost).pvalue)
            assert 2 * (task.stderr or 0) < (task.detectable or 0) < 4 * (task.stderr or 0)
        if task is arc:
            assert (task.n, task.sources, task.strata) == (60, 60, 1)
            assert task.stderr == pytest.approx(stats.sem(b - a), rel=1e-10)
        if task is boolq:
            assert (task.sources, task.test) == (20, "sign flip and t")
            model = sm.OLS(b - a, np.ones(40)).fit(cov_type="cluster", cov_kwds={"groups": PASSAGES}, use_t=True)
            assert task.stderr == pytest.approx(model.bse[0], rel=1e-10)
            clusters = np.array(PASSAGES)
            sums = cluster_sums(b - a, clusters)
            size = size_of_differences(sums, np.full(20, 2.0))
            adjusted = with_one_won_and_one_lost(mean(b - a, clusters), 20, size)
            assert task.p == pytest.approx(max(sign_flip(sums), t_test(adjusted)))
        if task is mmlu:
            assert (task.strata, task.sources) == (19, 57)
            within = pd.Series(b - a).groupby(SUBJECTS).var(ddof=1)
            assert task.stderr == pytest.approx(np.sqrt((within * 3).sum()) / 57, rel=1e-10)  # Cochran's sum
    ps = [task.p or 0.0 for task in comparison.tasks]
    assert [task.p_holm for task in comparison.tasks] == pytest.approx(multipletests(ps, method="holm")[1])
    assert [average.name for average in comparison.averages] == ["Knowledge", "Average"]
    for average, tasks in zip(comparison.averages, ((boolq, mmlu), comparison.tasks), strict=True):
        assert average.difference == pytest.approx(np.mean([task.difference for task in tasks]))
        errors = [task.stderr or 0.0 for task in tasks]
        assert average.stderr == pytest.approx(np.linalg.norm(errors) / len(errors))


def test_the_error_of_a_runs_own_table_is_by_sources_and_subjects(tmp_path: Path) -> None:
    """That of accuracies, and of continuous outcomes: one definition with comparisons."""
    run = finished_run(tmp_path, "a", 0.4)
    boolq, mmlu = (np.array(answers(1 + number, 0.4, n), float) for number, n in ((1, N["boolq"]), (2, N["mmlu"])))
    errors = {task["task"]: task["stderr"] for task in run.stored["tasks"]}
    assert errors["arc_easy"] == pytest.approx(stats.sem(answers(1, 0.4, N["arc_easy"])), rel=1e-10)
    clustered = {"cov_type": "cluster", "cov_kwds": {"groups": PASSAGES}, "use_t": True}
    assert errors["boolq"] == pytest.approx(sm.OLS(boolq, np.ones(40)).fit(**clustered).bse[0], rel=1e-10)
    within = pd.Series(mmlu).groupby(SUBJECTS).var(ddof=1)
    assert errors["mmlu"] == pytest.approx(np.sqrt((within * 3).sum()) / 57, rel=1e-10)
    metrics = {metric.task: metric for metric in outcome_metrics(ComparableChoices(run), "bits_per_byte")}
    gold = run.scores[(run.scores["task"] == "boolq") & (run.scores["choice"] == 0)]
    bits = (-gold["ll_continuation"] / np.log(2) / gold["bytes"]).to_numpy()
    assert metrics["boolq"].stderr == pytest.approx(sm.OLS(bits, np.ones(40)).fit(**clustered).bse[0], rel=1e-9)


def test_a_sample_of_most_of_a_benchmark(tmp_path: Path) -> None:
    """360 of 400 documents of one task: about these 400 alone the error is √(1 − 360/400) of that."""
    counts = {
        task: {"official": True, "source": "made up", "count": 360, "total": n}
        for task, n in (("piqa", 400), ("obqa", 1000))
    }
    a, b = (make_run(tmp_path, {task: scores_of(task, answers(seed, 0.5, 360)) for task in counts}, model=str(seed),
                     manifest={"documents": counts}) for seed in (1, 2))  # fmt: skip
    [note] = [text for text in comparison_report([compared(a, b)]).parts[0].notes if "n/N" in text]
    assert "piqa 0.32" in note.lower() and "openbookqa" not in note.lower()


def test_subjects(tmp_path: Path) -> None:
    sides = [Side(name, (load_run(three_tasks(tmp_path, name, share, seed)),))
             for name, share, seed in (("a", 0.2, 1), ("b", 0.9, 5))]  # fmt: skip
    pairing = pair(*sides, {})
    [task] = [task for task in pairing.tasks if task.strata is not None]
    subjects = subject_differences(pairing, task, "acc")
    table = pd.DataFrame({"a": answers(3, 0.2, N["mmlu"]), "b": answers(7, 0.9, N["mmlu"]), "subject": SUBJECTS})
    groups = list(table.groupby("subject", sort=False))
    assert [subject.name for subject in subjects] == [name for name, _ in groups]
    ps = []
    for subject, (_, rows) in zip(subjects, groups, strict=True):
        counts = [[((rows["a"] == a) & (rows["b"] == b)).sum() for b in (1, 0)] for a in (1, 0)]
        ps.append(mcnemar(counts, exact=True).pvalue)
        assert (subject.n, subject.difference) == (3, pytest.approx((rows["b"] - rows["a"]).mean()))
        assert subject.p == pytest.approx(ps[-1]) and subject.low <= subject.difference <= subject.high
    assert [subject.p_holm for subject in subjects] == pytest.approx(multipletests(ps, method="holm")[1])


MACRO, MACRO_SIZES = "mmlu_test_rc_5shot", {"law": 3, "biology": 5, "logic": 22}
"""OLMES's MMLU: a mean over subjects of any size, each of which counts the same."""


def macro_run(root: Path, model: str, seed: int, share: float) -> Path:
    subtasks = [f"{MACRO}_{name}" for name, size in MACRO_SIZES.items() for _ in range(size)]
    tables = {
        MACRO: scores_of(MACRO, answers(seed, share, len(subtasks)), subtasks=subtasks),
        "piqa": scores_of("piqa", answers(seed + 1, share, 40)),
    }
    return make_run(root, tables, model=model)


def test_subjects_that_count_the_same(tmp_path: Path) -> None:
    """In results, outcomes, comparisons and averages, with the error of the mean over fixed subjects."""
    folders = [macro_run(tmp_path, name, seed, share) for name, seed, share in (("a", 1, 0.4), ("b", 5, 0.7))]
    a, b = map(load_run, folders)
    subject = np.repeat(list(MACRO_SIZES), list(MACRO_SIZES.values()))

    def expected(values: Any) -> tuple[float, float]:
        by_subject = pd.Series(np.asarray(values, float)).groupby(subject)
        return by_subject.mean().mean(), np.sqrt((by_subject.var() / by_subject.size()).sum()) / 3

    right = [np.array(answers(seed, share, 30), float) for seed, share in ((1, 0.4), (5, 0.7))]
    of_run, plain = a.results("acc").tasks
    assert (of_run.value, of_run.stderr) == pytest.approx(expected(right[0]))
    assert of_run.value != pytest.approx(right[0].mean(), abs=1e-3)
    assert [part.n for part in a.results("acc").subtasks[MACRO]] == list(MACRO_SIZES.values())
    assert a.results("acc").average.value == pytest.approx((expected(right[0])[0] + plain.value) / 2)
    gold = a.scores[(a.scores["task"] == MACRO) & (a.scores["choice"] == 0)]
    bits = -gold["ll_continuation"] / np.log(2) / gold["bytes"]
    [metric, _] = outcome_metrics(ComparableChoices(a), "bits_per_byte")
    assert (metric.value, metric.stderr) == pytest.approx(expected(bits))
    comparison = compared(a, b)
    task, other = comparison.tasks
    assert (task.score_a, task.score_b) == pytest.approx([expected(side)[0] for side in right])
    assert (task.difference, task.stderr) == pytest.approx(expected(right[1] - right[0]))
    assert comparison.average.difference == pytest.approx((task.difference + other.difference) / 2)
    assert (task.won, task.lost) == (int((right[1] > right[0]).sum()), int((right[1] < right[0]).sum()))
    [note] = [text for text in comparison_report([comparison]).parts[0].notes if "counts the same" in text]
    assert "MMLU" in note
    pairing = pair(Side("a", (a,)), Side("b", (b,)), {})
    each = subject_differences(pairing, pairing.tasks[0], "acc")
    assert np.mean([of.difference for of in each]) == pytest.approx(expected(right[1] - right[0])[0])


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), min_size=3, max_size=25))
def test_a_and_b_are_mirrors(tmp_path: Path, documents: list[tuple[bool, bool, int]]) -> None:
    first, second, shared = map(list, zip(*documents, strict=True))
    clusters = [shared.index(source) for source in shared]
    shutil.rmtree(tmp_path / "mirror", ignore_errors=True)
    a, b = (
        load_run(make_run(tmp_path / "mirror", {"piqa": scores_of("piqa", right, clusters=clusters)}, model=name))
        for name, right in (("a", first), ("b", second))
    )
    there, back = compared(a, b), compared(b, a)
    for row, mirrored in ((there.tasks[0], back.tasks[0]), (there.average, back.average)):
        assert (row.difference, row.low, row.high) == pytest.approx(
            (-mirrored.difference, -mirrored.high, -mirrored.low)
        )
        assert (row.score_a, row.score_b, row.p) == (mirrored.score_b, mirrored.score_a, mirrored.p)
    assert (there.tasks[0].won, there.tasks[0].lost) == (back.tasks[0].lost, back.tasks[0].won)


def test_rules_can_disagree(tmp_path: Path) -> None:
    right, wrong = [1] * 40, [0] * 40
    a = make_run(tmp_path, {"arc_easy": scores_of("arc_easy", wrong, norm_right=right)}, model="a")
    b = make_run(tmp_path, {"arc_easy": scores_of("arc_easy", right, norm_right=wrong)}, model="b")
    comparison = compared(a, b)
    assert (comparison.rule, comparison.average.difference) == ("acc", 1)
    verdicts = {verdict.rule: (verdict.average.verdict, verdict.better, verdict.worse) for verdict in comparison.rules}
    assert (verdicts["acc"], verdicts["acc_norm"]) == (("better", 1, 0), ("worse", 0, 1))
    assert compared(a, b, "acc_norm").average.difference == -1


def test_what_is_paired(tmp_path: Path) -> None:
    """Documents by their number, whatever their order; those that all runs have, of tasks that all runs have."""
    short, long = three_tasks(tmp_path, "a", first=30, limit=30), three_tasks(tmp_path, "b", 0.7, seed=5)
    comparison = compared(short, long)
    assert [(task.n, task.dropped) for task in comparison.tasks] == [(30, 30), (30, 10), (30, 27)]
    assert comparison.claim.settings["limit"] == ("30", "none")
    alone = compared(short, three_tasks(tmp_path, "c", 0.7, seed=5, first=30, limit=30))
    for other in (alone, compared(short, shuffled(long))):
        for row, expected in zip(other.tasks, comparison.tasks, strict=True):
            assert (row.difference, row.p, row.won) == (expected.difference, expected.p, expected.won)
            assert row.stderr == pytest.approx(expected.stderr)
    tables = {task: scores_of(task, [1, 0, 1, 1]) for task in ("arc_easy", "piqa", "boolq")}
    some = {task: tables[task] for task in ("arc_easy", "piqa")}
    partly = compared(make_run(tmp_path, tables, model="x"), make_run(tmp_path, some, model="y"))
    assert [task.name for task in partly.tasks] == ["arc_easy", "piqa"]
    assert [average.name for average in partly.averages] == ["Average (2 of 3)"]
    assert partly.left_out == {"boolq": "not in every run"}
    # Sources are numbered within subjects
    sources = {"clusters": [0, 0, 2, 0, 0, 2], "subtasks": ["x", "x", "x", "y", "y", "y"]}
    right = [1, 0, 1, 0, 1, 1]
    runs = [make_run(tmp_path, {"mmlu": scores_of("mmlu", given, **sources)}, model=f"mmlu{n}")  # type: ignore[arg-type]
            for n, given in enumerate((right, right[::-1]))]  # fmt: skip
    assert (compared(*runs).tasks[0].sources, compared(*runs).tasks[0].strata) == (4, 2)


def shuffled(folder: Path) -> Path:
    """The run with its documents in another order."""
    table = pd.read_parquet(folder / "scores.parquet")
    documents = [rows for _, rows in table.groupby(["task", "subtask", "doc_id"], sort=False)]
    np.random.default_rng(1).shuffle(documents)
    pd.concat(documents).to_parquet(folder / "scores.parquet", index=False)
    reseal(folder)
    return folder


def test_what_a_difference_is_a_claim_about(tmp_path: Path) -> None:
    def run(model: str, share: float = 0.5, seed: int = 1, **more: Any) -> Path:
        tables = {"piqa": scores_of("piqa", answers(seed, share, 30))}
        return make_run(tmp_path, tables, model=model, **more)

    a, b = run("org/a"), run("org/b", 0.6)
    seeds_a = [run(f"org/a-seed{seed}", 0.5, seed) for seed in (4, 8)]
    seeds_b = [run(f"org/b-seed{seed}", 0.6, seed) for seed in (4, 8)]
    steps = [run(f"org/b-{step}", 0.6, 3, manifest={"revision": f"step{step}"}) for step in (1000, 2000)]
    claim = compared(a, run("org/a", 0.6, dtype="bfloat16")).claim
    assert (claim.kind, claim.settings) == ("setting", {"dtype": ("float32", "bfloat16")})
    for first, second, kind in (
        ([a], [b], "checkpoints"),
        ([a], [b, *seeds_b], "mixed"),
        ([a, *seeds_a], [b, *seeds_b], "architectures"),
        ([a, seeds_a[0]], steps, "trainings"),
    ):
        claim = compared(first, second).claim
        assert claim.kind == kind


STRETCHED = {"method": "yarn", "target": 4096, "original": 2048, "factor": 2.0}
OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "template": ({"template": "hash of inst", "manifest": {"template": {"name": "inst"}}}, "prompt"),
    "template's text": ({"template": "hash of another text"}, "prompt"),
    "shots": ({"num_fewshot": 5}, "prompt"),
    "examples": ({"examples": {"piqa": "other"}}, "prompt"),
    "prompts": ({"prompts": {"templates": ["plain", "inst"], "choice_orders": 1}}, "prompt"),
    "dtype": ({"dtype": "bfloat16"}, "dtype"),
    "control": ({"control": "swap"}, "control"),
    "rounding": ({"quantise": "w4g64"}, "rounding"),
    "stretched": ({"context_extension": STRETCHED}, "context extension"),
    "version": ({"scoring": 1}, "evalkit version"),
}
"""What differs between two runs → its entries, and what the claim is about then."""


@pytest.mark.parametrize("name", fast(("template", "dtype"), OTHERWISE))
def test_a_verdict_begins_with_what_differs_beside_the_checkpoint(tmp_path: Path, name: str) -> None:
    """In every format, also without sentences, and on the page; nothing of the kind where only the device differs."""
    more, subject = OTHERWISE[name]
    table, examples = {"piqa": scores_of("piqa", answers(1, 0.5, 30))}, {"examples": {"piqa": "own"}}
    a = make_run(tmp_path, table, model="org/a", **examples)
    others = {model: make_run(tmp_path, table, model=model, **(examples | more)) for model in ("org/a", "org/b")}
    for model, first in (
        ("org/b", f"The claim is about checkpoint and {subject} together: "),
        ("org/a", f"The claim is about the {subject}, not about models: "),
    ):
        page = tmp_path / "page.html"
        sides = [str(a), str(others[model])]
        printed = {
            form: CliRunner().invoke(cli, ["compare", *sides, "--rule", "acc", "--format", form, *quiet]).stdout
            for form in ("terminal", "markdown", "html", "latex")
            for quiet in ([], ["--quiet"])
        }
        assert all(first in text for text in printed.values())
        assert printed["terminal"].startswith(first) and f"\\caption{{{first}" in printed["latex"]
        command = ["report", *sides, "--rule", "acc", "--without-documents", "-o", str(page)]
        assert CliRunner().invoke(cli, command).exit_code == 0 and first in page.read_text(encoding="utf-8")
        [content] = json.loads(CliRunner().invoke(cli, ["compare", *sides, "--format", "json"]).stdout)["comparisons"]
        assert content["verdict"].startswith(first) and "Primary verdict: " in content["verdict"]
        planned = CliRunner().invoke(cli, ["plan", *sides, "--rule", "acc", "--quiet"]).stdout
        assert planned.startswith(first)


def test_a_verdict_about_two_checkpoints_begins_with_it(tmp_path: Path) -> None:
    """Where all that differs changes the last bits only, and where the common documents of two samples are compared."""
    a, b = (three_tasks(tmp_path, name, seed=seed) for seed, name in enumerate("ab"))
    assert comparison_report([compared(a, b)]).parts[0].verdict[0].startswith("Primary verdict: ")
    newer = three_tasks(tmp_path, "c", versions={"torch": "3"})
    assert comparison_report([compared(a, newer)]).parts[0].verdict[0].startswith("Primary verdict: ")
    part = three_tasks(tmp_path, "d", first=30, limit=30)
    first = comparison_report([compared(a, part)]).parts[0].verdict[0]
    common = "Only the common documents of two samples are compared (none | 30)."
    assert first.startswith(common)
    for name, beginning in (("d", "The claim is about checkpoint and dtype together: "),
                            ("a", "The claim is about the dtype, not about models: ")):  # fmt: skip
        other = three_tasks(tmp_path, name, first=30, limit=30, dtype="bfloat16")
        first = comparison_report([compared(a, other)]).parts[0].verdict[0]
        assert first.startswith(beginning) and f"dtype (float32 | bfloat16). {common}" in first
    same = comparison_report([compared(a, three_tasks(tmp_path, "a", first=30, limit=30))]).parts[0].verdict[0]
    assert "about the sample" not in same and common in same


def test_the_parts_of_the_variance_of_an_average(tmp_path: Path) -> None:
    """Two tasks of which one has sources of four; only A's two runs differ, B's three are alike."""
    dice = np.random.default_rng(7)
    first, second = ({"piqa": dice.integers(0, 2, 30), "boolq": dice.integers(0, 2, 40)} for _ in range(2))
    alike = {"piqa": dice.integers(0, 2, 30), "boolq": dice.integers(0, 2, 40)}
    sources = {"piqa": list(range(30)), "boolq": [number - number % 4 for number in range(40)]}

    def side(name: str, runs: list[dict[str, Any]]) -> list[Path]:
        tables = [{task: scores_of(task, right, clusters=sources[task]) for task, right in run.items()} for run in runs]
        return [make_run(tmp_path, table, model=f"{name}{n}") for n, table in enumerate(tables)]

    def variance(task: str, values: Any) -> float:
        """The variance of a task's mean, by Liang and Zeger."""
        sums, count = np.bincount(sources[task], values - values.mean()), len(set(sources[task]))
        return float(count / (count - 1) * (sums**2).sum() / len(values) ** 2)

    means = [np.mean([right.mean() for right in run.values()]) for run in (first, second)]
    documents = sum(variance(task, alike[task] - (first[task] + second[task]) / 2) for task in alike) / 4
    shared = sum(variance(task, (first[task] - second[task]) / 2) for task in alike) / 4
    spread = compared(side("a", [first, second]), side("b", [alike] * 3)).average.spread
    assert spread == pytest.approx((np.var(means, ddof=1) / 2, 0.0, documents, shared, 2, 3))


def lm_eval(root: Path, model: str, right: list[int], task: dict[str, Any] | None = None, **more: Any) -> Path:
    """A run of two of lm-eval's tasks, of which one has choices."""
    about = {"documents": "hash", "config": "hash", "num_fewshot": 0}
    tasks = {"sciq": about | (task or {}), "lambada": about}
    run = make_run(root, {"sciq": scores_of("sciq", right)}, model=model, suite="lm_eval", tasks=tasks, **more)
    results = read(run, "results.json")
    write(run, "results.json", results | {"tasks": [*results["tasks"], results["tasks"][0] | {"task": "lambada"}]})
    reseal(run)
    return run


def test_tasks_of_lm_eval(tmp_path: Path) -> None:
    a = lm_eval(tmp_path, "a", [1, 0, 0, 0])
    comparison = compared(a, lm_eval(tmp_path, "b", [1, 1, 1, 0]))
    assert (comparison.tasks[0].name, comparison.tasks[0].won, list(comparison.left_out)) == ("sciq", 2, ["lambada"])
    for number, (noun, change) in enumerate({
        "documents": {"task": {"documents": "another"}},
        "definition": {"task": {"config": "another"}},
        "examples": {"task": {"num_fewshot": 5}},
        "limit": {"limit": 3},
    }.items()):  # fmt: skip
        other = lm_eval(tmp_path, f"other{number}", [1, 0, 1, 0], **change)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"task sciq: the .*{noun}.*{other.name}.*{a.name}"):
            compared(a, other)


@pytest.mark.parametrize(
    ("share", "margin", "code"),
    [(0.95, 0.0, 0), (0.2, 0.0, 3), (0.6, 0.0, 4), (0.6, 0.1, 0), (0.59, 0.001, 4), (0.2, 0.9, 0), (0.54, 0.0, 3)],
)
def test_exit_codes(tmp_path: Path, share: float, margin: float, code: int) -> None:
    a, b = three_tasks(tmp_path, "a", 0.6), three_tasks(tmp_path, "b", share)
    comparison = compared(a, b, margin=margin)
    if share == 0.54:  # the average is enough
        assert comparison.count("worse") == 0
    assert exit_code([comparison]) == code
    if not margin:
        assert exit_code([compared(a, b)]) == code


def test_a_task_that_is_worse_withholds_the_pass(tmp_path: Path) -> None:
    a, b = (
        make_run(tmp_path, {task: scores_of(task, [answer] * 40) for task, answer in right.items()}, model=name)
        for name, right in (("a", {"piqa": 1, "boolq": 0, "obqa": 0}), ("b", {"piqa": 0, "boolq": 1, "obqa": 1}))
    )
    comparison = compared(a, b)
    assert (comparison.average.verdict, comparison.count("worse")) == ("better", 1)
    assert exit_code([comparison]) == 4
    with_margin = compared(a, b, margin=0.5)
    assert with_margin.margin is not None and with_margin.margin.worse == ("piqa",)
    assert exit_code([with_margin]) == 4


def test_what_an_interval_says_of_a_margin(tmp_path: Path) -> None:
    """35 of 400 documents of each task lost and 20 won: -3.75 points, of which the interval of a task reaches -7.4."""
    lost_and_won = [1] * 35 + [0] * 20 + [1] * 345, [0] * 35 + [1] * 20 + [1] * 345
    tasks = ("piqa", "boolq", "obqa", "arc_easy")
    a, b = (make_run(tmp_path, {task: scores_of(task, right) for task in tasks}, model=name)
            for name, right in zip("ab", lost_and_won, strict=True))  # fmt: skip
    low, high = compared(a, b).average.low, compared(a, b).average.high
    assert -0.06 < low < -0.05 and -0.025 < high < -0.015
    verdicts = {}
    for margin in (0.01, 0.03, 0.0561, 0.2):
        comparison = compared(a, b, margin=margin)
        assert comparison.margin is not None
        # Every point estimate is beyond the two smaller margins, and no task's interval is
        assert comparison.margin.worse == ()
        assert comparison.margin.not_worse == (tasks if margin == 0.2 else ())
        verdicts[margin] = comparison.margin.verdict, exit_code([comparison])
        assert ("non-inferior" in " ".join(comparison_report([comparison]).parts[0].verdict)) is False or margin > 0.05
    assert verdicts == {0.01: ("worse", 3), 0.03: ("undecided", 4), 0.0561: ("equivalent", 0), 0.2: ("equivalent", 0)}
    gain = compared(b, a, margin=0.01)
    assert gain.margin is not None and (gain.margin.verdict, exit_code([gain])) == ("not worse", 0)


def test_several_sides_are_decided_together(tmp_path: Path) -> None:
    """Holm over the sides' averages; their intervals are Bonferroni's, and agree with it about zero."""
    runs = [make_run(tmp_path, {"piqa": scores_of("piqa", [1] * right + [0] * (400 - right))}, model=str(number))
            for number, right in enumerate((200, 206, 206, 230))]  # fmt: skip
    alone = [compared(runs[0], run).average for run in runs[1:]]
    together = evalkit.compare(*runs)
    assert isinstance(together, list)
    averages = [each.average for each in together]
    assert [average.p for average in averages] == [average.p for average in alone]
    expected = multipletests([average.p for average in alone], method="holm")[1]
    assert [average.p_holm for average in averages] == pytest.approx(expected)
    assert [average.verdict for average in alone] == ["better"] * 3
    assert [average.verdict for average in averages] == ["undecided", "undecided", "better"]
    assert averages[0].low < 0 < averages[0].high
    z, n = stats.t.ppf(1 - 0.05 / 6, 399), 400
    value = 30 / (n + 2)
    error = np.sqrt((np.array([1] * 31 + [-1] + [0] * 370) - value).var() / (n + 2))
    assert averages[2].high == pytest.approx(value + z * error, rel=0.01)
    words = [part.verdict[0] for part in comparison_report(together).parts]
    assert all("3 sides" in text for text in words) and words[0].startswith("Primary verdict: no difference")
