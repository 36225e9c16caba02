"""ALiBi inside a token tree: position biases from each token's position in its own sequence, not from its row index.

BLOOM, Falcon and MPT add slope × position of the key to the logits, and take the position from the row or from a
padding mask. Softmax does not change when a constant is added to all keys (Press et al., 2108.12409), so a bias
computed from the key's own position is also correct in a tree. It replaces the model's own bias during a forward pass
over a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")
"""Functions of transformers' modules that build the biases."""


@contextmanager
def alibi_by_position(base: Any, positions: torch.Tensor) -> Iterator[None]:
    """Make a base model compute its ALiBi from token positions; models without ALiBi are not changed.

    Args:
        base: the base model of a transformers model.
        positions: [keys] of the trunk and the tree.
    """
    module = sys.modules[type(base).__module__]
    found = {name: getattr(module, name) for name in _BUILDERS if hasattr(module, name)}
    try:
        for name, original in found.items():
            setattr(module, name, _by_position(name, original, positions))
        yield
    finally:
        for name, original in found.items():
            setattr(module, name, original)


def _by_position(name: str, original: Any, positions: torch.Tensor) -> Any:
    length = int(positions.max()) + 1

    def from_mask(_: Any, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """[heads, 1, keys]; the original's argument is a padding mask, [batch, keys]."""
        table: torch.Tensor = original(torch.ones(1, length, device=positions.device, dtype=torch.long), heads, dtype)
        return table[..., positions]

    def from_length(heads: int, _: int, alibi_bias_max: int = 8, device: Any = None) -> torch.Tensor:
        """[heads, 1, keys]; the original's argument is the length."""
        table: torch.Tensor = original(heads, length, alibi_bias_max, device)
        return table[..., positions]

    return from_length if name == "build_mpt_alibi_tensor" else from_mask
