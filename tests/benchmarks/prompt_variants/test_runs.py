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
from evalkit.errors import RunError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.runs.accuracies import document_outcomes
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.score_table import OUTCOMES
from evalkit.runs.traits import summary, traits
from tests.printed import printed

Evaluate = Callable[..., Run]
VARY = ("template", "choice_order", "system_prompt")
PROMPTS = (
    *("inst", "no-instruction", "instruction-line", "dialogue", "system-1", "system-2", "system-3"),
    *("order-BCDA", "order-CDAB", "order-DABC"),
)


@pytest.fixture(scope="module")
def options(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run of MMLU and PIQA."""
    data = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("mmlu", "piqa"), "limit": 12}
    return data | {"dtype": "float32", "token_budget": 700, "output": tmp_path_factory.mktemp("varied")}


@pytest.fixture(scope="module")
def run_of(checkpoint: Path, options: dict[str, Any]) -> Evaluate:
    """`evaluate` with these options; keyword arguments change the rest."""
    common = options | {"progress": Progress(live=False)}
    return lambda **changes: evalkit.evaluate(str(checkpoint), **(common | changes))


@pytest.fixture(scope="module")
def varied(run_of: Evaluate) -> Run:
    """A run under all shipped prompts. Do not modify."""
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


def test_a_template_has_the_scores_of_an_ordinary_run_with_it(varied: Run, run_of: Evaluate) -> None:
    ordinary = run_of()
    same_scores(varied.scores, ordinary.scores)
    assert varied.manifest["rule"] == ordinary.manifest["rule"] == "ppl"
    for name in ("inst", "dialogue"):
        same_scores(of_prompt(varied, name), run_of(template=name).scores)


def test_a_system_prompt_has_the_scores_of_a_template_with_it(varied: Run, run_of: Evaluate, tmp_path: Path) -> None:
    content = asdict(load_template("inst")) | {"system": "You are a helpful assistant."}
    parts = [{part["segment"]: part["text"]} for part in content.pop("parts")]
    del content["name"], content["chat"]
    (tmp_path / "helpful.yaml").write_text(yaml.safe_dump(content | {"parts": parts, "score": [*content["score"]]}))
    same_scores(of_prompt(varied, "system-2"), run_of(template=str(tmp_path / "helpful.yaml")).scores)


def test_an_order_has_the_scores_of_documents_rotated_by_hand(
    varied: Run, run_of: Evaluate, documents: Path, tmp_path: Path
) -> None:
    records = [json.loads(line) for line in (documents / "mmlu.jsonl").read_text("utf-8").splitlines()]
    for shift, name in ((1, "order-BCDA"), (3, "order-DABC")):
        moved = [
            record | {"choices": record["choices"][shift:] + record["choices"][:shift],
                      "answer": (int(record["answer"]) - shift) % 4}
            for record in records
        ]  # fmt: skip
        (tmp_path / "mmlu.jsonl").write_text("\n".join(map(json.dumps, moved)), encoding="utf-8")
        same_scores(of_prompt(varied, name), run_of(data_dir=tmp_path, tasks=("mmlu",)).scores)
        assert of_prompt(varied, name, "piqa").empty


def test_few_shot_limits_and_other_rules(run_of: Evaluate) -> None:
    """Two examples and PMI: the unconditional scores too are those of an ordinary run."""
    changes: dict[str, Any] = {"tasks": ("mmlu",), "num_fewshot": 2, "rule": "pmi", "limit": 3, "token_budget": None}
    found, ordinary = run_of(vary="choice_order", **changes), run_of(**changes)
    same_scores(of_prompt(found, "inst"), ordinary.scores)
    assert len(prompt_tables(found).documents) == 3 and found.rule == "pmi"
    assert np.isfinite(of_prompt(found, "order-BCDA")["ll_unconditional"]).all()


def test_one_rule_that_every_prompt_supports(run_of: Evaluate, tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("templates: [inst, plain]\n")
    changes: dict[str, Any] = {"vary": str(tmp_path / "both.yaml"), "tasks": ("piqa",)}
    found = run_of(**changes)
    assert found.rule == "acc" and "ppl" not in prompt_tables(found).rules
    with pytest.raises(UsageError, match=r"rule ppl .* plain"):
        run_of(**changes, rule="ppl")


def test_accuracies_spread_and_mean(varied: Run) -> None:
    """By hand from the decisions of each prompt."""
    for task, prompts, n in (("mmlu", PROMPTS, 12), ("piqa", PROMPTS[:7], 6)):
        right = np.array([decide(of_prompt(varied, one, task), find_rule("ppl"))["correct"] for one in prompts])
        [stored] = [one for one in varied.stored["tasks"] if one["task"] == task]
        assert {one["prompt"]: one["accuracy"] for one in stored["prompts"]} == pytest.approx(
            dict(zip(prompts, right.mean(axis=1), strict=True))
        )
        assert stored["accuracy"] == pytest.approx(right.mean())
        assert stored["stderr"] == pytest.approx(right.mean(axis=0).std(ddof=1) / n**0.5)
        assert stored["spread"] == pytest.approx(right.mean(axis=1).std(ddof=1))
        metrics = [metric for metric in benchmark_of(varied).metrics(varied) if metric.task == task]
        assert metrics[0].value == stored["accuracy"] and len(metrics) == len(prompts) + 1


def test_the_report_names_every_prompt(varied: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(benchmark_of(varied).report(varied))
    assert all(f"\n{name}" in text for name in PROMPTS)
    assert "prompt system-2: system prompt: You are a helpful assistant." in text
    assert "no order of the options, since prompts do not list them: PIQA" in text
    detailed = benchmark_of(varied).report(varied, "acc", detail=True)
    assert "mmlu" in [table.name for table in detailed.tables]
    assert {record["rule"] for record in detailed.records or ()} == {"acc"}
    with pytest.raises(SystemExit):
        main(["rescore", str(varied.folder), "--rule", "acc_norm"])
    out = capsys.readouterr().out
    assert "order-DABC" in out and "acc_norm <" in out
    with pytest.raises(UsageError, match="bits_per_byte"):
        benchmark_of(varied).report(varied, "bits_per_byte")


def test_other_prompts_are_another_run_and_another_trait(varied: Run, run_of: Evaluate) -> None:
    template, ordinary = run_of(vary="template", tasks=("piqa",)), run_of(tasks=("piqa",))
    assert len({varied.folder, template.folder, ordinary.folder}) == 3
    assert traits(ordinary)["prompts"].value == "one"
    assert traits(template)["prompts"].value != traits(varied)["prompts"].value
    assert traits(template)["prompts"].refused
    assert "mean over prompts inst, " in summary(varied)


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"vary": "choice_order"}, "piqa"),
        ({"vary": "template", "log_samples": True}, "--log-samples"),
        ({"vary": "template", "suite": "lm_eval"}, "--suite lm_eval"),
    ],
)
def test_nothing_to_vary_is_an_error(run_of: Evaluate, changes: dict[str, Any], noun: str) -> None:
    with pytest.raises(UsageError, match=noun):
        run_of(tasks=("piqa",), **changes)


def test_a_damaged_table_is_rejected(varied: Run, tmp_path: Path) -> None:
    copied = evalkit.load_run(shutil.copytree(varied.folder, tmp_path / varied.folder.name))
    shutil.copy(copied.folder / SCORES, copied.folder / "prompts.parquet")
    with pytest.raises(RunError, match=r"prompts.parquet"):
        prompt_tables(copied)


def test_prompts_are_shown_under_each_template_and_order(
    checkpoint: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(checkpoint), "--tasks", "mmlu", "--vary", ",".join(VARY), "--show-prompts", "1"]
    with pytest.raises(SystemExit):
        main([*command, "--data-dir", str(documents), "--allow-unofficial-data"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("prompt ")]
    assert [line.removeprefix("prompt ") for line in lines] == ["inst", *PROMPTS[7:], *PROMPTS[1:7]]


def test_tokens_are_counted_over_all_prompts(checkpoint: Path, options: dict[str, Any], varied: Run) -> None:
    changes: dict[str, dict[str, Any]] = {"all": {"vary": VARY}, "orders": {"vary": ("choice_order",)}, "one": {}}
    plans = {name: planned(checkpoint, options | more, silent) for name, more in changes.items()}
    tokenizer = tokenizer_alone(plans["one"].checkpoint, silent)
    counts = {
        name: {one.task: one for one in benchmark(plan.manifest["kind"]).token_counts(plan, tokenizer, 100, silent)}
        for name, plan in plans.items()
    }
    table = pd.concat(prompt_tables(varied).by_prompt.values())
    for task, documents in {"mmlu": 12, "piqa": 6}.items():
        tokens = table.loc[table["task"] == task, [name for name in table if name.startswith("n_")]]
        assert (counts["all"][task].alone, counts["all"][task].documents) == (tokens.to_numpy().sum(), documents)
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
    assert view.texts == ordinary.texts and len(view.scores) == len(ordinary.scores)  # type: ignore[attr-defined]
    assert "inst" in view.problem


@pytest.mark.parametrize("name", ["bits_per_byte", "margin"])
def test_continuous_outcomes_are_means_over_prompts(varied: Run, name: str) -> None:
    """In comparisons, and in tables; also under one prompt."""
    comparable, tables = ComparablePrompts(varied), prompt_tables(varied).by_prompt
    outcomes = {}
    for prompt, rows in tables.items():
        first = rows[rows["choice"] == 0].set_index(["task", "subtask", "doc_id"])
        of_prompt = document_outcomes(rows, OUTCOMES[name], find_rule(str(varied.manifest["rule"])))
        outcomes[prompt] = pd.Series(of_prompt, first.index)
    values = pd.DataFrame(outcomes).reindex(
        pd.MultiIndex.from_frame(comparable.documents[["task", "subtask", "doc_id"]])
    )
    assert comparable.by_rule(name) == pytest.approx(values.mean(axis=1).to_numpy())
    under = values["order-DABC"].fillna(values["inst"]).to_numpy()
    assert comparable.by_rule(f"{name}@order-DABC") == pytest.approx(under)
    by_task = {metric.task: metric.value for metric in benchmark_of(varied).metrics(varied, name)}
    assert by_task == pytest.approx(values.mean(axis=1).groupby(level="task").mean().to_dict())
    assert comparable.measure(name).higher_is_better is (name == "margin")
