"""Stopping criteria of LongBench's predictions.

In: a task and a tokenizer. Out: its `Stops`. The official code has no stop strings: it generates to the maximum length
and scores the first line, or the first line of code, of some tasks. Here generation ends after the scored part, so
predictions are shorter and every score is the same.
"""

from __future__ import annotations

from typing import Any

from evalkit.benchmarks.longbench.protocol import Task
from evalkit.generation.prompts import Stops

FIRST_LINE = r"\A\n*[^\n]+\n"
"""Matches when the first line after leading newlines is complete (`metrics.first_line`)."""
CODE_LINE = r"\A\n*(?=[^\n])(?:[^\n]*\n)*?(?:(?!//)[^\n`#])*\n"
"""Matches when a line without a backtick, "#" or "//" is complete (`metrics.code_line`); an empty line counts."""


def stops_of(task: Task, ends: frozenset[int], tokenizer: Any) -> Stops:
    """Return the stopping criteria of a task.

    Args:
        task: the task. samsum ends at a newline too, and must start with neither a newline nor the EOS token.
        ends: the model's end tokens (`generation.tokens.end_tokens`).
        tokenizer: the model's tokenizer.
    """
    barred: frozenset[int] = frozenset()
    if task.newline_ends:
        # The official code uses the tokenizer's EOS token here, not the model's end tokens
        eos = ends if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
        ends = barred = eos | frozenset(tokenizer("\n", add_special_tokens=False).input_ids[-1:])
    if task.first_line_only:
        return Stops(ends, barred, pattern=FIRST_LINE)
    return Stops(ends, barred, pattern=CODE_LINE if task.metric == "edit_similarity" else "")
