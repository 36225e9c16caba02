"""Facts of a model that generates answers. In: a prepared model. Out: what planning of its batches needs."""

from __future__ import annotations

from dataclasses import dataclass

from evalkit.generation.capacity import MeasuredCapacity


@dataclass(frozen=True)
class GeneratingFacts:
    """Properties of a generating model that planning needs."""

    ends: tuple[int, ...]
    """Token ids that end a text."""
    room: MeasuredCapacity
    """Memory available for generation, and cost estimates."""
