"""What a processor can do while the model is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from evalkit.scoring.pack import TreeBatch


def in_turn(batches: list[TreeBatch], skip: Callable[[TreeBatch], bool]) -> Iterator[tuple[int, TreeBatch]]:
    """Batches with their numbers, the tree of the next one laid out by another thread meanwhile.

    Args:
        batches: emptied from the front, so that nothing is held of what is done.
        skip: which of them to leave out.
    """
    left = [(number, batch) for number, batch in enumerate(batches) if not skip(batch)][::-1]
    batches.clear()
    with ThreadPoolExecutor(1, "evalkit-tree") as builder:
        following = builder.submit(_lay_out, left[-1][1]) if left else None
        while left and following is not None:
            number, batch = left.pop()
            following.result()
            following = builder.submit(_lay_out, left[-1][1]) if left else None
            yield number, batch


def _lay_out(batch: TreeBatch) -> None:
    _ = batch.tree
