"""Random samples of documents. In: the questions of a task. Out: some of them, in their order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.tasks import Question


def sampled(task: str, questions: Sequence[Question], count: int, seed: int) -> list[Question]:
    """Return a random sample, stratified over the task's subjects.

    Each document has the same probability, and a subject's share of the sample is its share of the task, rounded up or
    down: the documents are shuffled within their subject, and every k-th one is taken from a random start.

    Args:
        task: the task's name; the samples of two tasks are independent.
        questions: the task's documents; those of a subject are neighbours.
        count: size of the sample; all documents if there are not more.
        seed: the same seed gives the same sample.
    """
    if count >= len(questions):
        return list(questions)
    random = np.random.default_rng([seed, zlib.crc32(task.encode())])
    by_subject: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        by_subject.setdefault(question.subtask, []).append(place)
    shuffled = np.concatenate([random.permutation(places) for places in by_subject.values()])
    step = len(questions) / count
    taken = ((random.random() + np.arange(count)) * step).astype(int)
    return [questions[place] for place in sorted(shuffled[np.minimum(taken, len(questions) - 1)])]


def sampled_numbers(total: int, count: int, seed: int) -> list[int]:
    """Return `count` of the numbers below `total`, in order; all if there are not more."""
    if count >= total:
        return list(range(total))
    return sorted(np.random.default_rng(seed).choice(total, count, replace=False).tolist())
