"""Prompts for a terminal: encoded questions → text with segments in colour and their token counts."""

from __future__ import annotations

from typing import Any

import click

from evalkit.benchmarks.multiple_choice.encoded import EncodedQuestion
from evalkit.reporting.escape import printable
from evalkit.reporting.segments import COLOURS


def prompt_text(encoded: EncodedQuestion, tokenizer: Any) -> str:
    """Return a question's sequences as text, with segments in colour and their token counts."""
    question = encoded.question
    lines = [click.style(printable(f"{question.label}, gold answer {question.gold}"), bold=True)]
    for choice, sequence in enumerate(encoded.sequences):
        spans = sequence.spans()
        text = "".join(
            click.style(printable(tokenizer.decode(sequence.tokens[start:end].tolist()), "\n\t"), fg=COLOURS[segment])
            for segment, start, end in spans
        )
        counts = ", ".join(
            click.style(f"{segment} {end - start}", fg=COLOURS[segment]) for segment, start, end in spans
        )
        cut = f", {sequence.truncated} context tokens cut" if sequence.truncated else ""
        mark = "*" if choice == question.gold else " "
        lines += [f"[{choice}]{mark} {len(sequence.tokens)} tokens: {counts}{cut}", text, ""]
    return "\n".join(lines)
