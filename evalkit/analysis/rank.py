"""Effective ranks of a map from its singular values.

In: a map [tokens, tokens]. Out: three definitions of its rank, between 1 and the number of tokens; 0 for a map of
zeros. The rank of a causal map grows with its length, so compare maps of the same sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Ranks(NamedTuple):
    """Effective ranks under three definitions, from the singular values σ₁ ≥ σ₂ ≥ … of a map."""

    entropy: float
    """exp of the entropy of σ / Σσ; Roy and Vetterli, "The effective rank" (EUSIPCO 2007), definition 1."""
    squares: float
    """The same of σ² / Σσ²: exp of the entropy of the shares of variance."""
    stable: float
    """Stable rank, Σσ² / σ₁²: the squared ratio of the Frobenius norm and the spectral norm."""


def ranks_of(seen: torch.Tensor) -> Ranks:
    """Compute the effective ranks of a map, [tokens, tokens]; the singular values in its dtype, sums in float64."""
    values = torch.linalg.svdvals(seen).double()
    largest = float(values.max())
    if largest == 0:
        return Ranks(0.0, 0.0, 0.0)
    values = values / largest
    squares = values.square()
    return Ranks(_exponential(values), _exponential(squares), float(squares.sum()))


def _exponential(weights: torch.Tensor) -> float:
    """Return exp of the entropy of weights that are divided by their sum."""
    shares = weights / weights.sum()
    return float(torch.special.entr(shares).sum().exp())
