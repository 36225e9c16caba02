"""Questions made in a test, and their encoding by code independent of evalkit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evalkit.suites.questions import LeafTask, Question


def question(
    context: str | Sequence[str],
    choices: Sequence[str],
    *,
    doc_id: int = 0,
    subtask: str = "made_up",
    gap: str = " ",
    gold: int = 0,
) -> Question:
    """A document of the task "made_up"; one context for all choices, or one for each."""
    contexts = (context,) * len(choices) if isinstance(context, str) else tuple(context)
    return Question(
        task="made_up",
        subtask=subtask,
        doc_id=doc_id,
        contexts=contexts,
        continuations=tuple(choices),
        delimiter=" ",
        gaps=(gap,) * len(choices),
        choices=tuple(choices),
        gold=gold,
        cluster=doc_id,
        doc={},
        leaf=LeafTask(subtask, 1.0, 1),
    )


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes a byte-level token stands for, by GPT-2's table of printable stand-ins."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(table[letter] for letter in tokenizer.convert_ids_to_tokens(token_id))
