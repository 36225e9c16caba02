"""Every rule, compared with its explicit formula and with lm-eval's own arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.task import ConfigurableTask

from evalkit.runs.rules import RULES, decide
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


def predictions(frame: pd.DataFrame, rule: str) -> list[int]:
    return [int(choice) for choice in decide(frame, RULES[rule])["prediction"]]


@pytest.mark.parametrize("rule", RULES)
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
@given(documents, st.randoms(use_true_random=False), st.sampled_from(sorted(RULES)))
def test_documents_are_decided_one_by_one(drawn: list[list[Choice]], dice: Any, rule: str) -> None:
    """In any order, each as if it were the only one; a copy of the best choice at the end is a tie and never wins."""
    together = predictions(table(*drawn), rule)
    assert together == [predictions(table(choices), rule)[0] for choices in drawn]
    order = dice.sample(range(len(drawn)), len(drawn))
    assert predictions(table(*(drawn[i] for i in order)), rule) == [together[i] for i in order]
    doubled = table(*([*choices, choices[best]] for choices, best in zip(drawn, together, strict=True)))
    assert predictions(doubled, rule) == together and decide(doubled, RULES[rule])["tie"].all()


@settings(max_examples=40)
@given(documents, st.sampled_from(["special", "instruction", "context", "continuation", "end"]))
def test_the_whole_sequence_rule_does_not_see_segments(drawn: list[list[Choice]], into: str) -> None:
    """Moving log-likelihood and tokens from one segment to another leaves the perplexity of the whole as it is."""
    names = ["special", "instruction", "context", "continuation", "end"]
    moved = [
        [
            choice
            | {f"{kind}_{name}": 0 for name in names for kind in ("ll", "n")}
            | {f"{kind}_{into}": math.fsum(choice[f"{kind}_{name}"] for name in names) for kind in ("ll", "n")}
            for choice in choices
        ]
        for choices in drawn
    ]
    np.testing.assert_allclose(RULES["ppl"].score(table(*moved)), RULES["ppl"].score(table(*drawn)), rtol=1e-12)
