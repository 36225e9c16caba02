"""Running a bfloat16 or float16 model in float32 without a copy of it.

Rounding in half precision is as large as the effect of real errors on a single token, so states are compared in
float32. A float32 copy may not fit in memory, so each module's weights are widened only while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Make a model compute in float32 inside the context, whatever the dtype of its weights; widening is exact.

    At most one module's weights exist twice: its own, and those of its children without children, since some modules
    read these directly (`conv1d.weight` in Zamba 2, which rounds its input to their dtype). A module that reads the
    weights of others gets two dtypes and fails.
    """
    kept: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    # As large as many other modules together
    ends = (model.get_input_embeddings(), model.get_output_embeddings())

    def parts(module: nn.Module) -> list[nn.Module]:
        leaves = (child for child in module.children() if not any(child is end for end in ends))
        return [module, *(leaf for leaf in leaves if not any(True for _ in leaf.children()))]

    def widen(module: nn.Module, *_: Any) -> None:
        for part in parts(module):
            for name, value in list(_halves(part)):
                kept.setdefault(id(module), []).append((part, name, value))
                wide = value.detach().float()
                # A parameter can be replaced by a parameter only
                setattr(part, name, nn.Parameter(wide, False) if isinstance(value, nn.Parameter) else wide)

    def restore(module: nn.Module, *_: Any) -> None:
        for owner, name, value in kept.pop(id(module), []):
            setattr(owner, name, value)

    hooks: list[Any] = []
    for module in model.modules():
        if any(True for part in parts(module) for _ in _halves(part)):
            hooks.append(module.register_forward_pre_hook(widen, prepend=True))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for changes in kept.values():
            for owner, name, value in changes:
                setattr(owner, name, value)


def _halves(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a module's own parameters and buffers of half precision, by name."""
    named = (module.named_parameters, module.named_buffers)
    own = (pair for each in named for pair in each(recurse=False, remove_duplicate=False))
    return ((name, value) for name, value in own if value.dtype in HALF)
