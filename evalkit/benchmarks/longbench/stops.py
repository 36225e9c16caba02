"""When a prediction is complete.

In: a task and a tokenizer. Out: what ends its generation. The official code has no stop strings: it generates on and
then reads the first line, or the first line of code. Here generation ends where nothing more would be read, so that
predictions are shorter and every score is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evalkit.benchmarks.longbench.metrics import code_line, first_line
from evalkit.benchmarks.longbench.protocol import Task


@dataclass(frozen=True)
class Stops:
    """Of one task's predictions."""

    ends: frozenset[int]
    """Token ids after which nothing comes."""
    barred_first: frozenset[int]
    """Token ids that may not come first."""
    enough: Callable[[str], bool] | None
    """Whether a text holds all that will be read; None where everything is."""


def stops_of(task: Task, ends: frozenset[int], tokenizer: Any) -> Stops:
    """What ends the predictions of a task.

    Args:
        task: samsum ends at a newline too, and may begin neither with that nor with the end token.
        ends: the model's end tokens (`generation.tokens.end_tokens`).
        tokenizer: of the model.
    """
    barred: frozenset[int] = frozenset()
    if task.newline_ends:
        # The official code names the tokenizer's end token here, in place of those that the model names
        own = ends if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        ends = barred = own | frozenset(tokenizer("\n", add_special_tokens=False).input_ids[-1:])

    if task.first_line_only:
        return Stops(ends, barred, has_first_line)
    return Stops(ends, barred, has_code_line if task.metric == "edit_similarity" else None)


def has_first_line(text: str) -> bool:
    """Whether the first line is followed by another."""
    return len(first_line(text)) < len(text.lstrip("\n"))


def has_code_line(text: str) -> bool:
    """Whether the first line of code is there to its end."""
    whole, newline, _ = text.lstrip("\n").rpartition("\n")
    # An empty line counts too, and is what `code_line` gives where there is none
    return bool(newline) and (bool(code_line(whole)) or "" in whole.split("\n"))
