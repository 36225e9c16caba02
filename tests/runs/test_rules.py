"""Rules, accuracies and continuous outcomes, against closed forms, loops, scikit-learn and lm-eval's own arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lm_eval.api.metrics import mean_stderr
from lm_eval.api.task import ConfigurableTask

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.runs.accuracies import better_forms, summarise, summarise_all
from evalkit.runs.continuous import (
    OUTCOMES,
    available_outcomes,
    document_outcomes,
    outcome_key,
    outcome_of,
    with_default_rule,
)
from evalkit.runs.rules import RULES, decide, why_unusable
from tests.comparison.made import scores_of
from tests.tables.made import Choice, documents, table

# One document on which each rule's preferences differ; scores are worked out beside each rule below
A: Choice = {"ll_continuation": -6.0, "n_continuation": 2, "ll_end": -3.0, "chars": 4, "bytes": 12}
B: Choice = {"ll_continuation": -8.0, "n_continuation": 4, "ll_end": -0.5, "chars": 8, "bytes": 8}
C: Choice = {"ll_continuation": -9.0, "n_continuation": 6, "ll_end": -4.0, "chars": 5, "bytes": 30}
ALONE = ({"ll_unconditional": -7.0}, {"ll_unconditional": -8.5}, {"ll_unconditional": -13.0})

BY_HAND = {
    # special -1, instruction -2, context -4 over 2 + 3 + 5 tokens stand before each continuation
    "ppl": [-(7 + 9) / 13, -(7 + 8.5) / 15, -(7 + 13) / 17],
    "ppl_continuation": [-6 / 2, -8 / 4, -9 / 6],
    "ppl_continuation_end": [-9 / 3, -8.5 / 5, -13 / 7],
    "acc": [-6, -8, -9],
    "acc_norm": [-6 / 4, -8 / 8, -9 / 5],
    "acc_bytes": [-6 / 12, -8 / 8, -9 / 30],
    "acc_token": [-6 / 2, -8 / 4, -9 / 6],
    "pmi": [-6 + 7, -8 + 8.5, -9 + 13],
}


BY_TASK = {name for name, rule in RULES.items() if rule.by_task}
"""Rules that apply each task's own rule."""
OWN = [name for name in RULES if name not in BY_TASK]


def predictions(frame: pd.DataFrame, rule: str) -> list[int]:
    return [int(choice) for choice in decide(frame, RULES[rule])["prediction"]]


@pytest.mark.parametrize("rule", OWN)
def test_scores_follow_the_formula(rule: str) -> None:
    """A, B and C are chosen under different rules, so that a rule cannot pass for another."""
    document = table([choice | alone for choice, alone in zip((A, B, C), ALONE, strict=True)])
    np.testing.assert_allclose(RULES[rule].score(document), BY_HAND[rule], rtol=1e-12)
    assert predictions(document, rule) == [int(np.argmax(BY_HAND[rule]))]
    assert len(decide(document.iloc[:0], RULES["acc"])) == 0


@pytest.mark.parametrize("rule", ["acc_norm", "acc_bytes", "acc_token", "ppl_continuation"])
def test_an_option_without_length_never_wins(rule: str) -> None:
    empty = {"ll_continuation": 0.0, "chars": 0, "bytes": 0, "n_continuation": 0}
    assert predictions(table([empty, A, B]), rule) != [0]
    assert RULES[rule].score(table([empty, A]))[0] == -math.inf


def lm_eval_metrics(choices: list[Choice], metrics: tuple[str, ...]) -> dict[str, float]:
    """What lm-eval's `process_results` gives on one document; choice 0 is gold."""
    texts = []
    for choice in choices:  # with as many characters and bytes as the table says
        wide, rest = divmod(choice["bytes"] - choice["chars"], 3)
        texts.append("😀" * wide + ("a", "é", "€")[rest] + "a" * (choice["chars"] - wide - 1))
    task = SimpleNamespace(
        OUTPUT_TYPE="multiple_choice",
        _metric_fn_list=dict.fromkeys(metrics),
        multiple_input=False,
        multiple_target=False,
        doc_to_choice=lambda doc: texts,
        doc_to_target=lambda doc: 0,
        config=SimpleNamespace(process_results=None, use_prompt=None),
    )
    columns = ("ll_continuation", "ll_unconditional")[: 1 + ("acc_mutual_info" in metrics)]
    pairs = [(choice[column], False) for column in columns for choice in choices]
    values: dict[str, Any] = ConfigurableTask.process_results(task, {}, pairs)
    return values


possible = documents.map(
    lambda drawn: [
        [choice | {"bytes": choice["chars"] + choice["bytes"] % (3 * choice["chars"])} for choice in choices]
        for choices in drawn
    ]
)


@settings(max_examples=40)
@given(possible)
def test_lm_evals_rules_choose_as_lm_eval(drawn: list[list[Choice]]) -> None:
    frame = table(*drawn)
    by_rule = {rule: decide(frame, RULES[rule])["correct"] for rule in ("acc", "acc_norm", "acc_bytes", "pmi")}
    for number, choices in enumerate(drawn):
        theirs = lm_eval_metrics(choices, ("acc", "acc_norm", "acc_bytes"))
        theirs["pmi"] = lm_eval_metrics(choices, ("acc_mutual_info",))["acc_mutual_info"]
        assert {rule: right[number] for rule, right in by_rule.items()} == {rule: theirs[rule] for rule in by_rule}


@settings(max_examples=40)
@given(documents, st.randoms(use_true_random=False), st.sampled_from(OWN))
def test_documents_are_decided_one_by_one(drawn: list[list[Choice]], dice: Any, rule: str) -> None:
    """In any order, each as if it were the only one; a copy of the best choice at the end is a tie and never wins."""
    together = predictions(table(*drawn), rule)
    assert together == [predictions(table(choices), rule)[0] for choices in drawn]
    order = dice.sample(range(len(drawn)), len(drawn))
    assert predictions(table(*(drawn[i] for i in order)), rule) == [together[i] for i in order]
    doubled = table(*([*choices, choices[best]] for choices, best in zip(drawn, together, strict=True)))
    assert predictions(doubled, rule) == together and decide(doubled, RULES[rule])["tie"].all()


# Rules of tasks

OF_TASKS = {
    # task: its rule in OLMES (arXiv 2406.08446), and in OLMo-core's evaluation
    "arc_challenge_test_rc_5shot": ("pmi", "acc_norm"),
    "csqa_val_rc_5shot": ("pmi", "acc_norm"),
    "openbookqa_test_rc_5shot": ("pmi", "acc_norm"),
    "arc_easy_test_rc_5shot": ("acc_norm", "acc_norm"),
    "hellaswag_val_rc_5shot": ("acc_norm", "acc_norm"),
    "piqa_val_rc_5shot": ("acc_norm", "acc_norm"),
    "socialiqa_val_rc_5shot": ("acc_norm", "acc_norm"),
    "mmlu_test_rc_5shot": ("acc_norm", "acc_norm"),
    "boolq_val_rc_5shot": ("acc", "acc"),
    "winogrande_val_rc_5shot": ("acc", "acc"),
    "piqa_val_mc_5shot": ("acc", "acc"),
    "basic_skills_pattern_rc_5shot": ("acc_token", "acc"),
}
DOCUMENT = [choice | alone for choice, alone in zip((A, B, C), ALONE, strict=True)]


def test_a_rule_of_tasks_applies_to_each_its_own() -> None:
    """The same document in every task: pmi chooses C, acc_norm B, acc A, acc_token C."""
    assert {"olmes", "olmo_core"} == BY_TASK
    frame = pd.concat([table(DOCUMENT, task=task) for task in OF_TASKS], ignore_index=True)
    mixed = frame.sample(frac=1, random_state=3).sort_values("task", kind="stable")  # no order of rows or of the index
    for number, rule in enumerate(("olmes", "olmo_core")):
        expected = {task: BY_HAND[rules[number]] for task, rules in OF_TASKS.items()}
        scores = RULES[rule].score(frame).reshape(-1, 3)
        for task, row in zip(OF_TASKS, scores, strict=True):
            np.testing.assert_allclose(row, expected[task], rtol=1e-12)
        by_hand = [expected[task][choice] for task, choice in zip(mixed["task"], mixed["choice"], strict=True)]
        np.testing.assert_allclose(RULES[rule].score(mixed), by_hand, rtol=1e-12)
        assert predictions(frame, rule) == [int(np.argmax(expected[task])) for task in OF_TASKS]


@settings(max_examples=20)
@given(st.lists(documents, min_size=2, max_size=4), st.sampled_from(sorted(BY_TASK)))
def test_a_rule_of_tasks_decides_as_these_rules_alone(drawn: list[list[list[Choice]]], rule: str) -> None:
    tasks = list(OF_TASKS)[:: len(OF_TASKS) // len(drawn)][: len(drawn)]
    parts = [table(*part, task=task) for task, part in zip(tasks, drawn, strict=True)]
    together = predictions(pd.concat(parts), rule)
    alone = [predictions(part, OF_TASKS[task][rule == "olmo_core"]) for task, part in zip(tasks, parts, strict=True)]
    assert together == [choice for part in alone for choice in part]


def test_rules_that_a_task_does_not_have() -> None:
    """A task without a rule of its own, one whose rule needs an unconditional pass, and one with gold answers."""
    known = table(DOCUMENT, task="piqa_val_rc_5shot")
    with pytest.raises(UsageError, match=r"olmes.*made_up"):
        decide(pd.concat([known, table(DOCUMENT)]), RULES["olmes"])
    without = pd.concat([known, table([A, B], task="csqa_val_rc_5shot")])
    with pytest.raises(UsageError, match=r"pmi.*--rule"):
        decide(without, RULES["olmes"])
    assert len(decide(without, RULES["olmo_core"])) == 2  # which does not need the pass
    # An unconditional pass of whole tasks is none that lacks rows; of some rows of a task it is
    half = pd.concat([known, table([DOCUMENT[0], B], task="csqa_val_rc_5shot")])
    with pytest.raises(RunError, match="1 of its rows"):
        decide(half, RULES["pmi"])
    gold = pd.concat([known, table([A], task="gsm8k_gold_bpb_5shot")])
    for rule in ("acc", "olmes", "pmi"):
        assert "gsm8k_gold_bpb_5shot" in str(why_unusable(RULES[rule], gold))
        with pytest.raises(UsageError, match="gsm8k_gold_bpb_5shot"):
            decide(gold, RULES[rule])


# Accuracies

RIGHT: list[dict[str, Any]] = [{"ll_continuation": -1.0}, {"ll_continuation": -2.0}]
WRONG: list[dict[str, Any]] = [{"ll_continuation": -2.0}, {"ll_continuation": -1.0}]


def task(name: str, right: int, wrong: int, subtask: str | None = None, extra: int = 0) -> pd.DataFrame:
    """A task whose rule `acc` gets so many documents right; `extra` further, hopeless choices each."""
    hopeless = [{"ll_continuation": -9.0}] * extra
    documents = [RIGHT + hopeless] * right + [WRONG + hopeless] * wrong
    return table(*documents, task=name, subtask=subtask)


def manifest(**groups: list[str]) -> dict[str, Any]:
    return {"groups": groups, "group_sizes": {name: len(members) for name, members in groups.items()}}


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(0, 12))
def test_accuracy_and_standard_error_are_lm_evals(right: int, wrong: int) -> None:
    assume(right + wrong >= 2)
    [result] = summarise(task("a", right, wrong), manifest(G=["a"]), "acc").tasks
    outcomes = [1.0] * right + [0.0] * wrong
    assert result.n == right + wrong
    assert result.value == pytest.approx(sum(outcomes) / len(outcomes), abs=1e-15)
    # lm-eval's is 0 where all documents are right, or none is, which says nothing of others
    assert result.stderr == (pytest.approx(mean_stderr(outcomes), abs=1e-15) if right and wrong else None)


def test_averages_are_unweighted_and_their_errors_independent() -> None:
    scores = pd.concat([task("a", 1, 3), task("b", 6, 2), task("c", 2, 1), task("d", 1, 0), task("e", 3, 0)])
    results = summarise(scores, manifest(First=["a", "b"], Second=["c"]), "acc")
    se_a, se_b, se_c = (math.sqrt(p * (1 - p) / (n - 1)) for p, n in ((1 / 4, 4), (3 / 4, 8), (2 / 3, 3)))
    assert [(average.name, average.value) for average in results.averages] == [
        ("First", pytest.approx(0.5)), ("Second", pytest.approx(2 / 3)), ("Average", pytest.approx(5 / 9))
    ]  # fmt: skip
    assert results.averages[0].stderr == pytest.approx(math.hypot(se_a, se_b) / 2)
    assert results.average.stderr == pytest.approx(math.hypot(se_a, se_b, se_c) / 3)
    some = manifest(First=["a", "b"], Second=["d"]) | {"group_sizes": {"First": 3, "Second": 1}}
    results = summarise(scores, some, "acc")
    assert [average.name for average in results.averages] == ["First (2 of 3)", "Second", "Average (3 of 4)"]
    assert results.tasks[2].stderr is None and results.average.stderr is None
    of_equal = summarise(scores, manifest(First=["a"], Second=["e"]), "acc")
    assert of_equal.tasks[0].stderr and of_equal.tasks[1].stderr is None and of_equal.average.stderr is None
    assert [average.name for average in summarise(scores, manifest(Only=["a"]), "acc").averages] == ["Only"]


def test_subjects_weigh_by_their_documents() -> None:
    scores = pd.concat([task("mmlu", 1, 0, "mmlu_anatomy"), task("mmlu", 1, 4, "mmlu_virology"), task("a", 1, 1)])
    results = summarise(scores, manifest(Knowledge=["mmlu"], Rest=["a"]), "acc")
    assert (results.tasks[0].n, results.tasks[0].value) == (6, pytest.approx(2 / 6))  # not the mean of 1 and 1/5
    assert {name: [(part.task, part.n, part.value) for part in parts] for name, parts in results.subtasks.items()} == {
        "mmlu": [("mmlu_anatomy", 1, 1.0), ("mmlu_virology", 5, pytest.approx(1 / 5))]
    }


def test_chance_ties_and_truncation_are_counted_by_document() -> None:
    scores = pd.concat([task("arc", 1, 1, extra=1), task("arc", 1, 0, extra=2), task("arc", 1, 0, extra=3)])
    [result] = summarise(scores, manifest(G=["arc"]), "acc").tasks
    assert result.chance == pytest.approx((1 / 3 + 1 / 3 + 1 / 4 + 1 / 5) / 4)
    tied, cut = [{"ll_continuation": -1.0}] * 3, [choice | {"truncated": 7} for choice in RIGHT]
    [result] = summarise(table(tied, tied, cut, RIGHT), manifest(G=["made_up"]), "acc").tasks
    assert (result.n, result.ties, result.truncated) == (4, 2, 1)


def test_centred_accuracies_are_those_above_chance() -> None:
    """CORE's measure (accuracy - chance) / (1 - chance), by task, then the mean over tasks."""
    scores = pd.concat([task("a", 3, 1), task("b", 1, 4, extra=2)])  # chance 1/2 and 1/4
    results = summarise(scores, manifest(G=["a"], H=["b"]), "acc")
    a, b = (3 / 4 - 1 / 2) / (1 / 2), (1 / 5 - 1 / 4) / (3 / 4)
    assert [result.centred for result in results.tasks] == [pytest.approx(a), pytest.approx(b)]
    assert [average.centred for average in results.averages] == [pytest.approx(each) for each in (a, b, (a + b) / 2)]
    errors = math.sqrt(3 / 16 / 3) / (1 / 2), math.sqrt(4 / 25 / 4) / (3 / 4)
    assert results.average.centred_stderr == pytest.approx(math.hypot(*errors) / 2)


def test_the_better_form_counts() -> None:
    scores = pd.concat(
        [task("a_rc", 3, 1), task("a_mc", 2, 2), task("b_rc", 1, 1), task("b_mc", 2, 0), task("c", 1, 0)]
    )
    names = ["a_rc", "a_mc", "b_rc", "b_mc", "c"]
    results = summarise(scores, manifest(G=names), "acc")
    forms = {"A": ["a_rc", "a_mc"], "B": ["b_rc", "b_mc"], "C": ["c", "absent"], "D": ["absent"]}
    assert [(name, result.task, result.value) for name, result in better_forms(results, forms)] == [
        ("A", "a_rc", 3 / 4), ("B", "b_mc", 1.0), ("C", "c", 1.0)
    ]  # fmt: skip


def test_tasks_with_gold_answers_have_outcomes_and_no_accuracy() -> None:
    """In a table of both kinds rules are those of the tasks with choices; averages count these only."""
    gold = table(*[[A | {"greedy": right}] for right in (True, False, False, True)], task="gold")
    both, groups = pd.concat([task("a", 3, 1), gold, task("b", 1, 1)]), manifest(G=["a", "gold"], H=["gold2"], I=["b"])
    both = pd.concat([both, gold.assign(task="gold2", subtask="gold2")])
    results = summarise(both, groups, "acc")
    assert [(each.name, each.value) for each in results.averages] == [("G", 3 / 4), ("I", 1 / 2), ("Average", 5 / 8)]
    assert {"acc", "ppl", "acc_norm"} <= set(summarise_all(both, groups)) and summarise_all(gold, groups) == {}
    with pytest.raises(UsageError, match=r"acc.* gold "):
        summarise(gold, manifest(G=["gold"]), "acc")
    assert values(gold, "greedy_match").tolist() == [1, 0, 0, 1]
    assert values(gold, "log_likelihood").tolist() == [-6] * 4
    np.testing.assert_allclose(values(both, "bits_per_byte")[4:8], 6 / math.log(2) / 12, rtol=1e-12)
    for name in ("log_loss", "brier", "margin"):
        for frame in (gold, both):
            with pytest.raises(UsageError, match=f"{name}.* gold "):
                values(frame, name)
    with pytest.raises(UsageError, match=r"greedy_match.* a "):
        values(both, "greedy_match")
    names = [[outcome.name for outcome in available_outcomes(frame)] for frame in (gold, both, task("a", 1, 1))]
    of_one = ["bits_per_byte", "log_likelihood"]
    assert names == [[*of_one, "greedy_match"], of_one, [name for name in OUTCOMES if name != "greedy_match"]]


# Continuous outcomes

LIKELIHOODS = st.floats(-700, -1e-6)
DOCUMENTS = st.lists(
    st.lists(st.tuples(LIKELIHOODS, st.integers(1, 80), st.integers(1, 20)), min_size=2, max_size=5),
    min_size=1,
    max_size=6,
)


def table_of(documents: list[list[tuple[float, int, int]]], golds: list[int]) -> pd.DataFrame:
    """A score table with (log-likelihood, bytes, tokens) of each choice."""
    rows = [
        {"doc_id": number, "choice": choice, "choices": len(choices), "gold": gold, "ll_continuation": likelihood,
         "bytes": size, "chars": size, "n_continuation": tokens}
        for number, (choices, gold) in enumerate(zip(documents, golds, strict=True))
        for choice, (likelihood, size, tokens) in enumerate(choices)
    ]  # fmt: skip
    base = scores_of("made", [1]).iloc[:1]
    return pd.concat([base.assign(**row) for row in rows], ignore_index=True)


def values(table: pd.DataFrame, name: str, rule: str = "acc") -> np.ndarray:
    return document_outcomes(table, OUTCOMES[name], rule)


@settings(max_examples=40)
@given(DOCUMENTS, st.data())
def test_outcomes_are_those_of_loops_over_documents(documents: list[Any], data: st.DataObject) -> None:
    golds = [data.draw(st.integers(0, len(choices) - 1)) for choices in documents]
    table = table_of(documents, golds)
    for number, (choices, gold) in enumerate(zip(documents, golds, strict=True)):
        likelihoods = [likelihood for likelihood, _, _ in choices]
        per_byte = [likelihood / size for likelihood, size, _ in choices]
        highest, (likelihood, size, _) = max(likelihoods), choices[gold]
        total = math.fsum(math.exp(each - highest) for each in likelihoods)
        expected = {
            "bits_per_byte": -likelihood / math.log(2) / size,
            "log_loss": highest - likelihood + math.log(total),
            "brier": math.fsum((math.exp(each - highest) / total - (choice == gold)) ** 2
                               for choice, each in enumerate(likelihoods)),
            "margin": likelihood - max(likelihoods[:gold] + likelihoods[gold + 1 :]),
        }  # fmt: skip
        for name, value in expected.items():
            assert values(table, name)[number] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        margin = per_byte[gold] - max(per_byte[:gold] + per_byte[gold + 1 :])
        assert values(table, "margin", "acc_bytes")[number] == pytest.approx(margin, rel=1e-9, abs=1e-12)


def test_against_scikit_learn_and_lm_eval() -> None:
    from lm_eval.api.metrics import bits_per_byte, brier_score
    from sklearn.metrics import log_loss

    dice = np.random.default_rng(3)
    likelihoods, sizes = -dice.gamma(3, 2, (200, 4)), dice.integers(1, 60, (200, 4))
    documents = [[(float(ll), int(size), 3) for ll, size in zip(*pair, strict=True)]
                 for pair in zip(likelihoods, sizes, strict=True)]  # fmt: skip
    golds = dice.integers(0, 4, 200).tolist()
    table = table_of(documents, golds)
    p = np.exp(likelihoods) / np.exp(likelihoods).sum(axis=1, keepdims=True)
    assert values(table, "log_loss").mean() == pytest.approx(log_loss(golds, p, labels=range(4)), rel=1e-6)
    assert values(table, "brier").mean() == pytest.approx(brier_score(list(zip(golds, p, strict=True))), rel=1e-6)
    theirs = [bits_per_byte([choices[gold][:2]]) for choices, gold in zip(documents, golds, strict=True)]
    assert values(table, "bits_per_byte") == pytest.approx(np.array(theirs), rel=1e-12)


def test_extreme_tables_and_margins_that_do_not_exist() -> None:
    """Likelihoods far below the smallest number; no documents; a choice alone, and one without length."""
    table = table_of([[(-20_000.0, 10, 1), (-19_000.0, 10, 1)]], [0])
    assert values(table, "log_loss")[0] == pytest.approx(1000)
    assert values(table, "brier")[0] == pytest.approx(2)
    assert [len(values(table.iloc[:0], name)) for name in OUTCOMES] == [0] * len(OUTCOMES)
    for frame, rule in ((table.iloc[:1], "acc"), (table.assign(chars=[0, 3]), "acc_norm")):
        with pytest.raises(UsageError, match=f"document 0 .* {rule}"):
            values(frame, "margin", rule)


def test_outcomes_are_better_in_the_direction_that_they_say() -> None:
    sure, unsure = (table_of([[(gold, 3, 1), (-3.0, 3, 1)]], [0]) for gold in (-1.0, -2.5))
    sure["greedy"], unsure["greedy"] = True, False
    for name, outcome in OUTCOMES.items():
        assert (values(sure, name)[0] > values(unsure, name)[0]) == outcome.scale.higher_is_better, name


def test_keys_of_outcomes() -> None:
    assert outcome_key(None, None) is None and outcome_key("accuracy", "acc") == "acc"
    assert outcome_key("margin", "acc_norm") == "margin:acc_norm" and outcome_key("margin", None) == "margin"
    assert outcome_of("acc_norm") is None and outcome_of("acc@order-2") is None
    outcome = outcome_of("margin:acc_norm")
    assert outcome is not None and (outcome[0].name, outcome[1]) == ("margin", "acc_norm")
    assert with_default_rule("margin", "ppl") == "margin:ppl" and with_default_rule("brier", "ppl") == "brier"
    for kind, *key in ((UsageError, "brier", "acc"), (UnknownNameError, "bits_per_bytes", None)):
        with pytest.raises(kind, match=key[0]):
            outcome_key(*key)
