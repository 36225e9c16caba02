"""Facts of a model that generates answers. In: a prepared model. Out: what planning of its batches needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evalkit.generation.capacity import MeasuredCapacity
from evalkit.generation.generator import CHUNK


@dataclass(frozen=True)
class GeneratingFacts:
    """Properties of a generating model that planning needs."""

    ends: tuple[int, ...]
    """Token ids that end a text."""
    room: MeasuredCapacity
    """Memory available for generation, and cost estimates."""


def assumed_facts(plan: Any, tokenizer: Any) -> GeneratingFacts:
    """Return facts for prompts without a model: its end token is the tokenizer's, and nothing is measured."""
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return GeneratingFacts(ends, assumed_capacity(int(plan.manifest["context"])))


def assumed_capacity(context: int) -> MeasuredCapacity:
    """Return a capacity for one prompt at a time, without measured costs."""
    return MeasuredCapacity(
        tokens=context,
        most_rows=1,
        chunk=CHUNK,
        token_bytes=0,
        linear=0.0,
        square=0.0,
        weights=0.0,
        operations_a_second=1.0,
        bytes_a_second=1.0,
    )
