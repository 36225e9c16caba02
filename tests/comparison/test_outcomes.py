"""Comparisons by other measures than accuracy, against scipy and statsmodels: continuous outcomes, LongBench's scores,
several prompts, and the measures of another package's benchmark, which are unbounded or of each layer."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from evalkit import Comparison
from evalkit.benchmarks.registry import benchmark
from evalkit.comparison.comparison_report import comparison_report
from evalkit.comparison.curves import curve, curve_report
from evalkit.comparison.differences import exit_code
from evalkit.comparison.plots import curves as draw_curves
from evalkit.comparison.plots import forest
from evalkit.comparison.sentences import prompts_sentence
from evalkit.comparison.sides import Side
from evalkit.errors import UsageError
from evalkit.runs.folder import SCORES, Run, load_run
from evalkit.runs.score_table import PROMPT
from tests import sealed
from tests.benchmarks.conftest import install_plugin
from tests.comparison.made import compared, make_longbench, make_run, scores_of
from tests.plugin.copying import COPYING, LAYERS, LEAD, SURPLUS
from tests.plugin.made import make_copying
from tests.printed import printed


def line_of(comparison: Comparison) -> str:
    """The sentence on bits per byte below the verdict."""
    [line] = [text for text in comparison_report([comparison]).parts[0].verdict if "Secondary, bits per byte" in text]
    return line


# Continuous outcomes of choices

TASKS = {"arc_easy": 300, "piqa": 200}


def likelihoods(better: float = 0.0, noise: float = 0.5, seed: int = 1) -> dict[str, pd.DataFrame]:
    """Score tables with gamma-distributed log-likelihoods, those of the gold answers better by so many nats."""
    dice, own, tables = np.random.default_rng(7), np.random.default_rng(seed), {}
    for task, n in TASKS.items():
        gold, others, sizes = -dice.gamma(4, 5, n), -dice.gamma(4, 5, (n, 3)), dice.integers(5, 60, n)
        tables[task] = scores_of(task, [1] * n)
        tables[task]["ll_continuation"] = np.column_stack([gold + better + own.normal(0, noise, n), others]).ravel()
        tables[task]["bytes"] = tables[task]["chars"] = np.repeat(sizes, 4)
    return tables


def bits(tables: Mapping[str, pd.DataFrame], task: str) -> np.ndarray:
    """Bits per byte of the gold answers, which are the first choices."""
    rows = tables[task][tables[task]["choice"] == 0]
    return np.asarray(-rows["ll_continuation"] / math.log(2) / rows["bytes"])


def test_bits_per_byte(tmp_path: Path) -> None:
    of_a, of_b = likelihoods(), likelihoods(0.4, seed=2)
    a, b = make_run(tmp_path, of_a, model="a"), make_run(tmp_path, of_b, model="b")
    comparison, ps = compared(a, b, outcome="bits_per_byte"), []
    for task in comparison.tasks:
        apart = bits(of_b, task.name) - bits(of_a, task.name)
        assert (task.difference, task.stderr) == pytest.approx((apart.mean(), stats.sem(apart)), rel=1e-9)
        assert task.score_a == pytest.approx(bits(of_a, task.name).mean(), rel=1e-9)
        assert (task.won, task.lost) == ((apart < 0).sum(), (apart > 0).sum())  # lower is better
        assert task.p is not None and task.p >= stats.ttest_1samp(apart, 0).pvalue - 1e-12
        ps.append(task.p)
    assert [task.p_holm for task in comparison.tasks] == pytest.approx(multipletests(ps, method="holm")[1])
    assert {row.verdict for row in (*comparison.tasks, comparison.average)} == {"better"}
    assert {row.verdict for row in compared(b, a, outcome="bits_per_byte").tasks} == {"worse"}
    # The line below a comparison by accuracy, which shows nothing here
    by_accuracy = compared(a, b)
    evidence = by_accuracy.continuous
    assert by_accuracy.average.verdict == "undecided" and evidence is not None
    assert evidence.average.difference == comparison.average.difference
    assert evidence.times_low is not None and evidence.times_low > 1 and evidence.times_high is None
    assert "b is better in bits per byte; for the same power accuracy needs at least" in line_of(by_accuracy)
    both_clear = compared(a, make_run(tmp_path, likelihoods(8.0, seed=3), model="c"))
    assert re.search(r"accuracy needs [\d,.]+ to [\d,.]+ times as many", line_of(both_clear))
    alike = line_of(compared(a, make_run(tmp_path, likelihoods(seed=5), model="d")))
    assert ": undecided; " in alike and "not known" in alike


def test_a_task_with_too_few_documents_has_no_verdict_in_likelihoods(tmp_path: Path) -> None:
    """199 of a task; the average over tasks, and bounded outcomes, have one."""
    tables = [{task: rows[rows["doc_id"] < 199] if task == "piqa" else rows for task, rows in of.items()}
              for of in (likelihoods(), likelihoods(0.4, seed=2))]  # fmt: skip
    a, b = (make_run(tmp_path, of, model=name) for name, of in zip("ab", tables, strict=True))
    for outcome in ("bits_per_byte", "log_loss", "margin"):
        comparison = compared(a, b, outcome=outcome, margin=100.0)
        assert [task.verdict == "too few" for task in comparison.tasks] == [False, True], outcome
        task = comparison.tasks[1]
        assert (task.low, task.high, task.p, task.detectable) == (-math.inf, math.inf, None, None)
        assert comparison.average.p is not None and comparison.average.high < math.inf
        assert comparison.margin is not None and comparison.margin.not_worse == ("arc_easy",)
        printed(comparison_report([comparison]))
        forest([comparison], tmp_path / "forest.png")
    assert "too few" not in {task.verdict for task in compared(a, b, outcome="brier").tasks}
    alone = [make_run(tmp_path, {"piqa": of["piqa"]}, model=f"{n} alone") for n, of in enumerate(tables)]
    only = compared(*alone, outcome="bits_per_byte", margin=0.1)
    assert only.average.verdict == "too few" and exit_code([only]) == 4


def changed(root: Path, model: str, change: Any) -> Path:
    """A run of `likelihoods` whose tables are changed in place."""
    tables = likelihoods()
    for task, rows in tables.items():
        change(task, rows, rows["choice"] == 0)
    return make_run(root, tables, model=model)


@pytest.mark.slow
def test_outcomes_that_contradict_are_rounding_or_of_letters(tmp_path: Path) -> None:
    a = make_run(tmp_path, likelihoods(), model="a")

    def likelier(task: str, rows: pd.DataFrame, gold: Any) -> None:
        """More likely gold answers, and other answers that have become even more likely."""
        rows["ll_continuation"] += np.where(gold, 1.0, 15.0)

    contradicting = compared(a, changed(tmp_path, "likelier", likelier))
    assert contradicting.average.verdict == "worse" and "contradict" in line_of(contradicting)

    def rounded(task: str, rows: pd.DataFrame, gold: Any, by: float = 1e-6) -> None:
        """One checkpoint scored by two programs: every document differs in the same direction."""
        rows["ll_continuation"] *= 1 + by

    more = changed(tmp_path, "more", lambda *given: rounded(*given, by=2e-4))  # twice the tolerance
    assert all(task.p < 1 for task in compared(a, more, outcome="bits_per_byte").tasks)
    b = changed(tmp_path, "rounded", rounded)
    for outcome in ("bits_per_byte", "log_loss", "brier", "margin"):
        comparison = compared(a, b, outcome=outcome)
        assert {row.verdict for row in (*comparison.tasks, *comparison.averages)} == {"undecided"}, outcome
        assert all(task.p == 1 and task.low <= 0 <= task.high for task in comparison.tasks)

    def letters(task: str, rows: pd.DataFrame, gold: Any, shift: float = 0.0) -> None:
        """Bits per byte of letters are several times those of sentences, and would decide the average."""
        rows["ll_continuation"] += np.where(gold, shift + np.random.default_rng(3).normal(0, 0.1, len(rows)), 0.0)
        if task == "piqa":
            rows["bytes"] = 1
            rows["ll_continuation"] -= np.where(gold, 50 * shift, 0.0)

    runs = [changed(tmp_path, f"letters{n}", lambda *given, n=n: letters(*given, shift=0.4 * n)) for n in (0, 1)]
    evidence = compared(*runs).continuous
    assert evidence is not None and (evidence.left_out, evidence.average.verdict) == (("piqa",), "better")
    every = compared(*runs, outcome="bits_per_byte")
    assert (every.average.verdict, every.letters) == ("worse", ("piqa",))
    assert compared(*runs, outcome="log_loss").letters == ()


# LongBench


def graded(seed: int, shift: float = 0.0) -> list[float]:
    """40 scores between 0 and 1 with two decimals; those of one seed differ by their shifts."""
    return np.clip(np.round(np.random.default_rng(seed).random(40) + shift, 2), 0, 1).tolist()


def test_graded_answers(tmp_path: Path) -> None:
    first, second = graded(1), graded(2, 0.2)
    right, other = [1.0] * 12 + [0.0] * 28, [0.0] * 3 + [1.0] * 13 + [0.0] * 24
    a = make_longbench(tmp_path, {"hotpotqa": first, "trec": right}, model="a")
    b = make_longbench(tmp_path, {"hotpotqa": second, "trec": other}, model="b")
    comparison = compared(a, b)
    hotpotqa, trec = comparison.tasks
    apart = np.subtract(second, first)
    assert (hotpotqa.difference, hotpotqa.stderr) == pytest.approx((apart.mean(), stats.sem(apart)), abs=1e-12)
    dice = np.random.default_rng(3)
    flipped = stats.permutation_test((apart,), np.mean, permutation_type="samples", n_resamples=50_000, rng=dice)
    assert hotpotqa.p == pytest.approx(max(flipped.pvalue, stats.ttest_rel(first, second).pvalue), rel=0.2)
    expected = stats.t.interval(0.95, 39, apart.mean(), stats.sem(apart))
    assert (hotpotqa.low, hotpotqa.high) == pytest.approx(expected, abs=0.02)
    assert (trec.test, trec.p) == ("McNemar", pytest.approx(stats.binomtest(3, 7).pvalue))
    assert (comparison.average.name, [verdict.rule for verdict in comparison.rules]) == (
        "Average (2 of 16)", ["longbench"],
    )  # fmt: skip
    # Two questions of a document with the same score are one draw
    doubled = [np.repeat(values, 2).tolist() for values in (first, second)]
    sources = {"hotpotqa": [str(number // 2) for number in range(80)]}
    runs = [make_longbench(tmp_path, {"hotpotqa": values}, model=f"twice{n}", sources=sources)
            for n, values in enumerate(doubled)]  # fmt: skip
    [task] = compared(*runs).tasks
    assert (task.n, task.sources, task.stderr) == (80, 40, pytest.approx(hotpotqa.stderr))
    with pytest.raises(UsageError, match="prompt tokens"):
        compared(a, make_longbench(tmp_path, {"hotpotqa": first}, max_prompt_tokens=3500))


# Several prompts

LONG = 200


def prompted(root: Path, model: str, answers: Mapping[str, Mapping[str, Sequence[int]]], text: str = "") -> Run:
    """A finished run under several prompts; answers by prompt and task. `text` is that of the prompts, by default
    their names."""
    base = next(iter(answers))
    tables = {task: scores_of(task, right) for task, right in answers[base].items()}
    about = {"templates": {name: text or name for name in answers}, "choice_orders": 1}
    manifest = {"kind": "prompt_variants", "prompts": {name: name for name in answers if name != base}}
    folder = make_run(root, tables, model=model, manifest=manifest, prompts=about)
    rows = [scores_of(task, right).assign(**{PROMPT: prompt})
            for prompt, tasks in answers.items() for task, right in tasks.items()]  # fmt: skip
    pd.concat(rows).to_parquet(folder / SCORES, index=False)
    results = sealed.read(folder, "results.json")
    more = {"spread": None, "by_chance": None, "prompts": [], "truncated": 0}
    tasks = [task | more for task in results["tasks"]]
    sealed.write(folder, "results.json", results | {"rule": "acc", "tasks": tasks})
    sealed.reseal(folder)
    return load_run(folder)


def shares(*rights: float) -> dict[str, dict[str, list[int]]]:
    """Answers to one task under the prompts base, a and b, of which the first share is right."""
    return {prompt: {"piqa": [1] * round(LONG * share) + [0] * (LONG - round(LONG * share))}
            for prompt, share in zip(("base", "a", "b"), rights, strict=False)}  # fmt: skip


def test_scores_are_means_over_a_documents_prompts(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0).integers(0, 2, (2, 3, 2, 40))  # run, prompt, task, document
    runs = []
    for model, right in zip("ab", drawn, strict=True):
        by_prompt = {prompt: {"piqa": right[n, 0].tolist(), "boolq": right[n, 1].tolist()}
                     for n, prompt in enumerate(("base", "a", "b"))}  # fmt: skip
        del by_prompt["b"]["boolq"]
        runs.append(prompted(tmp_path, model, by_prompt))
    comparison = compared(*runs)
    piqa, boolq = comparison.tasks
    apart = drawn[1, :, 0].mean(axis=0) - drawn[0, :, 0].mean(axis=0)
    assert (piqa.difference, piqa.stderr) == pytest.approx((apart.mean(), stats.sem(apart)))
    assert boolq.score_a == pytest.approx(drawn[0, :2, 1].mean())
    under = {verdict.rule: verdict.average for verdict in comparison.rules}
    assert list(under) == ["acc", "acc@base", "acc@a", "acc@b"]
    gains = drawn[1].mean(axis=2) - drawn[0].mean(axis=2)
    assert under["acc@a"].difference == pytest.approx(gains[1].mean())
    assert under["acc@b"].difference == pytest.approx((gains[2, 0] + gains[0, 1]) / 2)  # boolq has no prompt b
    alone = compared(*runs, "acc@a")  # an ordinary comparison of right and wrong answers
    assert [task.test for task in alone.tasks] == ["McNemar", "McNemar"]
    assert (alone.tasks[0].difference, alone.average.p) == (pytest.approx(gains[1, 0]), under["acc@a"].p)
    one_prompt = load_run(make_run(tmp_path, {"piqa": scores_of("piqa", [1] * 40)}, model="one prompt"))
    for sides in ((one_prompt, runs[0]), (runs[0], one_prompt)):
        with pytest.raises(UsageError, match="--vary"):
            compared(*sides)


def test_better_under_all_prompts(tmp_path: Path) -> None:
    """The largest p decides (Berger 1982): 8 of 200 documents won under prompt b, none lost."""
    three = shares(0.3, 0.4, 0.5)
    a = prompted(tmp_path, "a", three)
    comparison = compared(a, b := prompted(tmp_path, "b", shares(0.5, 0.6, 0.54)))
    ps = {verdict.rule: verdict.average.p or 0 for verdict in comparison.rules if "@" in verdict.rule}
    assert max(ps.values()) == ps["acc@b"] == pytest.approx(2 * 0.5**8)
    assert "b is better than a under all 3 prompts" in prompts_sentence(comparison)
    assert "b is worse than a under all 3 prompts" in prompts_sentence(compared(b, a))
    same = prompted(tmp_path, "same", shares(0.5, 0.5, 0.5))
    for first, rights, said in (
        (a, (0.5, 0.4, 0.3), "better under 1, worse under 1, undecided under 1"),
        (same, (0.51, 0.5, 0.49), "b is ahead under 1, a under 1"),
    ):
        other = prompted(tmp_path, f"model {rights}", shares(*rights))
        assert said in prompts_sentence(compared(first, other))
    for noun, other in {
        "prompt b": prompted(tmp_path, "two", shares(0.3, 0.4)),
        "prompt a": prompted(tmp_path, "texts", three, "text"),
        "several prompts": load_run(make_run(tmp_path, {"piqa": scores_of("piqa", [1] * LONG)}, model="ordinary")),
    }.items():
        with pytest.raises(UsageError, match=noun):
            compared(a, other)


# Measures of another package: signed, unbounded, per layer, lower is better, or without a better direction

DOCUMENTS = 60


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = str(install_plugin(tmp_path_factory.mktemp("installed")))
    sys.path.insert(0, folder)
    benchmark.cache_clear()
    yield
    sys.path.remove(folder)
    benchmark.cache_clear()


def drawn(seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    """Signed values far from any share."""
    return scale * (np.random.default_rng(seed).normal(3, 5, DOCUMENTS) + shift)


def copier(root: Path, model: str, sources: Sequence[str] | None = None, **columns: Any) -> Run:
    """A run with values under each measure."""
    every = {SURPLUS: np.zeros(DOCUMENTS)} | {f"{LEAD} {layer}": np.zeros(DOCUMENTS) for layer in LAYERS}
    named = {name.replace("_", " "): values for name, values in columns.items()}
    root = root / str(len(list(root.iterdir())))
    return load_run(make_copying(root, every | named, model=model, sources=sources))


def hall_or_t(values: np.ndarray) -> tuple[float, float]:
    """Union of the intervals of t before and after Hall's cubic transformation, solved numerically."""
    n, error = len(values), stats.sem(values)
    skewness, critical = float(stats.skew(values)) / n**0.5, stats.t.ppf(0.975, n - 1)

    def transformed(t: float) -> float:
        return t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6

    ends = [critical, -critical]
    ends += [optimize.brentq(lambda t, end=end: transformed(t) - end, -50, 50, xtol=1e-13) for end in ends[:2]]
    return values.mean() - max(ends) * error, values.mean() - min(ends) * error


def test_unbounded_measures(plugin: None, tmp_path: Path) -> None:
    """No clipping at one and no pseudo-source: there is no bound near which the interval would be too short."""
    first, second = drawn(1), drawn(1) + np.random.default_rng(2).normal(40, 30, DOCUMENTS)
    [task] = compared(copier(tmp_path, "a", surplus=first), copier(tmp_path, "b", surplus=second), SURPLUS).tasks
    apart = second - first
    assert (task.difference, task.stderr) == pytest.approx((apart.mean(), stats.sem(apart)))
    expected = hall_or_t(apart)
    assert (task.low, task.high) == pytest.approx(expected, rel=1e-9) and task.low > 1
    # The variance is estimated, from 60 documents, and so a little more than if it were known
    smallest = TTestPower().solve_power(nobs=DOCUMENTS, alpha=0.05, power=0.8) * apart.std(ddof=1)
    assert smallest < task.detectable < 1.03 * smallest
    # Of five sources no pattern of signs is significant, of six one is
    for count in (5, 6):
        sources = [str(n % count) for n in range(DOCUMENTS)]
        a, b = copier(tmp_path, "a", sources, surplus=first), copier(tmp_path, "b", sources, surplus=second)
        assert (compared(a, b, SURPLUS).tasks[0].detectable is None) is (count == 5)
    # Another unit changes no p value
    for sources in (None, [str(n // 3) for n in range(DOCUMENTS)]):
        small, large = (
            compared(
                copier(tmp_path, "a", sources, surplus=drawn(1, scale=scale)),
                copier(tmp_path, "b", sources, surplus=drawn(2, 1.5, scale)),
                SURPLUS,
            ).tasks[0]
            for scale in (1.0, 1e6)
        )
        assert 0.001 < (small.p or 0) < 0.999 and small.p == pytest.approx(large.p, abs=1e-9)
        for name in ("score_a", "difference", "low", "high", "stderr", "detectable"):
            assert getattr(large, name) == pytest.approx(1e6 * getattr(small, name), rel=1e-6), name


@pytest.mark.parametrize(("shift", "verdict", "code"), [(9.0, "worse", 3), (-9.0, "better", 0), (0.0, "undecided", 4)])
def test_lower_is_better(plugin: None, tmp_path: Path, shift: float, verdict: str, code: int) -> None:
    noise = np.random.default_rng(3).normal(0, 1, DOCUMENTS)
    b = copier(tmp_path, "b", surplus=drawn(1, shift) + noise - noise.mean())
    comparison = compared(copier(tmp_path, "a", surplus=drawn(1)), b, SURPLUS)
    [task] = comparison.tasks
    assert task.verdict == verdict
    assert verdict == "undecided" or (task.won > task.lost) == (verdict == "better")
    assert exit_code([comparison]) == code
    in_unit = compared(copier(tmp_path, "a", surplus=drawn(1)), b, SURPLUS, margin=20.0)
    assert exit_code([in_unit]) == 0  # a margin in the measure's own unit
    assert " points" not in printed(comparison_report([comparison]))


@pytest.mark.slow
def test_layers_of_which_neither_direction_is_better(plugin: None, tmp_path: Path) -> None:
    noise = np.random.default_rng(3).normal(0, 1, (2, DOCUMENTS))
    a = copier(tmp_path, "step1", lead_0=drawn(1), lead_1=drawn(2), lead_2=drawn(3))
    b = copier(tmp_path, "step2", lead_0=drawn(1) + 5 + noise[0], lead_1=drawn(2) - 2 + noise[1], lead_2=drawn(3))
    comparison = compared(a, b, LEAD)
    assert [task.verdict for task in comparison.tasks] == ["higher", "lower", "undecided"]
    same = comparison.tasks[2]
    assert (same.difference, same.low, same.high, same.p) == (0, 0, 0, 1)
    # Of each document's mean over the layers, so that what layers share is not counted three times
    apart = (5 + noise[0] - 2 + noise[1]) / 3
    assert (comparison.average.difference, comparison.average.stderr) == pytest.approx((apart.mean(), stats.sem(apart)))
    assert [record["layer"] for record in comparison_report([comparison]).records or ()] == [0, 1, 2, None]
    with pytest.raises(UsageError, match="lead"):
        exit_code([comparison])
    training = curve(Side("training", (a, b)), LEAD)
    assert list(training.tasks) == [f"{COPYING} layer {layer}" for layer in LAYERS]
    point = training.tasks[f"{COPYING} layer 2"][0]
    expected = stats.t.interval(0.95, DOCUMENTS - 1, drawn(3).mean(), stats.sem(drawn(3)))
    assert (point.low, point.high) == pytest.approx(expected, rel=1e-9)
    assert "Copy, layer 1" in printed(curve_report([training]))
    forest([comparison], tmp_path / "forest.png")
    draw_curves([training], tmp_path / "curve.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("forest", "curve"))
