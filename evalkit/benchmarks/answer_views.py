"""Generated answers of a finished run as people read them. In: a row of its table. Out: an `AnsweredDocument`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evalkit.benchmarks.document_views import CUT, AnsweredDocument, Piece
from evalkit.reporting.decimals import fixed

_ENDS = {"end": "end token", "enough": "stop text", "length": "maximum length"}
"""Stopping criterion in the table → its description."""


def answered(
    row: Mapping[Any, Any], task: str, answer: str, references: Sequence[str], score: float, prompt: str = ""
) -> AnsweredDocument:
    """Return one document.

    Args:
        row: a row of the run's table as plain data, with `id` and the columns of `GeneratedAnswer` that the table has.
        task: the task.
        answer: the text that was scored.
        references: the right answers.
        score: the document's score.
        prompt: the whole prompt, if the run stores it.
    """
    pieces = (Piece("context", prompt),) if prompt else ()
    return AnsweredDocument(task, str(row["id"]), tuple(references), answer, float(score), pieces, answer_facts(row))


def answer_facts(row: Mapping[Any, Any]) -> dict[str, str]:
    """Return how an answer was generated, by name: what ended it, tokens of the prompt and of the answer, seconds.

    Args:
        row: see `answered`; a table without `tokens_before` has no truncated prompts.
    """
    before, after = (int(row.get(name, row["tokens"])) for name in ("tokens_before", "tokens"))
    found = {"ended": _ENDS.get(row["ended"], str(row["ended"])), "prompt tokens": f"{before:,}"}
    if row.get("truncated"):
        found |= {CUT: f"{before - after:,} tokens of the prompt's middle", "prompt tokens after the cut": f"{after:,}"}
    return found | {"generated tokens": f"{row['new_tokens']:,}", "seconds": fixed(row["seconds"], 1)}
