"""Prefetching of token trees: the next batch's tree is built in a thread while the model scores the current batch.

In: planned batches. Out: the same batches in order, each with its tree built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from evalkit.scoring.pack import TreeBatch


def prefetched(batches: list[TreeBatch], skip: Callable[[TreeBatch], bool]) -> Iterator[tuple[int, TreeBatch]]:
    """Yield batches with their numbers, while a thread builds the tree of the next one.

    Args:
        batches: emptied at the start, so that finished batches can be freed.
        skip: whether a batch is skipped.
    """
    left = [(number, batch) for number, batch in enumerate(batches) if not skip(batch)][::-1]
    batches.clear()
    with ThreadPoolExecutor(1, "evalkit-tree") as builder:
        following = builder.submit(_build_tree, left[-1][1]) if left else None
        while left and following is not None:
            number, batch = left.pop()
            following.result()
            following = builder.submit(_build_tree, left[-1][1]) if left else None
            yield number, batch


def _build_tree(batch: TreeBatch) -> None:
    _ = batch.tree
