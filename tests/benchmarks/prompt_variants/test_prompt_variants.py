"""Sets of prompts; runs under several prompts have the scores of ordinary runs with each; their spread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import evalkit
from evalkit.benchmarks.multiple_choice.varied_results import (
    PromptTables,
    expected_deviation,
    prompt_tables,
    varied_results,
)
from evalkit.benchmarks.registry import results_of
from evalkit.errors import DataError, RunError, TemplateError, UsageError
from evalkit.runs.continuous import OUTCOMES, document_outcomes
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.rules import decide, find_rule
from evalkit.runs.score_table import PROMPT
from evalkit.runs.traits import traits
from evalkit.suites.prompt_sets import in_orders, load_prompts, order_name, orders_of, under_order
from evalkit.suites.questions import Question
from evalkit.suites.templates import Part, load_template
from tests.benchmarks.kinds import Lines
from tests.comparison.made import scores_of
from tests.questions import question

INST = load_template("inst")
HASHES = {
    "inst": "48356555",
    "no-instruction": "c8650ff9",
    "instruction-line": "c3d5aa61",
    "dialogue": "1af7b859",
    "system-2": "0c0bc130",
    "system-3": "126a2d5b",
}
"""Of prompts in finished runs: a change would repeat them."""
BY_TEMPLATE = ["inst", "no-instruction", "instruction-line", "dialogue"]
BY_SYSTEM = ["inst", "system-1", "system-2", "system-3"]


def written(folder: Path, **content: Any) -> str:
    (folder / "my.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(folder / "my.yaml")


@pytest.mark.parametrize(
    ("vary", "names", "orders"),
    [
        (["template"], BY_TEMPLATE, 1),
        (["choice_order"], ["inst"], 4),
        (["choice_order", "system_prompt", "template"], [*BY_TEMPLATE, *BY_SYSTEM[1:]], 4),
    ],
)
def test_each_factor_adds_its_own_prompts(vary: list[str], names: list[str], orders: int) -> None:
    prompts = load_prompts(vary, INST)
    assert ([*prompts.templates], prompts.choice_orders) == (names, orders)
    hashes = prompts.specification["templates"]
    assert {name: digest[:8] for name, digest in hashes.items() if name != "system-1"}.items() <= HASHES.items()
    # Every rule applies to every prompt
    assert all(template.scores_all for template in prompts.templates.values())
    for name in {"system-2", "system-3"} & set(names):
        assert replace(prompts.templates[name], name="inst", system=INST.system) == INST


def test_no_system_prompt_leaves_no_space_of_its_own(tmp_path: Path) -> None:
    texts = {"instruction": "{system}\n", "context": "{context}", "special": "\n\n", "continuation": "{continuation}"}
    for base, text in (
        (INST, "[INST] [/INST] Context yes"),
        (load_template("instruction-line"), "Context yes"),
        (load_template("dialogue"), "User: Context\nAssistant: yes"),
        (replace(INST, parts=tuple(Part(*part) for part in texts.items())), "Context\n\nyes"),
    ):
        [_, without] = load_prompts([written(tmp_path, system_prompts=[""])], base).templates.values()
        assert "".join(piece.text for piece in without.pieces(question("Context", ["yes", "no"]), 0)) == text


def test_a_file_names_its_own_prompts_and_none_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("parts:\n- context: '{context}'\n- continuation: ' {continuation}'\n")
    content: dict[str, Any] = {"templates": ["inst", "plain", "mine.yaml"], "choice_orders": 2}
    prompts = load_prompts([written(tmp_path, **content, system_prompts=["Be brief."])], INST)
    assert [*prompts.templates] == ["inst", "plain", "mine", "system-1"] and prompts.choice_orders == 2
    assert prompts.templates["mine"] == load_template(str(tmp_path / "mine.yaml"))
    for change in ({"system_prompts": ["Be kind."]}, {"system_prompts": ["Be brief."], "choice_orders": 3}):
        assert load_prompts([written(tmp_path, **content | change)], INST).specification != prompts.specification
    # Neither the run's own, nor one that is another template without its system prompt
    prompts = load_prompts(["template", "system_prompt"], load_template("instruction-line"))
    assert [*prompts.templates] == ["instruction-line", "inst", "no-instruction", "dialogue", "system-2", "system-3"]


def test_invalid_sets(tmp_path: Path) -> None:
    for content, noun in (
        ({"templates": ["absent.yaml"]}, "absent.yaml"),
        ({"choice_orders": 1}, "templates, choice_orders, system_prompts"),
        ({"system_prompts": ["x", "x"]}, "'system-2'.*'system-1'"),
    ):
        with pytest.raises((UsageError, TemplateError), match=noun):
            load_prompts([written(tmp_path, **content)], INST)
    with pytest.raises(UsageError, match="plain"):  # which has no system prompt
        load_prompts(["system_prompt"], load_template("plain"))


OPTIONS = ["red", "green", "blue", "A. red\nB. green"]
"""The last one looks like a list itself."""


def listed(
    options: list[str] = OPTIONS, gold: int = 0, before: str = "Which colour?", form: str = "{}. {}"
) -> Question:
    letters = "ABCDE"[: len(options)]
    lines = "\n".join(form.format(letter, text) for letter, text in zip(letters, options, strict=True))
    asked = question(f"{before}\n{lines}\nAnswer:", list(letters), gold=gold)
    return replace(asked, doc={"choices": options, "answer": gold})


@given(st.permutations(range(4)), st.integers(0, 3), st.sampled_from(["{}. {}", "{}) {}", "({}) {}"]))
def test_options_move_and_the_gold_letter_still_names_the_gold_option(order: list[int], gold: int, form: str) -> None:
    """Letters and solved examples stay."""
    example = listed(form=form).contexts[0] + " A\n\nWhich colour?"
    moved = under_order(listed(gold=gold, form=form, before=example), tuple(order))
    options = [OPTIONS[number] for number in order]
    assert moved.contexts == listed(options, form=form, before=example).contexts
    assert options[moved.gold] == OPTIONS[gold]
    assert moved.choices == moved.continuations == ("A", "B", "C", "D")


def test_orders_are_cyclic_begin_with_the_original_and_follow_each_other() -> None:
    assert orders_of([listed(), listed(gold=3)], 4) == [(0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)]
    assert orders_of([listed(["red", "green"])], 9) == [(0, 1), (1, 0)]
    assert order_name((1, 2, 3, 0)) == "order-BCDA"
    orders = orders_of([listed()], 3)
    joined = in_orders(listed(gold=2), orders)
    assert joined.contexts == tuple(text for order in orders for text in under_order(listed(gold=2), order).contexts)
    assert (joined.continuations, joined.gold) == (("A", "B", "C", "D") * 3, 2)
    assert len(joined.gaps) == len(joined.choices) == 12
    assert in_orders(listed(), orders[:1]) == listed()
    # One document that lists them does not suffice, nor documents with different numbers
    plain = replace(question("Which colour?", ["red", "green"]), doc={"choices": ["red", "green"]})
    lettered = replace(plain, continuations=("A", "B"), choices=("A", "B"))
    for members in ([plain], [listed(["red", "green"]), lettered], [listed(["red", "green"]), listed()]):
        assert orders_of(members, 4) == [(0, 1)]
    with pytest.raises(DataError, match="made_up document 0"):
        under_order(plain, (1, 0))


Evaluate = Callable[..., Run]
VARY = ("template", "choice_order", "system_prompt")
PROMPTS = (
    *("inst", "no-instruction", "instruction-line", "dialogue", "system-1", "system-2", "system-3"),
    *("order-BCDA", "order-CDAB", "order-DABC"),
)
KEY = ["task", "subtask", "doc_id"]


@pytest.fixture(scope="module")
def options(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("mmlu", "piqa"), "limit": 8}
    return data | {"dtype": "float32", "token_budget": 700, "output": tmp_path_factory.mktemp("varied")}


@pytest.fixture(scope="module")
def run_of(checkpoint: Path, options: dict[str, Any]) -> Evaluate:
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
    """A template; and documents whose options are rotated by hand."""
    ordinary = run_of()
    same_scores(varied.scores, ordinary.scores)
    assert varied.manifest["rule"] == ordinary.manifest["rule"] == "ppl"
    same_scores(of_prompt(varied, "inst"), ordinary.scores)
    same_scores(of_prompt(varied, "dialogue"), run_of(template="dialogue").scores)
    records = [json.loads(line) for line in (documents / "mmlu.jsonl").read_text("utf-8").splitlines()]
    for record in records:
        record["choices"] = record["choices"][3:] + record["choices"][:3]
        record["answer"] = (record["answer"] - 3) % 4
    (tmp_path / "mmlu.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    same_scores(of_prompt(varied, "order-DABC"), run_of(data_dir=tmp_path, tasks=("mmlu",)).scores)
    assert of_prompt(varied, "order-DABC", "piqa").empty


@pytest.mark.slow
def test_few_shot_and_other_rules(run_of: Evaluate) -> None:
    """With an example and PMI, the unconditional scores too are those of an ordinary run."""
    changes: dict[str, Any] = {"tasks": ("mmlu",), "num_fewshot": 1, "rule": "pmi", "limit": 2, "token_budget": None}
    varied, ordinary = run_of(vary="choice_order", **changes), run_of(**changes)
    same_scores(of_prompt(varied, "inst"), ordinary.scores)
    assert len(prompt_tables(varied).documents) == 2 and varied.rule == "pmi"
    assert np.isfinite(of_prompt(varied, "order-BCDA")["ll_unconditional"]).all()


def test_accuracies_spread_and_mean(varied: Run) -> None:
    for task, prompts, n in (("mmlu", PROMPTS, 8), ("piqa", PROMPTS[:7], 6)):
        right = np.array([decide(of_prompt(varied, prompt, task), find_rule("ppl"))["correct"] for prompt in prompts])
        [stored] = [entry for entry in varied.stored["tasks"] if entry["task"] == task]
        assert {under["prompt"]: under["value"] for under in stored["prompts"]} == pytest.approx(
            dict(zip(prompts, right.mean(axis=1), strict=True))
        )
        assert stored["value"] == pytest.approx(right.mean())
        assert stored["stderr"] == pytest.approx(right.mean(axis=0).std(ddof=1) / n**0.5)
        assert stored["spread"] == pytest.approx(right.mean(axis=1).std(ddof=1))
        metrics = [metric for metric in results_of(varied).metrics() if metric.task == task]
        assert metrics[0].value == stored["value"] and len(metrics) == len(prompts) + 1


def test_continuous_outcomes_are_means_over_prompts(varied: Run) -> None:
    name, comparable, outcomes = "bits_per_byte", results_of(varied).comparable(), {}
    for prompt, rows in prompt_tables(varied).by_prompt.items():
        first = rows[rows["choice"] == 0].set_index(KEY)
        outcomes[prompt] = pd.Series(document_outcomes(rows, OUTCOMES[name]), first.index)
    values = pd.DataFrame(outcomes).reindex(pd.MultiIndex.from_frame(comparable.documents[KEY]))
    assert comparable.by_rule(name) == pytest.approx(values.mean(axis=1).to_numpy())
    under = values["order-DABC"].fillna(values["inst"]).to_numpy()
    assert comparable.by_rule(f"{name}@order-DABC") == pytest.approx(under)
    by_task = {metric.task: metric.value for metric in results_of(varied).metrics(name)}
    assert by_task == pytest.approx(values.mean(axis=1).groupby(level="task").mean().to_dict())
    assert comparable.measure(name).higher_is_better is False


def test_other_prompts_are_another_run_and_another_trait(varied: Run, run_of: Evaluate, tmp_path: Path) -> None:
    template, ordinary = run_of(vary="template", tasks=("piqa",)), run_of(tasks=("piqa",))
    assert len({varied.folder, template.folder, ordinary.folder}) == 3
    assert traits(ordinary)["prompts"].value == "one"
    assert traits(template)["prompts"].value != traits(varied)["prompts"].value
    assert traits(template)["prompts"].refused
    with pytest.raises(UsageError, match="--log-samples"):
        run_of(tasks=("piqa",), vary="template", log_samples=True)
    copied = evalkit.load_run(shutil.copytree(varied.folder, tmp_path / varied.folder.name))
    shutil.copy(ordinary.folder / SCORES, copied.folder / SCORES)
    with pytest.raises(RunError, match=SCORES):
        prompt_tables(copied)


# The spread over prompts by chance, against permutations and closed forms

MANIFEST = {"groups": {"Average": ["one", "two"]}, "group_sizes": {"Average": 2}}


def tables_of(answers: dict[str, dict[str, Any]]) -> PromptTables:
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
    assert results.average.value == pytest.approx((5 / 12 + 1 / 4) / 2)
    # Task two counts with the run's own prompt under b
    assert [under.value for under in results.average.prompts] == pytest.approx([0.5, 0.375, 0.25])
    # Of a single prompt, the errors of an ordinary run
    alone = varied_results(tables_of({"base": {"one": [1, 1, 0, 0], "two": [1, 0, 0]}}), MANIFEST, "acc")
    assert alone.tasks[0].stderr == pytest.approx(alone.tasks[0].prompts[0].stderr)
    assert (alone.tasks[0].spread, alone.tasks[0].by_chance, alone.average.by_chance) == (None, None, None)
    with pytest.raises(RunError, match="prompt a has other documents"):
        tables_of({"base": {"one": [1, 1, 0]}, "a": {"one": [1, 0]}})
