"""Orders of listed options: letters stay, options and the gold answer move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.benchmarks.prompt_variants.prompt_sets import (
    in_orders,
    order_name,
    orders_of,
    under_order,
)
from evalkit.errors import DataError
from tests.questions import question

OPTIONS = ["red", "green", "blue", "A. red\nB. green"]
"""The last one looks like a list itself."""


def listed(
    options: list[str] = OPTIONS, gold: int = 0, before: str = "Which colour?", form: str = "{}. {}"
) -> Question:
    letters = "ABCDE"[: len(options)]
    lines = "\n".join(form.format(letter, text) for letter, text in zip(letters, options, strict=True))
    return replace(
        question(f"{before}\n{lines}\nAnswer:", list(letters), gold=gold), doc={"choices": options, "answer": gold}
    )


def test_rotations_are_cyclic_and_begin_with_the_original_order() -> None:
    assert orders_of([listed()], 4) == [(0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)]
    assert orders_of([listed()], 2) == [(0, 1, 2, 3), (1, 2, 3, 0)]
    assert orders_of([listed(["red", "green"])], 9) == [(0, 1), (1, 0)]
    assert order_name((1, 2, 3, 0)) == "order-BCDA"


@pytest.mark.parametrize("form", ["{}. {}", "{}) {}", "({}) {}"])
def test_options_move_and_letters_stay(form: str) -> None:
    found = under_order(listed(gold=1, form=form), (1, 2, 3, 0))
    by_hand = listed(["green", "blue", "A. red\nB. green", "red"], gold=0, form=form)
    assert found.contexts == by_hand.contexts
    assert (found.gold, found.choices, found.continuations) == (0, ("A", "B", "C", "D"), ("A", "B", "C", "D"))


@given(st.permutations(range(4)), st.integers(0, 3))
def test_the_gold_letter_still_names_the_gold_option(order: list[int], gold: int) -> None:
    found = under_order(listed(gold=gold), tuple(order))
    shown = [OPTIONS[place] for place in order]
    assert shown[found.gold] == OPTIONS[gold]
    assert f"{'ABCD'[found.gold]}. {OPTIONS[gold]}\n" in found.contexts[0]


def test_solved_examples_keep_their_order() -> None:
    example = listed().contexts[0] + " A\n\n"
    found = under_order(listed(before=example + "Which colour?"), (3, 0, 1, 2))
    assert found.contexts[0].startswith(example)
    assert found.contexts[0].removeprefix(example) == under_order(listed(), (3, 0, 1, 2)).contexts[0]


def test_the_choices_of_several_orders_follow_each_other() -> None:
    orders = orders_of([listed()], 3)
    found = in_orders(listed(gold=2), orders)
    assert found.contexts == tuple(one for order in orders for one in under_order(listed(gold=2), order).contexts)
    assert found.continuations == ("A", "B", "C", "D") * 3
    assert len(found.gaps) == len(found.choices) == 12
    assert found.gold == 2
    assert in_orders(listed(), orders[:1]) == listed()


def test_prompts_that_list_no_options_have_one_order() -> None:
    plain = replace(question("Which colour?", ["red", "green"]), doc={"choices": ["red", "green"]})
    assert orders_of([plain], 4) == [(0, 1)]
    # One document that lists them does not suffice, nor documents with different numbers
    lettered = replace(plain, continuations=("A", "B"), choices=("A", "B"))
    assert orders_of([listed(["red", "green"]), lettered], 4) == [(0, 1)]
    assert len(orders_of([listed(["red", "green"]), listed()], 4)) == 1
    assert len(orders_of([listed(), listed(gold=3)], 4)) == 4
    with pytest.raises(DataError, match="made_up document 0: its context does not list its options"):
        under_order(plain, (1, 0))
