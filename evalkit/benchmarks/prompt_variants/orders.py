"""Orders of the options that a prompt lists by letter, as MMLU's do.

In: a question whose context has "A. …", "B. …" and whose choices are these letters. Out: the same question with its
options in another order: the letters stay in their places, the options move, and so does the gold answer. Solved
examples before the question keep their order.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.errors import DataError

Order = tuple[int, ...]
"""At each place of the list, the number of the original option."""

_FORMS = ("{}. {}", "{}) {}", "({}) {}")
"""How a letter and its option are written."""


def rotations(options: int, most: int) -> list[Order]:
    """Return the original order of some options and its cyclic rotations, at most `most` orders in all."""
    return [tuple((place + shift) % options for place in range(options)) for shift in range(min(most, options))]


def order_name(order: Order) -> str:
    """Return an order's name: the original letters, in the order in which their options are listed."""
    return "order-" + "".join(string.ascii_uppercase[option] for option in order)


def orders_of(questions: Sequence[Question], most: int) -> list[Order]:
    """Return the orders of a task's options, the original one first; that one alone if they cannot be reordered.

    They can if every document lists the same number of options.
    """
    counts = {len(one.choices) for one in questions}
    if most == 1 or len(counts) > 1 or any(_list_of(one) is None for one in questions):
        return [tuple(range(len(questions[0].choices)))]
    return rotations(counts.pop(), most)


def in_orders(question: Question, orders: Sequence[Order]) -> Question:
    """Return a question with the choices of several orders, one order after the other; the gold answer stays as it was.

    Raises:
        DataError: the context does not list the options.
    """
    if len(orders) == 1:
        return question
    contexts = [context for order in orders for context in _contexts(question, order)]
    count = len(orders)
    return replace(
        question,
        contexts=tuple(contexts),
        continuations=question.continuations * count,
        gaps=question.gaps * count,
        choices=question.choices * count,
    )


def under_order(question: Question, order: Order) -> Question:
    """Return a question with its options in another order.

    Raises:
        DataError: the context does not list the options.
    """
    gold = int(places_of(np.array([question.gold]), order)[0])
    return replace(question, contexts=_contexts(question, order), gold=gold)


def places_of(gold: NDArray[np.int64], order: Order) -> NDArray[np.int64]:
    """Return the place of each gold option in an order."""
    return np.argsort(order)[gold]


def _contexts(question: Question, order: Order) -> tuple[str, ...]:
    found = _list_of(question)
    if found is None:
        raise DataError(f"{question.label}: its context does not list its options by letter; leave out choice_order")
    before, form, options, after = found
    listed = _listed(form, [options[place] for place in order])
    return (before + listed + after,) * len(question.contexts)


def _list_of(question: Question) -> tuple[str, str, Sequence[str], str] | None:
    """Return the text before the list of options, its form, the options, and the text after it; None without a list."""
    letters = tuple(string.ascii_uppercase[: len(question.choices)])
    options = _options(question.doc)
    if question.choices != letters or len(options) != len(letters) or len(set(question.contexts)) != 1:
        return None
    for form in _FORMS:
        # The last one: solved examples may have the same options
        before, found, after = question.contexts[0].rpartition(_listed(form, options))
        if found:
            return before, form, options, after
    return None


def _options(doc: dict[str, object]) -> list[str]:
    """Return the texts of a document's options, as most datasets store them."""
    found = doc.get("choices")
    if isinstance(found, dict):
        found = found.get("text")
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else []


def _listed(form: str, options: Sequence[str]) -> str:
    letters = string.ascii_uppercase[: len(options)]
    return "\n".join(form.format(letter, option) for letter, option in zip(letters, options, strict=True))
