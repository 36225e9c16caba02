"""Random samples of lm-eval's documents, which keep their numbers and their solved examples.

In: one of lm-eval's tasks and the numbers of the documents to read. Out: the task restricted to them. (lm-eval's own
`samples` numbers them anew, and draws other examples for them.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any


def restrict(task: Any, numbers: Sequence[int]) -> None:
    """Make a task iterate over some of its documents, in order.

    Args:
        task: its method `doc_iterator` is replaced.
        numbers: the documents' numbers, at least one.
    """
    every, chosen = task.doc_iterator, frozenset(numbers)

    def restricted(*, limit: int | None = None, **_: Any) -> Iterator[tuple[int, Any]]:
        found = ((number, doc) for number, doc in every(rank=0, world_size=1) if number in chosen)
        return islice(found, limit)

    task.doc_iterator = restricted
    if task.config.num_fewshot:
        _draw_in_turn(task, chosen)


def _draw_in_turn(task: Any, chosen: frozenset[int]) -> None:
    """Draw the examples of all documents when requests are built: a document's depend on those drawn before it."""
    build, context = task.build_all_requests, task.fewshot_context

    def built(**options: Any) -> None:
        before = enumerate(task.eval_docs)

        def in_turn(doc: Any, *arguments: Any, **rest: Any) -> Any:
            for number, skipped in before:
                if number in chosen:
                    break
                context(skipped, *arguments, **rest)
            return context(doc, *arguments, **rest)

        task.fewshot_context = in_turn
        try:
            build(**options)
        finally:
            task.fewshot_context = context

    task.build_all_requests = built
