"""Orders of the options that a prompt lists by letter, as MMLU's do.

In: a question whose context has "A. …", "B. …" and whose choices are these letters. Out: the same question with its
options in another order: the letters stay in their places, the options move, and so does the gold answer. Solved
examples before the question keep their order.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace

from evalkit.benchmarks.multiple_choice.tasks import Question
from evalkit.errors import DataError

Order = tuple[int, ...]
"""At each place of the list, the number of the original option."""

_FORMS = ("{}. {}", "{}) {}", "({}) {}")
"""How a letter and its option are written."""


def order_name(order: Order) -> str:
    """Return an order's name: the original letters, in the order in which their options are listed."""
    return "order-" + "".join(string.ascii_uppercase[option] for option in order)


def orders_of(questions: Sequence[Question], most: int) -> list[Order]:
    """Return the original order of a task's options and its cyclic rotations, at most `most` orders in all.

    The original one alone if the options cannot be reordered, since not every document lists the same number of them.
    """
    options = len(questions[0].choices)
    if most > 1 and any(len(one.choices) != options or _list_of(one) is None for one in questions):
        most = 1
    return [tuple((place + shift) % options for place in range(options)) for shift in range(min(most, options))]


def in_orders(question: Question, orders: Sequence[Order]) -> Question:
    """Return a question with the choices of several orders, one order after the other; the gold answer stays as it was.

    Raises:
        DataError: the context does not list the options.
    """
    if len(orders) == 1:
        return question
    return replace(
        question,
        contexts=tuple(context for order in orders for context in under_order(question, order).contexts),
        continuations=question.continuations * len(orders),
        gaps=question.gaps * len(orders),
        choices=question.choices * len(orders),
    )


def under_order(question: Question, order: Order) -> Question:
    """Return a question with its options in another order.

    Raises:
        DataError: the context does not list the options.
    """
    if (found := _list_of(question)) is None:
        raise DataError(f"{question.label}: its context does not list its options by letter; leave out choice_order")
    before, form, options, after = found
    context = before + _listed(form, [options[place] for place in order]) + after
    return replace(question, contexts=(context,) * len(question.contexts), gold=order.index(question.gold))


def _list_of(question: Question) -> tuple[str, str, list[str], str] | None:
    """Return the text before the list of options, its form, the options, and the text after it; None without a list."""
    options = question.doc.get("choices")
    if isinstance(options, dict):
        options = options.get("text")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return None
    letters = tuple(string.ascii_uppercase[: len(options)])
    if question.choices != letters or len(letters) < len(options) or len(set(question.contexts)) != 1:
        return None
    for form in _FORMS:
        # The last one: solved examples may have the same options
        before, listed, after = question.contexts[0].rpartition(_listed(form, options))
        if listed:
            return before, form, options, after
    return None


def _listed(form: str, options: Sequence[str]) -> str:
    return "\n".join(form.format(*pair) for pair in zip(string.ascii_uppercase, options, strict=False))
