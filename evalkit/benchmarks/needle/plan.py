"""What was asked of a needle test, made into what the run is.

In: a `NeedleRequest`. Out: a `NeedlePlan` with its manifest. Nothing here needs torch, so a run that is already
finished is found at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.benchmarks.generated_plan import GeneratedPlan, context_of, generated_manifest
from evalkit.benchmarks.needle import NEEDLE
from evalkit.benchmarks.needle.text import Haystack, NeedleCase
from evalkit.benchmarks.request import Request, numerics
from evalkit.errors import UsageError
from evalkit.models.locate import Checkpoint, Say

MAX_NEW_TOKENS = 32
"""Of an answer: a sentence with seven digits, each of which may be a token."""
DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)
_SHORTEST = 1000
_MOST_CELLS = 100_000


@dataclass(frozen=True)
class NeedleRequest(Request):
    """What a user can ask of a needle test."""

    lengths: tuple[int, ...] = ()
    """Most tokens of the prompts; empty: 1,000, 2,000, 4,000 … as far as the context goes."""
    depths: tuple[float, ...] = DEPTHS
    """How much of the text stands before the needle, in percent."""
    repeats: int = 3
    """Texts for each length and depth."""
    text: Path | None = None
    """A file with the text to hide needles in; None: sentences made by evalkit."""
    chat: bool = False
    """Whether prompts go into the tokenizer's chat template."""


@dataclass(frozen=True)
class NeedlePlan(GeneratedPlan):
    """A request with everything found that does not need torch."""

    request: NeedleRequest
    checkpoint: Checkpoint
    haystack: Haystack
    cells: tuple[NeedleCase, ...]
    """By length, depth and repeat."""
    manifest: dict[str, Any]


def plan_needle(request: NeedleRequest, say: Say) -> NeedlePlan:
    """Find out what a run is, and refuse what cannot be.

    Raises:
        EvalkitError: whatever is wrong with the request, the checkpoint or the text.
    """
    haystack = Haystack(request.text)
    checkpoint = request.model.locate(say)
    context = context_of(request.model, checkpoint, NEEDLE)
    lengths = _lengths(request.lengths, context)
    depths = sorted(set(request.depths))
    if not depths or not all(0 <= depth <= 100 for depth in depths):
        raise UsageError(f"--depths {', '.join(f'{depth:g}' for depth in depths)}: expected percents from 0 to 100")
    if (count := len(lengths) * len(depths) * request.repeats) > _MOST_CELLS:
        raise UsageError(f"{count:,} needles, where {_MOST_CELLS:,} are years of work; lower --repeats, or name fewer")
    cells = [
        NeedleCase(length, depth, repeat) for length in lengths for depth in depths for repeat in range(request.repeats)
    ]
    specification = {
        **numerics(request.model, checkpoint, None, say),
        "suite": NEEDLE,
        "lengths": lengths,
        "depths": depths,
        "repeats": request.repeats,
        "text": haystack.sha,
    }
    documents = {NEEDLE: {"source": haystack.source, "official": None, "count": len(cells)}}
    manifest = generated_manifest(NEEDLE, request.model, checkpoint, context, specification, request.chat, documents)
    return NeedlePlan(request, checkpoint, haystack, tuple(cells), manifest)


def _lengths(asked: tuple[int, ...], context: int) -> list[int]:
    most = context - MAX_NEW_TOKENS
    if not asked:
        doubled = [_SHORTEST << power for power in range(most.bit_length()) if _SHORTEST << power <= most]
        if not doubled:
            raise UsageError(
                f"the model takes {context} tokens; give --lengths of at most {most}, or a longer --context"
            )
        return doubled
    if not all(1 <= length <= most for length in asked):
        raise UsageError(
            f"--lengths {','.join(map(str, asked))}: the model takes {context} tokens, of which an answer may need "
            f"{MAX_NEW_TOKENS}; give lengths of 100 to {most}, or a longer --context"
        )
    return sorted(set(asked))
