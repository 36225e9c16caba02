"""A model in bfloat16 or float16, run in float32 without a copy of it.

Rounding in half precision is as large as what the mistakes that matter do to a single token, so what must be compared
is compared in float32. A whole copy may not fit in memory; here each module's weights are widened while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Have a model compute in float32, whatever its weights are in; widening them is exact.

    At most one module's own weights exist twice. A module that reads another's weights itself, in place of calling it,
    meets two dtypes and fails.
    """
    kept: dict[int, list[tuple[dict[str, Any], str, Any]]] = {}

    def widen(module: torch.nn.Module, *_: Any) -> None:
        tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in tensors:
            for name, value in held.items():
                if value is not None and value.dtype in HALF:
                    kept.setdefault(id(module), []).append((held, name, value))
                    held[name] = value.detach().float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for held, name, value in kept.pop(id(module), []):
            held[name] = value

    hooks: list[Any] = []
    for module in model.modules():
        own = (*module._parameters.values(), *module._buffers.values())
        if any(value is not None and value.dtype in HALF for value in own):
            hooks.append(module.register_forward_pre_hook(widen, prepend=True))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for changes in kept.values():
            for held, name, value in changes:
                held[name] = value
