"""Batches of prompts.

In: prompts and a token budget. Out: batches. Prompts with a common prefix are placed next to each other, so that the
prefix is computed once. The others are sorted by length, to reduce padding. The token budget limits a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evalkit.generation.prompts import Ints, Prompt


def plan_batches(prompts: Sequence[Prompt], budget: int, chunk: int, most_rows: int) -> list[list[Prompt]]:
    """Group prompts into batches.

    Args:
        prompts: in any order.
        budget: most tokens of keys and values in a batch, padding included; a longer prompt is a batch of one.
        chunk: chunk size; shared prefixes are counted in whole chunks.
        most_rows: largest batch size.
    """
    batches: list[list[Prompt]] = []
    for group in _prefix_groups(prompts, chunk):
        for prompt in group:
            if batches and _padded_tokens([*batches[-1], prompt]) <= budget and len(batches[-1]) < most_rows:
                batches[-1].append(prompt)
            else:
                batches.append([prompt])
    return batches


def shared_tokens(one: Ints, other: Ints, chunk: int) -> int:
    """Return the length of the common prefix of two prompts, in whole chunks; always less than either prompt."""
    length = min(len(one), len(other)) - 1
    differ = np.flatnonzero(one[:length] != other[:length])
    same = int(differ[0]) if len(differ) else length
    return same - same % chunk


def _prefix_groups(prompts: Sequence[Prompt], chunk: int) -> list[list[Prompt]]:
    """Group prompts that share at least a chunk with a neighbour in lexicographic order; longest group first."""
    groups: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda p: p.tokens.tolist()):
        if groups and shared_tokens(groups[-1][-1].tokens, prompt.tokens, chunk):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    # Longest first: out of memory occurs at once, and the remaining time is not underestimated
    return sorted(groups, key=lambda group: -max(len(prompt.tokens) for prompt in group))


def _padded_tokens(prompts: Sequence[Prompt]) -> int:
    """Return columns × rows of a batch."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    return (longest + max(prompt.max_new_tokens for prompt in prompts)) * len(prompts)
