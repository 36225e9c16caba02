"""Which prompts go through the model together.

Prompts that begin alike stand beside each other, so that what they share is computed once; among the rest those of like
length, so that little memory is left empty. A batch is as large as memory for keys and values allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evalkit.generation.prompts import Ints, Prompt


def plan_batches(prompts: Sequence[Prompt], budget: int, chunk: int, most_rows: int) -> list[list[Prompt]]:
    """Put prompts into batches.

    Args:
        prompts: any order.
        budget: most tokens of keys and values at a time, empty columns included; a prompt beyond it stands alone.
        chunk: shared beginnings count in whole chunks.
        most_rows: of a batch.
    """
    batches: list[list[Prompt]] = []
    for group in _families(prompts, chunk):
        for prompt in group:
            if batches and _room([*batches[-1], prompt]) <= budget and len(batches[-1]) < most_rows:
                batches[-1].append(prompt)
            else:
                batches.append([prompt])
    return batches


def shared_tokens(one: Ints, other: Ints, chunk: int) -> int:
    """Tokens that two prompts begin with alike, in whole chunks; always less than either has."""
    length = min(len(one), len(other)) - 1
    differ = np.flatnonzero(one[:length] != other[:length])
    same = int(differ[0]) if len(differ) else length
    return same - same % chunk


def _families(prompts: Sequence[Prompt], chunk: int) -> list[list[Prompt]]:
    """Prompts that share a chunk or more with a neighbour in lexicographic order; families by their longest prompt."""
    families: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda p: p.tokens.tolist()):
        if families and shared_tokens(families[-1][-1].tokens, prompt.tokens, chunk):
            families[-1].append(prompt)
        else:
            families.append([prompt])
    # The longest first: what memory cannot hold shows at once, and the estimate of time is never too rosy
    return sorted(families, key=lambda family: -max(len(prompt.tokens) for prompt in family))


def _room(prompts: Sequence[Prompt]) -> int:
    """Columns × rows of a batch."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    return (longest + max(prompt.max_new_tokens for prompt in prompts)) * len(prompts)
