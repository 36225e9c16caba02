"""When a prediction is complete.

In: a task and a tokenizer. Out: what ends its generation. The official code has no stop strings: it generates on and
then reads the first line, or the first line of code. Here generation ends where nothing more would be read, so that
predictions are shorter and every score is the same.
"""

from __future__ import annotations

from typing import Any

from evalkit.benchmarks.longbench.protocol import Task
from evalkit.generation.prompts import Stops

FIRST_LINE = r"\A\n*[^\n]+\n"
"""The first line is complete, leading newlines apart (`metrics.first_line`)."""
CODE_LINE = r"\A\n*(?=[^\n])(?:[^\n]*\n)*?(?:(?!//)[^\n`#])*\n"
"""A complete line has no backtick, "#" or "//" (`metrics.code_line`); an empty one counts, as it does there."""


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
        return Stops(ends, barred, pattern=FIRST_LINE)
    return Stops(ends, barred, pattern=CODE_LINE if task.metric == "edit_similarity" else "")
