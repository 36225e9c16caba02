"""Runs under several prompts: each prompt's scores are those of an ordinary run with that prompt."""

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
from evalkit.benchmarks.prompt_variants.outcomes import ComparablePrompts
from evalkit.benchmarks.prompt_variants.results import prompt_tables
from evalkit.benchmarks.registry import benchmark, benchmark_of
from evalkit.benchmarks.run import planned
from evalkit.cli import main
from evalkit.display import Progress
from evalkit.errors import UnknownNameError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.runs.continuous import OUTCOMES, document_outcomes
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.traits import summary, traits
from tests.printed import printed

Evaluate = Callable[..., Run]
VARY = ("template", "choice_order", "system_prompt")
PROMPTS = (
    "inst",
    "no-instruction",
    "instruction-line",
    "dialogue",
    "system-1",
    "system-2",
    "system-3",
    "order-BCDA",
    "order-CDAB",
    "order-DABC",
)


@pytest.fixture(scope="module")
def run_of(checkpoint: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """`evaluate` on MMLU and PIQA; keyword arguments change the rest."""
    output = tmp_path_factory.mktemp("varied")

    def run(**options: Any) -> Run:
        asked = {
            "data_dir": documents,
            "allow_unofficial_data": True,
            "tasks": ("mmlu", "piqa"),
            "dtype": "float32",
            "token_budget": 700,
            "limit": 12,
            "output": output,
            "progress": Progress(live=False),
        }
        return evalkit.evaluate(str(checkpoint), **asked | options)

    return run


@pytest.fixture(scope="module")
def varied(run_of: Evaluate) -> Run:
    """A run under all shipped prompts."""
    return run_of(vary=VARY)


def of_prompt(run: Run, prompt: str, task: str = "") -> pd.DataFrame:
    rows = prompt_tables(run).by_prompt[prompt].drop(columns="prompt")
    return (rows[rows["task"] == task] if task else rows).reset_index(drop=True)


def same_scores(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Equal documents, tokens and, to 1e-4, log-likelihoods; equal decisions under every rule."""
    likelihoods = [name for name in expected if name.startswith("ll_")]
    others = [name for name in expected if name not in likelihoods]
    pd.testing.assert_frame_equal(found[others], expected[others], check_dtype=False)
    np.testing.assert_allclose(found[likelihoods].to_numpy(float), expected[likelihoods].to_numpy(float), rtol=1e-4)
    for rule in ("ppl", "acc", "acc_norm"):
        decisions = [decide(table, find_rule(rule))["prediction"] for table in (found, expected)]
        pd.testing.assert_series_equal(*decisions)


def test_the_run_s_own_prompt_has_the_scores_of_an_ordinary_run(varied: Run, run_of: Evaluate) -> None:
    ordinary = run_of()
    same_scores(of_prompt(varied, "inst"), ordinary.scores)
    same_scores(varied.scores, ordinary.scores)
    assert varied.manifest["rule"] == ordinary.manifest["rule"] == "ppl"


@pytest.mark.parametrize("name", ["no-instruction", "instruction-line", "dialogue"])
def test_a_template_has_the_scores_of_an_ordinary_run_with_it(name: str, varied: Run, run_of: Evaluate) -> None:
    same_scores(of_prompt(varied, name), run_of(template=name).scores)


def test_a_system_prompt_has_the_scores_of_a_template_with_it(varied: Run, run_of: Evaluate, tmp_path: Path) -> None:
    content = asdict(load_template("inst")) | {"system": "You are a helpful assistant."}
    parts = [{part["segment"]: part["text"]} for part in content.pop("parts")]
    del content["name"], content["chat"]
    (tmp_path / "helpful.yaml").write_text(yaml.safe_dump(content | {"parts": parts, "score": [*content["score"]]}))
    ordinary = run_of(template=str(tmp_path / "helpful.yaml"))
    assert ordinary.manifest["template"]["system"] == "You are a helpful assistant."
    same_scores(of_prompt(varied, "system-2"), ordinary.scores)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_an_order_has_the_scores_of_documents_rotated_by_hand(
    shift: int, varied: Run, run_of: Evaluate, documents: Path, tmp_path: Path
) -> None:
    lines = (documents / "mmlu.jsonl").read_text(encoding="utf-8").splitlines()
    rotated = []
    for record in map(json.loads, lines):
        choices = record["choices"]
        moved = choices[shift:] + choices[:shift]
        rotated.append(record | {"choices": moved, "answer": (int(record["answer"]) - shift) % 4})
    (tmp_path / "mmlu.jsonl").write_text("\n".join(map(json.dumps, rotated)), encoding="utf-8")
    ordinary = run_of(data_dir=tmp_path, tasks=("mmlu",))
    name = ("", "order-BCDA", "order-CDAB", "order-DABC")[shift]
    same_scores(of_prompt(varied, name), ordinary.scores)
    assert of_prompt(varied, name, "piqa").empty


def test_few_shot_limits_and_other_rules(run_of: Evaluate) -> None:
    """Two examples and PMI: the unconditional scores too are those of an ordinary run."""
    options: dict[str, Any] = {"tasks": ("mmlu",), "num_fewshot": 2, "rule": "pmi", "limit": 3, "token_budget": None}
    found, ordinary = run_of(vary="choice_order", **options), run_of(**options)
    same_scores(of_prompt(found, "inst"), ordinary.scores)
    assert len(prompt_tables(found).documents) == 3
    assert np.isfinite(of_prompt(found, "order-BCDA")["ll_unconditional"]).all()
    assert found.rule == "pmi"


def test_one_rule_that_every_prompt_supports(run_of: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("templates: [inst, plain]\n")
    both = str(tmp_path / "both.yaml")
    found = run_of(vary=both, tasks=("piqa",))
    assert found.rule == "acc"
    assert "ppl" not in prompt_tables(found).rules
    with pytest.raises(UsageError, match=r"rule ppl needs .* template plain does not score"):
        run_of(vary=both, tasks=("piqa",), rule="ppl")


def test_accuracies_spread_and_mean(varied: Run) -> None:
    """By hand from the decisions of each prompt."""
    for task, prompts, n in (("mmlu", PROMPTS, 12), ("piqa", PROMPTS[:7], 6)):
        right = np.array([decide(of_prompt(varied, one, task), find_rule("ppl"))["correct"] for one in prompts])
        [stored] = [one for one in varied.stored["tasks"] if one["task"] == task]
        assert [one["prompt"] for one in stored["prompts"]] == list(prompts)
        assert [one["accuracy"] for one in stored["prompts"]] == pytest.approx(right.mean(axis=1))
        assert stored["accuracy"] == pytest.approx(right.mean())
        assert stored["stderr"] == pytest.approx(right.mean(axis=0).std(ddof=1) / n**0.5)
        assert stored["spread"] == pytest.approx(right.mean(axis=1).std(ddof=1))
        metrics = [metric for metric in benchmark_of(varied).metrics(varied) if metric.task == task]
        assert metrics[0].value == stored["accuracy"]
        assert len(metrics) == len(prompts) + 1
    by_task = {one["task"]: {p["prompt"]: p["accuracy"] for p in one["prompts"]} for one in varied.stored["tasks"]}
    under = {one["prompt"]: one["accuracy"] for one in varied.stored["averages"][-1]["prompts"]}
    assert under["dialogue"] == pytest.approx((by_task["mmlu"]["dialogue"] + by_task["piqa"]["dialogue"]) / 2)
    assert under["order-BCDA"] == pytest.approx((by_task["mmlu"]["order-BCDA"] + by_task["piqa"]["inst"]) / 2)


def test_the_report_names_every_prompt_and_both_errors(varied: Run) -> None:
    text = printed(benchmark_of(varied).report(varied))
    assert all(f"\n{name}" in text for name in PROMPTS)
    assert "prompt system-2: system prompt: You are a helpful assistant." in text
    assert "no order of the options, since prompts do not list them: PIQA" in text
    assert "a fixed set and no sample" in text
    detailed = benchmark_of(varied).report(varied, "acc", detail=True)
    assert "mmlu" in [table.name for table in detailed.tables]
    assert {record["rule"] for record in detailed.records or ()} == {"acc"}
    assert " SD " in benchmark_of(varied).headline(varied)[1]


def test_rescore_shows_all_prompts(varied: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rescore", str(varied.folder), "--rule", "acc_norm"])
    out = capsys.readouterr().out
    assert "order-DABC" in out
    assert "acc_norm <" in out


def test_other_prompts_are_another_run_and_another_trait(varied: Run, run_of: Evaluate) -> None:
    one, other = run_of(vary="template", tasks=("piqa",)), run_of(tasks=("piqa",))
    assert len({varied.folder, one.folder, other.folder}) == 3
    assert traits(other)["prompts"].value == "one"
    assert traits(one)["prompts"].value != traits(varied)["prompts"].value
    assert traits(one)["prompts"].refused


def test_nothing_to_vary_is_an_error(run_of: Evaluate) -> None:
    with pytest.raises(UsageError, match="the prompts of piqa do not list their options by letter"):
        run_of(vary="choice_order", tasks=("piqa",))
    with pytest.raises(UsageError, match="--log-samples"):
        run_of(vary="template", log_samples=True)
    with pytest.raises(UsageError, match="leave out --suite lm_eval"):
        run_of(vary="template", suite="lm_eval", tasks=("piqa",))


def test_a_damaged_table_is_rejected(varied: Run, run_of: Evaluate, tmp_path: Path) -> None:
    copied = evalkit.load_run(shutil.copytree(varied.folder, tmp_path / varied.folder.name))
    shutil.copy(copied.folder / SCORES, copied.folder / "prompts.parquet")
    with pytest.raises(evalkit.errors.RunError, match=r"prompts.parquet is damaged"):
        prompt_tables(copied)


def test_prompts_are_shown_under_each_template_and_order(
    checkpoint: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(checkpoint), "--tasks", "mmlu", "--vary", ",".join(VARY), "--show-prompts", "1"]
    with pytest.raises(SystemExit):
        main([*command, "--data-dir", str(documents), "--allow-unofficial-data"])
    out = capsys.readouterr().out
    assert [line.removeprefix("prompt ") for line in out.splitlines() if line.startswith("prompt ")] == [
        "inst",
        *PROMPTS[7:],
        *PROMPTS[1:7],
    ]
    assert "Assistant: A" in out


def test_tokens_are_counted_over_all_prompts(checkpoint: Path, documents: Path, varied: Run) -> None:
    asked = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("mmlu", "piqa"), "limit": 12}
    plans = {
        name: planned(checkpoint, asked | more, silent)
        for name, more in {"all": {"vary": VARY}, "orders": {"vary": ("choice_order",)}, "one": {}}.items()
    }
    tokenizer = tokenizer_alone(plans["one"].checkpoint, silent)
    counts = {
        name: {one.task: one for one in benchmark(plan.manifest["kind"]).token_counts(plan, tokenizer, 100, silent)}
        for name, plan in plans.items()
    }
    tables = prompt_tables(varied)
    for task in ("mmlu", "piqa"):
        tokens = [
            rows.loc[rows["task"] == task, [c for c in rows if c.startswith("n_")]].to_numpy().sum()
            for rows in tables.by_prompt.values()
        ]
        assert counts["all"][task].alone == sum(tokens)
        assert counts["all"][task].documents == {"mmlu": 12, "piqa": 6}[task]
    # Instruction, subject and question are computed once for all orders
    assert counts["orders"]["mmlu"].alone == 4 * counts["one"]["mmlu"].alone
    assert counts["orders"]["mmlu"].distinct < 0.8 * 4 * counts["one"]["mmlu"].distinct
    assert counts["orders"]["piqa"] == counts["one"]["piqa"]


def test_the_figure_shows_every_prompt(varied: Run, tmp_path: Path) -> None:
    [figure] = benchmark_of(varied).figures([varied], ["tiny"])
    figure.draw(tmp_path / "prompts.svg")
    drawn = (tmp_path / "prompts.svg").read_text(encoding="utf-8")
    assert all(name in drawn for name in (*PROMPTS, "MMLU", "PIQA", "Knowledge"))


def test_documents_can_be_looked_at_under_the_run_s_own_prompt(varied: Run, run_of: Evaluate) -> None:
    [view], [ordinary] = (benchmark_of(run).views(run, ["piqa"], silent) for run in (varied, run_of()))
    assert view.texts == ordinary.texts  # type: ignore[attr-defined]
    assert "this shows the run's own prompt, inst" in view.problem
    assert len(view.scores) == len(of_prompt(varied, "inst", "piqa"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["bits_per_byte", "log_loss", "brier", "margin"])
def test_continuous_outcomes_are_means_over_prompts(varied: Run, name: str) -> None:
    """In comparisons, and in tables; also under one prompt."""
    rule = str(varied.manifest["rule"])
    comparable = ComparablePrompts(varied)
    prompts = prompt_tables(varied).prompts
    of_prompts = {}
    for prompt in prompts:
        rows = of_prompt(varied, prompt)
        found = document_outcomes(rows, OUTCOMES[name], find_rule(rule))
        keys = rows.loc[rows["choice"] == 0, ["task", "subtask", "doc_id"]]
        of_prompts[prompt] = dict(zip(keys.itertuples(index=False, name=None), found.tolist(), strict=True))
    documents = [*comparable.documents[["task", "subtask", "doc_id"]].itertuples(index=False, name=None)]
    means = [np.mean([of_prompts[p][one] for p in prompts if one in of_prompts[p]]) for one in documents]
    assert comparable.by_rule(name) == pytest.approx(means)
    base = [of_prompts[prompts[0]][one] for one in documents]
    under = [of_prompts[prompts[-1]].get(one, own) for one, own in zip(documents, base, strict=True)]
    assert comparable.by_rule(f"{name}@{prompts[-1]}") == pytest.approx(under)
    by_task = {metric.task: metric.value for metric in benchmark_of(varied).metrics(varied, name)}
    tasks = [task for task, _, _ in documents]
    for task, value in by_task.items():
        assert value == pytest.approx(np.mean([mean for mean, own in zip(means, tasks, strict=True) if own == task]))
    assert comparable.measure(name).higher_is_better is (name == "margin")


def test_an_outcome_is_no_rule_to_rescore_by(varied: Run) -> None:
    with pytest.raises(UnknownNameError, match="rule of run"):
        benchmark_of(varied).report(varied, "bits_per_byte")


def test_a_table_says_that_its_numbers_are_means_over_prompts(varied: Run) -> None:
    assert "mean over prompts inst, " in summary(varied)
