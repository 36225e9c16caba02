"""Runs under several prompts: each prompt's scores are those of an ordinary run with that prompt; their spread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import evalkit
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.benchmarks.prompt_variants import PROMPT
from evalkit.benchmarks.prompt_variants.results import PromptTables, expected_deviation, prompt_tables, varied_results
from evalkit.benchmarks.registry import benchmark, benchmark_of
from evalkit.benchmarks.run import planned
from evalkit.errors import RunError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.runs.accuracies import document_outcomes
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.score_table import OUTCOMES
from evalkit.runs.traits import traits
from tests.benchmarks.kinds import Lines
from tests.comparison.made import scores_of

Evaluate = Callable[..., Run]
VARY = ("template", "choice_order", "system_prompt")
PROMPTS = (
    *("inst", "no-instruction", "instruction-line", "dialogue", "system-1", "system-2", "system-3"),
    *("order-BCDA", "order-CDAB", "order-DABC"),
)
KEY = ["task", "subtask", "doc_id"]


@pytest.fixture(scope="module")
def options(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run of MMLU and PIQA."""
    data = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("mmlu", "piqa"), "limit": 8}
    return data | {"dtype": "float32", "token_budget": 700, "output": tmp_path_factory.mktemp("varied")}


@pytest.fixture(scope="module")
def run_of(checkpoint: Path, options: dict[str, Any]) -> Evaluate:
    """`evaluate` with these options; keyword arguments change the rest."""
    return lambda **changes: evalkit.evaluate(str(checkpoint), **(options | {"progress": Lines()} | changes))


@pytest.fixture(scope="module")
def varied(run_of: Evaluate) -> Run:
    """A run under all shipped prompts. Do not modify."""
    return run_of(vary=VARY)


def of_prompt(run: Run, prompt: str, task: str = "") -> pd.DataFrame:
    rows = prompt_tables(run).by_prompt[prompt].drop(columns="prompt")
    return (rows[rows["task"] == task] if task else rows).reset_index(drop=True)


def same_scores(scores: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Equal documents, tokens and, to 1e-4, log-likelihoods; equal decisions under every rule."""
    likelihoods = [name for name in expected if name.startswith("ll_")]
    others = [name for name in expected if name not in likelihoods]
    pd.testing.assert_frame_equal(scores[others], expected[others], check_dtype=False)
    np.testing.assert_allclose(scores[likelihoods].to_numpy(float), expected[likelihoods].to_numpy(float), rtol=1e-4)
    for rule in ("ppl", "acc", "acc_norm"):
        decisions = [decide(table, find_rule(rule))["prediction"] for table in (scores, expected)]
        pd.testing.assert_series_equal(*decisions)


def test_each_prompt_has_the_scores_of_an_ordinary_run_with_it(
    varied: Run, run_of: Evaluate, documents: Path, tmp_path: Path
) -> None:
    """A template; a template with another system prompt; documents whose options are rotated by hand."""
    ordinary = run_of()
    same_scores(varied.scores, ordinary.scores)
    assert varied.manifest["rule"] == ordinary.manifest["rule"] == "ppl"
    same_scores(of_prompt(varied, "inst"), ordinary.scores)
    same_scores(of_prompt(varied, "dialogue"), run_of(template="dialogue").scores)
    content = asdict(load_template("inst")) | {"system": "You are a helpful assistant."}
    parts = [{part["segment"]: part["text"]} for part in content.pop("parts")]
    del content["name"], content["chat"]
    (tmp_path / "helpful.yaml").write_text(yaml.safe_dump(content | {"parts": parts, "score": [*content["score"]]}))
    same_scores(of_prompt(varied, "system-2"), run_of(template=str(tmp_path / "helpful.yaml")).scores)
    records = [json.loads(line) for line in (documents / "mmlu.jsonl").read_text("utf-8").splitlines()]
    for record in records:
        record["choices"] = record["choices"][3:] + record["choices"][:3]
        record["answer"] = (record["answer"] - 3) % 4
    (tmp_path / "mmlu.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    same_scores(of_prompt(varied, "order-DABC"), run_of(data_dir=tmp_path, tasks=("mmlu",)).scores)
    assert of_prompt(varied, "order-DABC", "piqa").empty


def test_few_shot_and_other_rules(run_of: Evaluate, tmp_path: Path) -> None:
    """With an example and PMI, the unconditional scores too are those of an ordinary run."""
    changes: dict[str, Any] = {"tasks": ("mmlu",), "num_fewshot": 1, "rule": "pmi", "limit": 2, "token_budget": None}
    varied, ordinary = run_of(vary="choice_order", **changes), run_of(**changes)
    same_scores(of_prompt(varied, "inst"), ordinary.scores)
    assert len(prompt_tables(varied).documents) == 2 and varied.rule == "pmi"
    assert np.isfinite(of_prompt(varied, "order-BCDA")["ll_unconditional"]).all()
    (tmp_path / "both.yaml").write_text("templates: [inst, plain]\n")
    with pytest.raises(UsageError, match=r"rule ppl .* plain"):
        run_of(vary=str(tmp_path / "both.yaml"), tasks=("piqa",), rule="ppl")


def test_accuracies_spread_and_mean(varied: Run) -> None:
    """By hand from the decisions of each prompt."""
    for task, prompts, n in (("mmlu", PROMPTS, 8), ("piqa", PROMPTS[:7], 6)):
        right = np.array([decide(of_prompt(varied, prompt, task), find_rule("ppl"))["correct"] for prompt in prompts])
        [stored] = [entry for entry in varied.stored["tasks"] if entry["task"] == task]
        assert {under["prompt"]: under["accuracy"] for under in stored["prompts"]} == pytest.approx(
            dict(zip(prompts, right.mean(axis=1), strict=True))
        )
        assert stored["accuracy"] == pytest.approx(right.mean())
        assert stored["stderr"] == pytest.approx(right.mean(axis=0).std(ddof=1) / n**0.5)
        assert stored["spread"] == pytest.approx(right.mean(axis=1).std(ddof=1))
        metrics = [metric for metric in benchmark_of(varied).metrics(varied) if metric.task == task]
        assert metrics[0].value == stored["accuracy"] and len(metrics) == len(prompts) + 1


@pytest.mark.parametrize("name", ["bits_per_byte", "margin"])
def test_continuous_outcomes_are_means_over_prompts(varied: Run, name: str) -> None:
    """In comparisons, and in tables; also under one prompt."""
    comparable, outcomes = benchmark_of(varied).comparable(varied), {}
    for prompt, rows in prompt_tables(varied).by_prompt.items():
        first = rows[rows["choice"] == 0].set_index(KEY)
        outcomes[prompt] = pd.Series(document_outcomes(rows, OUTCOMES[name], find_rule("ppl")), first.index)
    values = pd.DataFrame(outcomes).reindex(pd.MultiIndex.from_frame(comparable.documents[KEY]))
    assert comparable.by_rule(name) == pytest.approx(values.mean(axis=1).to_numpy())
    under = values["order-DABC"].fillna(values["inst"]).to_numpy()
    assert comparable.by_rule(f"{name}@order-DABC") == pytest.approx(under)
    by_task = {metric.task: metric.value for metric in benchmark_of(varied).metrics(varied, name)}
    assert by_task == pytest.approx(values.mean(axis=1).groupby(level="task").mean().to_dict())
    assert comparable.measure(name).higher_is_better is (name == "margin")


def test_reports_and_documents(varied: Run, run_of: Evaluate) -> None:
    served_by = benchmark_of(varied)
    assert {record["rule"] for record in served_by.report(varied, "acc", detail=True).records or ()} == {"acc"}
    with pytest.raises(UsageError, match="bits_per_byte"):
        served_by.report(varied, "bits_per_byte")
    # Documents are those of the run's own prompt
    [view], [own] = (benchmark_of(run).views(run, ["piqa"], silent) for run in (varied, run_of()))
    assert view.texts == own.texts and len(view.scores) == len(own.scores)  # type: ignore[attr-defined]
    assert "inst" in view.problem


def test_other_prompts_are_another_run_and_another_trait(varied: Run, run_of: Evaluate, tmp_path: Path) -> None:
    template, ordinary = run_of(vary="template", tasks=("piqa",)), run_of(tasks=("piqa",))
    assert len({varied.folder, template.folder, ordinary.folder}) == 3
    assert traits(ordinary)["prompts"].value == "one"
    assert traits(template)["prompts"].value != traits(varied)["prompts"].value
    assert traits(template)["prompts"].refused
    for changes, noun in (
        ({"vary": "choice_order"}, "piqa"),
        ({"vary": "template", "log_samples": True}, "--log-samples"),
    ):
        with pytest.raises(UsageError, match=noun):
            run_of(tasks=("piqa",), **changes)
    copied = evalkit.load_run(shutil.copytree(varied.folder, tmp_path / varied.folder.name))
    shutil.copy(copied.folder / SCORES, copied.folder / "prompts.parquet")
    with pytest.raises(RunError, match=r"prompts.parquet"):
        prompt_tables(copied)


def test_tokens_are_counted_under_each_template_and_order(
    checkpoint: Path, options: dict[str, Any], varied: Run
) -> None:
    changes: dict[str, dict[str, Any]] = {"all": {"vary": VARY}, "orders": {"vary": ("choice_order",)}, "own": {}}
    plans = {name: planned(checkpoint, options | more, silent) for name, more in changes.items()}
    tokenizer = tokenizer_alone(plans["own"].checkpoint, silent)
    counts = {
        name: {part.task: part for part in benchmark(plan.manifest["kind"]).token_counts(plan, tokenizer, 100, silent)}
        for name, plan in plans.items()
    }
    table = pd.concat(prompt_tables(varied).by_prompt.values())
    for task, documents in {"mmlu": 8, "piqa": 6}.items():
        tokens = table.loc[table["task"] == task, [name for name in table if name.startswith("n_")]]
        assert (counts["all"][task].alone, counts["all"][task].documents) == (tokens.to_numpy().sum(), documents)
    # Instruction, subject and question are computed once for all orders
    assert counts["orders"]["mmlu"].alone == 4 * counts["own"]["mmlu"].alone
    assert counts["orders"]["mmlu"].distinct < 0.8 * 4 * counts["own"]["mmlu"].distinct
    assert counts["orders"]["piqa"] == counts["own"]["piqa"]


# The spread over prompts by chance, against permutations and closed forms

MANIFEST = {"groups": {"Average": ["one", "two"]}, "group_sizes": {"Average": 2}}


def tables_of(answers: dict[str, dict[str, Any]]) -> PromptTables:
    """Return the tables of prompt → task → which documents are right."""
    parts = [
        scores_of(task, list(right)).assign(**{PROMPT: prompt})
        for prompt, tasks in answers.items()
        for task, right in tasks.items()
    ]
    return PromptTables(pd.concat(parts, ignore_index=True))


def drawn(prompts: int, documents: int, seed: int) -> np.ndarray:
    """Return [prompts, documents] right answers to documents of different difficulty."""
    generator = np.random.default_rng(seed)
    return (generator.random((prompts, documents)) < generator.random(documents)).astype(int)


def test_the_deviation_by_chance_is_that_of_permutations() -> None:
    """Each document's answers shuffled over its prompts; of an average too, of which a task lacks two prompts."""
    first, second, generator = drawn(5, 20, 3), drawn(3, 10, 4), np.random.default_rng(5)
    names = ["base", "a", "b", "order-BA", "order-CB"]
    answers: dict[str, dict[str, Any]] = {name: {"one": right} for name, right in zip(names, first, strict=True)}
    for name, right in zip(names, second, strict=False):
        answers[name]["two"] = right
    average = varied_results(tables_of(answers), MANIFEST, "acc").average
    assert [under.prompt for under in average.prompts] == names
    of_first, of_average = [], []
    for _ in range(4_000):
        one, two = (generator.permuted(task, axis=0).mean(axis=1) for task in (first, second))
        of_first.append(one.var(ddof=1))
        of_average.append(((one + two[[0, 1, 2, 0, 0]]) / 2).var(ddof=1))
    assert expected_deviation(first.astype(float)) == pytest.approx(np.mean(of_first) ** 0.5, rel=0.01)
    assert average.by_chance == pytest.approx(np.mean(of_average) ** 0.5, rel=0.01)


def test_means_extremes_and_errors() -> None:
    answers: dict[str, dict[str, Any]] = {
        "base": {"one": [1, 1, 0, 0], "two": [1, 0]},
        "a": {"one": [1, 1, 1, 0], "two": [0, 0]},
        "b": {"one": [0, 0, 0, 0]},
    }
    results = varied_results(tables_of(answers), MANIFEST, "acc")
    assert results.tasks[0].stderr == pytest.approx(np.std([2 / 3, 2 / 3, 1 / 3, 0], ddof=1) / 2)
    assert results.average.accuracy == pytest.approx((5 / 12 + 1 / 4) / 2)
    # Task two counts with the run's own prompt under b
    assert [under.accuracy for under in results.average.prompts] == pytest.approx([0.5, 0.375, 0.25])
    # Of a single prompt, the errors of an ordinary run
    alone = varied_results(tables_of({"base": {"one": [1, 1, 0, 0], "two": [1, 0, 0]}}), MANIFEST, "acc")
    assert alone.tasks[0].stderr == pytest.approx(alone.tasks[0].prompts[0].stderr)
    assert (alone.tasks[0].spread, alone.tasks[0].by_chance, alone.average.by_chance) == (None, None, None)
    with pytest.raises(RunError, match="prompt a has other documents"):
        tables_of({"base": {"one": [1, 1, 0]}, "a": {"one": [1, 0]}})
