"""Comparison of runs under several prompts: the mean of each document, each prompt, and all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.prompt_variants import PROMPT, PROMPTS
from evalkit.comparison.comparison_report import comparison_report, prompts_sentence
from evalkit.comparison.differences import Comparison
from evalkit.errors import UnknownNameError, UsageError
from evalkit.runs.folder import SCORES, Run, load_run
from tests import sealed
from tests.comparison.made import compared, make_run, scores_of
from tests.printed import printed

Answers = Mapping[str, Mapping[str, Sequence[int]]]
"""Prompt → task → which documents are right."""
LONG = 200


def made(root: Path, answers: Answers, model: str, texts: Mapping[str, str] | None = None) -> Run:
    """Write a finished run under several prompts; `texts` are those of prompts where they are not their names."""
    base = next(iter(answers))
    tables = {task: scores_of(task, right) for task, right in answers[base].items()}
    about: dict[str, Any] = {"templates": {name: (texts or {}).get(name, name) for name in answers}, "choice_orders": 1}
    manifest = {"kind": "prompt_variants", "prompts": {name: name for name in answers if name != base}}
    folder = make_run(root, tables, model=model, manifest=manifest, prompts=about)
    rows = [
        scores_of(task, right).assign(**{PROMPT: prompt})
        for prompt, tasks in answers.items()
        for task, right in tasks.items()
    ]
    pd.concat(rows).to_parquet(folder / PROMPTS, index=False)
    results = sealed.read(folder, "results.json")
    more = {"spread": None, "by_chance": None, "prompts": [], "truncated": 0}
    results["tasks"] = [task | more for task in results["tasks"]]
    sealed.write(folder, "results.json", results)
    sealed.reseal(folder)
    return load_run(folder)


def shares(*rights: float) -> list[dict[str, list[int]]]:
    """Return answers to one task of which the first share is right."""
    return [{"piqa": [1] * round(LONG * share) + [0] * (LONG - round(LONG * share))} for share in rights]


def named(found: Sequence[Mapping[str, Sequence[int]]]) -> Answers:
    return dict(zip(("base", "a", "b"), found, strict=False))


def test_scores_are_means_over_a_document_s_prompts(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    answers = [generator.integers(0, 2, (3, 2, 40)) for _ in "AB"]
    runs = []
    for model, one in zip(("org/a", "org/b"), answers, strict=True):
        both = {p: {"piqa": one[n, 0].tolist(), "boolq": one[n, 1].tolist()} for n, p in enumerate(("base", "a", "b"))}
        del both["b"]["boolq"]
        runs.append(made(tmp_path, both, model))
    found = compared(*runs)
    assert [one.score_a for one in found.tasks] == pytest.approx([answers[0][:, 0].mean(), answers[0][:2, 1].mean()])
    assert [one.score_b for one in found.tasks] == pytest.approx([answers[1][:, 0].mean(), answers[1][:2, 1].mean()])
    assert found.measure.graded
    differences = answers[1][:, 0].mean(axis=0) - answers[0][:, 0].mean(axis=0)
    assert found.tasks[0].stderr == pytest.approx(differences.std(ddof=1) / 40**0.5)
    assert [one.rule for one in found.rules] == ["acc", "acc@base", "acc@a", "acc@b"]
    under = {one.rule: one.average.difference for one in found.rules}
    gains = answers[1].mean(axis=2) - answers[0].mean(axis=2)
    assert under["acc@a"] == pytest.approx(gains[1].mean())
    assert under["acc@b"] == pytest.approx((gains[2, 0] + gains[0, 1]) / 2)  # boolq has no prompt b
    # Under one prompt it is an ordinary comparison of right and wrong answers
    alone = compared(*runs, "acc@a")
    assert [one.test for one in alone.tasks] == ["McNemar", "McNemar"]
    assert alone.tasks[0].difference == pytest.approx(gains[1, 0])
    assert alone.average.p == under_p(found, "acc@a")


def under_p(found: Comparison, rule: str) -> float | None:
    [p] = [one.average.p for one in found.rules if one.rule == rule]
    return p


def test_better_under_all_prompts_is_the_largest_p(tmp_path: Path) -> None:
    a = made(tmp_path, named(shares(0.3, 0.4, 0.5)), "org/a")
    b = made(tmp_path, named(shares(0.5, 0.6, 0.54)), "org/b")
    found = compared(a, b)
    ps = [under_p(found, rule) for rule in ("acc@base", "acc@a", "acc@b")]
    assert max(p or 0 for p in ps) == ps[2] == pytest.approx(2 * 0.5**8)  # 8 won, none lost
    said = prompts_sentence(found)
    assert said == "b is better than a under all 3 prompts (intersection-union test: the largest p is 0.008, b)."
    assert prompts_sentence(compared(b, a)).startswith("b is worse than a under all 3 prompts")
    text = printed(comparison_report([found]))
    assert said in text
    assert "Berger 1982" in text
    assert "mean over prompts <" in text
    assert "acc@" not in text


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ((0.3, 0.4, 0.5), (0.5, 0.6, 0.51), "Of 3 prompts, b against a is better under 2, undecided under 1: neither"),
        ((0.3, 0.4, 0.5), (0.5, 0.4, 0.3), "b against a is better under 1, worse under 1, undecided under 1: neither"),
        ((0.5, 0.5, 0.5), (0.51, 0.5, 0.49), "is shown under any of 3 prompts; b is ahead under 1, a under 1"),
    ],
)
def test_prompts_that_disagree(a: tuple[float, ...], b: tuple[float, ...], said: str, tmp_path: Path) -> None:
    found = compared(made(tmp_path, named(shares(*a)), "org/a"), made(tmp_path, named(shares(*b)), "org/b"))
    assert said in prompts_sentence(found)


def test_different_prompts_are_named(tmp_path: Path) -> None:
    three, two = named(shares(0.3, 0.4, 0.5)), named(shares(0.3, 0.4))
    a = made(tmp_path, three, "org/a")
    with pytest.raises(UsageError, match=r"task piqa: run a-\w+ has prompt b, which run b-\w+ does not have"):
        compared(a, made(tmp_path, two, "org/b"))
    with pytest.raises(UsageError, match=r"run c-\w+ does not have"):
        compared(made(tmp_path, two, "org/c"), a)
    with pytest.raises(UsageError, match=r"prompt a of run a-\w+ has another text than that of run d-\w+"):
        compared(a, made(tmp_path, three, "org/d", {"a": "other"}))
    ordinary = load_run(make_run(tmp_path, {"piqa": scores_of("piqa", [1] * LONG)}, model="org/e"))
    for pair_of in ((a, ordinary), (ordinary, a)):
        with pytest.raises(UsageError, match=r"run a-\w+ has several prompts and run e-\w+ has one"):
            compared(*pair_of)
    with pytest.raises(UnknownNameError, match="did you mean 'base'"):
        compared(a, made(tmp_path, three, "org/f"), "acc@bas")
    assert (a.folder / SCORES).is_file()
