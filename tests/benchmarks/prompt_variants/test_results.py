"""The spread over prompts, and the spread to expect by chance, against permutations and closed forms."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.prompt_variants import PROMPT
from evalkit.benchmarks.prompt_variants.results import PromptTables, expected_deviation, varied_results
from evalkit.errors import RunError
from tests.comparison.made import scores_of

MANIFEST = {"groups": {"Average": ["one", "two"]}, "group_sizes": {"Average": 2}}


def tables_of(answers: dict[str, dict[str, list[int]]]) -> PromptTables:
    """Return the tables of prompt → task → which documents are right."""
    parts = [
        scores_of(task, right).assign(**{PROMPT: prompt})
        for prompt, tasks in answers.items()
        for task, right in tasks.items()
    ]
    return PromptTables(pd.concat(parts, ignore_index=True))


def drawn(prompts: int, documents: int, seed: int) -> np.ndarray:
    """Return [prompts, documents] right answers to documents of different difficulty."""
    generator = np.random.default_rng(seed)
    return (generator.random((prompts, documents)) < generator.random(documents)).astype(int)


def test_the_deviation_by_chance_is_that_of_permutations() -> None:
    """Each document's answers shuffled over its prompts: the mean variance of the accuracies over prompts."""
    answers, generator = drawn(5, 30, 1), np.random.default_rng(2)
    variances = [generator.permuted(answers, axis=0).mean(axis=1).var(ddof=1) for _ in range(20_000)]
    assert expected_deviation(answers.astype(float)) == pytest.approx(np.mean(variances) ** 0.5, rel=0.01)
    assert expected_deviation(answers[:1].astype(float)) is None


def test_that_of_an_average_is_that_of_permutations_where_a_task_lacks_prompts() -> None:
    """The second task has three of five prompts; its first one stands in for the others."""
    one, two, generator = drawn(5, 20, 3), drawn(3, 10, 4), np.random.default_rng(5)
    names = ["base", "a", "b", "order-BA", "order-CB"]
    answers = {name: {"one": one[place].tolist()} for place, name in enumerate(names)}
    for place, name in enumerate(names[:3]):
        answers[name]["two"] = two[place].tolist()
    found = varied_results(tables_of(answers), MANIFEST, "acc").average
    assert [one.prompt for one in found.prompts] == names
    variances = []
    for _ in range(20_000):
        first, second = (generator.permuted(task, axis=0).mean(axis=1) for task in (one, two))
        variances.append(((first + second[[0, 1, 2, 0, 0]]) / 2).var(ddof=1))
    assert found.by_chance == pytest.approx(np.mean(variances) ** 0.5, rel=0.01)


def test_means_extremes_and_errors() -> None:
    answers = {
        "base": {"one": [1, 1, 0, 0], "two": [1, 0]},
        "a": {"one": [1, 1, 1, 0], "two": [0, 0]},
        "b": {"one": [0, 0, 0, 0]},
    }
    found = varied_results(tables_of(answers), MANIFEST, "acc")
    one, two = found.tasks
    assert one.accuracy == pytest.approx(5 / 12)
    assert one.stderr == pytest.approx(np.std([2 / 3, 2 / 3, 1 / 3, 0], ddof=1) / 2)
    assert one.spread == pytest.approx(np.std([0.5, 0.75, 0], ddof=1))
    assert two.accuracy == 0.25
    assert [p.prompt for p in two.prompts] == ["base", "a"]
    assert found.average.accuracy == pytest.approx((5 / 12 + 1 / 4) / 2)
    # Task two counts with the run's own prompt under b
    assert [p.accuracy for p in found.average.prompts] == pytest.approx([0.5, 0.375, 0.25])


def test_one_prompt_has_the_error_of_an_ordinary_run() -> None:
    found = varied_results(tables_of({"base": {"one": [1, 1, 0, 0], "two": [1, 0, 0]}}), MANIFEST, "acc")
    assert found.tasks[0].stderr == pytest.approx(found.tasks[0].prompts[0].stderr)
    assert (found.tasks[0].spread, found.tasks[0].by_chance, found.average.by_chance) == (None, None, None)


def test_a_prompt_without_some_documents_is_damaged() -> None:
    with pytest.raises(RunError, match="prompt a has other documents than the first"):
        tables_of({"base": {"one": [1, 1, 0]}, "a": {"one": [1, 0]}})
